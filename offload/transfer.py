"""How a block travels between its home and where it is used: one contiguous transfer each way, two where a disk and a device
are the ends.

``store.py`` asks for leases and write-backs; buffers come from ``staging.py``.  It never decides what travels, or when.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from offload.block import Block
from offload.device import Device, OnHost
from offload.disk import DiskFile, Extent
from offload.lease import Lease, Mode, Step, Then, as_bytes, view_of
from offload.staging import Staging
from offload.tier import Tier

__all__ = ["Transfers"]


class Transfers:
    """The ways in and out of one store.

    Args:
        take: a staging buffer of so many bytes for a key at a tier; may wait until others are free.
        disk: the scratch file, opened at the first call.
    """

    def __init__(
        self, device: Device, staging: Staging, take: Callable[[int, str, Tier], Tensor], disk: Callable[[], DiskFile]
    ) -> None:
        self._device, self._staging, self._take, self._disk = device, staging, take, disk

    def lease(self, block: Block, at: Tier, mode: Mode) -> Lease:
        """Start bringing a block to ``at``, as far as it is read there."""
        home, key, blank, read = block.home, block.key, block.blank, mode is not Mode.WRITE_ALL
        if isinstance(home, Tensor) and (block.tier is at or self._device.addresses_host or not block.numel):
            if blank and read:
                home.data.zero_()  # data: reading counts as no change
            block.blank = False
            block.calm()
            return Lease(key, at, home, None, mode, blank=blank)
        buffer = self._take(block.nbytes, key, at)
        lease = Lease(key, at, view_of(buffer, block.numel, block.dtype), buffer, mode, blank=blank)
        try:
            if blank and read:
                lease.values.zero_()
            elif read:
                lease.arrive(self._bring(block, lease.values, at), self._staging.bus)
        except BaseException:
            self._staging.recycle(lease)
            raise
        block.blank = False
        return lease

    def _bring(self, block: Block, values: Tensor, at: Tier) -> Step:
        if not isinstance(block.home, Tensor):
            return self.read(values, block.home, block.key)
        ticket = block.outgoing = self._device.copy(values, block.home, key=block.key)
        return OnHost(ticket) if at is Tier.HOST else ticket

    def read(self, values: Tensor, extent: Extent, key: str) -> Step:
        """From disk: straight into host memory, or through a staging buffer on to the device."""
        if self._device.on_host(values):
            return self._disk().read(extent, as_bytes(values), 0, key)
        # What the current stream was given before may still use the memory of ``values``; what comes later must not delay it.
        ready = self._device.mark()
        staging = self._take(extent.nbytes, key, Tier.HOST)
        try:
            first = self._disk().read(extent, staging, 0, key)
        except BaseException:
            self._staging.give(staging, Tier.HOST)
            raise
        source = view_of(staging, values.numel(), values.dtype)
        both = Then(first, lambda: self._device.copy(values, source, key=key, after=ready))
        self._staging.give_after(both, staging)
        return both

    def write(self, block: Block, lease: Lease) -> Step:
        """Start taking a lease's values home."""
        home, key = block.home, block.key
        if isinstance(home, Tensor):
            return OnHost(self._device.copy(home, lease.values, key=key))
        if self._device.on_host(lease.values):
            return self._disk().write(home, as_bytes(lease.values), 0, key)
        staging = self._take(block.nbytes, key, Tier.HOST)
        try:
            first = OnHost(self._device.copy(view_of(staging, block.numel, block.dtype), lease.values, key=key))
        except BaseException:
            self._staging.give(staging, Tier.HOST)
            raise
        write = Then(first, lambda: self._disk().write(home, staging[: block.nbytes], 0, key))
        self._staging.give_after(write, staging)
        return write

