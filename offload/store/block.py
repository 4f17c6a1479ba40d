"""A block: a 1-D run of elements stored on one tier, and ranges of it.

``store.py`` makes blocks and moves them; whoever holds one asks it for its values.  It never moves anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.disk import Extent
from offload.store.allocation import Allocation
from offload.store.lease import Lease, Mode
from offload.tier import Tier
from offload.work import DONE, HostWork

if TYPE_CHECKING:
    from offload.store.store import Store

__all__ = ["Block", "BlockRange", "owner_of"]


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
