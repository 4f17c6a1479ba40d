"""The three places memory can be, as the policy and the store call them.

Whatever places something names a ``Tier``; ``store/store.py`` says which moves between them are legal.  It holds no
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Tier", "Tiers"]


class Tier(Enum):
    """Where a block is kept: with the compute, in (pinned) host memory, or in a file."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one parameter's cells: its values, its gradient, its optimizer's states (and their fp32 masters)."""

    parameter: Tier
    gradient: Tier
    optimizer: Tier

    @property
    def cells(self) -> tuple[Tier, Tier, Tier]:
        """All three, in that order."""
        return self.parameter, self.gradient, self.optimizer

    @property
    def anywhere(self) -> bool:
        """Something is kept off the device."""
        return any(tier is not Tier.DEVICE for tier in self.cells)
