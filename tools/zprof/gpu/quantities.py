"""Owns what a quantity is, and those NVML is asked for: which calls answer each.

`watched` reads them a device at a time; their units and bounds are those of `vendors`. It never keeps what was read: what only
grows is summed in `zprof.gpu.counters`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zprof.gpu.answers import Nvml, Unbelievable, field_value, within
from zprof.gpu.vendors import BOUNDS

__all__ = ["ENERGY", "QUANTITIES", "Quantity", "Reader", "Scope", "bounded"]

#: Of a library and a handle of its own.
Reader = Callable[[Any, Any], int]

_POWER_INSTANT = 186
_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_SENSOR_GPU = 0


class Scope(Enum):
    """Of what a quantity speaks where a GPU is divided by MIG."""

    INSTANCE = "instance"
    CHIP = "chip"
    WHOLE = "whole GPU"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing to read.

    Attributes:
        what: the name of its rows.
        scope: INSTANCE is read from the MIG instance, CHIP from the GPU it is a part of; WHOLE would mislead there.
        readers: (name of the source, call), the best first.
    """

    what: str
    scope: Scope
    readers: tuple[tuple[str, Reader], ...]


def bounded(quantity: str, value: float) -> int:
    """``value`` as a whole number; raises `Unbelievable` where no device has so much."""
    bounds = BOUNDS[quantity]
    return within(value, bounds.least, bounds.most, bounds.unit)


def _memory(nvml: Nvml, handle: Any) -> int:
    """Bytes in use, without what the driver keeps for itself."""
    return _used(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))


def _memory_v1(nvml: Nvml, handle: Any) -> int:
    return _used(nvml.nvmlDeviceGetMemoryInfo(handle))


def _used(memory: Any) -> int:
    total = within(memory.total, 1, BOUNDS["memory used"].most, "bytes in all")
    return within(memory.used, 0, total, "bytes")


def _utilisation(nvml: Nvml, handle: Any) -> int:
    return bounded("utilisation", nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _power_now(nvml: Nvml, handle: Any) -> int:
    fields = nvml.nvmlDeviceGetFieldValues(handle, [_POWER_INSTANT])
    if int(fields[0].fieldId) != _POWER_INSTANT:
        raise Unbelievable(f"answered field {fields[0].fieldId}")
    return bounded("power", field_value(fields[0])[0])


def _power(nvml: Nvml, handle: Any) -> int:
    return bounded("power", nvml.nvmlDeviceGetPowerUsage(handle))


def _energy(nvml: Nvml, handle: Any) -> int:
    return bounded("energy", nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def _temperature(nvml: Nvml, handle: Any) -> int:
    return bounded("temperature", nvml.nvmlDeviceGetTemperature(handle, _SENSOR_GPU))


def _temperature_v1(nvml: Nvml, handle: Any) -> int:
    return bounded("temperature", nvml.nvmlDeviceGetTemperatureV(handle, _SENSOR_GPU))


def _sm_clock(nvml: Nvml, handle: Any) -> int:
    return bounded("sm clock", nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))


def _memory_clock(nvml: Nvml, handle: Any) -> int:
    return bounded("memory clock", nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_MEMORY))


def _reasons(nvml: Nvml, handle: Any) -> int:
    return bounded("throttle", nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))


def _throttle_reasons(nvml: Nvml, handle: Any) -> int:
    return bounded("throttle", nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "nvml memory used",
        Scope.INSTANCE,
        (
            ("nvmlDeviceGetMemoryInfo_v2", _memory),
            ("nvmlDeviceGetMemoryInfo (with what the driver keeps)", _memory_v1),
        ),
    ),
    Quantity("nvml utilisation", Scope.WHOLE, (("nvmlDeviceGetUtilizationRates", _utilisation),)),
    Quantity(
        "nvml power",
        Scope.WHOLE,
        # The field is this instant's; the call is a mean over up to a second and can take milliseconds.
        (("field 186 (instant)", _power_now), ("nvmlDeviceGetPowerUsage", _power)),
    ),
    Quantity(
        "nvml temperature",
        Scope.CHIP,
        (("nvmlDeviceGetTemperatureV", _temperature_v1), ("nvmlDeviceGetTemperature", _temperature)),
    ),
    Quantity("nvml sm clock", Scope.CHIP, (("nvmlDeviceGetClockInfo", _sm_clock),)),
    Quantity("nvml memory clock", Scope.CHIP, (("nvmlDeviceGetClockInfo", _memory_clock),)),
    Quantity(
        "nvml throttle",
        Scope.CHIP,
        (
            ("nvmlDeviceGetCurrentClocksEventReasons", _reasons),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", _throttle_reasons),
        ),
    ),
)

#: The energy since the driver was loaded; summed from zero, so that a reload in between costs one difference and no more.
ENERGY = Quantity("nvml energy", Scope.WHOLE, (("nvmlDeviceGetTotalEnergyConsumption", _energy),))
