"""The bytes a rank holds between steps: of one buffer's cells, and of a policy with Adam for a number of parameters.

Pure arithmetic, which counts no buffers that come and go.

Source: ZeRO, arXiv:1910.02054, section 3, with the masters in fp32 and gradients in the masters' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.policy.policy import Policy
from offload.policy.tables import CELLS
from offload.text import Share
from offload.tier import Tier, Tiers

__all__ = ["CellCost", "Cost", "Footprint", "TierCost", "cost", "footprint"]

_MASTER_NBYTES = 4
_STATES_NBYTES = 8
_HALF_NBYTES = 2


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one cell of the table takes on one rank between steps: ``numel`` elements of ``itemsize`` bytes on a tier."""

    what: str
    tier: Tier
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the cell."""
        return self.numel * self.itemsize

    def on(self, tier: Tier) -> int:
        """Bytes of it that lie on ``tier``: all, or none."""
        return self.nbytes if self.tier is tier else 0


def footprint(
    tiers: Tiers, *, parameter: int, shard: int, master: int, compute: int, apart: bool, trainable: bool = True
) -> tuple[Footprint, Footprint, Footprint]:
    """The three cells of parameters that share tiers and dtypes; the optimizer's is their masters alone.

    Args:
        parameter: elements of the parameters that a rank keeps between uses.
        shard: elements that a rank updates: of masters, gradients and states.
        master, compute: bytes of an element the optimizer updates, and of one the model computes with.
        apart: masters and parameters are two buffers; else parameters are kept in the masters' dtype and are both.
    """
    return (
        Footprint("parameter", tiers.parameter, parameter, compute if apart else master),
        Footprint("gradient", tiers.gradient, shard, master if trainable else 0),
        Footprint("optimizer", tiers.optimizer, shard, master if apart else 0),
    )


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

    Rules are left out: which parameters they match only a model can say.  Of ``device_share`` the elements are divided to one.
    """
    tiers = Tiers(*(Tier(getattr(policy, cell).tier) for cell in CELLS))
    placed = policy.table()
    # A partial sum is sharded by the end of a backward that steps.
    shard = numel if placed["optimizer"] == "R" else -(-numel // ranks)
    kept = numel if placed["parameter"] == "R" else shard
    # At most that share: what is left is on the tier.
    near, near_kept = map(policy.optimizer.kept_on_device, (shard, kept))
    parts = [(tiers, kept - near_kept, shard - near), (replace(tiers, optimizer=Tier.DEVICE), near_kept, near)]
    found: dict[tuple[int, Tier, int, str], CellCost] = {}
    for where, parameter, updated in [part for part in parts if any(part[1:])] or parts[:1]:
        for place, cell in enumerate(_cells(policy, where, parameter, updated)):
            key = place, cell.tier, cell.per_numel, cell.holds
            found[key] = replace(cell, numel=cell.numel + (found[key].numel if key in found else 0))
    ordered = tuple(found[key] for key in sorted(found, key=lambda key: key[0]))
    return Cost(numel, ranks, ordered, _by_tier(policy, ordered))


def _by_tier(policy: Policy, cells: Sequence[CellCost]) -> tuple[TierCost, ...]:
    return tuple(
        TierCost(tier, sum(cell.nbytes for cell in cells if cell.tier is tier), getattr(policy.budget, tier.value))
        for tier in Tier
    )


def _cells(policy: Policy, tiers: Tiers, parameter: int, shard: int) -> Iterator[CellCost]:
    """The three cells of elements on these tiers: so many of parameters, so many that the rank updates."""
    narrow = policy.optimizer.rounding == "stochastic"
    half = policy.precision.param in ("bf16", "fp16") and not narrow
    # The 16-bit copy is apart from the masters where every rank has it whole, and where the two are on tiers.
    apart = half and (policy.partition("parameter") == "replicate" or _placed(policy, tiers))
    master = _HALF_NBYTES if narrow else _MASTER_NBYTES
    taken = footprint(tiers, parameter=parameter, shard=shard, master=master, compute=_HALF_NBYTES, apart=apart)
    words = "bf16" if narrow else "fp32"
    states = {"optimizer": _STATES_NBYTES}
    holds = {
        "parameter": f"{policy.precision.param} copy" if apart else f"{words} parameters",
        "gradient": f"{words} gradients",
        "optimizer": f"fp32 {'masters and ' if apart else ''}moments",
    }
    for cell in taken:
        yield CellCost(cell.what, cell.tier, cell.numel, cell.itemsize + states.get(cell.what, 0), holds[cell.what])


def _placed(policy: Policy, tiers: Tiers) -> bool:
    """Parameters or masters lie off the device, or may by a rule."""
    ruled = [rule.tiers().get(cell) for rule in policy.rule for cell in ("parameter", "optimizer")]
    here = tiers.parameter is Tier.DEVICE and tiers.optimizer is Tier.DEVICE
    return not here or any(tier not in (None, "device") for tier in ruled)
