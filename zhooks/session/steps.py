"""The steps of a session's optimizers: ``[budget]`` at first ones, and what makes them over tiers or of whole parameters.

Before a first step, and before the first after an optimizer was given more, the budgets of all tiers are held against its
states.  Where states cannot be foreseen (Note [States ahead] in ``plan/budget.py``) the device's is held against them after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

from torch.optim import Optimizer

from offload.policy import Policy
from offload.tier import Tier
from zhooks.comm import Comm
from zhooks.grad import in_backward
from zhooks.layout import UnitPlan, flats_of
from zhooks.optim import Arguments, Overlap, Step, Stepper, Updater, Whole, choices_of, open_worker, with_owners
from zhooks.plan import STAGED_NBYTES, Headroom, check_states, device_headroom, headroom_within, ignored_here
from zhooks.session.plug_in import needed
from zhooks.unit import Flat

if TYPE_CHECKING:
    from zhooks.session.session import Session
    from zhooks.whole import WholeUpdater

__all__ = [
    "Budgets", "admit_change", "admit_layout", "admit_step", "adopt_states", "count_step", "open_stepper", "whole_updater",
]  # fmt: skip


@dataclass(slots=True, eq=False)
class Budgets:
    """What was found of them so far.

    Attributes:
        limit: the least bound of any rank for the device, in bytes; None is none.
        on_device, on_tiers: how many groups of parameters each optimizer had when its states were counted there.
        unforeseen: those whose states count on the device after their first step.
    """

    limit: int | None = None
    on_device: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)
    on_tiers: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)
    unforeseen: WeakSet[Optimizer] = field(default_factory=WeakSet)

    def begin(self, headroom: Headroom) -> None:
        """A policy begins, under which this was found; what was counted on the device under another one counts no more."""
        self.limit = headroom.limit
        self.on_device.clear()
        self.unforeseen.clear()
        self.count(headroom)

    def count(self, headroom: Headroom) -> None:
        """The states of these optimizers are in the count."""
        self.on_device.update((optimizer, len(optimizer.param_groups)) for optimizer in headroom.foreseen)


def admit_step(session: Session, step: Step) -> None:
    """Before every step of the model's.  Collective at a first step, if there is a budget.

    Raises:
        BudgetError: the states would not fit; nothing has been updated, on any rank.
    """
    # Ranks need not come to a step in backward (an optimizer a parameter) in one order.
    if in_backward():
        return
    budgets, optimizer, groups = session.budgets, step.optimizer, len(step.optimizer.param_groups)
    if budgets.limit is not None and budgets.on_device.get(optimizer) != groups:
        after = " Nothing has been updated: call attachment.apply(policy), then repeat the optimizer's step."
        headroom = _on_device(session, budgets.limit, {*budgets.on_device, optimizer}, after)
        session.keep_within(headroom.spare)
        if optimizer not in headroom.foreseen:
            budgets.unforeseen.add(optimizer)
        budgets.on_device[optimizer] = groups
    bounds = {tier: limit for tier in (Tier.HOST, Tier.DISK) if (limit := session.tiers.limits.get(tier)) is not None}
    if bounds and budgets.on_tiers.get(optimizer) != groups:
        for tier, limit in bounds.items():
            check_states(session.policy, session.plans(), session.comm, tier, limit, {*budgets.on_tiers, optimizer})
        budgets.on_tiers[optimizer] = groups


def count_step(session: Session, step: Step) -> None:
    """After every step of the model's.  Collective after the first step of an optimizer whose states could not be foreseen.

    Raises:
        BudgetError: its states do not fit; the step has been made on every rank, and the next one is refused.
    """
    budgets, optimizer = session.budgets, step.optimizer
    if budgets.limit is not None and optimizer in budgets.unforeseen and not in_backward():
        budgets.unforeseen.discard(optimizer)
        budgets.on_device.pop(optimizer, None)
        after = " This step has been made, but the next one is refused until attachment.apply(policy) frees memory."
        headroom = _on_device(session, budgets.limit, {*budgets.on_device, optimizer}, after)
        budgets.on_device[optimizer] = len(optimizer.param_groups)
        session.keep_within(headroom.spare)


def admit_change(
    session: Session, policy: Policy, units: Sequence[UnitPlan], comm: Comm, optimizers: Iterable[Optimizer]
) -> Headroom:
    """What the device's bound leaves under another policy beside units that are, or would be, laid out so.  Collective.

    Args:
        optimizers: those that have made states without a bound, too.
    Raises:
        BudgetError: they are not within it; on every rank.
    """
    counted, ignored = {*session.budgets.on_device, *optimizers}, ignored_here(session.ignored, session.device)
    return device_headroom(policy, session.device, units, counted, comm, ignored, " Nothing has been changed.")


def admit_layout(session: Session, units: Sequence[UnitPlan]) -> int | None:
    """Parameters were frozen or unfrozen, and units are to be laid out so; what ``Headroom.spare`` will be.  Collective.

    Raises:
        BudgetError: what is trained now does not fit; nothing has been laid out, on any rank.
    """
    budgets = session.budgets
    if budgets.limit is None:
        return None
    after = (
        " This includes the parameters that were unfrozen: freeze them again, or call attachment.apply(policy). Nothing has "
        "been changed."
    )
    headroom = _on_device(session, budgets.limit, list(budgets.on_device), after, units)
    budgets.count(headroom)
    return headroom.spare


def _on_device(
    session: Session, limit: int, optimizers: Iterable[Optimizer], after: str, units: Sequence[UnitPlan] | None = None
) -> Headroom:
    """What the device's bound leaves beside ``units``, or as they are laid out now; ``after`` ends the refusal.  Collective."""
    ignored = ignored_here(session.ignored, session.device)
    units = session.plans() if units is None else units
    return headroom_within(limit, session.policy, units, optimizers, session.comm, ignored, after)


