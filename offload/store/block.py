"""A block, a 1-D run of elements stored on one tier; ranges of it; the lease that brings its values into memory for a while.

``store.py`` makes blocks, opens and closes leases; whoever fetched one waits for it, works on its values and closes it.
Whether anything has to be written back is read from the version counter that torch keeps for every tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.device import keep
from offload.disk import Extent
from offload.events import HERE, Bus
from offload.store.allocation import Allocation
from offload.tier import Tier
from offload.work import DONE, HostWork, Work

if TYPE_CHECKING:
    from offload.store.store import Store

__all__ = ["Block", "BlockRange", "Lease", "Mode", "owner_of", "seen"]


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
        fresh: nothing was read: whatever the values become is what the block holds.
        opened: the version of the values that the block holds.
        write_back: it, once the last holder has closed.
    """

    __slots__ = (
        "_arrived", "_arriving", "_bus", "_lent", "allocation", "at", "blank", "direct", "fresh", "holds", "key", "mode",
        "opened", "values", "write_back",
    )  # fmt: skip

    def __init__(self, key: str, at: Tier, values: Tensor, allocation: Allocation | None, mode: Mode, *, blank: bool) -> None:
        self.key, self.at, self.values, self.allocation, self.mode = key, at, values, allocation, mode
        self.direct = allocation is None
        # The block had never been written.
        self.blank = blank
        self.fresh = not self.direct and (blank or mode is Mode.WRITE_ALL)
        self.holds = 1
        self.write_back: HostWork | None = None
        self._arriving: HostWork = DONE
        self._arrived = False
        self._bus: Bus | None = None
        # What another thread does with the values, which nobody else gets until it is over.
        self._lent: Work | None = None
        self.opened = values._version

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
            if self._arriving is not DONE:
                bus = self._bus if self._bus is not None and self._bus.active and not self._arriving.done() else None
                if bus is not None:
                    bus.begin("wait fetch", self.key, at=HERE)
                self._arriving.synchronize() if self.at is Tier.HOST else self._arriving.wait()
                if bus is not None:
                    bus.end("wait fetch", self.key, at=HERE)
            self._arrived = True
            # What arrived counts as no change: nobody may write before this.
            self.opened = self.values._version
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
        return int(self.values._version) - self.opened if self._arrived else 0

    @property
    def changed(self) -> bool:
        return self.fresh or self.writes > 0

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


class Block:
    """A 1-D run of elements stored on one tier.  Made by ``Store.put``."""

    def __init__(self, store: Store, key: str, numel: int, dtype: torch.dtype, allocation: Allocation) -> None:
        self.key, self.numel, self.dtype = key, numel, dtype
        self.store, self.allocation = store, allocation
        # Nothing was ever written: its values are zeros that are stored nowhere yet.
        self.blank = True
        self.lease: Lease | None = None
        # The last copy from the stored values to a device, which the host may overtake.
        self.outgoing: HostWork = DONE
        self.base = 0

    @property
    def stored(self) -> Tensor | Extent:
        """Where its tier keeps the values while no lease has others."""
        return self.allocation.memory

    @property
    def tier(self) -> Tier:
        """The tier that stores it."""
        return self.allocation.tier

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where the block's values are used, whatever its tier."""
        return self.store.compute

    @property
    def paged(self) -> bool:
        """Stored on disk: opening it may read, and push others out."""
        return self.tier is Tier.DISK

    @property
    def in_memory(self) -> bool:
        """The stored values are a tensor, on a disk only where there are none."""
        return isinstance(self.stored, Tensor)

    @property
    def version(self) -> int:
        """Grows with every in-place change, across tiers and leases."""
        if self.lease is not None and not self.lease.direct:
            return self.base + self.lease.writes
        return self.base + (int(self.stored._version) if isinstance(self.stored, Tensor) else 0)

    def wait_for_readers(self) -> None:
        """Nobody reads the stored values any more: they may be handed out, written or given back."""
        if self.outgoing is not DONE:
            outgoing, self.outgoing = self.outgoing, DONE
            outgoing.synchronize()

    def in_place(self, mode: Mode) -> Tensor:
        """The stored values themselves, to be used and perhaps written there."""
        stored = self.stored
        assert isinstance(stored, Tensor), f"block {self.key}: used in place on disk"
        if self.blank and mode is not Mode.WRITE_ALL:
            stored.data.zero_()  # data: reading counts as no change
        self.blank = False
        self.wait_for_readers()
        return stored

    def switch(self, lease: Lease | None) -> None:
        """The values are read through another lease, or where they are stored, from now on; the version stays."""
        version = self.version
        self.lease = lease
        self.base += version - self.version

    def written_back(self, lease: Lease) -> None:
        """Nothing of the lease is to be written back (any more); the version stays."""
        version = self.version
        lease.fresh, lease.opened = False, lease.values._version
        self.base += version - self.version

    def tensor(self, mode: Mode = Mode.UPDATE) -> Tensor:
        """The values in memory, 1-D: writes to them reach the block.  Short-lived where it is on disk."""
        return self.store.tensor(self, mode)

    def touch(self) -> None:
        """The values were written where torch counts no version: below autograd, or by a kernel of our own."""
        lease = self.lease
        values = self.stored if lease is None or lease.direct else lease.values
        assert isinstance(values, Tensor), f"block {self.key}: written while it is not in memory"
        torch.autograd.graph.increment_version(values)

    def drop(self) -> None:
        """Give its memory back; the block is not used again."""
        self.store.drop(self)

    def __del__(self) -> None:
        self.store.forsake(self)


@dataclass(frozen=True, slots=True)
class BlockRange:
    """A range of a block: what a sharded tensor holds where its values may be anywhere."""

    block: Block
    start: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.block.dtype

    @property
    def device(self) -> torch.device:
        return self.block.device

    def open(self) -> Tensor:
        """The range in memory: writes reach the block; short-lived where that is on disk."""
        return self.block.tensor()[self.start : self.start + self.numel]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """The values in memory of their own, off the device."""
        with torch.no_grad():
            return self.open().to("cpu", copy=True)


def owner_of(values: Tensor | Block | BlockRange) -> tuple[int, int]:
    """The identity and the bytes of the memory that values lie in: their block, or their storage."""
    block = values.block if isinstance(values, BlockRange) else values
    if isinstance(block, Block):
        return id(block), block.nbytes
    storage = block.untyped_storage()
    return storage._cdata, storage.nbytes()
