"""Owns Intel's GPUs, through Sysman of Level Zero (``libze_loader.so.1``, specification 1.9 and later): what each, or a tile of
one, is asked for, and which of them a process computes on.

`sampling` opens it where NVML has no device. It was never run on a device; it sets nothing.

Note: [When Level Zero begins]
    Sysman begins in one of two ways, for the whole process: by ``zesInit``, or within ``zeInit`` where ZES_ENABLE_SYSMAN is 1.
    A script that relies on the second crashes after the first (intel/compute-runtime issue 686). So nothing is begun before
    torch computes on a device: torch's runtime has chosen then, and what it has not chosen refuses to begin.

Structures: zes_api.h and ze_api.h of Level Zero 1.17. The package pyzes has them too, but loads the library from the folder of
one distribution alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_char, c_double, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from zprof.gpu.answers import Failure, Refused, Unbelievable, ask, one_line
from zprof.gpu.library import Calls, Counted, Library, Opened, Rate, begun, measured, text_of
from zprof.gpu.vendors import INTEL
from zprof.recording.sampler import torch_devices

if TYPE_CHECKING:
    from zprof.gpu.devices import Device, Visible

__all__ = ["opened", "opened_later"]

_NAME = "libze_loader.so.1"
_GPU = 1
_ON_DEVICE = 1
_ALL_ENGINES, _ALL_COMPUTE = 0, 1
_CORE, _MEMORY = 0, 1
_HOTTEST, _HOTTEST_OF_GPU = 0, 1
_UNKNOWN, _CARD, _PACKAGE, _STACK = 0, 1, 2, 3
_WORDS = {
    0x1: "not ready",
    0x70000001: "GPU is lost",
    0x70000002: "out of memory",
    0x70000003: "out of memory",
    0x70000006: "GPU requires a reset",
    0x70000007: "GPU is in a low power state",
    0x70010000: "no permission",
    0x70010001: "in use",
    0x70020000: "a library it needs is missing",
    0x78000001: "no driver for a GPU here, or Sysman begun by zeInit",
    0x78000002: "version not known to this driver",
    0x78000003: "not supported",
    0x78000004: "invalid argument",
    0x78000005: "handle is not valid",
    0x7FFFFFFE: "unknown error",
}
#: Codes that later calls will answer alike.
_FINAL = frozenset({*range(0x78000001, 0x78000006), 0x70000001, 0x70000006, 0x70010000, 0x70020000})
_LOST = frozenset({0x70000001, 0x70000006})
_STATES = {0x70010000: "no permission", 0x70020000: "no driver", 0x78000001: "no driver"}


class Uuid(ctypes.Structure):
    """``ze_device_uuid_t`` and ``zes_uuid_t``."""

    _fields_: ClassVar = [("id", c_uint8 * 16)]


class CoreProperties(ctypes.Structure):
    """``ze_device_properties_t``."""

    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("type", c_uint32), ("vendorId", c_uint32), ("deviceId", c_uint32),
        ("flags", c_uint32), ("subdeviceId", c_uint32), ("coreClockRate", c_uint32), ("maxMemAllocSize", c_uint64),
        ("maxHardwareContexts", c_uint32), ("maxCommandQueuePriority", c_uint32), ("numThreadsPerEU", c_uint32),
        ("physicalEUSimdWidth", c_uint32), ("numEUsPerSubslice", c_uint32), ("numSubslicesPerSlice", c_uint32),
        ("numSlices", c_uint32), ("timerResolution", c_uint64), ("timestampValidBits", c_uint32),
        ("kernelTimestampValidBits", c_uint32), ("uuid", Uuid), ("name", c_char * 256),
    ]  # fmt: skip


class DeviceProperties(ctypes.Structure):
    """``zes_device_properties_t``."""

    number = 0x1
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("core", CoreProperties), ("numSubdevices", c_uint32),
        ("serialNumber", c_char * 64), ("boardNumber", c_char * 64), ("brandName", c_char * 64), ("modelName", c_char * 64),
        ("vendorName", c_char * 64), ("driverVersion", c_char * 64),
    ]  # fmt: skip


class PciSpeed(ctypes.Structure):
    """``zes_pci_speed_t``."""

    _fields_: ClassVar = [("gen", c_int32), ("width", c_int32), ("maxBandwidth", c_int64)]


class PciAddress(ctypes.Structure):
    """``zes_pci_address_t``."""

    _fields_: ClassVar = [("domain", c_uint32), ("bus", c_uint32), ("device", c_uint32), ("function", c_uint32)]


class PciProperties(ctypes.Structure):
    """``zes_pci_properties_t``."""

    number = 0x2
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("address", PciAddress), ("maxSpeed", PciSpeed),
        ("haveBandwidthCounters", c_uint8), ("havePacketCounters", c_uint8), ("haveReplayCounters", c_uint8),
    ]  # fmt: skip


class PciStats(ctypes.Structure):
    """``zes_pci_stats_t``."""

    _fields_: ClassVar = [
        ("timestamp", c_uint64), ("replayCounter", c_uint64), ("packetCounter", c_uint64), ("rxCounter", c_uint64),
        ("txCounter", c_uint64), ("speed", PciSpeed),
    ]  # fmt: skip


class EngineProperties(ctypes.Structure):
    """``zes_engine_properties_t``."""

    number = 0x5
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("type", c_uint32), ("onSubdevice", c_uint8), ("subdeviceId", c_uint32),
    ]  # fmt: skip


class EngineStats(ctypes.Structure):
    """``zes_engine_stats_t``."""

    _fields_: ClassVar = [("activeTime", c_uint64), ("timestamp", c_uint64)]


class FreqProperties(ctypes.Structure):
    """``zes_freq_properties_t``."""

    number = 0x9
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("type", c_uint32), ("onSubdevice", c_uint8), ("subdeviceId", c_uint32),
        ("canControl", c_uint8), ("isThrottleEventSupported", c_uint8), ("min", c_double), ("max", c_double),
    ]  # fmt: skip


class FreqState(ctypes.Structure):
    """``zes_freq_state_t``."""

    number = 0x1B
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("currentVoltage", c_double), ("request", c_double), ("tdp", c_double),
        ("efficient", c_double), ("actual", c_double), ("throttleReasons", c_uint32),
    ]  # fmt: skip


class MemProperties(ctypes.Structure):
    """``zes_mem_properties_t``."""

    number = 0xB
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("type", c_uint32), ("onSubdevice", c_uint8), ("subdeviceId", c_uint32),
        ("location", c_uint32), ("physicalSize", c_uint64), ("busWidth", c_int32), ("numChannels", c_int32),
    ]  # fmt: skip


class MemState(ctypes.Structure):
    """``zes_mem_state_t``."""

    number = 0x1E
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("health", c_uint32), ("free", c_uint64), ("size", c_uint64),
    ]  # fmt: skip


class TempProperties(ctypes.Structure):
    """``zes_temp_properties_t``."""

    number = 0x14
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("type", c_uint32), ("onSubdevice", c_uint8), ("subdeviceId", c_uint32),
        ("maxTemperature", c_double), ("isCriticalTempSupported", c_uint8), ("isThreshold1Supported", c_uint8),
        ("isThreshold2Supported", c_uint8),
    ]  # fmt: skip


class PowerProperties(ctypes.Structure):
    """``zes_power_properties_t``."""

    number = 0xD
    _fields_: ClassVar = [
        ("stype", c_uint32), ("pNext", c_void_p), ("onSubdevice", c_uint8), ("subdeviceId", c_uint32), ("canControl", c_uint8),
        ("isEnergyThresholdSupported", c_uint8), ("defaultLimit", c_int32), ("minLimit", c_int32), ("maxLimit", c_int32),
    ]  # fmt: skip


class PowerExtProperties(ctypes.Structure):
    """``zes_power_ext_properties_t``."""

    number = 0x28
    _fields_: ClassVar = [("stype", c_uint32), ("pNext", c_void_p), ("domain", c_uint32), ("defaultLimit", c_void_p)]


class EnergyCounter(ctypes.Structure):
    """``zes_power_energy_counter_t``."""

    _fields_: ClassVar = [("energy", c_uint64), ("timestamp", c_uint64)]


class _Card:
    """A device, or one tile of it, which torch may count as a device of its own.

    What a device says of its tiles alone is that of all of them; what is of the whole card alone no tile has.

    Args:
        tile: its number, None for the whole.
    """

    def __init__(self, zes: Calls, handle: int, tile: int | None = None) -> None:
        self.zes, self.handle, self.tile = zes, handle, tile
        self._domains: dict[type[ctypes.Structure], list[tuple[int, Any]]] = {}
        self._powers: list[int] = []
        self._busy, self._watts = Rate(self._activity), Rate(self._energy)
        self._busy.begin()
        self._watts.begin()

    def total(self) -> int:
        return sum(size for size, _ in self._memories())

    def used(self) -> int:
        memories = self._memories()
        if any(free > size for size, free in memories):
            raise Unbelievable("answered more free bytes than there are")
        return sum(size - free for size, free in memories)

    def utilisation(self) -> float:
        return 100 * self._busy()

    def power(self) -> float:
        # Microjoules a microsecond are watts.
        if not (milliwatts := self._watts() * 1000):
            raise Unbelievable("answered no power at all")
        return milliwatts

    def energy(self) -> float:
        return self._energy()[0] / 1000

    def temperature(self) -> float:
        sensors = self._of_type("zesDeviceEnumTemperatureSensors", "zesTemperatureGetProperties", TempProperties,
                                _HOTTEST, _HOTTEST_OF_GPU)  # fmt: skip
        degrees = [c_double() for _ in sensors]
        for sensor, each in zip(sensors, degrees, strict=True):
            self.zes("zesTemperatureGetState", c_void_p(sensor), byref(each))
        return max(each.value for each in degrees)

    def clock(self, domain: int) -> float:
        # One that is not known is below 0.
        return max(float(state.actual) for state in self._clocks(domain))

    def throttles(self) -> int:
        reasons = 0
        for state in self._clocks(_CORE):
            reasons |= state.throttleReasons
        return reasons

    def crossed(self) -> tuple[int, int]:
        if self.tile is not None:
            raise Refused("known only for the whole card", final=True)
        about = _filled(self.zes, "zesDevicePciGetProperties", self.handle, PciProperties)
        if not about.haveBandwidthCounters:
            raise Refused("not supported", final=True)
        stats = PciStats()
        self.zes("zesDevicePciGetStats", c_void_p(self.handle), byref(stats))
        return stats.txCounter, stats.rxCounter

    def _memories(self) -> list[tuple[int, int]]:
        """(size, free) of each module on the device."""
        found = []
        for module, about in self._found("zesDeviceEnumMemoryModules", "zesMemoryGetProperties", MemProperties):
            if about.location == _ON_DEVICE:
                state = _filled(self.zes, "zesMemoryGetState", module, MemState)
                # Newer drivers no longer keep the second; older ones may not know the first.
                found.append((about.physicalSize or state.size, state.free))
        if not found:
            raise Refused("not supported", final=True)
        return found

    def _clocks(self, domain: int) -> list[Any]:
        found = self._of_type("zesDeviceEnumFrequencyDomains", "zesFrequencyGetProperties", FreqProperties, domain)
        return [_filled(self.zes, "zesFrequencyGetState", each, FreqState) for each in found]

    def _activity(self) -> tuple[int, int]:
        """(microseconds at work, microseconds)."""
        engines = self._of_type("zesDeviceEnumEngineGroups", "zesEngineGetProperties", EngineProperties,
                                _ALL_ENGINES, _ALL_COMPUTE)  # fmt: skip
        stats = [EngineStats() for _ in engines]
        for engine, each in zip(engines, stats, strict=True):
            self.zes("zesEngineGetActivity", c_void_p(engine), byref(each))
        return sum(each.activeTime for each in stats), sum(each.timestamp for each in stats)

    def _energy(self) -> tuple[int, int]:
        """(microjoules, microseconds)."""
        domains = self._power_domains()
        counters = [EnergyCounter() for _ in domains]
        for domain, each in zip(domains, counters, strict=True):
            self.zes("zesPowerGetEnergyCounter", c_void_p(domain), byref(each))
        if not (energy := sum(each.energy for each in counters)):
            raise Unbelievable("answered that it is not available")
        return energy, sum(each.timestamp for each in counters) // len(counters)

    def _power_domains(self) -> list[int]:
        """The card's; where a driver does not say what a domain is of, the first, which it lists before its parts."""
        if not self._powers:
            found = self._found("zesDeviceEnumPowerDomains", "zesPowerGetProperties", PowerProperties)
            levels = {domain: self._level(domain) for domain, _ in found}
            known = (level for level in (_CARD, _PACKAGE, _STACK, _UNKNOWN) if level in levels.values())
            chosen = next(([domain for domain in levels if levels[domain] == level] for level in known), [])
            # Each tile has its own where a card has none.
            self._powers = chosen if found[0][1].onSubdevice and self.tile is None else chosen[:1]
        if not self._powers:
            raise Refused("not supported", final=True)
        return self._powers

    def _level(self, domain: int) -> int:
        more = PowerExtProperties(stype=PowerExtProperties.number)
        about = PowerProperties(stype=PowerProperties.number, pNext=ctypes.addressof(more))
        asked = ask(lambda: self.zes("zesPowerGetProperties", c_void_p(domain), byref(about)))
        return _UNKNOWN if isinstance(asked, Failure) else int(more.domain)

    def _of_type(self, listing: str, asking: str, kind: type[ctypes.Structure], *types: int) -> list[int]:
        """Those of the first of ``types`` that there is."""
        found = self._found(listing, asking, kind)
        for wanted in types:
            if chosen := [handle for handle, about in found if about.type == wanted]:
                return chosen
        raise Refused("not supported", final=True)

    def _found(self, listing: str, asking: str, kind: type[ctypes.Structure]) -> list[tuple[int, Any]]:
        """The domains of a kind, with what they are."""
        if kind not in self._domains:
            found = [
                (handle, _filled(self.zes, asking, handle, kind)) for handle in self.zes.handles(listing, c_void_p(self.handle))
            ]
            mine = [each for each in found if (each[1].subdeviceId if each[1].onSubdevice else None) == self.tile]
            self._domains[kind] = mine or (found if self.tile is None else [])
        if not self._domains[kind]:
            raise Refused("not supported", final=True)
        return self._domains[kind]


