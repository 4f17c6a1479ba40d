"""Owns AMD's GPUs, through the C library of AMD SMI (``libamd_smi.so``, ROCm 6.0 and later): what each is asked for, and which
of them a process computes on.

`sampling` opens it where NVML has no device. It was never run on a device; it sets nothing, and never ends the library, which
the script may use too.

Note: [Why not the package amdsmi]
    Its structures are those of one release, and a library of another answers them all the same: in ``amdsmi_power_info_t`` of
    ROCm 7.0 the first power has 64 bits, in 6.x 32. Here only functions are called whose arguments are plain numbers, or a
    structure that every release from 6.0 on begins alike; power is the rise of the energy counter. Declarations:
    amd_smi/amdsmi.h of ROCm 6.0.0, 6.1.0, 6.2.0 and amdsmi 7.0.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar

from zprof.gpu.answers import Failure, Refused, Unbelievable, ask, one_line
from zprof.gpu.library import Calls, Library, Opened, Rate, begun, measured, text_of
from zprof.gpu.vendors import AMD
from zprof.recording.sampler import torch_devices

if TYPE_CHECKING:
    from zprof.gpu.devices import Device, Visible

__all__ = ["opened"]

_NAME = "libamd_smi.so"
_INIT_GPUS = 1 << 1
_VRAM, _CURRENT, _EDGE, _HOTSPOT = 0, 0, 0, 1
_CORE, _MEMORY = 0, 4
#: More than any structure has that is begun to be read here.
_ROOM = 4096
_WORDS = {
    1: "invalid argument",
    2: "not supported",
    3: "not supported",
    4: "a library it needs is missing",
    5: "a library it needs is too old",
    6: "libdrm failed",
    8: "timeout",
    9: "not ready",
    10: "no permission",
    12: "input or output error",
    15: "out of memory",
    30: "in use",
    31: "not found",
    32: "AMD SMI is not initialised",
    34: "driver not loaded",
    40: "no data",
    51: "driver not loaded",
    52: "not found",
    55: "not available",
}
#: Codes that later calls will answer alike.
_FINAL = frozenset({1, 2, 3, 4, 5, 10, 31, 32, 34, 51, 52, 55})
_STATES = {34: "no driver", 51: "no driver", 10: "no permission"}


class EngineUsage(ctypes.Structure):
    """``amdsmi_engine_usage_t``."""

    _fields_: ClassVar = [
        ("gfx_activity", c_uint32),
        ("umc_activity", c_uint32),
        ("mm_activity", c_uint32),
        ("reserved", c_uint32 * 13),
    ]


class _Gpu:
    """A device as the library's handle, and the counter of which its power is the rise."""

    def __init__(self, smi: Calls, handle: int) -> None:
        self._smi, self._handle = smi, c_void_p(handle)
        self.watts = Rate(self._energy)
        self.watts.begin()

    def name(self) -> str:
        # Its first member, of 64 characters in old releases and of 256 in new ones.
        about = ctypes.create_string_buffer(_ROOM)
        self._smi("amdsmi_get_gpu_asic_info", self._handle, about)
        return text_of(about.raw)

    def bus(self) -> str:
        at = c_uint64(0)
        self._smi("amdsmi_get_gpu_bdf_id", self._handle, byref(at))
        return f"{at.value >> 32:04x}:{at.value >> 8 & 0xFF:02x}:{at.value >> 3 & 0x1F:02x}.{at.value & 7:x}"

    def total(self) -> int:
        nbytes = c_uint64(0)
        self._smi("amdsmi_get_gpu_memory_total", self._handle, c_int32(_VRAM), byref(nbytes))
        return nbytes.value

    def used(self) -> int:
        nbytes = c_uint64(0)
        self._smi("amdsmi_get_gpu_memory_usage", self._handle, c_int32(_VRAM), byref(nbytes))
        if nbytes.value > self.total():
            raise Unbelievable(f"answered {nbytes.value} bytes, more than there are")
        return nbytes.value

    def utilisation(self) -> int:
        usage = EngineUsage()
        self._smi("amdsmi_get_gpu_activity", self._handle, byref(usage))
        return int(usage.gfx_activity)

    def power(self) -> float:
        # Microjoules a nanosecond are kilowatts. A second die, which is counted with the first, answers 0.
        if not (milliwatts := self.watts() * 1e6):
            raise Unbelievable("answered no power at all")
        return milliwatts

    def energy(self) -> float:
        return self._energy()[0] / 1000

    def temperature(self) -> int:
        hottest = ask(lambda: self._temperature(_HOTSPOT))
        return self._temperature(_EDGE) if isinstance(hottest, Failure) else hottest

    def clock(self, kind: int) -> int:
        # Its first member in every release, though not under one name.
        about = (c_uint32 * (_ROOM // 4))()
        self._smi("amdsmi_get_clock_info", self._handle, c_int32(kind), about)
        return int(about[0])

    def _temperature(self, sensor: int) -> int:
        # The header says thousandths; every release divides by a thousand first.
        degrees = c_int64(0)
        self._smi("amdsmi_get_temp_metric", self._handle, c_int32(sensor), c_int32(_CURRENT), byref(degrees))
        return degrees.value

    def _energy(self) -> tuple[int, int]:
        """(microjoules, nanoseconds)."""
        ticks, microjoules, stamp_ns = c_uint64(0), c_float(0), c_uint64(0)
        self._smi("amdsmi_get_energy_count", self._handle, byref(ticks), byref(microjoules), byref(stamp_ns))
        if ticks.value in (0, 2**64 - 1) or not 0 < microjoules.value < 1e6:
            raise Unbelievable("answered that it is not available")
        return int(ticks.value * microjoules.value), stamp_ns.value


def opened() -> Opened:
    """The library, begun, with its devices in the order of the bus."""
    loaded = ask(_load)
    if isinstance(loaded, Failure):
        return Opened(AMD, "absent", f"no AMD SMI: {loaded.why}")
    smi = Calls(loaded, _WORDS, _FINAL)
    return begun(
        AMD, _STATES, lambda: smi("amdsmi_init", c_uint64(_INIT_GPUS)), lambda: (_devices(smi), ""), lambda: _library(smi)
    )


def _load() -> ctypes.CDLL:
    folder = os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH")
    # As torch looks for it: a second copy of the library in one process would share the first one's globals.
    places = [os.path.join(folder, "lib", _NAME)] if folder else []
    places += [_NAME, f"/opt/rocm/lib/{_NAME}"]
    failures = []
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            failures.append(one_line(str(error)))
    raise Refused(failures[0], final=True)


def _devices(smi: Calls) -> list[Device]:
    from zprof.gpu.devices import Device

    gpus = []
    for socket in smi.handles("amdsmi_get_socket_handles"):
        for handle in smi.handles("amdsmi_get_processor_handles", c_void_p(socket)):
            gpu = _Gpu(smi, handle)
            bus, name = ask(gpu.bus), ask(gpu.name)
            gpus.append((gpu, "" if isinstance(bus, Failure) else bus, "" if isinstance(name, Failure) else name))
    gpus.sort(key=lambda each: each[1])
    return [Device(str(place), gpu, gpu, name, bus) for place, (gpu, bus, name) in enumerate(gpus)]


def _library(smi: Calls) -> Library:
    quantities = (
        measured(AMD, "memory used", "amdsmi_get_gpu_memory_usage", _Gpu.used),
        measured(AMD, "utilisation", "amdsmi_get_gpu_activity (gfx)", _Gpu.utilisation),
        measured(AMD, "power", "amdsmi_get_energy_count (energy / time)", _Gpu.power),
        measured(AMD, "temperature", "amdsmi_get_temp_metric", _Gpu.temperature),
        measured(AMD, "core clock", "amdsmi_get_clock_info", lambda gpu: gpu.clock(_CORE)),
        measured(AMD, "memory clock", "amdsmi_get_clock_info", lambda gpu: gpu.clock(_MEMORY)),
    )
    return Library(
        smi,
        quantities,
        energy=measured(AMD, "energy", "amdsmi_get_energy_count", _Gpu.energy),
        buses=(),
        total=lambda smi, gpu: gpu.total(),
        visible=_visible,
        running=lambda: _torch_buses() is not None,
        close=lambda: None,
    )


def _torch_buses() -> list[str] | None:
    """Where the devices of this process are on the bus, in its order; None where it does not compute on any yet."""
    return torch_devices("cuda", _bus_of)


def _bus_of(device: Any) -> str:
    return f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}"


def _visible(found: Sequence[Device]) -> Visible:
    from zprof.gpu.devices import Visible, at_places

    if (buses := _torch_buses()) is not None:
        at = {device.uuid.rpartition(".")[0]: device for device in reversed(found)}
        notes = tuple(f"AMD SMI does not show {bus}, on which this process computes" for bus in buses if bus not in at)
        return Visible(tuple(at[bus] for bus in buses if bus in at), notes)
    # ROCm's own variable leaves devices to HIP, which numbers those anew.
    chosen, said = list(found), list[str]()
    own = next((name for name in AMD.variables[1:] if name in os.environ), AMD.variables[1])
    for name in (AMD.variables[0], own):
        if (wanted := os.environ.get(name)) is not None:
            chosen, noted = at_places(chosen, wanted, name, AMD.library)
            said += noted
    if len(found) > 1:
        said.append("HIP may number devices differently than the bus; their keys are corrected once torch computes on one")
    return Visible(tuple(chosen), tuple(said))
