"""The table of the design: what x partition, and the few questions the rest of the code asks of it.

This module turns the policy's cells into the moments of gathering and reducing; ``attach.py`` builds it once and every
other module reads it.  It never branches on a ZeRO stage: a stage is only the name of a row.

Source: ZeRO, arXiv:1910.02054, sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from offload.tier import Tier, Tiers


class Placement(Enum):
    """How one cell of the table lies over the ranks (the words of DTensor)."""

    REPLICATE = "R"
    PARTIAL = "P"
    SHARD = "S"


@dataclass(frozen=True, slots=True)
class Table:
    """One row: the placement of parameters, gradients and optimizer states at rest."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement

    @classmethod
    def of(cls, cells: Mapping[str, str]) -> Table:
        """Read ``Policy.table()``: ``{"parameter": "R", "gradient": "S", "optimizer": "S"}``."""
        return cls(*(Placement(cells[name]) for name in ("parameter", "gradient", "optimizer")))

    @property
    def gathers_at_use(self) -> bool:
        """Parameters rest sharded: gather before a use, release after it."""
        return self.parameter is Placement.SHARD

    def keeps_gathered(self, tiers: Tiers) -> bool:
        """Parameters on these tiers stay gathered on the device between uses."""
        return not self.gathers_at_use and tiers.parameter is Tier.DEVICE

    @property
    def shards_optimizer(self) -> bool:
        """Each rank updates its own range; replicated parameters are gathered again after the update."""
        return self.optimizer is Placement.SHARD

    @property
    def accumulates_unreduced(self) -> bool:
        """Inside ``no_sync`` the gradient stays a full partial sum; reduced at the accumulation boundary."""
        return self.gradient is not Placement.SHARD
