"""Memory of a tier, charged from when it is taken until it is given back, whatever it is for.

``store.py`` takes one for each block and each buffer that a block passes through, ``stash/stash.py`` one for each copy.
Admission to the budget and the memory itself are one act here.  It never moves data and never knows what lies there.

Note: [Given back later]
    Memory must not become another's under the eyes of somebody who has a view of it, nor while something moves there.  What is
    freed meanwhile waits, and is given back by a later ``sweep``.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import Device
from offload.disk import Disk, Extent
from offload.errors import ZhooksError
from offload.memory import HostPool
from offload.tier import Tier
from offload.work import HostWork

__all__ = ["Allocation", "Allocator", "Pools"]


class Pools(Protocol):
    """Where memory comes from, and what bounds it; a ``Store`` is one."""

    @property
    def device(self) -> Device: ...
    @property
    def host(self) -> HostPool: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def budget(self) -> Budget: ...


class Allocation:
    """Memory of a tier, until it is freed: a tensor, or an extent of the scratch file.

    Attributes:
        nbytes: what is charged; 0 where there is nothing to give back.
        private: nobody is ever given a view of it.
        freed: whoever took it needs it no longer.
    """

    __slots__ = ("_uses", "freed", "key", "memory", "nbytes", "private", "tier")

    def __init__(self, tier: Tier, key: str, memory: Tensor | Extent, nbytes: int, *, private: bool) -> None:
        self.tier, self.key, self.memory, self.nbytes, self.private = tier, key, memory, nbytes, private
        self.freed = False
        # Counted before a transfer begins, which refers to the memory itself until it has ended.
        self._uses = _storage_uses(memory) if isinstance(memory, Tensor) else 0

    @property
    def values(self) -> Tensor:
        """1-D, in the dtype it was taken for."""
        assert isinstance(self.memory, Tensor)
        return self.memory

    @property
    def extent(self) -> Extent:
        assert isinstance(self.memory, Extent)
        return self.memory

    @property
    def held(self) -> bool:
        """Somebody has a view of it: it must not be used again yet."""
        return not self.private and isinstance(self.memory, Tensor) and _storage_uses(self.memory) > self._uses


class Allocator:
    """Memory of the tiers for one holder, and how much of it that holder has.

    Args:
        uncharged: a tier whose memory no budget counts; it goes with the last tensor that refers to it.
    Attributes:
        used: bytes charged now, by tier.
    """

    def __init__(self, pools: Pools, *, uncharged: Tier | None = None) -> None:
        self._pools, self._uncharged = pools, uncharged
        self.used = dict.fromkeys(Tier, 0)
        self._later: deque[tuple[Allocation, list[HostWork]]] = deque()

    def take(self, tier: Tier, key: str, numel: int, dtype: torch.dtype = torch.uint8, *, private: bool = False) -> Allocation:
        """Memory for ``numel`` elements, contents undefined, starting on a page.

        Raises:
            BudgetError: the tier cannot admit it.  TierError: the disk failed.
        """
        pools, nbytes = self._pools, numel * dtype.itemsize
        if not nbytes:
            return Allocation(tier, key, view_of(pools.device.empty(0), 0, dtype), 0, private=private)
        charged = nbytes if tier is not self._uncharged else 0
        pools.budget.admit(tier, key, charged)
        try:
            memory: Tensor | Extent
            if tier is Tier.DISK:
                memory = pools.disk.allocate(nbytes, key)
            else:
                memory = pools.device.empty(nbytes) if tier is Tier.DEVICE else pools.host.take(nbytes, key)
        except BaseException:
            pools.budget.release(tier, charged)
            raise
        self.used[tier] += charged
        pools.budget.account.take(tier, key, nbytes, memory)
        if isinstance(memory, Tensor):
            memory = view_of(memory, numel, dtype)
        return Allocation(tier, key, memory, charged, private=private)

    def free(self, allocation: Allocation, *after: HostWork) -> None:
        """Nobody needs it any more after this work; nothing if it was freed before.  See Note [Given back later]."""
        if allocation.held or not all(work.done() for work in after):
            self.free_later(allocation, *after)
        elif not allocation.freed:
            allocation.freed = True
            self._give_back(allocation)

    def free_later(self, allocation: Allocation, *after: HostWork) -> None:
        """As ``free``, but nothing is given back before the next ``sweep``; any thread may call, also in a finalizer."""
        if not allocation.freed and allocation.nbytes:
            self._later.append((allocation, list(after)))
        allocation.freed = True

    def wait_for_oldest(self) -> bool:
        """Wait for work that keeps memory which nobody needs any more, the oldest first; False where there is none.

        It is given back by the next ``sweep``.  What the work met with is said to who waits for its result.
        """
        # By place: a finalizer, of this thread or another, may add to it meanwhile.
        for place in range(len(self._later)):
            for work in self._later[place][1]:
                if not work.done():
                    with suppress(ZhooksError):
                        work.synchronize()
                    return True
        return False

    def sweep(self) -> bool:
        """Give back what has become free; whether there was anything."""
        gave = False
        for _ in range(len(self._later)):
            allocation, works = self._later.popleft()
            # What has ended may still refer to the memory it moved.
            works = [work for work in works if not work.done()]
            if works or allocation.held:
                self._later.append((allocation, works))
            else:
                self._give_back(allocation)
                gave = True
        return gave

    def _give_back(self, allocation: Allocation) -> None:
        pools, tier, nbytes = self._pools, allocation.tier, allocation.nbytes
        if not nbytes:
            return
        pools.budget.release(tier, nbytes)
        pools.budget.account.give(tier, allocation.key, nbytes)
        self.used[tier] -= nbytes
        if tier is Tier.HOST:
            pools.host.give(allocation.values)
        elif tier is Tier.DISK:
            pools.disk.free(allocation.extent)


def _storage_uses(tensor: Tensor) -> int:
    """How many tensors and handles refer to the tensor's memory, this call's own among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def view_of(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first ``numel`` elements of a uint8 buffer as ``dtype``, with a version counter of its own."""
    with torch.no_grad(), torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), buffer.storage_offset() // dtype.itemsize, (numel,), (1,))
