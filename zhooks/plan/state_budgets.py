"""``[budget] host`` and ``disk`` against the states that an optimizer places there: at its first step, all of them at once.

torch's step hooks ask, so that what does not fit is refused in one sum before anything is updated.  It allocates nothing; what
cannot be counted ahead, the tiers admit block by block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, least
from zhooks.layout import UnitPlan
from zhooks.optim import grad_of, watch_steps
from zhooks.plan.state_sizes import stored_states
from zhooks.unit import Unit

__all__ = ["StateBudgets"]

_REMEDIES = {Tier.HOST: 'set [optimizer] tier = "disk"', Tier.DISK: "run on more ranks"}


class StateBudgets:
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
        self._comm, self._units, self._policy, self._limits = comm, units, policy, limits
        # How many groups of parameters each had when it was counted: a step with more counts it again.
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Be called before every optimizer's step from now on."""
        self._handles = watch_steps(self)

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook.  Collective at the first step of an optimizer that holds parameters of the model, and at the first
        after it was given more, where a tier has a budget.

        Raises:
            BudgetError: a tier cannot hold its states; nothing has been updated, on any rank.
        """
        limits = {tier: limit for tier in _REMEDIES if (limit := self._limits().get(tier)) is not None}
        # Ranks need not come to a step in backward (an optimizer a parameter) in one order.
        if not limits or torch._C._current_graph_task_id() != -1:
            return
        if self._counted.get(optimizer) == len(optimizer.param_groups):
            return
        ours = {id(param) for unit in self._units for flat in unit.flats for param in flat.params}
        if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
            for tier, limit in limits.items():
                self._check(tier, limit, {*self._counted, optimizer})
        self._counted[optimizer] = len(optimizer.param_groups)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""

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
