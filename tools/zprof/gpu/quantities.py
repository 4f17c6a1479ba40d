"""Owns the quantities NVML is asked for: which calls answer each, in which unit, within which bounds.

`sampling` reads them a device at a time; here alone units are made those of a trace. It never keeps what was read: what
only grows is summed in `zprof.gpu.counters`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from zprof.gpu.answers import INT64_MAX, Nvml, Unbelievable, field_value, within

__all__ = ["ENERGY", "QUANTITIES", "THROTTLES", "Quantity", "Reader", "Scope", "throttles"]

Reader = Callable[[Nvml, Any], int]

_POWER_INSTANT = 186
_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_SENSOR_GPU = 0
#: More than any device has; what lies above is an answer gone wrong.
_MOST_MEMORY = 1 << 50
_MOST_POWER_MW = 100_000_000
_MOST_CLOCK_MHZ = 100_000
_MOST_CELSIUS = 250

#: Bit of the mask -> why clocks are held back; those of power, heat and the board are what a user can change.
THROTTLES = {
    0x1: "idle",
    0x2: "clock setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability",
}


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
        unit: of its values.
        scope: INSTANCE is read from the MIG instance, CHIP from the GPU it is a part of; WHOLE would mislead there.
        readers: (name of the source, call), the best first.
    """

    what: str
    unit: str
    scope: Scope
    readers: tuple[tuple[str, Reader], ...]


def _memory(nvml: Nvml, handle: Any) -> int:
    """Bytes in use, without what the driver keeps for itself."""
    return _used(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))


def _memory_v1(nvml: Nvml, handle: Any) -> int:
    return _used(nvml.nvmlDeviceGetMemoryInfo(handle))


def _used(memory: Any) -> int:
    total = within(memory.total, 1, _MOST_MEMORY, "bytes in all")
    return within(memory.used, 0, total, "bytes")


def _utilisation(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetUtilizationRates(handle).gpu, 0, 100, "%")


def _power_now(nvml: Nvml, handle: Any) -> int:
    fields = nvml.nvmlDeviceGetFieldValues(handle, [_POWER_INSTANT])
    if int(fields[0].fieldId) != _POWER_INSTANT:
        raise Unbelievable(f"answered field {fields[0].fieldId}")
    return within(field_value(fields[0])[0], 0, _MOST_POWER_MW, "mW")


def _power(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetPowerUsage(handle), 0, _MOST_POWER_MW, "mW")


def _energy(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 0, INT64_MAX, "mJ")


def _temperature(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetTemperature(handle, _SENSOR_GPU), 0, _MOST_CELSIUS, "C")


def _temperature_v1(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetTemperatureV(handle, _SENSOR_GPU), -50, _MOST_CELSIUS, "C")


def _sm_clock(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM), 0, _MOST_CLOCK_MHZ, "MHz")


def _memory_clock(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_MEMORY), 0, _MOST_CLOCK_MHZ, "MHz")


def _reasons(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), 0, INT64_MAX, "as a mask")


def _throttle_reasons(nvml: Nvml, handle: Any) -> int:
    return within(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0, INT64_MAX, "as a mask")


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "nvml memory used",
        "bytes",
        Scope.INSTANCE,
        (
            ("nvmlDeviceGetMemoryInfo_v2", _memory),
            ("nvmlDeviceGetMemoryInfo (with what the driver keeps)", _memory_v1),
        ),
    ),
    Quantity("nvml utilisation", "%", Scope.WHOLE, (("nvmlDeviceGetUtilizationRates", _utilisation),)),
    Quantity(
        "nvml power",
        "mW",
        Scope.WHOLE,
        # The field is this instant's; the call is a mean over up to a second and can take milliseconds.
        (("field 186 (instant)", _power_now), ("nvmlDeviceGetPowerUsage", _power)),
    ),
    Quantity(
        "nvml temperature",
        "C",
        Scope.CHIP,
        (("nvmlDeviceGetTemperatureV", _temperature_v1), ("nvmlDeviceGetTemperature", _temperature)),
    ),
    Quantity("nvml sm clock", "MHz", Scope.CHIP, (("nvmlDeviceGetClockInfo", _sm_clock),)),
    Quantity("nvml memory clock", "MHz", Scope.CHIP, (("nvmlDeviceGetClockInfo", _memory_clock),)),
    Quantity(
        "nvml throttle",
        "",
        Scope.CHIP,
        (
            ("nvmlDeviceGetCurrentClocksEventReasons", _reasons),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", _throttle_reasons),
        ),
    ),
)

#: The energy since the driver was loaded; summed from zero, so that a reload in between costs one difference and no more.
ENERGY = Quantity("nvml energy", "mJ", Scope.WHOLE, (("nvmlDeviceGetTotalEnergyConsumption", _energy),))


def throttles(mask: int) -> list[str]:
    """The reasons in ``mask`` in words, without idling, which holds nothing back."""
    named = [word for bit, word in THROTTLES.items() if mask & bit and bit != 0x1]
    others = mask & ~sum(THROTTLES)
    return [*named, *([f"reason {others:#x}"] if others else [])]