def _filled(zes: Calls, name: str, handle: int, kind: type[Any]) -> Any:
    """A structure of properties or of a state, as the library fills it in."""
    about = kind(stype=kind.number)
    zes(name, c_void_p(handle), byref(about))
    return about


def opened() -> Opened:
    """The library, begun, with its devices in the order of the bus."""
    try:
        zes = Calls(ctypes.CDLL(_NAME), _WORDS, _FINAL, _LOST)
    except OSError as error:
        return Opened(INTEL, "absent", f"no Level Zero: {one_line(str(error))}")
    return begun(INTEL, _STATES, lambda: zes("zesInit", c_uint32(0)), lambda: _devices(zes), lambda: _library(zes))


def opened_later() -> Opened | None:
    """The library once torch computes on one of its devices; None until then. See Note: [When Level Zero begins]."""
    if _torch_uuids() is None:
        return None
    if os.environ.get("ZES_ENABLE_SYSMAN", "0") not in ("", "0"):
        return Opened(INTEL, "failed", "ZES_ENABLE_SYSMAN is set, which leaves Sysman to the script; unset it")
    return opened()


def _devices(zes: Calls) -> tuple[list[Device], str]:
    """GPUs of all drivers, and the driver's version; other devices, such as NPUs, are left out."""
    cards, version = [], ""
    for driver in zes.handles("zesDriverGet"):
        for handle in zes.handles("zesDeviceGet", c_void_p(driver)):
            about = ask(partial(_filled, zes, "zesDeviceGetProperties", handle, DeviceProperties))
            if not isinstance(about, Failure) and about.core.type == _GPU:
                version = version or text_of(about.driverVersion)
                cards.append((_address(zes, handle), _Card(zes, handle), about))
    return [_device(place, card, about) for place, (_, card, about) in enumerate(sorted(cards, key=itemgetter(0)))], version


