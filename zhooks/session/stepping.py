"""What steps the optimizers of a session: parameters updated whole, and what is kept on tiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakMethod

from torch.optim import Optimizer

from zhooks.layout import flats_of
from zhooks.optim import Arguments, Overlap, Stepper, Updater, Whole, choices_of, open_worker, with_owners
from zhooks.plan import STAGED_NBYTES
from zhooks.session.plug_in import needed
from zhooks.unit import Flat

if TYPE_CHECKING:
    from zhooks.session.session import Session
    from zhooks.whole import WholeUpdater

__all__ = ["adopt_states", "open_stepper", "whole_updater"]


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
