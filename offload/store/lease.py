"""A block's values in memory for a while: the lease, the work that brings it there, and the work that takes it back.

``store.py`` opens and closes leases; whoever fetched one waits for it, works on its values and closes it.  Whether anything
has to be written back is read from the version counter that torch keeps for every tensor.  It never decides what is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from offload.device import keep
from offload.events import HERE, Bus
from offload.store.allocation import Allocation
from offload.tier import Tier
from offload.work import DONE, HostWork, Work

__all__ = ["Lease", "Mode", "seen"]


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
        "_arrived",
        "_arriving",
        "_bus",
        "_lent",
        "_opened",
        "allocation",
        "at",
        "blank",
        "direct",
        "fresh",
        "holds",
        "key",
        "mode",
        "values",
        "write_back",
    )  # fmt: skip

    def __init__(self, key: str, at: Tier, values: Tensor, allocation: Allocation | None, mode: Mode, *, blank: bool) -> None:
        self.key, self.at, self.values, self.allocation, self.mode = key, at, values, allocation, mode
        self.direct = allocation is None
        # The block had never been written.
        self.blank = blank
        # Nothing was read: whatever the values become is what the block holds.
        self.fresh = not self.direct and (blank or mode is Mode.WRITE_ALL)
        self.holds = 1
        # The write-back, once the last holder has closed.
        self.write_back: HostWork | None = None
        self._arriving: HostWork = DONE
        self._arrived = False
        self._bus: Bus | None = None
        # What another thread does with the values, which nobody else gets until it is over.
        self._lent: Work | None = None
        self._opened = values._version

    def arrive(self, work: HostWork, bus: Bus) -> None:
        """The values are there once ``work`` has ended; ``bus`` hears how long somebody stood still for them."""
        self._arriving, self._bus = work, bus

    def lend(self, until: Work) -> None:
        """Another thread works on the values, which have arrived, until this is over: a wait of any other waits for it."""
        assert self._arrived, f"block {self.key}: lent before its values were waited for"
        self._lent = until

    def take_back(self) -> None:
        """That work is over."""
        self._lent = None

    def share(self, mode: Mode) -> None:
        """Another holder, who does this with the values."""
        if mode is self.mode:
            return
        # Until a whole write has been made, its buffer holds nothing of the block's; one that is lent is waited for.
        made = self.direct or self._lent is not None or self.writes
        assert self.mode is not Mode.WRITE_ALL or made, f"block {self.key}: read before it was written"
        self.mode = Mode.UPDATE

    def wait(self) -> Tensor:
        """The values, ready to be used."""
        if self._lent is not None:
            self._lent.wait()
        if not self._arrived:
            waits = self._bus is not None and self._bus.active and not self._arriving.done()
            if waits and self._bus is not None:
                self._bus.begin("wait fetch", self.key, at=HERE)
            self._arriving.synchronize() if self.at is Tier.HOST else self._arriving.wait()
            if waits and self._bus is not None:
                self._bus.end("wait fetch", self.key, at=HERE)
            self._arrived = True
            # What arrived counts as no change: nobody may write before this.
            self._opened = self.values._version
        elif self.at is Tier.DEVICE:
            # Whoever waited first may have been another stream.
            self._arriving.wait()
            keep(self.values)
        return self.values

    def arrived(self) -> bool:
        """Whether somebody has waited for the values, and what another thread did with them went well; that said so itself."""
        try:
            if self._lent is not None:
                self._lent.wait()
        except Exception:
            return False
        return self.under_way is DONE

    @property
    def under_way(self) -> HostWork:
        """What brings the values, until somebody has waited for it."""
        return DONE if self._arrived else self._arriving

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
    def held(self) -> bool:
        """Somebody still has a view of the buffer."""
        return self.allocation is not None and self.allocation.held

    def release(self, free: Callable[..., None]) -> None:
        """The lease is over: ``free`` its buffer after whatever moves there."""
        allocation, self.allocation = self.allocation, None
        if allocation is not None:
            # No operation of torch's: this may be a finalizer, inside anybody's call.
            del self.values
            free(allocation, self.under_way, self.write_back or DONE)


def seen(values: Tensor) -> Tensor:
    """Another tensor on the same memory and version counter: as long as it lives the buffer counts as held."""
    return values.view(-1)
