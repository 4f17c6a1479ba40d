"""Lays units out anew: parameters were frozen or unfrozen, the policy changed, or the mesh.

``change.py`` calls it between steps, with the plans that differ.  Values, gradients and optimizer states follow, one
unit at a time, as the ranges that ranks have.  It decides nothing about layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import DivergenceError
from zhooks.build import BuildContext, flat_of
from zhooks.comm import ControlPlane
from zhooks.layout import UnitPlan
from zhooks.live.moved_ranges import laid_down, moved, targets_of
from zhooks.optim import shard_vectors, state_keys, states_of, whole_vectors
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit, find_slots

__all__ = ["relayout_units"]


def relayout_units(
    model: nn.Module,
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    context: BuildContext,
    optimizers: Sequence[torch.optim.Optimizer],
    laid: Callable[[Flat], None],
    before: BuildContext | None = None,
) -> None:
    """Lay out anew the units that have another plan; gradients and states follow.  Collective.

    Args:
        laid: called with each new flat; never collective.
        before: what units are built on that have not moved to another mesh yet; None where the mesh stays.
    Raises:
        BudgetError, TierError: a unit does not fit on some rank; that one and those after it are laid out as they were.
            Where its states alone find none, it has moved, and those after it have not.
    """
    # Another layout divides them otherwise.
    vectors = [optimizer for optimizer in optimizers if whole_vectors(optimizer)]
    try:
        for unit, plan in zip(units, plans, strict=True):
            if plan is not unit.plan:
                _relayout_unit(unit, plan, context, before or context, optimizers)
                with ControlPlane(context.comm.stage, "lay out").all_or_none():
                    for flat in unit.flats:
                        laid(flat)
    finally:
        for optimizer in vectors:
            shard_vectors(optimizer)
        find_slots(model, units)


@dataclass(frozen=True, slots=True)
class _Carried:
    """A gradient (no ``owner``) or an optimizer's state of a parameter: as it was, and its new range on this rank."""

    param: nn.Parameter
    owner: torch.optim.Optimizer | None
    key: Any
    old: ShardedTensor
    new: Tensor


@torch.no_grad()
def _relayout_unit(
    unit: Unit, plan: UnitPlan, context: BuildContext, before: BuildContext, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    known, targets = unit.plan, targets_of(plan, context.comm.shard.axis)
    values: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    carried: list[_Carried] = []
    for flat in unit.flats:
        shard = flat.shard
        for index, (param, new) in enumerate(zip(flat.params, moved(flat, shard, targets), strict=True)):
            assert new is not None
            values[id(param)], kept[id(param)] = new, flat.local(index, shard).clone()
        del shard
        for owner, key, tensors in _kinds(flat, optimizers):
            for param, old, new in zip(flat.params, tensors, moved(flat, tensors, targets), strict=True):
                if new is not None:
                    carried.append(_Carried(param, owner, key, old, new))
    # Not before all of it is here: copies may need more memory than there is.
    for flat in unit.flats:
        flat.release()
        flat.end_graph()
        flat.storage.drop()
    hooks = {id(p): (s.hooks, s.post_hooks) for flat in unit.flats for p, s in zip(flat.params, flat.specs, strict=True)}
    asked = any(flat.node_asked for flat in unit.flats)
    there = False
    try:
        _lay_out(unit, plan, values, context)
        there = True
    except DivergenceError:
        # Nobody can be asked any more whether it fits.
        carried.clear()
        raise
    except Exception:
        # Its values are here and nowhere else: the memory they had a moment ago takes them back.
        with before.unlimited():
            _lay_out(unit, known, kept, before)
        raise
    finally:
        specs = {id(param): spec for flat in unit.flats for param, spec in flat.members()}
        for param, spec in [pair for flat in unit.flats for pair in flat.members()]:
            spec.hooks, spec.post_hooks = hooks[id(param)]
        for one in carried:
            spec = specs[id(one.param)]
            old = one.old.local_shard
            state = ShardedTensor(one.new, spec) if there else ShardedTensor(old.memory, spec, device=old.device)
            if one.owner is None:
                one.param.grad = state
            else:
                one.owner.state[one.param][one.key] = state
        for flat in unit.flats:
            flat.node_asked = asked


def _lay_out(unit: Unit, plan: UnitPlan, values: dict[int, Tensor], context: BuildContext) -> None:
    """New flats for a unit whose parameters are sharded already, by this rank's ranges.  Collective: it fits on all
    ranks, or on none."""
    unit.flats = []
    try:
        with ControlPlane(context.comm.stage, "lay out").all_or_none():
            for planned in plan.flats:
                unit.flats.append(flat_of(planned, plan.params(planned), context))
                unit.flats[-1].storage.reserve()
        with ControlPlane(context.comm.stage, "lay out").all_or_none():
            for flat in unit.flats:
                laid_down(flat, [values.pop(id(param)) for param in flat.params])
    except BaseException:
        for flat in unit.flats:
            flat.storage.drop()
        unit.flats = []
        raise
    unit.plan = plan
    for flat in unit.flats:
        for index, (spec, param) in enumerate(zip(flat.specs, flat.params, strict=True)):
            shard = cast(ShardedTensor, param).local_shard
            shard.memory, shard.device, shard.spec, shard.owner = flat.part(index), flat.kind.device, spec, flat


def _kinds(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[Any, Any, list[Any]]]:
    """Gradients and optimizer states of a flat, one a parameter or None, with whose they are."""
    jobs: list[tuple[Any, Any, list[Any]]] = [(None, "grad", [param.grad for param in flat.params])]
    jobs += [(one, key, states_of(flat, one, key)) for one in optimizers for key in state_keys(flat, one)]
    return [job for job in jobs if any(isinstance(tensor, ShardedTensor) for tensor in job[2])]
