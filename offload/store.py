"""The tiered store: blocks of memory, each at home on one tier, fetched to another for use and written back when changed.

The runtime puts parameters, gradients and optimizer states here; every block has one authoritative tier, and everything
that moves one goes through this room.  It never knows what a block means and never decides when it is needed.

Note: [Opened on demand]
    ``Block.tensor`` answers anybody at any time: a block on disk is read into a staging buffer and stays open among the few
    most recently used.  What was changed there is written back when it is pushed out.  A write that fails loses nothing:
    the buffer stays open and stays the truth, and the error is raised where somebody next waits for the store.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import Tensor

from offload.block import Block
from offload.budget import Budget
from offload.device import Device
from offload.disk import DiskFile
from offload.errors import BudgetError, TierError
from offload.homes import Homes
from offload.host import HostPool
from offload.lease import Done, Lease, Mode, Step, as_bytes, seen
from offload.staging import Staging
from offload.tier import Tier
from offload.transfer import Transfers

__all__ = ["MOVES", "Store"]

_T = TypeVar("_T")

#: From home to home: what ``Store.move`` may do.  Everything goes through host memory.
MOVES = frozenset((one, other) for one in Tier for other in Tier if one is not other)


class Store:
    """All blocks of one attachment on this rank.

    Args:
        device: the seam to the compute device; a CPU device computes on host memory directly.
        host: where HOST blocks and staging buffers come from.
        disk: opens the scratch file; called at the first block that needs it.
        budget: bytes a tier may hold; staging counts as host memory.
        staging_nbytes: how much staging may be under way before a fetch waits for write-backs to end.
    """

    #: Blocks that stay open after they were opened on demand.
    RECENT = 2
    #: Bytes that pass through the allocator's tensors before it returns what it keeps of them.
    RELEASE_NBYTES = 256 << 20

    def __init__(
        self, device: Device, host: HostPool, disk: Callable[[], DiskFile], budget: Budget, *, staging_nbytes: int = 0
    ) -> None:
        self.device, self.host, self.budget = device, host, budget
        self.staging = Staging(device, host, budget, staging_nbytes)
        self._homes = Homes(device, host, disk, budget)
        self._transfers = Transfers(device, self.staging, self._take, lambda: self.disk)
        self._recent: OrderedDict[int, Block] = OrderedDict()
        self._leaving: dict[int, Block] = {}
        self._forsaken: deque[Lease] = deque()
        self._passed = 0
        self._closed = self._unwinding = False

    # Blocks.

    @property
    def compute(self) -> torch.device:
        return self.device.device

    @property
    def disk(self) -> DiskFile:
        return self._homes.disk

    def put(self, key: str, numel: int, dtype: torch.dtype, tier: Tier) -> Block:
        """A new block of zeros.

        Raises:
            BudgetError: the tier cannot admit it.
        """
        self._sweep()
        home = self._admitted(lambda: self._homes.take(key, numel, dtype, tier))
        block = Block(self, key, numel, dtype, home)
        block.tier, block.charged, block.blank = tier, block.nbytes, True
        return block

    def drop(self, block: Block) -> None:
        lease, block.lease = block.lease, None
        if lease is not None:
            self._recent.pop(id(block), None)
            self._leaving.pop(id(block), None)
            with suppress(Exception):
                lease.wait()
            if lease.leaving is not None:
                with suppress(Exception):
                    lease.leaving.wait()
            self.staging.recycle(lease)
        if block.charged:
            with suppress(TierError):
                block.calm()
            self._homes.give(block.key, block.home, block.tier, block.charged)
            block.charged = 0

    def forsake(self, block: Block) -> None:
        """Nobody refers to the block any more; its room is given back at the next call (this may be any thread)."""
        if self._closed:
            return
        if block.lease is not None:
            self._forsaken.append(block.lease)
        if block.charged:
            self._homes.leave(block.key, block.home, block.tier, block.charged, block.outgoing)

    def change_limits(self, limits: Mapping[Tier, int | None]) -> None:
        """Other budgets from now on, and other bounds of the memory and the file behind them; nothing that is held goes."""
        self.budget.change(limits)
        self.host.limit = limits.get(Tier.HOST)
        if self._homes.file is not None:
            self._homes.file.limit = limits.get(Tier.DISK)

    @property
    def unused(self) -> dict[Tier, int]:
        """Bytes that host memory and scratch file have reserved and no block or buffer asked for."""
        reserved = {Tier.HOST: self.host.reserved, Tier.DISK: 0 if self._homes.file is None else self._homes.file.reserved}
        return {tier: max(0, nbytes - self.budget.used(tier)) for tier, nbytes in reserved.items()}

    # Leases.

    @contextmanager
    def lease(self, block: Block, at: Tier, mode: Mode) -> Iterator[Tensor]:
        """The values at ``at`` inside; a whole write that raises in a buffer has not happened.

        Raises:
            As ``fetch``.  TierError: the values could not be read.
        """
        lease = self.fetch(block, at, mode)
        try:
            yield lease.wait()
        except BaseException:
            self.give_up(block)
            raise
        self.close(block)

    def fetch(self, block: Block, at: Tier, mode: Mode = Mode.UPDATE) -> Lease:
        """Start bringing the values to ``at`` (DEVICE or HOST); close what is returned.

        Raises:
            BudgetError: no room for a buffer.  TierError: an earlier write-back of this block failed.
        """
        at = Tier.HOST if self.device.addresses_host else at
        self._sweep()
        held = block.lease
        if held is not None and held.at is not at:
            if held.leaving is None:
                assert held.holds == 1 and id(block) in self._recent, f"block {block.key}: fetched to two tiers at once"
                self._push_out(block)
            self._finish_leaving(block)
            held = None
        if held is not None and held.leaving is not None:
            self._revive(block, held)
        if held is not None:
            held.share(mode)
            held.holds += 1
            return held
        lease = self._transfers.lease(block, at, mode)
        block.switch(lease)
        return lease

    def close(self, block: Block) -> None:
        """One holder is done; after the last, changes start on their way home."""
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
            self.staging.recycle(lease)
            return
        assert lease.fresh or lease.mode is not Mode.READ, f"block {block.key}: written by who said it would read"
        try:
            lease.leaving = self._transfers.write(block, lease)
        except BaseException:
            self._keep_open(block, lease)
            raise
        self._leaving[id(block)] = block

    def give_up(self, block: Block) -> None:
        """``close`` for a holder that raised: changes are kept, but a whole write in a buffer has not happened."""
        lease = block.lease
        if lease is not None and lease.mode is Mode.WRITE_ALL and not lease.direct:
            self._as_at_home(block, lease)
            block.blank = lease.blank
        self.close(block)

    def _revive(self, block: Block, lease: Lease) -> None:
        """Fetched again while it is on its way home: the buffer has the values."""
        self._come_home(block, lease)
        lease.leaving, lease.holds, lease.mode = None, 0, Mode.READ

    def _come_home(self, block: Block, lease: Lease) -> None:
        """Wait until what was changed is written back."""
        leaving = lease.leaving
        assert leaving is not None
        self._leaving.pop(id(block), None)
        try:
            leaving.wait()
        except BaseException:
            self._keep_open(block, lease)
            raise
        self._as_at_home(block, lease)

    def _as_at_home(self, block: Block, lease: Lease) -> None:
        """Nothing of the lease is to be written back (any more); the version stays."""
        version = block.version
        lease.written_back()
        block.base += version - block.version

    def _keep_open(self, block: Block, lease: Lease) -> None:
        """Its way home is barred: the buffer is the truth until somebody writes it back."""
        lease.leaving, lease.holds = None, 1
        self._recent[id(block)] = block

    def _finish_leaving(self, block: Block) -> None:
        """Wait until a block is home, and give its buffer back."""
        lease = block.lease
        if lease is None or lease.leaving is None:
            return
        self._come_home(block, lease)
        block.switch(None)
        self.staging.recycle(lease)

    # Opened on demand.

    def tensor(self, block: Block, mode: Mode = Mode.UPDATE) -> Tensor:
        lease = block.lease
        if lease is None and isinstance(block.home, Tensor):
            if block.blank and mode is not Mode.WRITE_ALL:
                block.home.data.zero_()  # data: reading counts as no change
            block.blank = False
            block.calm()
            return block.home
        if lease is not None and lease.leaving is None:
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
        self._limit_recent(block)
        return values

    def _limit_recent(self, newest: Block) -> None:
        """Close what was not asked for lately and nobody has a view of."""
        for block in list(self._recent.values()):
            if len(self._recent) <= self.RECENT:
                return
            if block is not newest and self._idle(block):
                self._push_out(block)

    def _idle(self, block: Block) -> bool:
        """Opened on demand, and free to go home."""
        lease = block.lease
        return lease is not None and not lease.held_outside and not (self._unwinding and lease.changed)

    def _push_out(self, block: Block) -> None:
        del self._recent[id(block)]
        self.close(block)

    def rest(self) -> None:
        """Send everything that was opened on demand home; returns at once."""
        for block in list(self._recent.values()):
            if not self._unwinding or self._idle(block):
                self._push_out(block)

    def unwind(self) -> None:
        """The end is near: nothing is written back any more, and what could not be stays the truth in memory."""
        for home in (self.rest, lambda: self._finish_all(list(self._leaving.values()))):
            with suppress(TierError):
                home()
        self._unwinding = True

    # Whole blocks.

    def read_into(self, block: Block, out: Tensor) -> Step:
        """Start copying the values into ``out``: 1-D on the compute device, same numel; cast where dtypes differ."""
        self._sweep()
        home, lease = block.home, block.lease
        if lease is not None or block.blank or out.dtype != block.dtype:
            out.copy_(self.tensor(block))
            return Done()
        if isinstance(home, Tensor):
            block.outgoing = self.device.copy(out, home, key=block.key)
            return block.outgoing
        return self._transfers.read(out, home, block.key)

    def change(self, block: Block, values: Tensor, *, add: bool) -> None:
        """The whole block becomes ``values`` (1-D, on the compute device), or they are added there; then it goes home."""
        with self.lease(block, Tier.DEVICE, Mode.UPDATE if add else Mode.WRITE_ALL) as mine:
            mine.add_(values) if add else mine.copy_(values)
            block.touch()
        self.passed(block.nbytes)

    def passed(self, nbytes: int, limit: int = RELEASE_NBYTES) -> None:
        """So much went through tensors of the allocator's, which keeps what they leave: it is returned every ``limit``."""
        self._passed += nbytes
        if self._passed >= limit and self._homes.file is not None:
            self._passed = 0
            self.host.release_heap()

    def trim(self) -> None:
        """A step has ended: give the system what was not needed for some steps."""
        self.host.trim()
        if self._homes.file is not None:
            self.host.release_heap()

    def move(self, block: Block, tier: Tier) -> None:
        """Change the home; the values and the version stay.

        Raises:
            BudgetError: the new tier cannot admit the block, which stays where it was.
        """
        if tier is block.tier:
            return
        assert (block.tier, tier) in MOVES
        values = self.tensor(block)
        version = block.version
        home = self._admitted(lambda: self._homes.take(block.key, block.numel, block.dtype, tier))
        try:
            if isinstance(home, Tensor):
                home.copy_(values)
            else:
                self.disk.write(home, as_bytes(values.to("cpu").contiguous()), 0, block.key).wait()
        except BaseException:
            if block.nbytes:
                self._homes.give(block.key, home, tier, block.nbytes)
            raise
        charged = block.charged
        block.charged = 0
        old, was = block.home, block.tier
        lease, block.lease = block.lease, None
        self._recent.pop(id(block), None)
        del values
        if lease is not None:
            self.staging.recycle(lease)
        if charged:
            self._homes.give(block.key, old, was, charged)
        block.home, block.tier, block.charged = home, tier, block.nbytes
        block.base = version - (home._version if isinstance(home, Tensor) else 0)

    # At rest.

    def _take(self, nbytes: int, key: str, at: Tier) -> Tensor:
        while at is Tier.HOST and self.staging.crowded(nbytes) and self._leaving:
            self._finish_leaving(next(iter(self._leaving.values())))
        while at is Tier.DEVICE and self._leaving and self._on_device() + nbytes > self.staging.limit:
            self._finish_leaving(next(iter(self._leaving.values())))
        return self._admitted(lambda: self.staging.take(nbytes, key, at))

    def _on_device(self) -> int:
        """Bytes that wait on the device to go home: a host that runs ahead must not pile them up."""
        return sum(block.nbytes for block in self._leaving.values() if block.lease and block.lease.at is Tier.DEVICE)

    def _admitted(self, take: Callable[[], _T]) -> _T:
        """What ``take`` takes; where a tier is full, after waiting for what is on its way home, or sending there what was
        opened on demand."""
        while True:
            try:
                return take()
            except BudgetError:
                idle = [block for block in self._recent.values() if self._idle(block)]
                if self._leaving:
                    self._finish_leaving(next(iter(self._leaving.values())))
                elif idle:
                    self._push_out(idle[0])
                else:
                    raise

    def _sweep(self) -> None:
        """Take note of everything that has ended since the last call."""
        while self._forsaken:
            self.staging.recycle(self._forsaken.popleft())
        self._homes.sweep()
        self.staging.sweep()
        leaving = [(block, block.lease.leaving) for block in self._leaving.values() if block.lease is not None]
        self._finish_all([block for block, step in leaving if step is not None and step.done()])

    def _finish_all(self, blocks: Sequence[Block]) -> None:
        """Wait for all of them, whatever happens to one; raises the first error."""
        errors: list[Exception] = []
        for block in blocks:
            try:
                self._finish_leaving(block)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until everything is home.

        Raises:
            TierError: a write-back failed; the values stay in memory.
        """
        self.rest()
        self._finish_all(list(self._leaving.values()))
        self._sweep()

    def shut(self) -> None:
        """Release everything; blocks are not used again."""
        self._closed = True
        self._leaving.clear()
        self._recent.clear()
        if self._homes.file is not None:
            self._homes.file.close()
        self.device.close()
        self.host.close()
        self.budget.account.close()
