"""``[budget] device``: what an attachment will hold on the device, the states of its optimizers included, and its refusal.

``plan.py`` asks before anything is built, ``apply`` asks again, and ``session/budgets.py`` at the first steps of optimizers.
It never allocates on the device and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from offload.device import open_device
from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import Ignored, UnitPlan, flats_of, inner_units
from zhooks.plan.arena import beside, reductions
from zhooks.plan.state_sizes import Whole, state_nbytes
from zhooks.plan.tiers import limit_of
from zhooks.tensor import ShardedTensor

__all__ = ["Headroom", "device_floor", "device_headroom", "gathered_nbytes", "headroom_within", "ignored_here"]


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
    after: str = "",
) -> Headroom:
    """What the bound leaves beside these units, what is ``ignored`` there, and the states of these optimizers.  Collective.

    Args:
        after: ends the refusal.
    Raises:
        BudgetError: it does not hold what is kept on the device and the units in flight; on every rank.
    """
    seam = open_device(device)
    try:
        limit = limit_of(policy, Tier.DEVICE, seam, comm)
    finally:
        seam.close()
    return Headroom(None, None) if limit is None else headroom_within(limit, policy, units, optimizers, comm, ignored, after)


def ignored_here(ignored: Ignored, device: torch.device) -> list[Whole]:
    """What is left whole on the device; what another attachment has sharded is counted there."""
    return [
        (param, ignored.nbytes(name))
        for name, param in ignored.params.items()
        if param.device == device and not isinstance(param, ShardedTensor)
    ]


def headroom_within(
    limit: int,
    policy: Policy,
    units: Sequence[UnitPlan],
    optimizers: Iterable[Optimizer],
    comm: Comm,
    ignored: Sequence[Whole],
    after: str,
) -> Headroom:
    """As ``device_headroom``, of a bound that is known."""
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
