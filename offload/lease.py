"""A block's values in memory for a while: the lease, the steps that bring it there, and the steps that take it back.

``store.py`` opens and closes leases; whoever fetched one waits for it, works on its values and closes it.  Whether anything
has to be written back is read from the version counter that torch keeps for every tensor.  It never decides what is evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from offload.events import Bus
from offload.tier import Tier

__all__ = [
    "Done", "Failed", "HostStep", "Lease", "Mode", "Step", "Then", "as_bytes", "looked_at", "seen", "storage_uses", "view_of",
]  # fmt: skip


class Step(Protocol):
    """Something under way; the error of a worker surfaces at ``wait``, with the name of the block."""

    def wait(self) -> None:
        """Until the caller (the host on a CPU, the current stream on CUDA) may use the result."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""


class HostStep(Step, Protocol):
    """A step whose result the host itself uses: ``wait`` blocks until it is there."""

    def when_over(self, call: Callable[[], None]) -> None:
        """Run ``call``, which must not raise, once it is over, well or badly: where it ended, or here if it has ended."""


class Done:
    """Nothing is under way."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


class Failed:
    """It is over, and badly."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def done(self) -> bool:
        return True


class Then:
    """A step on the host, and what follows it: started by whoever ends the first (a disk worker, say), never by a look at it.

    Args:
        first: its result is used by the host; ``wait`` of it returns or raises at once when it is over.
        follow: starts the second; may run in another thread, and must not refer to the streams current there.
    """

    def __init__(self, first: HostStep, follow: Callable[[], Step]) -> None:
        self._first: HostStep | None = first
        self._follow: Callable[[], Step] | None = follow
        self._second: Step = Done()
        self._begun = threading.Event()
        first.when_over(self._go_on)

    def wait(self) -> None:
        self._begun.wait()
        self._second.wait()

    def done(self) -> bool:
        return self._begun.is_set() and self._second.done()

    def _go_on(self) -> None:
        """Start what follows; an error is kept for ``wait``."""
        first, follow = self._first, self._follow
        # Both refer to memory that must not live as long as this does.
        self._first = self._follow = None
        assert first is not None and follow is not None
        try:
            first.wait()
            self._second = follow()
        except BaseException as error:
            self._second = Failed(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._begun.set()


class Mode(Enum):
    """What a holder does with the values of a block."""

    #: Nothing is changed.
    READ = "read"
    #: Every element is overwritten, padding included: nothing is read, and the old values are gone once it ends well.
    WRITE_ALL = "write all"
    #: Elements are read, and some or all of them are changed.
    UPDATE = "update"


class Lease:
    """One block's values at one tier, shared by all who fetched it and have not closed it yet.

    Attributes:
        mode: the most that any of them does with the values.
        values: 1-D [numel], the block's dtype.  The block's own memory where that is at ``at`` already (``direct``), else
            a buffer; valid after ``wait`` and until the last ``close``.
    """

    __slots__ = (
        "_arrived", "_arriving", "_bus", "_lent", "_opened", "at", "blank", "buffer", "direct", "fresh", "holds", "key",
        "leaving", "mode", "uses", "values",
    )  # fmt: skip

    def __init__(self, key: str, at: Tier, values: Tensor, buffer: Tensor | None, mode: Mode, *, blank: bool) -> None:
        self.key, self.at, self.values, self.buffer, self.mode = key, at, values, buffer, mode
        self.direct = buffer is None
        # The block had never been written.
        self.blank = blank
        # Nothing was read: whatever the values become is what the block holds.
        self.fresh = not self.direct and (blank or mode is Mode.WRITE_ALL)
        self.holds = 1
        # The write-back, once the last holder has closed.
        self.leaving: Step | None = None
        self._arriving: Step = Done()
        self._arrived = False
        self._bus: Bus | None = None
        # What another thread does with the values, which nobody else gets until it is over.
        self._lent: Step | None = None
        self._opened = values._version
        # Counted before a transfer begins, which refers to the buffer itself until it has ended.
        self.uses = storage_uses(values)

    def arrive(self, step: Step, bus: Bus) -> None:
        """The values are there once ``step`` has ended; ``bus`` hears how long somebody stood still for them."""
        self._arriving, self._bus = step, bus

    def lend(self, until: Step) -> None:
        """Another thread works on the values, which have arrived, until this step is over: a wait of any other waits for it."""
        self._lent = until

    def take_back(self) -> None:
        """That step is over."""
        self._lent = None

    def share(self, mode: Mode) -> None:
        """Another holder, who does this with the values."""
        if mode is self.mode:
            return
        if self._lent is not None:
            self._lent.wait()
        # Until a whole write has been made, its buffer holds nothing of the block's.
        assert self.mode is not Mode.WRITE_ALL or self.direct or self.writes, f"block {self.key}: read before it was written"
        self.mode = Mode.UPDATE

    def wait(self) -> Tensor:
        """The values, ready to be used."""
        if self._lent is not None:
            self._lent.wait()
        if not self._arrived:
            waits = self._bus is not None and self._bus.active and not self._arriving.done()
            if waits and self._bus is not None:
                self._bus.begin("wait fetch", self.key)
            self._arriving.wait()
            if waits and self._bus is not None:
                self._bus.end("wait fetch", self.key)
            self._arriving, self._arrived = Done(), True
            # What arrived counts as no change: nobody may write before this.
            self._opened = self.values._version
        return self.values

    def arrived(self) -> bool:
        """Wait; whether it went well.  What did not was raised where the values were wanted."""
        try:
            self.wait()
        except Exception:
            return False
        return True

    @property
    def writes(self) -> int:
        """In-place changes since it was opened."""
        return int(self.values._version) - self._opened if self._arrived else 0

    @property
    def changed(self) -> bool:
        return self.fresh or self.writes > 0

    def written_back(self) -> None:
        """The block's own memory holds these values now, or shall not."""
        self.fresh, self._opened = False, self.values._version

    @property
    def held_outside(self) -> bool:
        """Somebody still has a view of the buffer: it must not be used again yet."""
        return storage_uses(self.values) > self.uses


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and handles refer to the tensor's memory, this call's own among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def looked_at(home: Tensor) -> bool:
    """Somebody has a view of a block's own memory: besides the block's tensor, and the handle that counts."""
    return storage_uses(home) > 2


def seen(values: Tensor) -> Tensor:
    """Another tensor on the same memory and version counter: as long as it lives the buffer counts as held."""
    return values.view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as 1-D uint8."""
    with torch.no_grad(), torch.inference_mode(False):
        return tensor.view(torch.uint8)


def view_of(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first ``numel`` elements of a uint8 buffer as ``dtype``, with a version counter of its own."""
    with torch.no_grad(), torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), buffer.storage_offset() // dtype.itemsize, (numel,), (1,))
