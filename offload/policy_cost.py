"""Owns what a policy costs: bytes a rank holds at rest with Adam, tier by tier, for a number of parameters and ranks.

``zprof policy show`` prints it; a planner may ask it of many policies. Pure arithmetic: it never looks at a model or a
machine, and counts neither padding nor the buffers that come and go.

Source: ZeRO, arXiv:1910.02054, section 3, with the masters in fp32 and gradients in the masters' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.policy import Policy
from offload.policy_rules import CELLS
from offload.policy_text import Share
from offload.tier import Tier

__all__ = ["CellCost", "Cost", "TierCost", "cost"]

_MASTER_NBYTES = 4
_STATES_NBYTES = 8
_HALF_NBYTES = 2


@dataclass(frozen=True, slots=True)
class CellCost:
    """One cell of the table on one rank.

    Attributes:
        numel: elements this rank holds, rounded up.
        per_numel: bytes of each.
        holds: what those bytes are.
    """

    what: str
    tier: Tier
    numel: int
    per_numel: int
    holds: str

    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""
        return self.numel * self.per_numel


@dataclass(frozen=True, slots=True)
class TierCost:
    """All cells of one tier beside its budget, as it was written."""

    tier: Tier
    nbytes: int
    budget: int | Share | None

    @property
    def holds(self) -> bool | None:
        """Whether the budget holds it; None where there is no budget, or it is a share of what a machine has free."""
        return self.nbytes <= self.budget if isinstance(self.budget, int) else None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank holds at the end of backward, buffers that come and go apart."""

    numel: int
    ranks: int
    cells: tuple[CellCost, ...]
    tiers: tuple[TierCost, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return sum(cell.nbytes for cell in self.cells)


def cost(policy: Policy, numel: int, ranks: int) -> Cost:
    """The cost of ``policy`` on each of ``ranks`` for a model of ``numel`` fp32 parameters trained with Adam.

    With ``rounding = "stochastic"`` the parameters are bf16, and nothing of them is kept in fp32.

    Rules are left out: which parameters they match only a model can tell.
    """
    half = policy.precision.param in ("bf16", "fp16")
    # The 16-bit copy is apart from the masters where every rank has it whole, and where the two rest on tiers.
    apart = half and (policy.partition("parameter") == "replicate" or _placed(policy))
    master = f"fp32 {'masters and ' if apart else ''}"
    narrow = policy.optimizer.rounding == "stochastic"
    size = {
        "parameter": (_HALF_NBYTES, "bf16 parameters"),
        "gradient": (_HALF_NBYTES, "bf16 gradients"),
        "optimizer": (_STATES_NBYTES, "fp32 moments"),
    } if narrow else {
        "parameter": (_HALF_NBYTES, f"{policy.precision.param} copy") if apart else (_MASTER_NBYTES, "fp32 parameters"),
        "gradient": (_MASTER_NBYTES, "fp32 gradients"),
        "optimizer": (_STATES_NBYTES + _MASTER_NBYTES * apart, f"{master}moments"),
    }
    placed = policy.table()
    cells = tuple(
        CellCost(
            cell,
            Tier(getattr(policy, cell).tier),
            # A partial sum is sharded by the end of a backward that steps.
            numel if placed[cell] == "R" else -(-numel // ranks),
            *size[cell],
        )
        for cell in CELLS
    )
    tiers = tuple(
        TierCost(tier, sum(cell.nbytes for cell in cells if cell.tier is tier), getattr(policy.budget, tier.value))
        for tier in Tier
    )
    return Cost(numel, ranks, cells, tiers)


def _placed(policy: Policy) -> bool:
    tiers = [getattr(policy, cell).tier for cell in CELLS]
    tiers += [tier for rule in policy.rule for tier in rule.tiers().values()]
    return any(tier != "device" for tier in tiers)
