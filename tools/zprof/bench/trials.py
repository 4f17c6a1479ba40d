"""Owns the measurements of ``zprof bench``: copies in host memory, to and from a GPU, the scratch file, and an all-gather.

`commands.bench` calls one function a figure. Each moves real bytes the way the runtime does, several times, and answers with
the median rate; it stores and prints nothing.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from offload.device import Device, open_device
from offload.disk import DiskFile
from offload.memory import HostPool
from zprof.clock import now_ns

__all__ = ["REPEATS", "copies_to_device", "disk", "gather", "memcpy"]

#: Timed repeats of each transfer, after one that is not timed.
REPEATS = 5


def _rate(nbytes: int, move: Callable[[], None]) -> float:
    """Bytes a second: the median of ``REPEATS``."""
    move()
    seconds: list[float] = []
    for _ in range(REPEATS):
        begin = now_ns()
        move()
        seconds.append((now_ns() - begin) / 1e9)
    return nbytes / max(statistics.median(seconds), 1e-9)


def memcpy(nbytes: int) -> float:
    """Bytes a second that one thread copies from host memory to host memory."""
    source, out = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return _rate(nbytes, lambda: _moved(out, source))


def _moved(out: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)


def copies_to_device(on: torch.device, nbytes: int) -> dict[str, float]:
    """"h2d" and "d2h" in bytes a second, between page-locked host memory and a GPU.

    Raises:
        CapabilityError: the driver does not let so much be page-locked.
    """
    device = open_device(on)
    pool = HostPool(device, slab_nbytes=nbytes)
    try:
        return _both_ways(device, pool.take(nbytes, "bench"))
    finally:
        device.close()
        pool.close()


def _both_ways(device: Device, host: torch.Tensor) -> dict[str, float]:
    there = device.empty(host.nbytes)
    to_device = _rate(host.nbytes, lambda: device.copy(there, host).synchronize())
    return {"h2d": to_device, "d2h": _rate(host.nbytes, lambda: device.copy(host, there).synchronize())}


def disk(folder: Path, nbytes: int) -> dict[str, float]:
    """"disk write" and "disk read" in bytes a second of a scratch file in ``folder``, checksums included, as zhooks uses it.

    Raises:
        BudgetError: the file system has not so much space.  TierError: it failed.
    """
    device = open_device(torch.device("cpu"))
    pool = HostPool(device, slab_nbytes=nbytes)
    file = DiskFile(folder, label="bench")
    try:
        return _out_and_in(file, pool.take(nbytes, "bench"))
    finally:
        file.close()
        device.close()
        pool.close()


def _out_and_in(file: DiskFile, buffer: torch.Tensor) -> dict[str, float]:
    extent = file.allocate(buffer.nbytes, "bench")
    buffer.random_(generator=torch.Generator().manual_seed(0))
    write = _rate(buffer.nbytes, lambda: file.write(extent, buffer).wait())
    return {"disk write": write, "disk read": _rate(buffer.nbytes, lambda: file.read(extent, buffer).wait())}


def gather(on: torch.device, nbytes: int) -> float:
    """Bytes a second of an all-gather of ``nbytes`` (the gathered tensor) on a device, over this process group's ranks.

    Call it on every rank of an initialised process group; each answers with its own rate.
    """
    import torch.distributed as dist

    share = nbytes // dist.get_world_size()
    mine = torch.zeros(share, dtype=torch.uint8, device=on)
    full = torch.empty(share * dist.get_world_size(), dtype=torch.uint8, device=on)

    def move() -> None:
        dist.all_gather_into_tensor(full, mine)
        if on.type != "cpu":
            torch.accelerator.synchronize()

    return _rate(full.numel(), move)
