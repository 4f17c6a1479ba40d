"""What the store needs of a compute device: copies under way, page-locking, free memory, where it sits.

``cpu.py``, ``stream_device.py``, ``cuda.py`` and ``synchronous.py`` have devices; ``open.py`` chooses.  It never decides what
moves, and never keeps a tensor past its copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.budget import THIS_MACHINE, Facts
from offload.errors import TierError
from offload.events import Bus
from offload.pages import mapped, over, round_up
from offload.work import HostWork

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
    def facts(self) -> Facts:
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
        return True

    @abstractmethod
    def start(self) -> None:
        """Start the threads that copies may need.

        Raises:
            CapabilityError: the system does not allow them; without this call it is raised by the first copy that needs one.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, contents undefined, not an inference tensor; page aligned on a CPU."""

    def pin(self, memory: Tensor) -> None:
        """Page-lock all of what `map_host` gave for this; nothing where it is locked already, or where nothing is.

        Raises:
            CapabilityError: the driver or RLIMIT_MEMLOCK does not let it.
        """
        assert not self.pins(), "a device that pins says how"

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin` of the same storage; no copy that uses it may be under way."""
        assert not self.pins(), "a device that pins says how"

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes (free, total) of the device; what torch's allocator caches but does not use counts as free.

        Raises:
            CapabilityError: torch does not say it.
        """

    @abstractmethod
    def used(self) -> tuple[int, int]:
        """Bytes of the device that this process uses: now, and at most since it began or last reset that count."""

    def pins(self) -> bool:
        """Whether `pin` locks anything here."""
        return False

    def memlock_applies(self) -> bool:
        """Whether what `pin` locks counts against RLIMIT_MEMLOCK; some drivers lock past it."""
        return False

    def pci_address(self) -> str | None:
        """Where sysfs has the device, e.g. "0000:3b:00.0"; None where it is no PCI device or torch does not say."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for every copy; none may be started afterwards."""


def failed(key: str, error: Exception) -> TierError:
    """The error of a copy that failed."""
    what = f"{type(error).__name__}: {error}"
    return TierError(f"The copy of {key or 'a block'} did not finish: {what}; the memory it wrote to is undefined")