def _address(zes: Calls, handle: int) -> list[int]:
    """Where a device is on the bus; behind all others where it does not say."""
    at = ask(partial(_filled, zes, "zesDevicePciGetProperties", handle, PciProperties))
    if isinstance(at, Failure):
        return [1 << 32]
    return [at.address.domain, at.address.bus, at.address.device, at.address.function]


def _device(place: int, card: _Card, about: Any) -> Device:
    from zprof.gpu.devices import Device

    name = text_of(about.modelName) or text_of(about.core.name)
    return Device(str(place), card, card, name, bytes(about.core.uuid.id).hex())


def _library(zes: Calls) -> Library:
    quantities = (
        measured(INTEL, "memory used", "zesMemoryGetState", _Card.used),
        measured(INTEL, "utilisation", "zesEngineGetActivity (time at work / time)", _Card.utilisation),
        measured(INTEL, "power", "zesPowerGetEnergyCounter (energy / time)", _Card.power),
        measured(INTEL, "temperature", "zesTemperatureGetState", _Card.temperature),
        measured(INTEL, "core clock", "zesFrequencyGetState", lambda card: card.clock(_CORE)),
        measured(INTEL, "memory clock", "zesFrequencyGetState", lambda card: card.clock(_MEMORY)),
        measured(INTEL, "throttle", "zesFrequencyGetState", _Card.throttles),
    )
    return Library(
        zes,
        quantities,
        energy=measured(INTEL, "energy", "zesPowerGetEnergyCounter", _Card.energy),
        buses=(("intel pcie", lambda zes, card: [lambda: Counted("zesDevicePciGetStats", card.crossed)]),),
        total=lambda zes, card: card.total(),
        visible=_Visible(zes),
        running=lambda: _torch_uuids() is not None,
        close=lambda: None,
    )


