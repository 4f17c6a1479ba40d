"""``[budget] device``: what an attachment will hold on the device, the states of its optimizers included, and its refusal.

``plan.py`` asks before anything is built, and ``apply`` asks again; torch's step hooks ask for optimizers that only the
first step shows.  It never allocates on the device and moves nothing.

Where states cannot be foreseen (`state_sizes.py`), they count once they exist: after that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from offload.device import open_device
from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, ControlPlane
from zhooks.grad import in_backward
from zhooks.layout import Ignored, UnitPlan, flats_of, inner_units
from zhooks.optim import Step
from zhooks.plan.arena import beside, reductions
from zhooks.plan.first_steps import FirstSteps
from zhooks.plan.state_sizes import Whole, state_nbytes
from zhooks.plan.tiers import limit_of
from zhooks.tensor import ShardedTensor
from zhooks.unit import Unit

__all__ = ["DeviceBudget", "Headroom", "device_floor", "device_headroom", "gathered_nbytes", "ignored_here"]


@dataclass(frozen=True, slots=True, eq=False)
class Headroom:
    """What ``[budget] device`` leaves under a policy.

    Attributes:
        limit: the least bound of any rank, in bytes; None is none.
        spare: bytes of gathered units that may stay between forward and backward; None is no bound.
        foreseen: the optimizers whose states are in the count.
    """

    limit: int | None
    spare: int | None
    foreseen: tuple[Optimizer, ...] = ()


def device_headroom(
    policy: Policy,
    device: torch.device,
    units: Sequence[UnitPlan],
    optimizers: Iterable[Optimizer],
    comm: Comm,
    ignored: Sequence[Whole] = (),
) -> Headroom:
    """What the bound leaves beside these units, what is ``ignored`` there, and the states of these optimizers.  Collective.

    Raises:
        BudgetError: it does not hold what is kept on the device and the units in flight; on every rank.
    """
    limit = _limit(policy, device, comm)
    return Headroom(None, None) if limit is None else _headroom(limit, policy, units, optimizers, comm, ignored, "")


def ignored_here(ignored: Ignored, device: torch.device) -> list[Whole]:
    """What is left whole on the device; what another attachment has sharded is counted there."""
    return [
        (param, ignored.nbytes(name))
        for name, param in ignored.params.items()
        if param.device == device and not isinstance(param, ShardedTensor)
    ]


def _limit(policy: Policy, device: torch.device, comm: Comm) -> int | None:
    seam = open_device(device)
    try:
        return limit_of(policy, Tier.DEVICE, seam, comm)
    finally:
        seam.close()


class DeviceBudget(FirstSteps):
    """One attachment's ``[budget] device``, at every step.

    Args:
        units: the attachment's own list.
        keep_within: called with what is left for gathered units once an optimizer that was not foreseen is counted.
        headroom: what the bound left before anything was built.
        ignored: what of the model stays whole.
    """

    def __init__(
        self,
        comm: Comm,
        units: Sequence[Unit],
        policy: Policy,
        headroom: Headroom,
        keep_within: Callable[[int | None], None],
        ignored: Ignored,
        device: torch.device,
    ) -> None:
        super().__init__(units)
        self._ignored, self._device = ignored, device
        self._comm, self._keep_within = comm, keep_within
        self._policy, self._limit = policy, headroom.limit
        # Their states could not be foreseen: they count after their first step.
        self._unforeseen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._count(headroom)

    def admit(
        self,
        policy: Policy,
        device: torch.device,
        units: Sequence[UnitPlan],
        comm: Comm,
        optimizers: Iterable[Optimizer],
    ) -> Headroom:
        """What the bound leaves under another policy beside units that are, or would be, laid out so.  Collective.

        Args:
            optimizers: those that have made states without a bound, too.
        Raises:
            BudgetError: they are not within it; on every rank.
        """
        limit = _limit(policy, device, comm)
        if limit is None:
            return Headroom(None, None)
        whole = ignored_here(self._ignored, self._device)
        return _headroom(limit, policy, units, {*self._counted, *optimizers}, comm, whole, " Nothing has been changed.")

    def change(self, policy: Policy, headroom: Headroom) -> None:
        """Another policy, between steps, under which ``admit`` has found this."""
        self._counted.clear()
        self._unforeseen.clear()
        self._policy, self._limit = policy, headroom.limit
        self._count(headroom)

    def lay_out(self, units: Sequence[UnitPlan]) -> int | None:
        """Parameters were frozen or unfrozen, and units are to be laid out so; returns what ``Headroom.spare`` will be.
        Collective.

        Raises:
            BudgetError: what is trained now does not fit; nothing has been laid out, on any rank.
        """
        if self._limit is None:
            return None
        after = (
            " This includes the parameters that were unfrozen: freeze them again, or call attachment.apply(policy). Nothing "
            "has been changed."
        )
        headroom = self._headroom(list(self._counted), after, units)
        self._count(headroom)
        return headroom.spare

    def _count(self, headroom: Headroom) -> None:
        self._counted.update((optimizer, len(optimizer.param_groups)) for optimizer in headroom.foreseen)

    def _headroom(
        self, optimizers: Iterable[Optimizer], after: str, units: Sequence[UnitPlan] | None = None
    ) -> Headroom:
        """What is left beside ``units``, or as they are laid out now."""
        assert self._limit is not None
        plans = [unit.plan for unit in self._units] if units is None else units
        whole = ignored_here(self._ignored, self._device)
        return _headroom(self._limit, self._policy, plans, optimizers, self._comm, whole, after)

    @property
    def _bounded(self) -> bool:
        return self._limit is not None

    def _admit_states(self, optimizer: Optimizer) -> None:
        after = " Nothing has been updated: call attachment.apply(policy), then repeat the optimizer's step."
        headroom = self._headroom({*self._counted, optimizer}, after)
        self._keep_within(headroom.spare)
        if optimizer not in headroom.foreseen:
            self._unforeseen.add(optimizer)

    def after(self, step: Step) -> None:
        """Collective after the first step of an optimizer whose states could not be foreseen.

        Raises:
            BudgetError: its states do not fit; the step has been made on every rank, and the next one is refused.
        """
        optimizer = step.optimizer
        if optimizer in self._unforeseen and not in_backward():
            self._unforeseen.discard(optimizer)
            self._counted.pop(optimizer, None)
            after = " This step has been made, but the next one is refused until attachment.apply(policy) frees memory."
            headroom = self._headroom({*self._counted, optimizer}, after)
            self._counted[optimizer] = len(optimizer.param_groups)
            self._keep_within(headroom.spare)


def _headroom(
    limit: int,
    policy: Policy,
    units: Sequence[UnitPlan],
    optimizers: Iterable[Optimizer],
    comm: Comm,
    ignored: Sequence[Whole],
    after: str,
) -> Headroom:
    """What is left beside the states of these optimizers; ``after`` ends the refusal.  Collective."""
    rounded, rank = policy.optimizer.rounding == "stochastic", comm.shard.axis.rank
    found = {optimizer: state_nbytes(optimizer, units, rank, wide=rounded, ignored=ignored) for optimizer in optimizers}
    floor = device_floor(policy, units, whole_sums=comm.pipelined) + beside(policy, units)
    floor += sum(nbytes * (2 if param.requires_grad else 1) for param, nbytes in ignored)
    spare = ControlPlane(comm.stage, "compare budgets").least(limit - floor - sum(nbytes for nbytes, _ in found.values()))
    assert spare is not None
    if spare >= 0:
        return Headroom(limit, spare, tuple(optimizer for optimizer, (_, foreseen) in found.items() if foreseen))
    states = limit - spare - floor
    tier, what = "", f"{as_size(floor)} in all"
    if states:
        of = ", ".join(sorted({type(optimizer).__name__ for optimizer in found}))
        divided = policy.optimizer.device_share
        tier = "lower [optimizer] device_share, " if divided else 'set [optimizer] tier = "host", '
        what = f"{as_size(floor)}, and for the states of {of}, {as_size(states)}: {as_size(floor + states)} in all"
    # What an optimizer that nobody has met keeps comes on top.
    at_least = "" if found and all(foreseen for _, foreseen in found.values()) else "at least "
    raise BudgetError(
        f"[budget] device is too small. Expected memory for what is stored there and the units in flight, {what}, found "
        f"{as_size(limit)}. Raise it to {at_least}{as_enough(floor + states)}, {tier}{_less(policy)}.{after}"
    )


def _less(policy: Policy) -> str:
    """What else takes less of the device, in words."""
    flying = "[schedule] prefetch or [units] max_numel" if policy.schedule.prefetch else "[units] max_numel"
    cells = {"gradient": policy.gradient.tier, "parameter": policy.parameter.tier if policy.stage in (0, 3) else None}
    there = [f"[{cell}]" for cell, tier in cells.items() if tier == "device"]
    moved = f'set the tier of {" and ".join(there)} to "host" or "disk"' if there else "run on more ranks"
    return f"lower {flying}, or {moved}"


def device_floor(policy: Policy, units: Sequence[UnitPlan], *, whole_sums: bool = False) -> int:
    """Bytes on the device whatever is kept: parameters, masters and gradients kept there, gathered units, sums in flight.

    Args:
        whole_sums: microbatches of a pipeline add up unreduced: every sum is held until the last.
    """
    flats = flats_of(units)
    sums = sorted((flat.sum_nbytes for flat in flats if flat.kind.trainable), reverse=True)
    flying = reductions(units, policy.schedule.most_reductions)
    # What is never sent goes where gradients are kept, unless it is cast, or looked at before.
    direct = not flying and policy.precision.loss_scale is None and all(flat.kind.reduces_in_place for flat in flats)
    under_way = 0 if direct else sum(sums if whole_sums else sums[: 1 + flying])
    kept = sum(cell.on(Tier.DEVICE) for flat in flats for cell in flat.footprint())
    return kept + gathered_nbytes(policy, units) + under_way


def gathered_nbytes(policy: Policy, units: Sequence[UnitPlan]) -> int:
    """The most bytes of full buffers at once: of the unit in use and those fetched ahead, and of those that stay meanwhile."""
    gathered = {unit.number: unit.full_nbytes for unit in units if unit.releasable}
    if policy.schedule.uneven:
        # Ranks that differ hold all of them until a pass ends.
        return sum(gathered.values())
    # Backward needs a tied parameter from its last use to its first.
    tied = {unit.number for unit in units if unit.trainable and unit.group.aliases}
    inner = inner_units(units)
    # A unit is held while units inside its modules run: the root's own parameters for as long as the pass.
    chains = {frozenset(outer for outer in gathered if number in inner[outer]) for number in gathered}
    most = 0
    for chain in chains:
        held = gathered.keys() & (chain | tied)
        others = sorted((nbytes for number, nbytes in gathered.items() if number not in held), reverse=True)
        most = max(most, sum(gathered[number] for number in held) + sum(others[: 1 + policy.schedule.prefetch]))
    return most
