"""``[budget] host`` and ``disk`` against the states that an optimizer places there: at its first step, all of them at once.

``session/budgets.py`` asks, so that what does not fit is refused in one sum before anything is updated: states, and in host
memory also what passes to and from the disk at once.  It allocates nothing.  What cannot be counted ahead (states of parameters
that are updated whole or have no gradient, and those that no stand-in shows) the tiers admit block by block, when some or all
parameters have been updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.optim import Optimizer

from offload.device import computes_on_host
from offload.errors import BudgetError
from offload.policy import Policy
from offload.text import as_enough, as_size
from offload.tier import Tier
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import UnitPlan
from zhooks.optim import OwnedStates, grad_of, params_of
from zhooks.plan.state_sizes import Stored, stored_states
from zhooks.plan.tiers import PASSING, SMALLER_UNITS, in_all

__all__ = ["check_states", "states_bounds"]

_REMEDIES = {Tier.HOST: 'set [optimizer] tier = "disk"', Tier.DISK: "run on more ranks"}


def states_bounds(limits: Mapping[Tier, int | None]) -> dict[Tier, int]:
    """The bounds of tiers off the device, of all that ``limits`` says."""
    return {tier: limit for tier in _REMEDIES if (limit := limits.get(tier)) is not None}


def check_states(
    policy: Policy, plans: Sequence[UnitPlan], comm: Comm, tier: Tier, limit: int, optimizers: set[Optimizer]
) -> None:
    """Hold the bound of a tier off the device against what these optimizers keep, or will keep, there.  Collective.

    Raises:
        BudgetError: it does not fit; on every rank.
    """
    wide = policy.optimizer.rounding == "stochastic"
    found = {optimizer: stored_states(optimizer, plans, tier, wide=wide) for optimizer in optimizers}
    kept, passing = _kept(plans, tier, overlap=policy.optimizer.overlap), 0
    if tier is Tier.HOST:
        on_disk = {optimizer: stored_states(optimizer, plans, Tier.DISK, wide=wide) for optimizer in optimizers}
        passing = max(nbytes for each, stored in on_disk.items() for nbytes in _passing(each, stored, policy, plans))
    room = limit - kept - passing - sum(stored.nbytes for stored in found.values())
    spare = ControlPlane(comm.stage, "compare budgets").least(room)
    assert spare is not None
    states = limit - kept - passing - spare
    if spare < 0 < states + passing:
        names = {type(optimizer).__name__ for optimizer, stored in found.items() if stored.nbytes}
        needed = {
            "the parameters, masters and gradients stored there": kept,
            f"{PASSING} in the update of one unit": passing,
            f"the states of {', '.join(sorted(names))}": states,
        }
        beside = tier is Tier.HOST and _passes_through(policy, plans)
        more = beside or policy.optimizer.overlap or any(stored.least for stored in found.values())
        raise _refusal(tier, limit, needed, _REMEDIES[tier] if states else SMALLER_UNITS, more=more)


def _kept(plans: Sequence[UnitPlan], tier: Tier, *, overlap: bool) -> int:
    """Bytes beside states that are certain to be there in a step: gradients if there are any, and no update has used them up
    in backward."""
    kept = 0
    for unit in plans:
        for flat in unit.flats:
            there = not overlap and any(grad_of(param) is not None for param in unit.params(flat))
            kept += sum(cell.on(tier) for cell in flat.footprint() if there or cell.what != "gradient")
    return kept


def _passing(optimizer: Optimizer, states: Stored, policy: Policy, plans: Iterable[UnitPlan]) -> Iterator[int]:
    """Of each update that the optimizer's step makes, flat by flat, the least that has to be in host memory of what is on the
    disk; ``states``: those that are there."""
    yield 0
    held = {id(param) for param in params_of(optimizer)}
    for unit in plans:
        for flat in unit.flats:
            mine = [param for param in unit.params(flat) if id(param) in held and grad_of(param) is not None]
            if not mine or any(isinstance(optimizer.state.get(param), OwnedStates) for param in mine):
                # Nothing is updated, or whole parameters, in rounds of their own.
                continue
            cells = [cell.on(Tier.DISK) for cell in flat.footprint()]
            moved = policy.optimizer.compute == "host" and flat.kind.tiers.optimizer is not Tier.DEVICE
            if moved or computes_on_host(flat.kind.device):
                yield sum(cells) + states.by_flat.get(flat.number, 0)
            else:
                # On their way to the device, one after the other.
                yield max(cells)


def _passes_through(policy: Policy, plans: Sequence[UnitPlan]) -> bool:
    """Host memory holds more than what is stored there: buffers of the disk's, or activations."""
    cells = (cell for unit in plans for flat in unit.flats for cell in flat.footprint())
    states = (flat.kind.tiers.optimizer for unit in plans for flat in unit.flats)
    return policy.activation.tier != "device" or Tier.DISK in states or any(cell.on(Tier.DISK) for cell in cells)


def _refusal(tier: Tier, limit: int, needed: Mapping[str, int], remedy: str, *, more: bool) -> BudgetError:
    """The error, with the sum of all that is needed; ``more``: which is not all that the tier will hold."""
    total, at_least = sum(needed.values()), "at least " if more else ""
    return BudgetError(
        f"[budget] {tier.value} is too small. Expected memory for {in_all(needed, at_least)}, found {as_size(limit)}, "
        f"{as_size(total - limit)} short. Raise it to {at_least}{as_enough(total)}, or {remedy}. Nothing has been updated: "
        "call attachment.apply(policy), then repeat the optimizer's step."
    )
