"""One rank's range of a flat buffer between uses, wherever it is kept, and the way from there into a gather.

``flat.py`` asks for values and starts its gathers here; ``optim/`` tells it of updates.  Which of the classes a flat has is
decided once, in ``buffer_of``.  It never decides when anything moves, and knows nothing of parameters.

Note: [Master and copy]
    Where parameters are computed in the dtype they are kept in, one block is both, on the parameter's tier.  Where they are
    not, the masters lie with the optimizer's states and a copy in the compute dtype lies on the parameter's tier: a gather
    fetches the copy, an update writes both.  A write that reaches only the masters makes the copy stale; the next fetch
    casts it anew.  Parameters that stay gathered on the device need no copy: they are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.device import beside, keep
from offload.errors import ShardedOpError
from offload.store import Block, BlockRange, Mode, Store
from offload.tier import Tier
from zhooks.comm import GATHER, Call, Work, gather
from zhooks.layout import FlatPlan, Keeps, Kind
from zhooks.tensor import ShardGroup
from zhooks.unit.buffer_pool import Pool

__all__ = ["Buffer", "buffer_of"]

Wanted = tuple[str, torch.dtype, Tier]
"""A block: what it holds, its dtype, and its tier."""


class Buffer:
    """This rank's range in memory of its own on the device, 1-D in the masters' dtype.

    Attributes:
        in_full: the range lies in the full buffer itself, which a gather completes in place.
        fetches: what a gather sends may be fetched from its tier ahead.
        lent: a thread of its own updates the values.
        copy: a block that holds the values in the compute dtype; see Note [Master and copy].
        writes: how often somebody announced a write.
    """

    in_full = False
    fetches = False

    def __init__(self, group: ShardGroup, kind: Kind, pool: Pool) -> None:
        self._group, self._kind, self._pool = group, kind, pool
        self._layout, self._transport = group.layout, group.transport
        self._call = Call(GATHER, "gather", group.name, group.number)
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")
        self.lent = False
        self.copy: Block | None = None
        self.writes = 0

    @property
    def held_nbytes(self) -> tuple[int, int]:
        """Bytes that exist of what a gather reads, and of the masters."""
        return self._values.nbytes, self._values.nbytes

    @property
    def memory(self) -> Tensor | None:
        """Memory on the device that is neither a block's nor the full buffer's."""
        return self._values

    def reserve(self) -> None:
        """Allocate the range, before anything short-lived that would strand behind it.

        Raises:
            BudgetError: its tier cannot admit it.
        """
        self._values = self._pool.lasting(self._layout.shard_numel, self._kind.master, self._kind.device)

    def take(self, full: Tensor) -> bool:
        """This rank's values out of a full buffer in the masters' dtype; whether that is their memory from now on."""
        ranges = self._layout.ranges(self._group.rank)
        for own, (start, stop) in zip(self.overwritten().split([high - low for low, high in ranges]), ranges, strict=True):
            own.copy_(full[start:stop])
        return False

    def values(self) -> Tensor:
        """The range in memory; short-lived where it is kept on disk.  Writes reach it."""
        return self._values

    def copied(self) -> Tensor | None:
        """What is kept of the range in the compute dtype beside it; as it will be, where it is due to be cast anew."""
        return None

    def stored(self) -> Tensor | BlockRange:
        """The range where it is kept, opened by nobody."""
        return self._values

    def overwritten(self) -> Tensor:
        """The range for whoever writes all of it: what it held is not read, and may have been lost."""
        return self._values

    def at(self, start: int, numel: int) -> Tensor | BlockRange:
        """A run of the range, wherever it is kept."""
        return self._values[start : start + numel]

    def version(self) -> int:
        """Another number after every write."""
        return self.writes + self._values._version

    # Gathers.

    def prepare(self) -> None:
        """Start fetching what this rank sends in the next gather."""

    def fill(self, full: Tensor) -> Work:
        """Start filling the full buffer, [layout.padded] in the compute dtype.  Collective where ranks share it."""
        return gather(self._transport, self._call, self._values, full, self._layout)

    @property
    def sending(self) -> bool:
        """Memory is held for what a gather sends."""
        return False

    def sent(self) -> None:
        """The gather has read what it sends, or will never happen."""

    # Updates.

    def lend(self, reclaim: Callable[[], None]) -> None:
        """A thread of its own updates the values.

        Args:
            reclaim: waits for it, and leaves the values as an update leaves them; then it calls ``take_back``.
        """

    def take_back(self) -> None:
        """That thread is done."""

    def lent_values(self) -> Tensor:
        """The range, for the thread that it is lent to."""
        return self._values

    def updated(self, at: Tier, *, copied: bool) -> None:
        """An update changed the values, which are held ``at`` this tier; ``copied``: and wrote the copy."""

    def drop(self) -> None:
        """The values are not used again."""


class FullBuffer(Buffer):
    """This rank's range of the full buffer itself: nothing to allocate, to copy or to release."""

    in_full = True

    @property
    def memory(self) -> Tensor | None:
        return None

    def reserve(self) -> None:
        """It comes with the full buffer."""

    def take(self, full: Tensor) -> bool:
        ranges = self._layout.ranges(self._group.rank)
        # Of one rank the segments follow each other.
        low, high = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        empty = torch.empty(0, dtype=full.dtype, device=full.device)
        self._values = empty.set_(full.untyped_storage(), low, (high - low,), (1,))
        return True


