"""Owns what is sampled beside the events: this process and its container, torch's allocators, and recorded values for tests.

The recorder asks every sampler once an interval, on a thread of its own. A sampler never raises from `sample`, never imports
torch, and leaves out what it cannot read.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from zprof.recording import kernel_files

__all__ = [
    "ProcessSampler",
    "Reading",
    "ReplaySampler",
    "Sampler",
    "TorchSampler",
    "cgroup_folder",
    "has_accelerator",
    "process_samplers",
    "running_device",
    "torch_devices",
    "torch_uuids",
]

#: (what, key, value): one COUNTER row, in the unit of its name.
Reading = tuple[str, str, int]

_FILE_CACHE = {"memory.current": (b"inactive_file", b"active_file")}
_FILE_CACHE_V1 = (b"total_inactive_file", b"total_active_file")
_SHARED, _SHARED_V1 = b"shmem", b"total_shmem"

_BUILT_IN = ("cuda", "xpu", "mtia")
#: Names of torch's for a type that nobody has registered, and for zhooks' device on paper.
_NO_DEVICE = ("privateuseone", "virtual")


class Sampler(Protocol):
    """A source of levels that no event states."""

    def sample(self) -> Sequence[Reading]:
        """What the levels are now; quick, and never raises."""

    def close(self) -> None:
        """Give back what the sampler holds; it is not sampled again."""


class ProcessSampler:
    """Resident bytes of this process ("rss"), what is charged to its container ("cgroup memory"), and of that what is shared
    memory ("cgroup shared memory"), and what the files in /dev/shm take ("/dev/shm used").

    Page cache is charged to a container too and given up before anybody is killed: it is not counted.

    Args:
        root: where /proc and /sys are; "/" outside tests.
        who: the number of another process.
    """

    def __init__(self, root: Path = Path("/"), who: str = "self") -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = root / "proc" / who / "statm"
        folder = cgroup_folder(root, who)
        self._usage = self._stat = None
        if folder is not None:
            name = "memory.current" if (folder / "memory.current").exists() else "memory.usage_in_bytes"
            self._usage, self._stat = folder / name, folder / "memory.stat"
            self._cache = _FILE_CACHE.get(name, _FILE_CACHE_V1)
            self._shared = _SHARED if name in _FILE_CACHE else _SHARED_V1
        self._shm = root / "dev/shm"

    def sample(self) -> Sequence[Reading]:
        readings: list[Reading] = []
        fields = kernel_files.read(self._statm).split()
        if len(fields) > 1 and fields[1].isdigit():
            readings.append(("rss", "", int(fields[1]) * self._page))
        if self._usage is not None and self._stat is not None:
            usage = kernel_files.read(self._usage).strip()
            if usage.isdigit():
                stat = _figures(kernel_files.read(self._stat))
                cached = sum(stat.get(name, 0) for name in self._cache)
                readings.append(("cgroup memory", "", max(0, int(usage) - cached)))
                if self._shared in stat:
                    readings.append(("cgroup shared memory", "", stat[self._shared]))
        with suppress(OSError):
            shm = os.statvfs(self._shm)
            readings.append(("/dev/shm used", "", (shm.f_blocks - shm.f_bfree) * shm.f_frsize))
        return readings

    def close(self) -> None:
        pass


class TorchSampler:
    """Bytes of torch's allocator for a device: "cuda allocated" and "cuda reserved" a device, of whatever type, and "pinned"
    host memory.

    It looks only at a torch that is imported and whose device runs; it starts neither.
    """

    def sample(self) -> Sequence[Reading]:
        found = running_device()
        if found is None:
            return ()
        kind, module = found
        readings: list[Reading] = []
        try:
            for index in range(module.device_count()):
                for name, level in zip(("allocated", "reserved"), _levels(module, index), strict=True):
                    if isinstance(level, int):
                        readings.append((f"cuda {name}", f"{kind}:{index}", level))
            host = module.host_memory_stats() if hasattr(module, "host_memory_stats") else {}
            pinned = host.get("allocated_bytes.current")
            if isinstance(pinned, int):
                readings.append(("pinned", "", pinned))
        except (AttributeError, RuntimeError, AssertionError, KeyError, TypeError, ValueError):
            # A device that failed, or a torch that is shutting down: the process will say so itself.
            return readings
        return readings

    def close(self) -> None:
        pass


class ReplaySampler:
    """Gives recorded readings, one sample after the other, and nothing once they are used up."""

    def __init__(self, samples: Iterable[Sequence[Reading]]) -> None:
        self._samples: Iterator[Sequence[Reading]] = iter(samples)
        self.closed = False

    def sample(self) -> Sequence[Reading]:
        return next(self._samples, ())

    def close(self) -> None:
        self.closed = True


def process_samplers() -> list[Sampler]:
    """What every recording samples: this process, its container, and torch's allocators once they run."""
    return [ProcessSampler(), TorchSampler()]


