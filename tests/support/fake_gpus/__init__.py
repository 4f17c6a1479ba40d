"""Owns a libamd_smi.so and a libze_loader.so.1 made for tests: builds them with gcc, and steers what they answer through a
shared file.

Tests of AMD's and Intel's counters start a Python whose loader finds one. They say nothing about what a real driver does: only
that what the headers declare is asked for, read and survived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.support import fake_nvml
from tests.support.fake_nvml import compiled, driven

__all__ = ["KINDS", "MIB", "Amd", "Intel", "build", "drive", "environment"]

HERE = Path(__file__).resolve().parent
MIB = fake_nvml.MIB


class Amd(fake_nvml.Slots):
    """What the fake AMD SMI answers. ``ret_*`` are return codes."""

    variable: ClassVar = "FAKE_AMD"
    library: ClassVar = "libamd_smi.so"
    pci: ClassVar = "0x1002"
    counts: ClassVar[tuple[str, ...]] = ("inits", "shutdowns")
    defaults: ClassVar[Mapping[str, int]] = {
        "ret_init": 0, "ret_sockets": 0, "ret_processors": 0, "ret_total": 0, "ret_used": 0, "ret_activity": 0, "ret_energy": 0,
        "ret_hotspot": 0, "ret_edge": 0, "ret_clock": 0, "ret_asic": 0, "ret_bus": 0,
        "inits": 0, "shutdowns": 0, "count": 1, "text": 0, "block_us": 0,
        "total": 192_000 * MIB, "used": 1000 * MIB, "activity": 37, "hotspot": 61, "edge": 45, "core_clock": 2100,
        "memory_clock": 1300,
        # Energy of 1000 ticks of 15.25 microjoules every 50 us is 305 W; each call is 50 us later.
        "energy": 4_000_000, "energy_step": 1000, "resolution_64ths": 976, "stamp": 10**15, "stamp_step": 50_000,
    }  # fmt: skip


class Intel(fake_nvml.Slots):
    """What the fake Level Zero answers. ``ret_*`` are return codes."""

    variable: ClassVar = "FAKE_INTEL"
    library: ClassVar = "libze_loader.so.1"
    pci: ClassVar = "0x8086"
    counts: ClassVar[tuple[str, ...]] = ("inits",)
    defaults: ClassVar[Mapping[str, int]] = {
        "ret_init": 0, "ret_drivers": 0, "ret_devices": 0, "ret_device": 0, "ret_pci": 0, "ret_pci_stats": 0, "ret_memories": 0,
        "ret_memory": 0, "ret_memory_state": 0, "ret_engines": 0, "ret_engine": 0, "ret_activity": 0, "ret_powers": 0,
        "ret_power": 0, "ret_energy": 0, "ret_clocks": 0, "ret_clock": 0, "ret_clock_state": 0, "ret_sensors": 0,
        "ret_sensor": 0, "ret_temperature": 0, "ret_uuid": 0,
        "inits": 0, "count": 1, "text": 0, "npu": 0, "tiles": 0, "only_tiles": 0, "no_levels": 0, "block_us": 0,
        "physical": 48_000 * MIB, "size": 48_000 * MIB, "free": 47_000 * MIB, "bandwidth": 1, "tx": 1000, "rx": 2000,
        # Of 100 us of the clock 37 are at work; 30,500 uJ in 100 us are 305 W. Each call is 100 us later.
        "active": 5_000_000, "active_step": 37, "clock": 10**9, "clock_step": 100, "energy": 9_000_000, "energy_step": 30_500,
        "stamp": 10**9, "stamp_step": 100,
        "core_clock": 1550, "memory_clock": 3200, "reasons": 0, "hottest": 58, "nan": 0,
    }  # fmt: skip


KINDS: tuple[type[Amd] | type[Intel], ...] = (Amd, Intel)


def build(kind: type[Amd] | type[Intel], folder: Path, *missing: str) -> Path:
    """Compile the library into ``folder``, beside an NVML that is none, and a kernel's list that has its GPU."""
    compiled(folder / kind.library, HERE / f"{kind.variable.lower()}.c", kind.defaults, *missing)
    (folder / "libnvidia-ml.so.1").write_bytes(b"no library")
    listed = folder / "drm/renderD128/device/vendor"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"{kind.pci}\n")
    return folder


def environment(kind: type[Amd] | type[Intel], folder: Path, slots: Path, **more: str) -> dict[str, str]:
    """Of a process that finds the library in ``folder`` and its answers in ``slots``."""
    told = fake_nvml.environment(folder, slots)
    for name in ("FAKE_NVML", "ROCM_HOME", "ROCM_PATH", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZES_ENABLE_SYSMAN"):
        told.pop(name, None)
    return {**told, kind.variable: str(slots), "FAKE_DRM": str(folder / "drm"), **more}


def drive(
    kind: type[Amd] | type[Intel], folder: Path, slots: Path, script: Sequence[Mapping[str, Any]], **more: str
) -> list[Any]:
    """Run `fake_nvml.drive` on ``script`` against the library in ``folder``; the answer of each of its lines."""
    return driven(script, environment(kind, folder, slots, **more))
