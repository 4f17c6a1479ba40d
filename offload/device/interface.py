"""What the store needs of a compute device: copies under way, page-locking, free memory, where it sits; and the thread that
copies between tensors of the host.

``cpu.py``, ``stream_device.py`` and ``cuda.py`` have devices; ``open.py`` chooses.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.budget import THIS_MACHINE
from offload.budget import Machine as HostMachine
from offload.device.torch_module import memory_of, used_of
from offload.errors import TierError
from offload.events import Bus
from offload.pages import mapped, over, round_up
from offload.threads import Task, Workers
from offload.work import HostWork

#: Below this a copy is over before a thread would have woken.
INLINE_NBYTES = 256 << 10
#: A point of a stream; None on a CPU, where nothing is queued.
Mark = Any


class HostMemory(Protocol):
    """Host memory in whole pages, until it is closed."""

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] from ``start``, in a storage of its own that spans whole pages."""

    def close(self) -> None:
        """Return it, now or with the last tensor that looks at it."""


class _Mapped:
    def __init__(self, nbytes: int) -> None:
        self._memory = mapped(nbytes)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        return over(memoryview(self._memory)[start : start + round_up(nbytes)], nbytes)

    def close(self) -> None:
        with suppress(BufferError):
            self._memory.close()


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
        move = partial(_move if _plain(out, source) else _convert, out, source)
        if bus.active:
            move = partial(_with_span, bus, key, out.nbytes, move)
        with self._issue:
            idle = self._last is None or self._last.done()
            inline = idle and out.nbytes < INLINE_NBYTES
            if not inline:
                self.start()
            if not out.is_inference():
                # Autograd must see the write now, as on a stream, and although memmove goes behind its back.
                torch.autograd.graph.increment_version(out)
            copy = Task(move, partial(failed, key))
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


class Device(ABC):
    """A compute device as the store needs it.

    Attributes:
        device: with its index where it has one.
        addresses_host: compute reads HOST memory where it lies, so nothing need be copied to be used.
        bus: hears spans "copy h2d" and "copy d2h", "copy h2h" between host tensors; where there are streams one ends when it
            is noticed, which is late rather than early.
    """

    def __init__(self, device: torch.device, addresses_host: bool) -> None:
        self.device = device
        self.addresses_host = addresses_host
        self.bus = Bus()
        self._worker = Worker()

    @abstractmethod
    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        """Start ``out.copy_(source)``; same shape, dtypes may differ, and both are kept alive until it is over.

        It runs after what the caller's current stream has queued. Copies in one direction run in the order of issue;
        between directions only ``wait`` orders. Until then nobody writes either tensor, nor reads ``out``.

        Args:
            out: contiguous where it lies on the other side than ``source``; its version counts up before this returns.
            key: what errors call it.
            after: where `mark` was called it runs after that instead: for a copy that another thread starts, or one that what
                was queued since must not hold up.
        Raises:
            TierError: it could not even be started, for the device has failed.
        """

    @property
    def facts(self) -> HostMachine:
        """What the host has."""
        return THIS_MACHINE

    @property
    def host(self) -> torch.device:
        """Where tensors in host memory are."""
        return torch.device("cpu")

    def map_host(self, nbytes: int, *, locked: bool = False) -> HostMemory:
        """Fresh host memory.

        Args:
            locked: for `pin`, and for nothing else.
        Raises:
            OSError, OverflowError, MemoryError, ValueError: the system does not give it.
            CapabilityError: it cannot be page-locked.
        """
        return _Mapped(nbytes)

    def mark(self) -> Mark:
        """The point that the caller's current stream has been given work up to."""
        return None

    def on_host(self, tensor: Tensor) -> bool:
        """The host, and so the system's file calls, may use the tensor's memory."""
        return tensor.device.type != self.device.type

    def start(self) -> None:
        """Start the threads that copies may need.

        Raises:
            CapabilityError: the system does not allow them; without this call it is raised by the first copy that needs one.
        """
        self._worker.start()

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, contents undefined, not an inference tensor; page aligned on a CPU."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pin(self, memory: Tensor) -> None:
        """Page-lock all of what `map_host` gave for this; nothing where it is locked already, or where nothing is.

        Raises:
            CapabilityError: the driver or RLIMIT_MEMLOCK does not let it.
        """
        assert not self.pins(), "a device that pins says how"

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin` of the same storage; no copy that uses it may be under way."""
        assert not self.pins(), "a device that pins says how"

    def memory(self) -> tuple[int, int]:
        """Bytes (free, total) of the device; what torch's allocator caches but does not use counts as free.

        Raises:
            CapabilityError: torch does not say it.
        """
        return memory_of(self.device)

    def used(self) -> tuple[int, int]:
        """Bytes of the device that this process uses: now, and at most since it began or last reset that count."""
        return used_of(self.device)

    def pins(self) -> bool:
        """Whether `pin` locks anything here."""
        return False

    def memlock_applies(self) -> bool:
        """Whether what `pin` locks counts against RLIMIT_MEMLOCK; some drivers lock past it."""
        return False

    def pci_address(self) -> str | None:
        """Where sysfs has the device, e.g. "0000:3b:00.0"; None where it is no PCI device or torch does not say."""
        return None

    def close(self) -> None:
        """Wait for every copy; none may be started afterwards."""
        self._worker.close()


def failed(key: str, error: Exception) -> TierError:
    """The error of a copy that failed."""
    what = f"{type(error).__name__}: {error}"
    return TierError(f"The copy of {key or 'a block'} did not finish: {what}; the memory it wrote to is undefined")


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


def _with_span(bus: Bus, key: str, nbytes: int, move: Callable[[], None]) -> None:
    bus.begin("copy h2h", key, nbytes)
    move()
    bus.end("copy h2h", key, nbytes)


def _convert(out: Tensor, source: Tensor) -> None:
    # In this order: leaving inference mode turns gradients on.
    with torch.inference_mode(out.is_inference()), torch.no_grad():
        out.copy_(source)
