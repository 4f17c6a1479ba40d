"""The CPU as a device: a worker thread stands in for the copy stream, so that compute goes on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch import Tensor

from offload.budget import THIS_MACHINE
from offload.device.interface import Device, Mark, failed
from offload.events import Bus
from offload.pages import aligned
from offload.threads import Task, Workers
from offload.work import HostWork

#: Below this a copy is over before a thread would have woken.
INLINE_NBYTES = 256 << 10


class Worker:
    """Copies between host tensors by one thread, in the order of issue as on a stream."""

    def __init__(self) -> None:
        self._threads = Workers("zhooks-copy")
        self._issue = threading.Lock()
        self._last: Task | None = None
        self._closed = False

    def start(self) -> None:
        self._threads.start()

    def copy(self, out: Tensor, source: Tensor, key: str, bus: Bus) -> HostWork:
        assert out.shape == source.shape, f"copy of {key}: {tuple(source.shape)} into {tuple(out.shape)}"
        move: Callable[[Tensor, Tensor], None] = _move if _plain(out, source) else _convert
        if bus.active:
            move = _with_span(bus, key, move)
        with self._issue:
            idle = self._last is None or self._last.done()
            inline = idle and out.nbytes < INLINE_NBYTES
            if not inline:
                self.start()
            if not out.is_inference():
                # Autograd must see the write now, as on a stream, and although memmove goes behind its back.
                torch.autograd.graph.increment_version(out)
            copy = Task(partial(move, out, source), partial(failed, key))
            if inline:
                copy.run()
            else:
                self.submit(copy)
        return copy

    def submit(self, task: Task) -> None:
        """Have the thread do ``task`` after what it was given before."""
        assert not self._closed, "a copy on a device that was closed"
        self._threads.submit(task.run)
        self._last = task

    def close(self) -> None:
        self._closed = True
        self._threads.stop()


class CpuDevice(Device):
    """Host memory is the device's memory; copies run in a thread so that compute goes on."""

    def __init__(self, device: torch.device, addresses_host: bool) -> None:
        super().__init__(device, addresses_host)
        self._worker = Worker()

    def start(self) -> None:
        self._worker.start()

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        on_host = out.device.type == source.device.type == "cpu"
        assert on_host, f"copy of {key}: a CPU device copies between host tensors only"
        return self._worker.copy(out, source, key, self.bus)

    def empty(self, nbytes: int) -> Tensor:
        return aligned(nbytes)

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def used(self) -> tuple[int, int]:
        return THIS_MACHINE.resident()

    def close(self) -> None:
        self._worker.close()


def _plain(out: Tensor, source: Tensor) -> bool:
    """Whether the bytes can be moved as they lie."""
    # A subclass (fake, functional) may have no bytes to move.
    return out.dtype == source.dtype and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        for tensor in (out, source)
    )


def _move(out: Tensor, source: Tensor) -> None:
    # ctypes releases the GIL, and unlike copy_ it starts no second team of OpenMP threads beside the compute's.
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)


def _with_span(bus: Bus, key: str, move: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """``move``, with a span around it."""

    def spanned(out: Tensor, source: Tensor) -> None:
        bus.begin("copy h2h", key, out.nbytes)
        move(out, source)
        bus.end("copy h2h", key, out.nbytes)

    return spanned


def _convert(out: Tensor, source: Tensor) -> None:
    # In this order: leaving inference mode turns gradients on.
    with torch.inference_mode(out.is_inference()), torch.no_grad():
        out.copy_(source)
