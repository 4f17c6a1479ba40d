"""Lays units out anew: parameters were frozen or unfrozen, or the policy changed.

``attach.py`` calls it between steps, with the plans that differ.  Values, gradients and optimizer states follow, one unit at a
time.  It decides nothing about layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zhooks.build.shard import BuildContext, flat_of
from zhooks.comm import all_or_none
from zhooks.layout import UnitPlan
from zhooks.optim import shard_vectors, state_keys, whole_vectors
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Unit, all_copies, find_slots

__all__ = ["relayout_units"]


def relayout_units(
    model: nn.Module,
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    context: BuildContext,
    optimizers: Sequence[torch.optim.Optimizer],
    laid: Callable[[Flat], None],
) -> None:
    """Lay out anew the units that have another plan; gradients and states follow.  Collective.

    Args:
        laid: called with each new flat; never collective.
    Raises:
        BudgetError, TierError: there is no room for a unit on some rank; that one and those after it are laid out as they were.
            Where its states alone find none, it has moved, and those after it have not.
    """
    # Another layout divides them otherwise.
    vectors = [optimizer for optimizer in optimizers if whole_vectors(optimizer)]
    try:
        for unit, plan in zip(units, plans, strict=True):
            if plan is not unit.plan:
                _relayout_unit(unit, plan, context, optimizers)
                with all_or_none(context.comm.stage, "lay out"):
                    for flat in unit.flats:
                        laid(flat)
    finally:
        for optimizer in vectors:
            shard_vectors(optimizer)
        find_slots(model, units)


@torch.no_grad()
def _relayout_unit(
    unit: Unit, plan: UnitPlan, context: BuildContext, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    before = unit.plan
    values: dict[int, Tensor] = {}
    carried: list[tuple[nn.Parameter, Any, str, Tensor]] = []
    for flat in unit.flats:
        values |= {id(param): value for value, param in zip(all_copies(flat, flat.shard), flat.params, strict=True)}
        carried.extend(_carried(flat, optimizers))
    # Not before all of it is here: copies may need more memory than there is.
    for flat in unit.flats:
        flat.release()
        flat.end_graph()
        flat.buffer.drop()
    hooks = {id(p): (s.hooks, s.post_hooks) for flat in unit.flats for p, s in zip(flat.params, flat.specs, strict=True)}
    asked = any(flat.node_asked for flat in unit.flats)
    try:
        _lay_out(unit, plan, values, context)
    except Exception:
        # Its values are here and nowhere else: the room they had a moment ago takes them back.
        _lay_out(unit, before, values, context)
        raise
    finally:
        for param, spec in [pair for flat in unit.flats for pair in zip(flat.params, flat.specs, strict=True)]:
            spec.hooks, spec.post_hooks = hooks[id(param)]
        specs = {id(param): spec for flat in unit.flats for param, spec in zip(flat.params, flat.specs, strict=True)}
        for param, owner, key, value in carried:
            moved = ShardedTensor(specs[id(param)].pick(value).clone(), specs[id(param)])
            if owner is None:
                param.grad = moved
            else:
                owner.state[param][key] = moved
        for flat in unit.flats:
            flat.node_asked = asked


def _lay_out(unit: Unit, plan: UnitPlan, values: dict[int, Tensor], context: BuildContext) -> None:
    """New flats for a unit whose parameters are sharded already, by their full values.  Collective: there is room on all ranks,
    or on none."""
    unit.flats = []
    try:
        with all_or_none(context.comm.stage, "lay out"):
            for planned in plan.flats:
                unit.flats.append(flat_of(planned, plan.params(planned), context))
                unit.flats[-1].buffer.reserve()
    except BaseException:
        for flat in unit.flats:
            flat.buffer.drop()
        unit.flats = []
        raise
    unit.plan = plan
    for flat in unit.flats:
        full = torch.zeros(flat.layout.padded, dtype=flat.kind.master, device=flat.kind.device)
        for spec, start, param in zip(flat.specs, flat.layout.starts, flat.params, strict=True):
            spec.within(full, start).copy_(values[id(param)])
        flat.adopt(full)
        flat.holds = True
        for index, (spec, param) in enumerate(zip(flat.specs, flat.params, strict=True)):
            sharded: Any = param
            sharded._at, sharded._on, sharded._spec, sharded._bound = flat.part(index), flat.kind.device, spec, flat


def _carried(flat: Flat, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[nn.Parameter, Any, str, Tensor]]:
    """Full gradients and optimizer states of a flat, with where they belong."""
    out: list[tuple[nn.Parameter, Any, str, Tensor]] = []
    jobs: list[tuple[Any, str, list[Any]]] = [(None, "grad", [param.grad for param in flat.params])]
    for optimizer in optimizers:
        for key in state_keys(flat, optimizer):
            jobs.append((optimizer, key, [optimizer.state.get(param, {}).get(key) for param in flat.params]))
    for owner, key, tensors in jobs:
        if not any(isinstance(tensor, ShardedTensor) for tensor in tensors):
            continue
        for param, tensor, value in zip(flat.params, tensors, all_copies(flat, tensors), strict=True):
            if isinstance(tensor, ShardedTensor):
                out.append((param, owner, key, value))
    return out
