"""Owns the measurements behind ``zprof bench --profile``: times of products, plain operations, copies and the disk by size.

`bench/profile.py` calls `measured` and fits a hardware profile to the answer. It measures one thread, the device of such a
profile, and stores and prints nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch

from offload.device import Device, open_device
from offload.disk import DiskFile
from offload.hardware import Sample
from offload.memory import HostPool
from offload.virtual import Calls
from zprof.bench.operations import Operations, operations
from zprof.clock import now_ns

__all__ = ["REPEATS", "host_bandwidth", "measured"]

REPEATS = 7
#: A timed repeat takes at least so long: shorter calls are repeated inside it.
_LEAST_S = 1e-3
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_SQUARES = (16, 32, 64, 128, 256, 512, 1024)
#: As many FLOPs as the square of 256, by products with a small dimension.
_NARROW = ((4, 2048, 2048), (16, 1024, 1024), (64, 512, 512))
_SMALL, _MOST = 1 << 12, 1 << 27
#: More bytes than a core's share of caches.
_CACHED, _MOST_COPIES = 1 << 26, 4096


def measured(folder: Path, most: int = _MOST) -> Iterator[tuple[str, Callable[[], list[Sample]]]]:
    """What there is to measure by name, each as a function that does so; ``most`` bounds the bytes of one operation."""
    yield "dispatch", lambda: [Sample("dispatch", _alone(_dispatching()))]
    yield "calls", _calls
    for name in _DTYPES:
        yield f"matmul {name}", lambda name=name: _products(name)  # type: ignore[misc]
    yield "memory", lambda: _plain(most)
    yield "operations", lambda: _operations(most)
    yield "copies", lambda: _copies(most)
    yield "disk", lambda: _disk(folder, most)


def host_bandwidth(threads: int, most: int = _MOST) -> float:
    """Bytes a second that so many threads read and write together."""
    with _threads(threads):
        return _stream(most)


def _alone(call: Callable[[], object]) -> float:
    with _threads(1):
        return _seconds(call)


def _dispatching() -> Callable[[], object]:
    a = torch.ones(1)
    return lambda: a + a


def _calls() -> list[Sample]:
    """Seconds of a Python call in a training step so small that its operations take no longer than to issue them."""
    with _threads(1):
        step, dispatch = _small_step(), _seconds(_dispatching())
        step()
        operations, calls = Operations(), Calls()
        with operations:
            step()
        with calls.on():
            step()
        return [Sample("call", max(_seconds(step) - operations.count * dispatch, 0.0) / calls.count)]


def _small_step() -> Callable[[], object]:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(20)])
    for module in model:
        module.register_forward_pre_hook(lambda module, args: None)
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=False), torch.ones(4, 4)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _products(name: str) -> list[Sample]:
    shapes = [(n, n, n) for n in _SQUARES] + (list(_NARROW) if name == "fp32" else [])
    samples = []
    with _threads(1):
        for m, n, k in shapes:
            a, b = torch.ones(m, k, dtype=_DTYPES[name]), torch.ones(k, n, dtype=_DTYPES[name])
            nbytes = a.nbytes + b.nbytes + m * n * a.element_size()
            # As a layer's forward, its input's gradient and its weight's have them: each is called once a step.
            layouts = [(a, b.t().contiguous().t()), (a, b), (a.t().contiguous().t(), b)]
            seconds = fmean(_seconds(_from_memory(a, b)) for a, b in layouts)
            samples.append(Sample("matmul", seconds, nbytes, 2.0 * m * n * k, name, min(m, n, k)))
    return samples


def _from_memory(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Their product, of copies in turn: more than caches hold, for in a step other layers come between."""
    count = max(1, min(_MOST_COPIES, _CACHED // (a.nbytes + b.nbytes)))
    copies = itertools.cycle([(a.clone(), b.clone()) for _ in range(count)])
    return lambda: torch.mm(*next(copies))


def _plain(most: int) -> list[Sample]:
    samples = []
    with _threads(1):
        for nbytes in _sizes(_SMALL, most, 4):
            a, b, out = (torch.ones(max(1, nbytes // 12)) for _ in range(3))
            seconds = _seconds(lambda a=a, b=b, out=out: torch.add(a, b, out=out))  # type: ignore[misc]
            samples.append(Sample("memory", seconds, 3 * a.nbytes))
    return samples


def _operations(most: int) -> list[Sample]:
    with _threads(1):
        return operations(most)


def _stream(nbytes: int) -> float:
    a, b, out = (torch.ones(max(1, nbytes // 12)) for _ in range(3))
    return 3 * a.nbytes / _seconds(lambda: torch.add(a, b, out=out))


def _copies(most: int) -> list[Sample]:
    """By memmove of one thread, into pages that were and that were not touched, and through the device's own copies."""
    nbytes = most // 2
    source, out = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    samples = [Sample("h2h", _seconds(lambda: ctypes.memmove(out.data_ptr(), source.data_ptr(), nbytes)), nbytes)]
    samples += [Sample("fresh", _touched(nbytes), nbytes)]
    device = open_device(torch.device("cpu"))
    try:
        for size in _sizes(1 << 16, nbytes, 8):
            samples += [Sample("h2d", _seconds(_copying(device, out[:size], source[:size])), size)]
    finally:
        device.close()
    return samples


def _copying(device: Device, out: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: device.copy(out, source).synchronize()


def _touched(nbytes: int) -> float:
    """Pages straight from the system each time: torch's allocator may have kept those of an earlier measurement."""
    seconds = []
    for _ in range(REPEATS):
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            first = ctypes.c_char.from_buffer(pages)
            begin = now_ns()
            ctypes.memset(ctypes.addressof(first), 1, nbytes)
            seconds.append((now_ns() - begin) / 1e9)
            del first
    return min(seconds)


def _disk(folder: Path, most: int) -> list[Sample]:
    device = open_device(torch.device("cpu"))
    pool = HostPool(device, slab_nbytes=most // 4)
    file = DiskFile(folder, label="bench")
    samples = []
    try:
        buffer = pool.take(most // 4, "bench")
        buffer.random_(generator=torch.Generator().manual_seed(0))
        for nbytes in _sizes(1 << 18, most // 4, 8):
            extent = file.allocate(nbytes, "bench")
            part = buffer[:nbytes]
            write = _seconds(lambda extent=extent, part=part: file.write(extent, part).wait())  # type: ignore[misc]
            read = _seconds(lambda extent=extent, part=part: file.read(extent, part).wait())  # type: ignore[misc]
            samples += [Sample("disk write", write, nbytes), Sample("disk read", read, nbytes)]
    finally:
        file.close()
        device.close()
        pool.close()
    return samples


def _sizes(least: int, most: int, factor: int) -> list[int]:
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def _seconds(call: Callable[[], object]) -> float:
    """The least of ``REPEATS``, after one that is not timed: what else the machine does only adds."""
    begin = now_ns()
    call()
    times = max(1, min(10_000, int(_LEAST_S * 1e9 / max(1, now_ns() - begin))))
    seconds = []
    for _ in range(REPEATS):
        begin = now_ns()
        for _ in range(times):
            call()
        seconds.append((now_ns() - begin) / 1e9 / times)
    return max(min(seconds), 1e-9)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