class StoreBuffer(Buffer):
    """All of the values in blocks of a store, which are read straight into the full buffer.

    Args:
        wanted: what ``reserve`` puts into the store: the masters, then the copy if there is one; see Note [Master and copy].
    """

    def __init__(self, group: ShardGroup, kind: Kind, pool: Pool, store: Store, wanted: Sequence[Wanted]) -> None:
        super().__init__(group, kind, pool)
        self._store, self._wanted = store, wanted
        self._blocks: list[Block] = []
        self._copied = -1
        self._sending: list[Block] = []
        self._dropped: int | None = None
        self._reclaim: Callable[[], None] = _nothing

    @property
    def master(self) -> Block:
        """The values that the optimizer updates."""
        return self._blocks[0]

    @property
    def sends(self) -> Block:
        """What a gather reads."""
        return self._blocks[-1]

    @property
    def held_nbytes(self) -> tuple[int, int]:
        return self.sends.nbytes, self.master.nbytes

    @property
    def memory(self) -> Tensor | None:
        return None

    def reserve(self) -> None:
        for what, dtype, tier in self._wanted:
            self._blocks.append(self._store.put(f"{what}/{self._group.name}", self._layout.shard_numel, dtype, tier))
        self.copy = self._blocks[1] if len(self._blocks) > 1 else None

    def values(self) -> Tensor:
        self._reclaim()
        return self.master.tensor()

    def copied(self) -> Tensor | None:
        if self.copy is None:
            return None
        values = self.values()
        return values.to(self._kind.compute) if self._copied != self.master.version else self.copy.tensor(Mode.READ)

    def stored(self) -> Tensor | BlockRange:
        self._reclaim()
        return BlockRange(self.master, 0, self._layout.shard_numel)

    def overwritten(self) -> Tensor:
        return self.master.tensor(Mode.WRITE_ALL)

    def at(self, start: int, numel: int) -> Tensor | BlockRange:
        return BlockRange(self.master, start, numel)

    def version(self) -> int:
        return self.writes + (self.master.version if self._dropped is None else self._dropped)

    def fill(self, full: Tensor) -> Work:
        self.refresh()
        return self._store.read_into(self.sends, full)

    @property
    def sending(self) -> bool:
        return bool(self._sending)

    def sent(self) -> None:
        while self._sending:
            block = self._sending.pop()
            assert block.lease is not None
            # It may have been fetched on another stream than the one that has waited for the gather.
            keep(block.lease.values)
            self._store.close(block)

    def lend(self, reclaim: Callable[[], None]) -> None:
        self._reclaim, self.lent = reclaim, True

    def take_back(self) -> None:
        self._reclaim, self.lent = _nothing, False

    def lent_values(self) -> Tensor:
        return self.master.tensor()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the copy anew where the masters were written without it.

        Raises:
            ShardedOpError: the flat was laid out anew since: a backward wants what its forward saw.
        """
        self._reclaim()
        if self._dropped is not None:
            raise ShardedOpError(
                f"Cannot run {self.master.key} backward. Expected the layout of its forward, found that apply() was called, or "
                "parameters were frozen or unfrozen, before its backward. Run the forward again."
            )
        if self._copied != self.master.version:
            for copy in self._blocks[1:]:
                values = self.master.tensor()
                copy.tensor(Mode.WRITE_ALL).copy_(values)
                copy.touch()
            self._copied = self.master.version

    @torch.no_grad()
    def updated(self, at: Tier, *, copied: bool) -> None:
        for copy in self._blocks[1:] if not copied else ():
            with self._store.lease(copy, at, Mode.WRITE_ALL) as values:
                values.copy_(self.values())
        self._copied = self.master.version

    def drop(self) -> None:
        self._reclaim()
        self.sent()
        self._dropped = self.master.version if self._blocks else 0
        for block in self._blocks:
            block.drop()


class SharedStoreBuffer(StoreBuffer):
    """A range in blocks of a store, gathered over the ranks from the block that is fetched to the device for it."""

    fetches = True

    def fill(self, full: Tensor) -> Work:
        # What is computed next must not wait for this range's way from its tier: only the collective does.
        with beside(self._kind.device, "gather"):
            return gather(self._transport, self._call, self._send(full), full, self._layout)

    def prepare(self) -> None:
        self.refresh()
        if not self._sending:
            self._store.fetch(self.sends, Tier.DEVICE, Mode.READ)
            self._sending.append(self.sends)

    def _send(self, full: Tensor) -> Tensor:
        """What this rank sends, 1-D, until ``sent``."""
        self.prepare()
        lease = self.sends.lease
        assert lease is not None
        return lease.wait()


class SharedMasterBuffer(SharedStoreBuffer):
    """Masters alone, for the parameters stay gathered: what nobody fetches ahead is sent from where it is."""

    fetches = False

    def _send(self, full: Tensor) -> Tensor:
        return self.values()


class SharedLongBuffer(SharedStoreBuffer):
    """A range longer than any buffer may be: it is sent from its place in the full buffer, where it is read to."""

    fetches = False

    def _send(self, full: Tensor) -> Tensor:
        start, stop = self._layout.ranges(self._group.rank)[0]
        self.refresh()
        self._store.read_into(self.sends, full[start:stop]).wait()
        return full[start:stop]


def buffer_of(plan: FlatPlan, group: ShardGroup, pool: Pool, store: Store | None) -> Buffer:
    """The buffer of one flat, without memory yet; ``store``: where there are tiers."""
    kind, tiers = plan.kind, plan.kind.tiers
    if plan.keeps is not Keeps.BLOCKS:
        return {Keeps.FULL: FullBuffer, Keeps.RANGE: Buffer}[plan.keeps](group, kind, pool)
    assert store is not None
    wanted: list[Wanted] = [("parameter", kind.master, tiers.parameter)]
    if kind.apart:
        wanted = [("optimizer/master", kind.master, tiers.optimizer), ("copy", kind.compute, tiers.parameter)]
    shared = SharedMasterBuffer if plan.resident else SharedLongBuffer if plan.long else SharedStoreBuffer
    made = shared if plan.sharded else StoreBuffer
    return made(group, kind, pool, store, wanted[:1] if plan.resident else wanted)


def _nothing() -> None:
    """The values are lent to nobody."""
