"""This rank's range of a flat buffer: in the full buffer, in memory of its own, or in blocks of a store.

Values and gradients lie in a ``Storage``.  ``ParamStorage`` is that of values: ``flat.py`` starts its gathers there, ``optim/``
reports updates to it.  Which of the three a flat has is decided in ``FlatPlan.keeps``.

Note: [Master and copy]
    Where parameters are computed in the dtype they are kept in, one block is both, on the parameter's tier.  Where they are
    not, the masters lie with the optimizer's states and a copy in the compute dtype lies on the parameter's tier: a gather
    fetches the copy, an update writes both.  A write that reaches only the masters makes the copy stale; the next fetch
    casts it anew.  Parameters that stay gathered on the device need no copy: they are one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.device import beside, keep
from offload.errors import ShardedOpError
from offload.store import Block, BlockRange, Mode, Store
from offload.tier import Tier
from zhooks.comm import GATHER, Call, Work, gather
from zhooks.layout import FlatPlan, Keeps
from zhooks.tensor import ShardGroup
from zhooks.unit.buffer_pool import Pool

__all__ = ["ParamStorage", "Storage"]


class Storage:
    """A range, 1-D [shard_numel] in the masters' dtype: ``at`` is a tensor on the device, or a block of ``store``."""

    def __init__(self, at: Tensor | Block, store: Store | None) -> None:
        self.at, self._store = at, store

    @property
    def store(self) -> Store:
        """Where blocks are kept."""
        assert self._store is not None
        return self._store

    def open(self, mode: Mode = Mode.UPDATE) -> Tensor:
        """The range in memory; short-lived where it is kept on disk.  Writes reach it."""
        return self.at.tensor(mode) if isinstance(self.at, Block) else self.at

    def overwritten(self) -> Tensor:
        """The range for whoever writes all of it: what it held is not read, and may have been lost."""
        return self.open(Mode.WRITE_ALL)

    def slice(self, start: int, numel: int) -> Tensor | BlockRange:
        """A run of the range, wherever it is kept."""
        return BlockRange(self.at, start, numel) if isinstance(self.at, Block) else self.at[start : start + numel]

    def put(self, start: int, values: Tensor, *, add: bool) -> None:
        """Set, or add to, a run of the range; ``values`` [1-D] are on the device."""
        if isinstance(self.at, Block) and values.numel() == self.at.numel:
            self.store.change(self.at, values, add=add)
        else:
            target = self.open()[start : start + values.numel()]
            target.add_(values.to(target.device)) if add else target.copy_(values)


