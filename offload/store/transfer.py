"""How a block travels between its home and where it is used: one contiguous transfer each way, two where a disk and a device
are the ends.

``store.py`` asks for leases and write-backs, and says where buffers come from.  It never decides what travels, or when.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.disk import Extent
from offload.store.block import Block
from offload.store.grants import Grant, Grants, Pools, view_of
from offload.store.lease import Lease, Mode, as_bytes
from offload.tier import Tier
from offload.work import HostWork, then

__all__ = ["Transfers"]


class Stage(Protocol):
    """Where a transfer's buffers come from."""

    def __call__(self, tier: Tier, key: str, numel: int, dtype: torch.dtype = ..., *, private: bool = False) -> Grant:
        """As ``Grants.take``; may wait until others are free."""


class Transfers:
    """The ways in and out of one store.

    Args:
        staging: what the buffers that ``take`` gives are of.
    """

    def __init__(self, pools: Pools, staging: Grants, take: Stage) -> None:
        self._pools, self._staging, self._take = pools, staging, take
        self._device = pools.device

    def lease(self, block: Block, at: Tier, mode: Mode) -> Lease:
        """Start bringing a block to ``at``, as far as it is read there."""
        home, key, blank, read = block.home, block.key, block.blank, mode is not Mode.WRITE_ALL
        if isinstance(home, Tensor) and (block.tier is at or self._device.addresses_host or not block.numel):
            if blank and read:
                home.data.zero_()  # data: reading counts as no change
            block.blank = False
            block.wait_for_readers()
            return Lease(key, at, home, None, mode, blank=blank)
        grant = self._take(at, key, block.numel, block.dtype)
        lease = Lease(key, at, grant.values, grant, mode, blank=blank)
        try:
            if blank and read:
                lease.values.zero_()
            elif read:
                lease.arrive(self._bring(block, lease.values), self._pools.budget.account.bus)
        except BaseException:
            lease.release(self._staging.free)
            raise
        block.blank = False
        return lease

    def _bring(self, block: Block, values: Tensor) -> HostWork:
        if not isinstance(block.home, Tensor):
            return self.read(values, block.home, block.key)
        block.outgoing = self._device.copy(values, block.home, key=block.key)
        return block.outgoing

    def read(self, values: Tensor, extent: Extent, key: str) -> HostWork:
        """From disk: straight into host memory, or through a staging buffer on to the device."""
        if self._device.on_host(values):
            return self._pools.disk.read(extent, as_bytes(values), 0, key)
        # What the current stream was given before may still use the memory of ``values``; what comes later must not delay it.
        ready = self._device.mark()
        staging = self._take(Tier.HOST, key, extent.nbytes, private=True)
        try:
            first = self._pools.disk.read(extent, staging.values, 0, key)
        except BaseException:
            self._staging.free(staging)
            raise
        source = view_of(staging.values, values.numel(), values.dtype)
        both = then(first, lambda: self._device.copy(values, source, key=key, after=ready))
        self._staging.free_later(staging, both)
        return both

    def write(self, block: Block, lease: Lease) -> HostWork:
        """Start taking a lease's values home."""
        home, key = block.home, block.key
        if isinstance(home, Tensor):
            return self._device.copy(home, lease.values, key=key)
        if self._device.on_host(lease.values):
            return self._pools.disk.write(home, as_bytes(lease.values), 0, key)
        staging = self._take(Tier.HOST, key, block.nbytes, private=True)
        try:
            first = self._device.copy(view_of(staging.values, block.numel, block.dtype), lease.values, key=key)
        except BaseException:
            self._staging.free(staging)
            raise
        write = then(first, lambda: self._pools.disk.write(home, staging.values, 0, key))
        self._staging.free_later(staging, write)
        return write