def _torch_uuids() -> list[str] | None:
    """The devices of this process by their UUIDs, in its order; None where it does not compute on any yet."""
    return torch_devices("xpu", _uuid_of)


def _uuid_of(device: Any) -> str:
    uuid = device.uuid
    return uuid.replace("-", "").lower() if isinstance(uuid, str) else bytes(uuid).hex()


class _Visible:
    """Which devices are those that torch computes on. It keeps the tiles it made, so that each stays one device."""

    def __init__(self, zes: Calls) -> None:
        self._zes = zes
        self._tiles: dict[tuple[int, int], _Card] = {}

    def __call__(self, found: Sequence[Device]) -> Visible:
        from zprof.gpu.devices import Visible

        chosen, notes = [], []
        for uuid in _torch_uuids() or ():
            device = self._device(found, uuid)
            if device is None:
                notes.append(f"Level Zero does not show {one_line(uuid, 48)}, on which this process computes")
            else:
                chosen.append(device)
        return Visible(tuple(chosen), tuple(notes))

    def _device(self, found: Sequence[Device], uuid: str) -> Device | None:
        from zprof.gpu.devices import Device

        whole = next((device for device in found if device.uuid == uuid), None)
        if whole is not None:
            return whole
        at = ask(partial(self._tile, bytes.fromhex(uuid)))
        if isinstance(at, Failure) or at is None:
            return None
        card = next((device for device in found if device.handle.handle == at[0]), None)
        if card is None:
            return None
        if at not in self._tiles:
            self._tiles[at] = _Card(self._zes, *at)
        tile = self._tiles[at]
        return Device(f"{card.label}.{at[1]}", tile, tile, card.name, uuid)

    def _tile(self, uuid: bytes) -> tuple[int, int] | None:
        """(handle of the card, number of the tile) of that UUID."""
        for driver in self._zes.handles("zesDriverGet"):
            device, on_tile, tile = c_void_p(), c_uint8(0), c_uint32(0)
            asked = (c_void_p(driver), Uuid.from_buffer_copy(uuid), byref(device), byref(on_tile), byref(tile))
            answer = ask(partial(self._zes, "zesDriverGetDeviceByUuidExp", *asked))
            if not isinstance(answer, Failure) and device.value and on_tile.value:
                return device.value, tile.value
        return None
