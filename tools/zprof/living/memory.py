"""Owns the bytes of a running process as the system and the driver count them: resident, its container's, and on each GPU.

`zprof attach` shows them. It reads /proc, the cgroup's files and NVML, asks the process nothing, and
leaves out what they do not say.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.text import counted
from zprof.gpu.processes import processes_on_gpus
from zprof.living.processes import Process
from zprof.recording.sampler import ProcessSampler, cgroup_folder

__all__ = ["Gpu", "Memory", "as_json", "memory_of"]

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Gpu:
    """What NVML says that the process holds on a device; None where the driver does not say."""

    key: str
    name: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process; None is "not seen".

    Attributes:
        resident: in memory. proportional: of it, what is shared counted by the number of those who share it (PSS).
        swapped: in swap. most: the most that was resident. cgroup, limit: of its container, file cache left out, and its bound.
        gpus: where it holds anything, by NVML's numbers. nvml: why there are none; "" where NVML answers.
    """

    resident: int | None
    proportional: int | None
    swapped: int | None
    most: int | None
    cgroup: int | None
    limit: int | None
    gpus: tuple[Gpu, ...]
    nvml: str


def memory_of(process: Process) -> Memory:
    """As it is now."""
    folder = Path(f"/proc/{process.pid}")
    rolled, status = _kib(folder / "smaps_rollup"), _kib(folder / "status")
    sampled = {what: value for what, _, value in ProcessSampler(who=str(process.pid)).sample()}
    gpus, why = _gpus(process)
    return Memory(
        resident=rolled.get("Rss", sampled.get("rss")),
        proportional=rolled.get("Pss"),
        swapped=rolled.get("Swap", status.get("VmSwap")),
        most=status.get("VmHWM"),
        cgroup=sampled.get("cgroup memory"),
        limit=_limit(process),
        gpus=gpus,
        nvml=why,
    )


def _kib(path: Path) -> dict[str, int]:
    """Lines such as "Rss:  314944 kB" as bytes."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {name: int(count) << 10 for name, count in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _limit(process: Process) -> int | None:
    """The narrowest bound on its container's memory, or on those above it, as far as they are mounted here."""
    here = cgroup_folder(who=str(process.pid))
    limits = []
    while here is not None and here.name:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (limit := _number(here / name)) is not None and limit < _UNLIMITED:
                limits.append(limit)
        above = here.parent
        here = above if (above / "cgroup.procs").exists() else None
    return min(limits, default=None)


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text().strip())
    return None


def _gpus(process: Process) -> tuple[tuple[Gpu, ...], str]:
    """By the numbers that the driver gives processes: those of the host, so that in a container none may be this one's."""
    used, why = processes_on_gpus()
    found = [Gpu(key, name, nbytes) for key, name, pid, nbytes in used if pid in (process.pid, process.inner)]
    if used and not found:
        others = len({pid for _, _, pid, _ in used})
        why = f"NVML names {counted(others, 'other process')}, and not this one (in a container it never does)"
    return tuple(found), why


def as_json(memory: Memory) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "rss_nbytes": memory.resident,
        "pss_nbytes": memory.proportional,
        "swap_nbytes": memory.swapped,
        "most_rss_nbytes": memory.most,
        "cgroup_nbytes": memory.cgroup,
        "cgroup_limit_nbytes": memory.limit,
        "gpus": [{"key": gpu.key, "name": gpu.name, "nbytes": gpu.nbytes} for gpu in memory.gpus],
        "nvml": memory.nvml,
    }