class ParamStorage(Storage):
    """Where a flat's values lie between uses, and what a gather sends of them.

    Attributes:
        in_full: the range lies in the full buffer itself, which a gather completes in place.
        fetches: the block that a gather sends is first brought to the device; False for long flats and for those that stay
            gathered.
        copy: a block that holds the values in the compute dtype; see Note [Master and copy].
        writes: how often somebody announced a write.
    """

    def __init__(self, plan: FlatPlan, group: ShardGroup, pool: Pool, store: Store | None) -> None:
        super().__init__(torch.empty(0, dtype=torch.float32, device="cpu"), store)
        self.in_full = plan.keeps is Keeps.FULL
        self.copy: Block | None = None
        self.writes = 0
        self._plan, self._group, self._pool = plan, group, pool
        self._call = Call(GATHER, "gather", group.name, group.number)
        self.fetches = plan.keeps is Keeps.BLOCKS and plan.sharded and not (plan.resident or plan.long)
        self._sending: Block | None = None
        # The masters' version that the copy was cast from, and the one the values had when they were dropped.
        self._copied = -1
        self._dropped: int | None = None
        self._reclaim: Callable[[], None] | None = None

    def reserve(self) -> None:
        """Allocate the range, before anything short-lived that would strand behind it.

        Raises:
            BudgetError: its tier cannot admit it.
        """
        plan, kind = self._plan, self._plan.kind
        if plan.keeps is Keeps.RANGE:
            self.at = self._pool.lasting(plan.shard_numel, kind.master, kind.device)
        elif plan.keeps is Keeps.BLOCKS and kind.apart:
            self.at = self._put("optimizer/master", kind.master, kind.tiers.optimizer)
            self.copy = None if plan.resident else self._put("copy", kind.compute, kind.tiers.parameter)
        elif plan.keeps is Keeps.BLOCKS:
            self.at = self._put("parameter", kind.master, kind.tiers.parameter)

    def _put(self, what: str, dtype: torch.dtype, tier: Tier) -> Block:
        return self.store.put(f"{what}/{self._plan.name}", self._plan.shard_numel, dtype, tier)

    def take(self, full: Tensor) -> bool:
        """This rank's values out of a full buffer in the masters' dtype; whether that is their memory from now on."""
        ranges = self._group.layout.ranges(self._group.rank)
        if self.in_full:
            # Of one rank the segments follow each other.
            low, high = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
            empty = torch.empty(0, dtype=full.dtype, device=full.device)
            self.at = empty.set_(full.untyped_storage(), low, (high - low,), (1,))
            return True
        for own, (start, stop) in zip(self.overwritten().split([high - low for low, high in ranges]), ranges, strict=True):
            own.copy_(full[start:stop])
        return False

    @property
    def sends(self) -> Block:
        """The block that a gather reads."""
        block = self.at if self.copy is None else self.copy
        assert isinstance(block, Block)
        return block

    @property
    def memory(self) -> Tensor | None:
        """Memory on the device that is neither a block's nor the full buffer's."""
        return None if self.in_full or isinstance(self.at, Block) else self.at

    def values(self) -> Tensor:
        """As ``open``, when nobody updates them any more."""
        self.reclaim()
        return self.open()

    def copied(self) -> Tensor | None:
        """What is kept of the range in the compute dtype beside it."""
        self.refresh()
        return None if self.copy is None else self.copy.tensor(Mode.READ)

    def stored(self) -> Tensor | BlockRange:
        """The range where it is kept, opened by nobody."""
        self.reclaim()
        return self.slice(0, self._plan.shard_numel)

    def version(self) -> int:
        """Another number after every write."""
        at = self.at
        if isinstance(at, Block):
            return self.writes + (at.version if self._dropped is None else self._dropped)
        return self.writes + at._version

    # Gathers.

    def prepare(self) -> None:
        """Start fetching what this rank sends in the next gather."""
        self.refresh()
        if self._sending is None:
            self.store.fetch(self.sends, Tier.DEVICE, Mode.READ)
            self._sending = self.sends

    def fill(self, full: Tensor) -> Work:
        """Start filling the full buffer, [layout.padded] in the compute dtype.  Collective where ranks share it."""
        group = self._group
        if isinstance(self.at, Tensor):
            return gather(group.transport, self._call, self.at, full, group.layout)
        if not self._plan.sharded:
            self.refresh()
            return self.store.read_into(self.sends, full)
        # What is computed next must not wait for this range's way from its tier: only the collective does.
        with beside(self._plan.kind.device, "gather"):
            return gather(group.transport, self._call, self._sent_from(full), full, group.layout)

    def _sent_from(self, full: Tensor) -> Tensor:
        """What this rank sends of blocks, 1-D, until ``sent``."""
        if self._plan.resident:
            return self.values()
        if self._plan.long:
            # From its place in the full buffer, where it is read to.
            start, stop = self._group.layout.ranges(self._group.rank)[0]
            self.refresh()
            self.store.read_into(self.sends, full[start:stop]).wait()
            return full[start:stop]
        self.prepare()
        lease = self.sends.lease
        assert lease is not None
        return lease.wait()

    @property
    def sending(self) -> bool:
        """Memory is held for what a gather sends."""
        return self._sending is not None

    def sent(self) -> None:
        """The gather has read what it sends, or will never happen."""
        block, self._sending = self._sending, None
        if block is not None:
            assert block.lease is not None
            # It may have been fetched on another stream than the one that has waited for the gather.
            keep(block.lease.values)
            self.store.close(block)

    # Updates.

    @property
    def lent(self) -> bool:
        """A thread of its own updates the values."""
        return self._reclaim is not None

    def lend(self, reclaim: Callable[[], None]) -> None:
        """A thread of its own updates the values, in blocks; there it opens them.

        Args:
            reclaim: waits for it, and leaves the values as an update leaves them; then it calls ``take_back``.
        """
        if isinstance(self.at, Block):
            self._reclaim = reclaim

    def take_back(self) -> None:
        """That thread is done."""
        self._reclaim = None

    def reclaim(self) -> None:
        """Wait until nobody updates the values."""
        if self._reclaim is not None:
            self._reclaim()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the copy anew where the masters were written without it.

        Raises:
            ShardedOpError: the flat was laid out anew since: a backward wants what its forward saw.
        """
        self.reclaim()
        if not isinstance(self.at, Block):
            return
        if self._dropped is not None:
            raise ShardedOpError(
                f"Cannot run {self.at.key} backward. Expected the layout of its forward, found that apply() was called, or "
                "parameters were frozen or unfrozen, before its backward. Run the forward again."
            )
        if self.copy is not None and self._copied != self.at.version:
            values = self.at.tensor()
            self.copy.tensor(Mode.WRITE_ALL).copy_(values)
            self.copy.touch()
            self._copied = self.at.version

    @torch.no_grad()
    def updated(self, at: Tier, *, copied: bool) -> None:
        """An update changed the values, which are held ``at`` this tier; ``copied``: and wrote the copy."""
        if self.copy is not None and not copied:
            with self.store.lease(self.copy, at, Mode.WRITE_ALL) as values:
                values.copy_(self.values())
        if isinstance(self.at, Block):
            self._copied = self.at.version

    def drop(self) -> None:
        """The values are not used again."""
        self.reclaim()
        self.sent()
        if isinstance(self.at, Block):
            self._dropped = self.at.version
            for block in (self.at, self.copy):
                if block is not None:
                    block.drop()
