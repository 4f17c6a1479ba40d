"""Where blocks are at home: memory of the device, pieces of the host's slabs, extents of the scratch file, each charged.

``store.py`` takes a home for a block and gives it back; a home in host memory that somebody still looks at is kept until they
do not.  It never moves data and never knows what lies in a home.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import Device, Ticket
from offload.disk import DiskFile, Extent
from offload.host import HostPool
from offload.lease import looked_at, view_of
from offload.tier import Tier

__all__ = ["Homes"]


class Homes:
    """The homes of all blocks of one store.

    Args:
        disk: opens the scratch file; called by the first block at home there.
    """

    def __init__(self, device: Device, host: HostPool, disk: Callable[[], DiskFile], budget: Budget) -> None:
        self._device, self._host, self._open, self._budget = device, host, disk, budget
        self.file: DiskFile | None = None
        self._left: deque[tuple[str, Tensor | Extent, Tier, int, Ticket | None]] = deque()

    @property
    def disk(self) -> DiskFile:
        if self.file is None:
            self.file = self._open()
        return self.file

    def take(self, key: str, numel: int, dtype: torch.dtype, tier: Tier) -> Tensor | Extent:
        """Room for a block; it holds nothing yet.

        Raises:
            BudgetError: the tier cannot admit it.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return view_of(self._device.empty(0), 0, dtype)
        self._budget.admit(tier, key, nbytes)
        try:
            memory: Tensor | Extent
            if tier is Tier.DISK:
                memory = self.disk.allocate(nbytes, key)
            else:
                memory = self._device.empty(nbytes) if tier is Tier.DEVICE else self._host.take(nbytes, key)
        except BaseException:
            self._budget.release(tier, nbytes)
            raise
        self._budget.account.take(tier, key, nbytes, memory)
        return view_of(memory, numel, dtype) if isinstance(memory, Tensor) else memory

    def leave(self, key: str, home: Tensor | Extent, tier: Tier, nbytes: int, outgoing: Ticket | None = None) -> None:
        """It is given back at a ``sweep`` after ``outgoing``; any thread may say so, also in a finalizer."""
        self._left.append((key, home, tier, nbytes, outgoing))

    def sweep(self) -> None:
        """Give back what was left and nobody looks at any more."""
        for _ in range(len(self._left)):
            key, home, tier, nbytes, outgoing = self._left.popleft()
            if outgoing is None or outgoing.done():
                self.give(key, home, tier, nbytes)
            else:
                self.leave(key, home, tier, nbytes, outgoing)

    def give(self, key: str, home: Tensor | Extent, tier: Tier, nbytes: int) -> None:
        """Nobody needs it any more."""
        if isinstance(home, Tensor) and tier is Tier.HOST:
            if looked_at(home):
                # It must not become another's block under their eyes.
                self.leave(key, home, tier, nbytes)
                return
            self._host.give(home)
        self._budget.release(tier, nbytes)
        self._budget.account.give(tier, key, nbytes)
        if isinstance(home, Extent) and self.file is not None:
            self.file.free(home)
