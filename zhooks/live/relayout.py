"""Lays units out anew between steps: parameters were frozen or unfrozen, the policy changed, or the mesh.

Values, gradients and optimizer states follow, one unit at a time, as the ranges that ranks have.  Ranks that share a buffer
hold all of it, so each finds what it lacks among those, and what it has it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import DivergenceError
from zhooks.build import BuildContext, flat_of
from zhooks.comm import GATHER, Call, ControlPlane
from zhooks.layout import Axis, Layout, UnitPlan
from zhooks.optim import shard_vectors, state_keys, states_of, whole_vectors
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Ranges, Unit, find_slots

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
    known, targets = unit.plan, _targets_of(plan, context.comm.shard.axis)
    values: dict[int, Tensor] = {}
    kept: dict[int, Tensor] = {}
    carried: list[_Carried] = []
    for flat in unit.flats:
        shard = flat.shard
        for index, (param, new) in enumerate(zip(flat.params, _moved(flat, shard, targets), strict=True)):
            assert new is not None
            values[id(param)], kept[id(param)] = new, flat.local(index, shard).clone()
        del shard
        for owner, key, tensors in _kinds(flat, optimizers):
            for param, old, new in zip(flat.params, tensors, _moved(flat, tensors, targets), strict=True):
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
                _laid_down(flat, [values.pop(id(param)) for param in flat.params])
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


# From the ranges that ranks have to those that they shall have: nothing is ever whole.


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one parameter lies in a layout: ``layout`` divides its flat buffer over the ranks of ``axis``, or over none."""

    layout: Layout
    index: int
    axis: Axis

    def runs(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """What a rank of the mesh has of it, run by run: start in the parameter, start in the rank's range, numel."""
        pieces = self.layout.pieces(self.index, 0 if self.layout.world == 1 else self.axis.place(rank))
        for piece in pieces:
            yield piece.start, piece.local - pieces[0].local, piece.numel

    def numel(self, rank: int) -> int:
        """Elements of that."""
        return sum(numel for _, _, numel in self.runs(rank))


def _targets_of(plan: UnitPlan, axis: Axis) -> dict[int, _Target]:
    """Where each parameter of a unit shall lie, by identity; ``axis``: the ranks that share its flats."""
    return {
        id(param): _Target(flat.shared, index, axis)
        for flat in plan.flats
        for index, param in enumerate(plan.params(flat))
    }


@torch.no_grad()
def _moved(flat: Flat, ranges: Ranges, targets: Mapping[int, _Target]) -> list[Tensor | None]:
    """This rank's ranges in the new layout as new tensors, one a parameter; None for those that have none of this kind.

    Collective over the ranks that share the buffer, which have the same kinds of the same parameters.
    """
    layout, transport = flat.group.layout, flat.group.transport
    axis = transport.axis
    aims, own, made = [targets[id(param)] for param in flat.params], list[Tensor | None](), list[Tensor | None]()
    for index, aim in enumerate(aims):
        if isinstance(ranges, Tensor):
            mine: Tensor | None = flat.local(index, ranges).to(flat.kind.device)
        else:
            held = ranges[index]
            mine = held.local_shard.values.to(flat.kind.device) if isinstance(held, ShardedTensor) else None
        own.append(mine)
        made.append(None if mine is None else mine.new_empty(aim.numel(axis.ranks[axis.rank])))
    widest = max((mine.itemsize for mine in own if mine is not None), default=1)
    call = Call(GATHER, "move ranges", flat.name, flat.number)
    most = max(1, flat.pool.bound // widest)
    for low in range(0, layout.padded, most):
        sends: list[list[Tensor]] = [[] for _ in axis.ranks]
        receives: list[list[Tensor]] = [[] for _ in axis.ranks]
        nbytes = [[0] * axis.world for _ in axis.ranks]
        for index, aim in enumerate(aims):
            mine, new = own[index], made[index]
            if mine is None or new is None:
                continue
            for reader, rank in enumerate(axis.ranks):
                for writer, begin, at, numel in _sources(layout, index, aim.runs(rank), low, low + most):
                    nbytes[writer][reader] += numel * mine.itemsize
                    if writer == axis.rank:
                        start = begin - flat.span(index)[0]
                        sends[reader].append(mine[start : start + numel])
                    if reader == axis.rank:
                        receives[writer].append(new[at : at + numel])
        if any(map(any, nbytes)):
            transport.exchange(call, sends, receives, nbytes).wait()
    return made


def _sources(
    layout: Layout, index: int, runs: Iterator[tuple[int, int, int]], low: int, high: int
) -> Iterator[tuple[int, int, int, int]]:
    """Who has these runs of a parameter, as far as they lie in ``[low, high)`` of the flat buffer: whose, place in that shard,
    place in the new range, numel."""
    first = layout.starts[index]
    for start, local, numel in runs:
        begin, end = max(first + start, low), min(first + start + numel, high)
        at = local + begin - first - start
        for writer, place, count in layout.holders(begin, end) if begin < end else ():
            yield writer, place, at, count
            at += count


def _laid_down(flat: Flat, values: Sequence[Tensor]) -> None:
    """Fill a flat buffer that is new with this rank's ranges, one a parameter."""
    if flat.storage.in_full:
        flat.adopt(torch.zeros(flat.layout.padded, dtype=flat.kind.master, device=flat.kind.device))
    shard = flat.storage.overwritten()
    if sum(value.numel() for value in values) < shard.numel():
        shard.zero_()
    for index, value in enumerate(values):
        flat.local(index, shard).copy_(value)
    del shard
    flat.written()
    flat.holds = True