def torch_uuids() -> list[str] | None:
    """The devices this process computes on, by their UUIDs and as CUDA numbers them; None where CUDA does not run here yet."""
    return torch_devices("cuda", lambda device: str(device.uuid))


def torch_devices(kind: str, about: Callable[[Any], str]) -> list[str] | None:
    """What ``about`` says of the properties of each device, in torch's order; None where it runs none, or does not know.

    Args:
        kind: "cuda", which is HIP too, or "xpu".
    """
    running = _running(kind)
    if running is None:
        return None
    try:
        return [about(running.get_device_properties(index)) for index in range(running.device_count())]
    except (AttributeError, RuntimeError, AssertionError, TypeError, ValueError):
        return None


def cgroup_folder(root: Path = Path("/"), who: str = "self") -> Path | None:
    """Where the memory of a process's container is accounted; None outside one, or where it cannot be seen from here."""
    mounts = kernel_files.read(root / "proc/self/mountinfo").decode(errors="replace")
    hierarchies = kernel_files.read(root / "proc" / who / "cgroup").decode(errors="replace")
    for controllers, path in re.findall(r"^\d+:([^:\n]*):(/.*)$", hierarchies, re.MULTILINE):
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "cgroup" if controllers else "cgroup2"
        for line in mounts.splitlines():
            left, _, right = line.partition(" - ")
            fields, more = left.split(), right.split()
            if len(fields) < 5 or len(more) < 2 or more[0] != kind:
                continue
            if controllers and "memory" not in more[-1].split(","):
                continue
            folder = root / _below(PurePosixPath(path), PurePosixPath(fields[3]), PurePosixPath(fields[4]))
            if (folder / "memory.current").exists() or (folder / "memory.usage_in_bytes").exists():
                return folder
    return None


def _below(path: PurePosixPath, mounted: PurePosixPath, point: PurePosixPath) -> str:
    """Where a cgroup's ``path`` is seen, relative to the root, of a tree whose part ``mounted`` is seen at ``point``."""
    # A container without a namespace of its own sees its host's path, and its own part of the tree at the mount.
    seen = path.is_relative_to(mounted) and ".." not in path.parts
    inside = path.relative_to(mounted) if seen else PurePosixPath(".")
    return str(point / inside).lstrip("/")


def running_device() -> tuple[str, Any] | None:
    """The type of device that torch computes on and its module, where torch is imported and the device runs."""
    core = getattr(sys.modules.get("torch"), "_C", None)
    registered = getattr(core, "_get_privateuse1_backend_name", None)
    # What others have registered, but for the virtual device, which has no memory; then what torch comes with.
    for kind in (*([registered()] if registered is not None else []), *_BUILT_IN):
        module = None if kind in _NO_DEVICE else _running(kind)
        if module is not None:
            return kind, module
    return None


def has_accelerator() -> bool:
    """torch, which is imported, computes on an accelerator here, or can: tensors of the CPU lie elsewhere."""
    torch = sys.modules["torch"]
    if torch._C._get_privateuse1_backend_name() not in _NO_DEVICE:
        return True
    # By the build, not by asking CUDA: to ask fixes the devices a script sees, and what its forks may do.
    return bool(torch.backends.cuda.is_built()) and any(Path("/dev").glob("nvidia[0-9]*"))


def _levels(module: Any, index: int) -> list[Any]:
    """Bytes allocated and reserved of a device, as its allocator counts them; None of one that does not."""
    nested = getattr(module, "memory_stats_as_nested_dict", None)
    if nested is not None:
        # As the allocator gives it: flattening two hundred counters takes longer than asking for them.
        stats = nested(index)
        return [stats.get(f"{name}_bytes", {}).get("all", {}).get("current") for name in ("allocated", "reserved")]
    asked = getattr(module, "memory_stats", None) or sys.modules["torch"].accelerator.memory_stats
    stats = asked(index)
    return [stats.get(f"{name}_bytes.all.current") for name in ("allocated", "reserved")]


def _running(kind: str) -> Any:
    """torch's module of a type of device, where torch is imported and it runs, else None."""
    module = getattr(sys.modules.get("torch"), kind, None)
    try:
        # While torch is still being imported its parts come one by one.
        return module if module is not None and module.is_initialized() else None
    except AttributeError:
        return None


def _figures(stat: bytes) -> dict[bytes, int]:
    lines = (line.split() for line in stat.splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2 and fields[1].isdigit()}
