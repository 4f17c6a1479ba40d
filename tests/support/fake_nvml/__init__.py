"""Owns a libnvidia-ml.so.1 made for tests: builds it with gcc, and steers what it answers through a shared file.

Tests of the NVML sampler start a Python whose loader finds it, so that the real bindings call it. It says nothing about
what a real driver does: only that what NVML documents is asked for, read and survived.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.support.paths import ROOT

HERE = Path(__file__).resolve().parent
MIB = 1 << 20

#: Slot -> what it holds at first. ``ret_*`` are return codes; a slot is a 64-bit integer.
DEFAULTS: dict[str, int] = {
    "ret_init": 0,
    "ret_driver": 0,
    "ret_count": 0,
    "ret_handle": 0,
    "ret_name": 0,
    "ret_uuid": 0,
    "ret_memory": 0,
    "ret_memory_v1": 0,
    "ret_utilisation": 0,
    "ret_power": 0,
    "ret_power_field": 0,
    "ret_energy": 0,
    "ret_temperature": 0,
    "ret_temperature_v": 0,
    "ret_clock": 0,
    "ret_reasons": 0,
    "ret_throttle_reasons": 0,
    "ret_link": 0,
    "ret_throughput": 0,
    "ret_fields": 0,
    "ret_pcie": 0,
    "ret_nvlink": 0,
    "ret_gpm": 0,
    "ret_gpm_sample": 0,
    "ret_metric": 0,
    "ret_mig": 0,
    "inits": 0,
    "shutdowns": 0,
    "text": 0,
    "cuda": 12080,
    "count": 1,
    "lost": 0,
    "unreachable": 0,
    "other": 0,
    "memory_total": 141_000 * MIB,
    "memory_used": 1000 * MIB,
    "utilisation": 37,
    "power": 250_000,
    "power_now": 251_000,
    "energy": 5_000_000,
    "temperature": 41,
    "sm_clock": 1980,
    "memory_clock": 3201,
    "reasons": 0,
    "link_generation": 5,
    "throughput_tx": 1000,
    "throughput_rx": 2000,
    "throughput_calls": 0,
    "block_us": 20_000,
    "pcie_tx": 10_000,
    "pcie_rx": 20_000,
    "pcie_step": 0,
    "pcie_type": 3,
    "nvlink_tx": 1800,
    "nvlink_rx": 3600,
    "nvlink_type": 3,
    "stamp": 1_700_000_000_000_000,
    "stamp_step": 1000,
    "nan": 0,
    "gpm": 1,
    "gpm_time": 0,
    "gpm_held": 0,
    "gpm_tx": 100,
    "gpm_rx": 200,
    "mig": 0,
    "mig_gpu": 0,
    "mig_most": 7,
    "mig_parts": 2,
    "ret_processes": 0,
    "process": 0,
    "process_memory": 0,
}
#: Steps of a script of `drive.py`: watch all devices, or those of this process; what the sampler says; its end.
ALL: dict[str, Any] = {"open": {"everything": True}}
MINE: dict[str, Any] = {"open": {}}
SAMPLE: dict[str, Any] = {"sample": True}
STATE: dict[str, Any] = {"state": True}
CLOSE: dict[str, Any] = {"close": True}
#: What the code under test does not steer: counters of calls.
COUNTS = ("inits", "shutdowns", "throughput_calls", "gpm_time", "gpm_held")


def build(folder: Path, *missing: str) -> Path:
    """Compile the library into ``folder``, without the functions named by ``missing`` ("FIELDS", "GPM", ...)."""
    return compiled(folder / "libnvidia-ml.so.1", HERE / "fake_nvml.c", DEFAULTS, *missing)


def compiled(library: Path, source: Path, slots: Iterable[str], *missing: str) -> Path:
    """Compile ``source``, which answers from ``slots``, to ``library``; the folder it is in."""
    library.parent.mkdir(parents=True, exist_ok=True)
    names = list(slots)
    defines = [f"-DS_{name}={place}" for place, name in enumerate(names)] + [f"-DSLOTS={len(names)}"]
    defines += [f"-DNO_{name}" for name in missing]
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    command = ["gcc", *flags, *defines, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return library.parent


class Slots:
    """The shared file, by the names of its slots."""

    defaults: ClassVar[Mapping[str, int]] = DEFAULTS
    counts: ClassVar[tuple[str, ...]] = COUNTS

    def __init__(self, path: Path, values: Mapping[str, int] = {}) -> None:
        self.path = path
        self.places = {name: place for place, name in enumerate(self.defaults)}
        if not path.exists():
            path.write_bytes(struct.pack(f"<{len(self.places)}q", *self.defaults.values()))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.set(values)

    def __getitem__(self, name: str) -> int:
        return int(struct.unpack_from("<q", self._memory, 8 * self.places[name])[0])

    def __setitem__(self, name: str, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * self.places[name], value)

    def set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self[name] = value

    def reset(self) -> None:
        self.set({name: value for name, value in self.defaults.items() if name not in self.counts})


def environment(folder: Path, slots: Path, **more: str) -> dict[str, str]:
    """Of a process that finds the library in ``folder`` and its answers in ``slots``."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return {**told, "LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(slots), "NO_COLOR": "1", **more}


def drive(folder: Path, slots: Path, script: Sequence[Mapping[str, Any]], **more: str) -> list[Any]:
    """Run `drive.py` on ``script`` against the library in ``folder``; the answer of each of its lines."""
    return driven(script, environment(folder, slots, **more))


def driven(script: Sequence[Mapping[str, Any]], env: Mapping[str, str]) -> list[Any]:
    """Run `drive.py` on ``script``; the answer of each of its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.fake_nvml.drive"],
        input=json.dumps(script),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert isinstance(answers, list) and not done.stderr, done.stderr
    return answers
