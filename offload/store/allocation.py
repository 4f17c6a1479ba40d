"""Memory of a tier, charged from when it is taken until it is given back, and the transfers between it and where its values are
used: one contiguous transfer each way, two (through host memory) between a disk and a device.

``store.py`` takes memory for each block and each buffer that a block passes through, ``stash/stash.py`` for each copy.

Note: [Given back later]
    Memory must not become another's under the eyes of somebody who has a view of it, nor while something moves there.  What is
    freed meanwhile waits, and is given back by a later ``sweep``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
from offload.work import HostWork, then

__all__ = ["Allocation", "Allocator", "Pools", "as_bytes", "view_of"]


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
    """Memory of the tiers for one holder, how much of it that holder has, and its transfers.

    Args:
        uncharged: a tier whose memory no budget counts; it goes with the last tensor that refers to it.
        buffer: gives host memory of this allocator, of so many bytes for a transfer of what is called so; may wait for it.
    Attributes:
        used: bytes charged now, by tier.
        later: what is given back by a ``sweep``, and the work that it waits for.
    """

    def __init__(
        self, pools: Pools, *, uncharged: Tier | None = None, buffer: Callable[[str, int], Allocation] | None = None
    ) -> None:
        self._pools, self._uncharged, self._buffer = pools, uncharged, buffer
        self.used = dict.fromkeys(Tier, 0)
        self.later: deque[tuple[Allocation, list[HostWork]]] = deque()

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
            self.later.append((allocation, list(after)))
        allocation.freed = True

    def wait_for_oldest(self) -> bool:
        """Wait for work that keeps memory which nobody needs any more, the oldest first; False where there is none.

        It is given back by the next ``sweep``.  What the work met with is said to who waits for its result.
        """
        # By place: a finalizer, of this thread or another, may add to it meanwhile.
        for place in range(len(self.later)):
            for work in self.later[place][1]:
                if not work.done():
                    with suppress(ZhooksError):
                        work.synchronize()
                    return True
        return False

    def sweep(self) -> bool:
        """Give back what has become free; whether there was anything."""
        gave = False
        for _ in range(len(self.later)):
            allocation, works = self.later.popleft()
            # What has ended may still refer to the memory it moved.
            works = [work for work in works if not work.done()]
            if works or allocation.held:
                self.later.append((allocation, works))
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

    # Transfers.

    def read(self, stored: Tensor | Extent, into: Tensor, key: str) -> HostWork:
        """Start filling ``into`` with what is stored: a disk reads straight into host memory."""
        device, pools = self._pools.device, self._pools
        if isinstance(stored, Tensor):
            return device.copy(into, stored, key=key)
        if device.on_host(into):
            return pools.disk.read(stored, as_bytes(into), 0, key)
        # What the current stream was given before may still use the memory of ``into``; what comes later must not delay it.
        ready = device.mark()
        assert self._buffer is not None, "transfers of this allocator need buffers"
        buffer = self._buffer(key, stored.nbytes)
        source = view_of(buffer.values, into.numel(), into.dtype)
        return self._through(
            buffer,
            lambda: pools.disk.read(stored, buffer.values, 0, key),
            lambda: device.copy(into, source, key=key, after=ready),
        )

    def write(self, values: Tensor, stored: Tensor | Extent, key: str, *, detached: bool = False) -> HostWork:
        """Start storing ``values``.

        Args:
            detached: a disk writes a copy even of host memory, so that ``values`` are free sooner and may change meanwhile.
        """
        device, pools = self._pools.device, self._pools
        if isinstance(stored, Tensor):
            return device.copy(stored, values, key=key)
        if device.on_host(values) and not detached:
            return pools.disk.write(stored, as_bytes(values), 0, key)
        assert self._buffer is not None, "transfers of this allocator need buffers"
        buffer = self._buffer(key, stored.nbytes)
        return self._through(
            buffer,
            lambda: device.copy(view_of(buffer.values, values.numel(), values.dtype), values, key=key),
            lambda: pools.disk.write(stored, buffer.values, 0, key),
        )

    def _through(self, buffer: Allocation, first: Callable[[], HostWork], follow: Callable[[], HostWork]) -> HostWork:
        """Two transfers, of which the second starts where the first ended, through a buffer that is free afterwards."""
        try:
            begun = first()
        except BaseException:
            self.free(buffer)
            raise
        both = then(begun, follow)
        self.free_later(buffer, both)
        return both


def _storage_uses(tensor: Tensor) -> int:
    """How many tensors and handles refer to the tensor's memory, this call's own among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def view_of(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first ``numel`` elements of a uint8 buffer as ``dtype``, with a version counter of its own."""
    with torch.no_grad(), torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), buffer.storage_offset() // dtype.itemsize, (numel,), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as 1-D uint8."""
    with torch.no_grad(), torch.inference_mode(False):
        return tensor.view(torch.uint8)
