"""Owns what a trace's header says of the process it was recorded in: its rank, machine, memory and the versions it runs.

The recorder and ``zprof run`` ask once, when a recording begins. It starts nothing: neither torch nor CUDA, which the run will
do in its own order.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from zprof.clock import boot_ns, now_ns, wall_ns
from zprof.recording.processes import stat_of
from zprof.recording.sampler import running_device
from zprof.trace.header import Header, here

__all__ = ["device", "header", "local_rank", "process_ns", "ranks"]


def header(rank: int, world: int, level: str, *, whole: bool = False) -> Header:
    """This process, now.

    Args:
        whole: its program is recorded from the start.
    """
    host, boot = here()
    return Header(
        rank=rank,
        world=world,
        host=host,
        boot=boot,
        pid=os.getpid(),
        mono_ns=now_ns(),
        wall_ns=wall_ns(),
        level=level,
        device=device() or "cpu",
        rss_nbytes=_rss_nbytes(),
        argv=tuple(sys.argv),
        versions=_versions(),
        process_ns=process_ns() if whole else 0,
    )


def process_ns(root: Path = Path("/")) -> int:
    """When this process began, on the clock of rows; 0 where the kernel does not say.

    Args:
        root: where /proc is; "/" outside tests.
    """
    stat = stat_of(os.getpid(), root)
    if stat is None:
        return 0
    age_ns = boot_ns() - stat.began_ns
    return max(0, now_ns() - age_ns) if age_ns >= 0 else 0


def ranks() -> tuple[int, int]:
    """(rank, world) as a process group, torchrun or Slurm say; (0, 1) without."""
    group: Any = sys.modules.get("torch.distributed")
    # While torch is still being imported its parts come one by one.
    started = getattr(group, "is_initialized", None)
    if started is not None and group.is_available() and started():
        return int(group.get_rank()), int(group.get_world_size())
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        mine, all_of = os.environ.get(rank, ""), os.environ.get(world, "")
        if mine.isdecimal() and all_of.isdecimal() and int(mine) < int(all_of):
            return int(mine), int(all_of)
    return 0, 1


def local_rank() -> int:
    """Which of the ranks on this host it is, as torchrun or Slurm say; 0 without."""
    found = (os.environ.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID"))
    return next((int(value) for value in found if value.isdecimal()), 0)


def device() -> str | None:
    """The accelerator in use; None before it runs, for to ask then would start it, on a device nobody chose."""
    found = running_device()
    try:
        return f"{found[0]}:{found[1].current_device()}" if found is not None else None
    except (RuntimeError, AssertionError, AttributeError):
        # A device that failed answers everything with its error; the script has it already.
        return None


def _rss_nbytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _versions() -> dict[str, str]:
    """Python and the packages that matter, as installed."""
    found = {"python": sys.version.split()[0]}
    for name in ("zhooks", "torch", "numba", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
