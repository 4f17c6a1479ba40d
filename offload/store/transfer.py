"""How values travel between where a tier stores them and where they are used: one contiguous transfer each way, two (through
host memory) between a disk and a device.

``store.py`` moves blocks through it and ``stash/stash.py`` what autograd saved; each says where buffers come from.  It never
decides what travels, or when.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.disk import Extent
from offload.store.allocation import Allocation, Allocator, Pools, view_of
from offload.tier import Tier
from offload.work import HostWork, then

__all__ = ["Transfers", "as_bytes"]


class TakeBuffer(Protocol):
    """Where a transfer's buffers come from."""

    def __call__(self, tier: Tier, key: str, numel: int, dtype: torch.dtype = ..., *, private: bool = False) -> Allocation:
        """As ``Allocator.take``; may wait until others are free."""


class Transfers:
    """The ways to and from the tiers of one holder.

    Args:
        allocator: what the buffers that ``take`` gives are of.
    """

    def __init__(self, pools: Pools, allocator: Allocator, take: TakeBuffer) -> None:
        self._pools, self._allocator, self._take = pools, allocator, take
        self._device = pools.device

    def read(self, stored: Tensor | Extent, into: Tensor, key: str) -> HostWork:
        """Start filling ``into`` with what is stored: a disk reads straight into host memory."""
        if isinstance(stored, Tensor):
            return self._device.copy(into, stored, key=key)
        if self._device.on_host(into):
            return self._pools.disk.read(stored, as_bytes(into), 0, key)
        # What the current stream was given before may still use the memory of ``into``; what comes later must not delay it.
        ready = self._device.mark()
        buffer = self._take(Tier.HOST, key, stored.nbytes, private=True)
        try:
            first = self._pools.disk.read(stored, buffer.values, 0, key)
        except BaseException:
            self._allocator.free(buffer)
            raise
        source = view_of(buffer.values, into.numel(), into.dtype)
        both = then(first, lambda: self._device.copy(into, source, key=key, after=ready))
        self._allocator.free_later(buffer, both)
        return both

    def write(self, values: Tensor, stored: Tensor | Extent, key: str, *, detached: bool = False) -> HostWork:
        """Start storing ``values``.

        Args:
            detached: a disk writes a copy even of host memory, so that ``values`` are free sooner and may change meanwhile.
        """
        if isinstance(stored, Tensor):
            return self._device.copy(stored, values, key=key)
        if self._device.on_host(values) and not detached:
            return self._pools.disk.write(stored, as_bytes(values), 0, key)
        buffer = self._take(Tier.HOST, key, stored.nbytes, private=True)
        try:
            first = self._device.copy(view_of(buffer.values, values.numel(), values.dtype), values, key=key)
        except BaseException:
            self._allocator.free(buffer)
            raise
        both = then(first, lambda: self._pools.disk.write(stored, buffer.values, 0, key))
        self._allocator.free_later(buffer, both)
        return both


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as 1-D uint8."""
    with torch.no_grad(), torch.inference_mode(False):
        return tensor.view(torch.uint8)
