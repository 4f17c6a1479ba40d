"""The tiered store: blocks of memory, each stored on one tier, fetched to another for use and written back when changed.

The runtime puts parameters, gradients and optimizer states here; every block has one authoritative tier, and everything
that moves one goes through here.

Note: [Opened on demand]
    ``Block.tensor`` answers anybody at any time: a block on disk is read into a staging buffer and stays open among the few
    most recently used.  What was changed there is written back when it is pushed out.  A write that fails loses nothing:
    the buffer stays open and stays the truth, and the error is raised where somebody next waits for the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import Device
from offload.disk import Disk, Extent, Kept
from offload.errors import BudgetError, TierError, ZhooksError
from offload.memory import HostPool
from offload.store.allocation import Allocation, Allocator, as_bytes
from offload.store.block import Block, Lease, Mode, seen
from offload.tier import Tier
from offload.work import DONE, HostWork

__all__ = ["MOVES", "Store"]

#: From tier to tier: what ``Store.move`` may do.  Everything goes through host memory.
MOVES = frozenset((one, other) for one in Tier for other in Tier if one is not other)


class Store:
    """All blocks of one attachment on this rank.

    Args:
        device: the seam to the compute device; a CPU device computes on host memory directly.
        host: where HOST blocks and staging buffers come from.
        disk: opens the scratch file; called at the first block that needs it.
        budget: bytes a tier may hold; staging counts as host memory.
        staging_nbytes: how much staging may be under way before a fetch waits for write-backs to end.

    Attributes:
        staging_limit: that, from now on.
        make_room: called where a tier is full and nothing here can be waited for: has who fetched ahead close what it can do
            without; whether there was any.
    """

    #: Blocks that stay open after they were opened on demand.
    RECENT = 2
    #: Bytes that pass through the allocator's tensors before it returns what it keeps of them.
    RELEASE_NBYTES = 256 << 20

    def __init__(
        self, device: Device, host: HostPool, disk: Callable[[], Disk], budget: Budget, *, staging_nbytes: int = 0
    ) -> None:
        self.device, self.host, self.budget = device, host, budget
        self.staging_limit = staging_nbytes
        self.make_room: Callable[[], bool] = _nobody
        self._open_disk = disk
        self._disk: Disk | None = None
        self._blocks = Allocator(self)
        self._staging = Allocator(self, buffer=partial(self._stage, Tier.HOST, private=True))
        self._recent: OrderedDict[int, Block] = OrderedDict()
        self._writing_back: dict[int, Block] = {}
        self._passed = 0
        self._closed = self._unwinding = False

    # Blocks.

    @property
    def compute(self) -> torch.device:
        return self.device.device

    @property
    def disk(self) -> Disk:
        """The scratch file, opened when it is first asked for."""
        if self._disk is None:
            self._disk = self._open_disk()
        return self._disk

    @property
    def staged(self) -> int:
        """Bytes of host memory that blocks pass through now."""
        return self._staging.used[Tier.HOST]

    @property
    def staged_on_device(self) -> int:
        """Bytes of the device's that values of other tiers are in: fetched ahead, in use, or still being written back."""
        return self._staging.used[Tier.DEVICE]

    def put(self, key: str, numel: int, dtype: torch.dtype, tier: Tier) -> Block:
        """A new block of zeros.

        Raises:
            BudgetError: the tier cannot admit it.
        """
        self._sweep()
        return Block(self, key, numel, dtype, self._admitted(lambda: self._blocks.take(tier, key, numel, dtype)))

    def drop(self, block: Block) -> None:
        lease, block.lease = block.lease, None
        under_way = DONE if lease is None else lease.under_way
        if lease is not None:
            lease.arrived()  # a thread that it is lent to is done with it
            self._recent.pop(id(block), None)
            self._writing_back.pop(id(block), None)
            if lease.write_back is not None:
                with suppress(Exception):
                    lease.write_back.synchronize()
            lease.release(self._staging.free)
        with suppress(TierError):
            block.wait_for_readers()
        self._blocks.free(block.allocation, under_way)

    def forsake(self, block: Block) -> None:
        """Nobody refers to the block any more; its memory is given back at a later call (this may be any thread)."""
        if self._closed:
            return
        if block.lease is not None:
            block.lease.release(self._staging.free_later)
        self._blocks.free_later(block.allocation, block.outgoing)

    def change_limits(self, limits: Mapping[Tier, int | None]) -> None:
        """Other budgets from now on, and other bounds of the memory and the file behind them; nothing that is held goes."""
        self.budget.change(limits)
        self.host.limit = limits.get(Tier.HOST)
        if self._disk is not None:
            self._disk.limit = limits.get(Tier.DISK)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Inside no budget refuses what comes back to where it was a moment ago."""
        limits = {tier: self.budget.limit(tier) for tier in Tier}
        self.change_limits(dict.fromkeys(Tier))
        try:
            yield
        finally:
            self.change_limits(limits)

    @property
    def unused(self) -> dict[Tier, int]:
        """Bytes that host memory and scratch file have reserved and no block or buffer has taken."""
        reserved = {Tier.HOST: self.host.reserved, Tier.DISK: 0 if self._disk is None else self._disk.reserved}
        rounded = self.rounded
        return {tier: max(0, nbytes - self.budget.used(tier) - rounded[tier]) for tier, nbytes in reserved.items()}

    @property
    def rounded(self) -> dict[Tier, int]:
        """Bytes that blocks and buffers have taken and not asked for: each ends on a page of its own."""
        return {Tier.HOST: self.host.rounded, Tier.DISK: 0 if self._disk is None else self._disk.rounded}

    # Leases.

    @contextmanager
    def lease(self, block: Block, at: Tier, mode: Mode) -> Iterator[Tensor]:
        """The values at ``at`` inside; a whole write that raises in a buffer has not happened.

        Raises:
            As ``fetch``.  TierError: the values could not be read.
        """
        with self.fetched(block, at, mode) as lease:
            yield lease.wait()

    @contextmanager
    def fetched(self, block: Block, at: Tier, mode: Mode = Mode.UPDATE) -> Iterator[Lease]:
        """The same for who waits for the values later: inside they are on their way to ``at``, or there.

        Raises:
            As ``fetch``.
        """
        lease = self.fetch(block, at, mode)
        try:
            yield lease
        except BaseException:
            with suppress(ZhooksError):  # the first error is the one that counts
                self.give_up(block)
            raise
        self.close(block)

    def fetch(self, block: Block, at: Tier, mode: Mode = Mode.UPDATE) -> Lease:
        """Start bringing the values to ``at`` (DEVICE or HOST); close what is returned.

        Raises:
            BudgetError: no memory for a buffer.  TierError: an earlier write-back of this block failed.
        """
        at = Tier.HOST if self.device.addresses_host else at
        self._sweep()
        held = block.lease
        if held is not None and held.at is not at:
            if held.write_back is None:
                assert held.holds == 1 and id(block) in self._recent, f"block {block.key}: fetched to two tiers at once"
                self._evict(block)
            self._finish_write_back(block)
            held = None
        if held is not None and held.write_back is not None:
            self._revive(block, held)
        if held is not None:
            held.share(mode)
            held.holds += 1
            return held
        lease = self._open(block, at, mode)
        block.switch(lease)
        return lease

    def _open(self, block: Block, at: Tier, mode: Mode) -> Lease:
        """A new lease at ``at``; the values are on their way there, as far as they are read."""
        blank, read = block.blank, mode is not Mode.WRITE_ALL
        if block.in_memory and (block.tier is at or self.device.addresses_host or not block.numel):
            return Lease(block.key, at, block.in_place(mode), None, mode, blank=blank)
        allocation = self._stage(at, block.key, block.numel, block.dtype)
        lease = Lease(block.key, at, allocation.values, allocation, mode, blank=blank)
        try:
            if blank and read:
                lease.values.zero_()
            elif read:
                lease.arrive(self._read(block, lease.values), self.budget.account.bus)
        except BaseException:
            lease.release(self._staging.free)
            raise
        block.blank = False
        return lease

    def close(self, block: Block) -> None:
        """One holder is done; after the last, changes start being written back."""
        lease = block.lease
        assert lease is not None and lease.holds > 0, f"block {block.key}: closed more often than fetched"
        lease.holds -= 1
        if lease.holds:
            return
        if lease.direct:
            block.switch(None)
            return
        if not lease.arrived() or not lease.changed:
            block.switch(None)
            lease.release(self._staging.free)
            return
        assert lease.fresh or lease.mode is not Mode.READ, f"block {block.key}: written by who said it would read"
        try:
            if isinstance(block.stored, Extent):
                # Elsewhere, while somebody saves what is stored.
                block.allocation.memory = self.disk.renew(block.stored, block.key)
            lease.write_back = self._staging.write(lease.values, block.stored, block.key)
        except BaseException:
            self._keep_open(block, lease)
            raise
        self._writing_back[id(block)] = block

    def give_up(self, block: Block) -> None:
        """``close`` for a holder that raised: changes are kept, but a whole write in a buffer has not happened."""
        lease = block.lease
        if lease is not None and lease.mode is Mode.WRITE_ALL and not lease.direct:
            block.written_back(lease)
            block.blank = lease.blank
        self.close(block)

    def _revive(self, block: Block, lease: Lease) -> None:
        """Fetched again while it is being written back: the buffer has the values."""
        self._await_write_back(block, lease)
        lease.write_back, lease.holds, lease.mode = None, 0, Mode.READ

    def _await_write_back(self, block: Block, lease: Lease) -> None:
        """Wait until what was changed is written back."""
        write_back = lease.write_back
        assert write_back is not None
        self._writing_back.pop(id(block), None)
        try:
            write_back.synchronize()
        except BaseException:
            self._keep_open(block, lease)
            raise
        block.written_back(lease)

    def _keep_open(self, block: Block, lease: Lease) -> None:
        """It could not be written back: the buffer is the truth until somebody does."""
        lease.write_back, lease.holds = None, 1
        self._recent[id(block)] = block

    def _finish_write_back(self, block: Block) -> None:
        """Wait until a block is written back, and give its buffer back."""
        lease = block.lease
        if lease is None or lease.write_back is None:
            return
        self._await_write_back(block, lease)
        block.switch(None)
        lease.release(self._staging.free)

    # Opened on demand.

    def tensor(self, block: Block, mode: Mode = Mode.UPDATE) -> Tensor:
        lease = block.lease
        if lease is None and block.in_memory:
            return block.in_place(mode)
        if lease is not None and lease.write_back is None:
            if id(block) in self._recent:
                self._recent.move_to_end(id(block))
            values = lease.wait()
            lease.share(mode)
            return seen(values)
        if lease is not None:
            self._revive(block, lease)
            lease.share(mode)
            lease.holds += 1
        else:
            lease = self.fetch(block, Tier.HOST, mode)
        try:
            values = seen(lease.wait())
        except BaseException:
            self._recent.pop(id(block), None)
            self.close(block)
            raise
        self._recent[id(block)] = block
        # What was not asked for lately and nobody has a view of is closed.
        for older in list(self._recent.values()):
            if len(self._recent) > self.RECENT and older is not block and self._idle(older):
                self._evict(older)
        return values

    def _idle(self, block: Block) -> bool:
        """Opened on demand, and free to be written back."""
        lease = block.lease
        return lease is not None and not lease.held and not (self._unwinding and lease.changed)

    def _evict(self, block: Block) -> None:
        del self._recent[id(block)]
        self.close(block)

    def evict(self) -> None:
        """Start writing back everything that was opened on demand; returns at once."""
        for block in list(self._recent.values()):
            if not self._unwinding or self._idle(block):
                self._evict(block)

    def unwind(self) -> None:
        """The end is near: nothing is written back any more, and what could not be stays the truth in memory."""
        for end in (self.evict, lambda: self._finish_all(list(self._writing_back.values()))):
            with suppress(TierError):
                end()
        self._unwinding = True

    # Whole blocks.

    def read_into(self, block: Block, out: Tensor) -> HostWork:
        """Start copying the values into ``out``: 1-D on the compute device, same numel; cast where dtypes differ."""
        self._sweep()
        if block.lease is not None or block.blank or out.dtype != block.dtype:
            out.copy_(self.tensor(block))
            return DONE
        return self._read(block, out)

    def _read(self, block: Block, into: Tensor) -> HostWork:
        work = self._staging.read(block.stored, into, block.key)
        if block.in_memory:
            block.outgoing = work
        return work

    def keep(self, block: Block) -> Kept | None:
        """What the block holds now, for who reads it later on another thread, whatever becomes of the block; None where its
        values are not those on a disk: then they are in memory, to be copied.  After a `flush` all on a disk are."""
        lease = block.lease
        if not isinstance(block.stored, Extent) or block.blank or (lease is not None and (lease.write_back or lease.changed)):
            return None
        return self.disk.keep(block.stored, block.key)

    def change(self, block: Block, values: Tensor, *, add: bool) -> None:
        """The whole block becomes ``values`` (1-D, on the compute device), or they are added there; then it is written back."""
        with self.lease(block, Tier.DEVICE, Mode.UPDATE if add else Mode.WRITE_ALL) as mine:
            mine.add_(values) if add else mine.copy_(values)
            block.touch()
        self.passed(block.nbytes)

    def passed(self, nbytes: int, limit: int = RELEASE_NBYTES) -> None:
        """So much went through tensors of the allocator's, which keeps what they leave: it is returned every ``limit``."""
        self._passed += nbytes
        if self._passed >= limit and self._disk is not None:
            self._passed = 0
            self.host.release_heap()

    def trim(self) -> None:
        """A step has ended: give the system what was not needed for some steps."""
        self.host.trim()
        if self._disk is not None:
            self.host.release_heap()

    def move(self, block: Block, tier: Tier) -> None:
        """Store it on another tier; the values and the version stay.

        Raises:
            BudgetError: the new tier cannot admit the block, which stays where it was.
        """
        if tier is block.tier:
            return
        assert (block.tier, tier) in MOVES
        values = self.tensor(block)
        version = block.version
        new = self._admitted(lambda: self._blocks.take(tier, block.key, block.numel, block.dtype))
        try:
            if isinstance(new.memory, Tensor):
                new.memory.copy_(values)
            else:
                stored = as_bytes(values.to(self.device.host).contiguous())
                self.disk.write(new.memory, stored, 0, block.key).synchronize()
        except BaseException:
            self._blocks.free(new)
            raise
        lease, block.lease = block.lease, None
        self._recent.pop(id(block), None)
        del values
        if lease is not None:
            lease.release(self._staging.free)
        old, block.allocation = block.allocation, new
        self._blocks.free(old)
        block.base += version - block.version

    # Memory.

    def _stage(
        self, tier: Tier, key: str, numel: int, dtype: torch.dtype = torch.uint8, *, private: bool = False
    ) -> Allocation:
        """A buffer for a transfer, once those being written back leave memory for it."""
        nbytes = numel * dtype.itemsize
        while self._writing_back:
            if tier is Tier.HOST:
                held = self.staged
            else:
                # What waits on the device to be written back: a host that runs ahead must not pile it up.
                leases = ((block, block.lease) for block in self._writing_back.values())
                held = sum(block.nbytes for block, lease in leases if lease is not None and lease.at is tier)
            if held + nbytes <= self.staging_limit or (tier is Tier.HOST and not held):
                break
            self._finish_write_back(next(iter(self._writing_back.values())))
        return self._admitted(lambda: self._staging.take(tier, f"staging of {key}", numel, dtype, private=private))

    def _admitted(self, take: Callable[[], Allocation]) -> Allocation:
        """What ``take`` takes; where a tier is full, after waiting for what is under way, or writing back what was opened on
        demand."""
        while True:
            try:
                return take()
            except BudgetError:
                # A buffer that values only pass through is free once they have, whoever waits for them.
                if self._staging.sweep() | self._blocks.sweep():
                    continue
                idle = [block for block in self._recent.values() if self._idle(block)]
                if self._writing_back:
                    self._finish_write_back(next(iter(self._writing_back.values())))
                elif self._staging.wait_for_oldest() or self._blocks.wait_for_oldest():
                    pass
                elif idle:
                    self._evict(idle[0])
                elif not self.make_room():
                    raise

    def _sweep(self) -> None:
        """Take note of everything that has ended since the last call."""
        for allocations in (self._blocks, self._staging):
            if allocations.later:
                allocations.sweep()
        if self._writing_back:
            write_back = [(block, block.lease.write_back) for block in self._writing_back.values() if block.lease is not None]
            self._finish_all([block for block, work in write_back if work is not None and work.done()])

    def _finish_all(self, blocks: Sequence[Block]) -> None:
        """Wait for all of them, whatever happens to one; raises the first error."""
        errors: list[Exception] = []
        for block in blocks:
            try:
                self._finish_write_back(block)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def flush(self) -> None:
        """Wait until everything is written back.

        Raises:
            TierError: a write-back failed; the values stay in memory.
        """
        self.evict()
        self._finish_all(list(self._writing_back.values()))
        self._sweep()

    def shut(self) -> None:
        """Release everything; blocks are not used again."""
        self._closed, self.make_room = True, _nobody
        self._writing_back.clear()
        self._recent.clear()
        if self._disk is not None:
            self._disk.close()
        self.device.close()
        self.host.close()
        self.budget.account.close()


def _nobody() -> bool:
    """Nobody has fetched ahead."""
    return False
