"""``[budget] host`` and ``disk`` against the states that an optimizer places there: at its first step, all of them at once.

torch's step hooks ask, so that what does not fit is refused in one sum before anything is updated.  It allocates nothing; what
cannot be counted ahead, the tiers admit block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.optim import Optimizer

from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, least
from zhooks.layout import UnitPlan
from zhooks.optim import grad_of
from zhooks.plan.first_steps import FirstSteps
from zhooks.plan.state_sizes import stored_states
from zhooks.unit import Unit

__all__ = ["StateBudgets"]

_REMEDIES = {Tier.HOST: 'set [optimizer] tier = "disk"', Tier.DISK: "run on more ranks"}


class StateBudgets(FirstSteps):
    """The states of one attachment's optimizers against the budgets of tiers off the device.

    Args:
        units: the attachment's own list.
        policy: the current one.
        limits: bytes a tier may hold, the least of any rank, now; None is no bound.
    """

    def __init__(
        self,
        comm: Comm,
        units: Sequence[Unit],
        policy: Callable[[], Policy],
        limits: Callable[[], Mapping[Tier, int | None]],
    ) -> None:
        super().__init__(units)
        self._comm, self._policy, self._limits = comm, policy, limits

    @property
    def _bounded(self) -> bool:
        return bool(self._bounds())

    def _admit_states(self, optimizer: Optimizer) -> None:
        for tier, limit in self._bounds().items():
            self._check(tier, limit, {*self._counted, optimizer})

    def _bounds(self) -> dict[Tier, int]:
        return {tier: limit for tier in _REMEDIES if (limit := self._limits().get(tier)) is not None}

    def _check(self, tier: Tier, limit: int, optimizers: set[Optimizer]) -> None:
        policy, plans = self._policy(), [unit.plan for unit in self._units]
        wide = policy.optimizer.rounding == "stochastic"
        found = {optimizer: stored_states(optimizer, plans, tier, wide=wide) for optimizer in optimizers}
        kept = _kept(plans, tier, overlap=policy.optimizer.overlap)
        spare = least(self._comm.stage, limit - kept - sum(stored.nbytes for stored in found.values()))
        assert spare is not None
        states = limit - kept - spare
        if spare < 0 < states:
            names = {type(optimizer).__name__ for optimizer, stored in found.items() if stored.nbytes}
            passing = tier is Tier.HOST and _passes_through(policy, self._units)
            more = passing or policy.optimizer.overlap or any(stored.least for stored in found.values())
            raise _refusal(tier, limit, kept, states, ", ".join(sorted(names)), more=more)


def _kept(plans: Sequence[UnitPlan], tier: Tier, *, overlap: bool) -> int:
    """Bytes beside states that are certain to be there in a step: gradients if there are any, and no update has used them up
    in backward."""
    kept = 0
    for unit in plans:
        for flat in unit.flats:
            there = not overlap and any(grad_of(param) is not None for param in unit.params(flat))
            kept += sum(cell.on(tier) for cell in flat.footprint() if there or cell.what != "gradient")
    return kept


def _passes_through(policy: Policy, units: Sequence[Unit]) -> bool:
    """Host memory holds more than what is stored there: buffers of the disk's, or activations."""
    cells = (cell for unit in units for flat in unit.plan.flats for cell in flat.footprint())
    states = (flat.kind.tiers.optimizer for unit in units for flat in unit.plan.flats)
    return policy.activation.tier != "device" or Tier.DISK in states or any(cell.on(Tier.DISK) for cell in cells)


def _refusal(tier: Tier, limit: int, kept: int, states: int, of: str, *, more: bool) -> BudgetError:
    """The error, with the sum of all that is to be stored; ``more``: which is not all that the tier will hold."""
    total, at_least = kept + states, "at least " if more else ""
    what = f"the states of {of}, {at_least}{as_size(total)} per rank"
    if kept:
        what = (
            f"the parameters, masters and gradients stored there, {as_size(kept)}, and for the states of {of}, "
            f"{as_size(states)}: {at_least}{as_size(total)} in all per rank"
        )
    return BudgetError(
        f"[budget] {tier.value}: expected memory for {what}, found {as_size(limit)}, {as_size(total - limit)} short. Raise it "
        f"to {at_least}{as_enough(total)}, or {_REMEDIES[tier]}. Nothing has been updated: call attachment.apply(policy), then "
        "repeat the optimizer's step."
    )
