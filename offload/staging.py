"""Buffers that blocks pass through on their way between tiers, and when each may be used again.

``store.py`` takes one a lease and gives it back; they are charged to the tier they lie on.  A buffer that somebody still has
a view of is kept aside until that view is gone.  It never moves data.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from offload.budget import Budget
from offload.device import Device
from offload.events import Bus
from offload.host import HostPool
from offload.lease import Lease, Step
from offload.tier import Tier

__all__ = ["Staging"]

#: Whose the buffers are, in the account: which block is passing through changes by the millisecond.
_PASSING = "staging of blocks"


class Staging:
    """All buffers under way.

    Args:
        limit: bytes of host memory under way before the store waits for write-backs to end.
    """

    def __init__(self, device: Device, host: HostPool, budget: Budget, limit: int) -> None:
        self._device, self._host, self._budget = device, host, budget
        self.limit, self.used = limit, 0
        self._detained: list[Lease] = []
        self._after: list[tuple[Step, Callable[[], None]]] = []

    @property
    def bus(self) -> Bus:
        """Who is told of what passes through."""
        return self._budget.account.bus

    def crowded(self, nbytes: int) -> bool:
        """Another buffer of this size would pass the limit."""
        return self.used > 0 and self.used + nbytes > self.limit

    def take(self, nbytes: int, key: str, at: Tier) -> Tensor:
        """A uint8 buffer at ``at``.

        Raises:
            BudgetError: the tier cannot admit it.
        """
        self._budget.admit(at, f"staging of {key}", nbytes)
        try:
            buffer = self._device.empty(nbytes) if at is Tier.DEVICE else self._host.take(nbytes, key)
        except BaseException:
            self._budget.release(at, nbytes)
            raise
        self._budget.account.take(at, _PASSING, nbytes, buffer)
        if at is Tier.HOST:
            self.used += nbytes
        return buffer

    def give(self, buffer: Tensor, at: Tier) -> None:
        """The buffer is free."""
        nbytes = buffer.numel()
        self._budget.release(at, nbytes)
        self._budget.account.give(at, _PASSING, nbytes)
        if at is Tier.HOST:
            self.used -= nbytes
            self._host.give(buffer)

    def give_after(self, step: Step, buffer: Tensor) -> None:
        """The host buffer is free once ``step`` has ended."""
        self._after.append((step, lambda: self.give(buffer, Tier.HOST)))

    def recycle(self, lease: Lease) -> None:
        """The lease is over: its buffer is free as soon as nobody has a view of it and nothing moves there any more."""
        if lease.buffer is None:
            return
        if lease.held_outside:
            self._detained.append(lease)
            return
        buffer, lease.buffer = lease.buffer, None
        lease.values = lease.values.new_empty(0)
        self.give(buffer, lease.at)

    def sweep(self) -> None:
        """Free what has become free."""
        for lease in [lease for lease in self._detained if not lease.held_outside]:
            self._detained.remove(lease)
            self.recycle(lease)
        for entry in [entry for entry in self._after if entry[0].done()]:
            self._after.remove(entry)
            entry[1]()
