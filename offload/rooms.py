"""Rooms for short-lived values: a buffer on the host or the device, or an extent of the scratch file, charged to its tier.

``stash.py`` takes one a copy and gives it back; admission to the budget and the memory itself are one act here.  It never
moves data and never decides when a room is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.budget import Budget
from offload.device import Device
from offload.disk import DiskFile, Extent
from offload.errors import BudgetError
from offload.host import HostPool
from offload.lease import storage_uses
from offload.tier import Tier

__all__ = ["Places", "Room", "give", "on_device", "take"]


class Places(Protocol):
    """Where rooms come from; a ``Store`` is one."""

    @property
    def device(self) -> Device: ...
    @property
    def host(self) -> HostPool: ...
    @property
    def disk(self) -> DiskFile: ...
    @property
    def budget(self) -> Budget: ...


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Memory of a tier that holds a copy, or that one passes through; ``uses`` is who refers to it while nobody reads it."""

    tier: Tier
    memory: Tensor | Extent
    nbytes: int
    key: str
    uses: int = 0

    @property
    def bytes(self) -> Tensor:
        """Its memory, uint8 [nbytes]."""
        assert isinstance(self.memory, Tensor)
        return self.memory

    @property
    def extent(self) -> Extent:
        assert isinstance(self.memory, Extent)
        return self.memory

    @property
    def held(self) -> bool:
        """Somebody has a view of it."""
        return isinstance(self.memory, Tensor) and storage_uses(self.memory) > self.uses


def take(places: Places, tier: Tier, nbytes: int, key: str) -> Room:
    """Room on the host or the disk.

    Raises:
        BudgetError: the tier is full; names the keys of the policy that make activations need less of it.
        TierError: the disk failed.
    """
    try:
        places.budget.admit(tier, key, nbytes)
        try:
            memory = places.host.take(nbytes, key) if tier is Tier.HOST else places.disk.allocate(nbytes, key)
        except BaseException:
            places.budget.release(tier, nbytes)
            raise
        places.budget.account.take(tier, key, nbytes, memory)
    except BudgetError as error:
        raise BudgetError(f'{error}; or set [activation] keep or tier, or [activation] checkpoint = "unit"') from error
    return Room(tier, memory, nbytes, key, storage_uses(memory) if isinstance(memory, Tensor) else 0)


def on_device(places: Places, nbytes: int, key: str) -> Room:
    """Room where compute is; a model's own activations are not charged to a budget there, and neither is this."""
    memory = places.device.empty(nbytes)
    places.budget.account.take(Tier.DEVICE, key, nbytes, memory)
    return Room(Tier.DEVICE, memory, nbytes, key, storage_uses(memory))


def give(places: Places, room: Room) -> None:
    """Give a room back that nobody uses any more."""
    if room.tier is Tier.DEVICE:
        return
    places.budget.release(room.tier, room.nbytes)
    places.budget.account.give(room.tier, room.key, room.nbytes)
    if isinstance(room.memory, Tensor):
        places.host.give(room.memory)
    else:
        places.disk.free(room.memory)