def open_stepper(session: Session) -> Stepper:
    """What steps optimizers over the current tiers, by the current policy."""
    policy, runtime, store, optimizers = session.policy, session.runtime, session.tiers.store, session.optimizers
    reducer, bus, ahead = runtime.reducer, session.bus, min(session.policy.schedule.prefetch, 1)
    flats = partial(flats_of, session.units)
    updater: Updater | None = None
    overlap: Overlap | None = None
    if store is not None:
        # A model that is dropped without detach goes while somebody still holds a block.
        asked = WeakMethod(runtime.make_room)
        store.make_room = lambda: (make_room := asked()) is not None and make_room()
        updater = Updater(store, bus, flats, choice_of=choices_of(policy, session.rounding), ahead=ahead)
        if policy.optimizer.overlap:
            axis = session.comm.stage.axis
            # On a device that computes by itself an update takes none of backward's time.
            worker = open_worker(store.compute) if policy.optimizer.compute == "host" else None
            overlap = Overlap(updater, optimizers, worker, rank=axis.ranks[axis.rank])
    reducer.update_early(overlap)
    shard = session.comm.shard
    opened: list[WholeUpdater] = []

    def update_whole(optimizer: Optimizer, updates: Sequence[Whole], arguments: Arguments) -> None:
        if not opened:
            updater_of = whole_updater(optimizer)
            opened.append(updater_of(optimizers.owners, shard, bus, policy.comm.buffer, store, ahead, 2 * STAGED_NBYTES))
        opened[0].step(optimizer, updates, arguments)

    return Stepper(optimizers.owners, update_whole, updater, flats, runtime.due, overlap)


def whole_updater(optimizer: Optimizer) -> type[WholeUpdater]:
    """What updates whole parameters, as this optimizer asks.

    Raises:
        CapabilityError: the package is not there.
    """
    with needed("whole", f"{type(optimizer).__name__}, which updates whole parameters,"):
        from zhooks.whole import WholeUpdater
    return WholeUpdater


def adopt_states(session: Session, optimizers: Sequence[Optimizer], flat: Flat) -> None:
    """States of a flat that were moved or loaded on the device go to their tier."""
    stepper, store = session.stepper, session.tiers.store
    if stepper is not None and stepper.updater is not None and store is not None:
        for optimizer in optimizers:
            stepper.updater.adopt(optimizer, flat)
            if any(with_owners(optimizer, flat.params)):
                whole_updater(optimizer).adopt(store, optimizer, flat)
