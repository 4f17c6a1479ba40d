"""From a model to units: lay out, fill, make ranks equal, shard, and swap parameters; and all the way back.

``attach.py`` calls it at attach, detach and when parameters were frozen.  One unit at a time is whole, so the peak is the
shards and one unit.  It never runs a forward and installs no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from offload.budget import shown
from offload.errors import AttachError
from offload.events import Bus
from offload.policy import Policy
from offload.store import Store
from zhooks.comm import CONTROL, Call, Comm, all_or_none
from zhooks.layout import FLATS, PP, TP, Cut, Group, Kind, Table, flat_layout, kind_of, part_of, pieces
from zhooks.optim import state_keys
from zhooks.run import Runtime, forget_idle_graphs, rehook
from zhooks.setup.materialize import Materializer, swap_memory
from zhooks.setup.plan import Plan
from zhooks.tensor import ParamShard, ShardedOverTp, ShardedTensor, part_numel
from zhooks.unit import (
    Flat,
    Links,
    Pool,
    Ranges,
    Scratch,
    Unit,
    all_copies,
    find_slots,
    loose_references,
    spread,
)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every unit of an attachment is built on."""

    policy: Policy
    table: Table
    comm: Comm
    pool: Pool
    bus: Bus
    sync: bool
    store: Store | None = None
    runtime: Runtime | None = None

    @property
    def links(self) -> Links:
        """What a flat is connected to; of one that is laid out for its sizes alone, to nobody who runs it."""
        beside = {TP: self.comm.tp, PP: self.comm.pp}
        if self.runtime is None:
            return Links(self.bus, self.store, beside)
        return Links(self.bus, self.store, beside, self.runtime.asked, self.runtime.node, self.runtime.scaling)

    @property
    def cut(self) -> Cut:
        """How units are cut into flats."""
        return Cut(self.pool.bound, self.comm.shard.axis.world, self.comm.replicate.axis.world)


def build_units(plan: Plan, context: BuildContext, units: list[Unit]) -> None:
    """Shard the model as planned.  Collective.

    Args:
        units: takes every unit before it is sharded, for whoever puts back what was done.
    """
    request = plan.request
    # Models that were dropped after a forward alone are freed before this one takes memory.
    forget_idle_graphs()
    with all_or_none(context.comm.stage, "attach"):
        scratch = scratch_for(plan.groups, context, request.device)
    materializer = Materializer(request.model, request.device, request.init, request.sync)
    wide = _normalised(request.model)
    with loose_references(request.model):
        for number, group in enumerate(plan.groups):
            units.append(Unit(group.name, number, group.entries))
            build_unit(group, units[-1], wide, context, materializer, scratch)
            for optimizer in request.known:
                shard_states(units[-1], optimizer, context)
    find_slots(request.model, units)
    materializer.buffers(context.comm)


def build_unit(
    group: Group,
    unit: Unit,
    wide: set[int],
    context: BuildContext,
    materializer: Materializer,
    scratch: Scratch,
) -> None:
    """Shard one group into ``unit``: its parameters are sharded tensors afterwards, of the same identity.

    Collective over all ranks when ``context.sync``: rank 0's values are broadcast.
    """
    scratch.reset()
    # A module of a meta model fills itself whole: its unit lies in the scratch buffer at once, others flat by flat.
    meta = on_meta(group)
    with all_or_none(context.comm.stage, "attach"):
        for flat in flats_of(group, unit, wide, context, materializer.device):
            flat.buffer.reserve()
        fulls = [_place(flat, scratch) for flat in unit.flats] if meta else []
        materializer.unit(group)
    for flat in unit.flats:
        if not meta:
            scratch.reset()
        if flat.long and not (flat.buffer.in_full or meta or context.comm.tp.axis.world > 1):
            _pass(flat, context)
            flat.holds = True
            with all_or_none(context.comm.stage, "attach"):
                _swap_in(flat, 0, flat.params[0])
        else:
            _take(flat, fulls.pop(0) if meta else _place(flat, scratch), context)


def _take(flat: Flat, full: Tensor, context: BuildContext) -> None:
    """Shard parameters by way of the full buffer; where that fails, on any rank, they are plain as before."""
    grads = [param.grad for param in flat.params]
    try:
        _fill(flat, full, context)
        with all_or_none(context.comm.stage, "attach"):
            flat.adopt(full)
            for index, param in enumerate(flat.params):
                _swap_in(flat, index, param)
    except BaseException:
        for spec, start, param, grad in zip(flat.specs, flat.layout.starts, flat.params, grads, strict=True):
            value = spec.within(full, start)
            if isinstance(param, ShardedTensor):
                _swap_out(spec, param, nn.Parameter(spec.wrap(value.clone()), param.requires_grad))
                param.grad = grad
            elif part_of(param).data_ptr() == value.data_ptr():
                part_of(param).data = value.clone()
        raise
    flat.holds = True


def flats_of(group: Group, unit: Unit, wide: set[int], context: BuildContext, device: torch.device) -> list[Flat]:
    """Lay a group out into ``unit``; returns its flats, without memory yet.

    Args:
        wide: parameters, by identity, that are computed with in their own dtype whatever the policy says.
    """
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, param in group.params.items():
        kind = kind_of(name, param, context.policy, device, wide=id(param) in wide)
        kinds.setdefault(kind, []).append((name, param))
    for kind, members in pieces(kinds, context.cut, part_numel):
        unit.flats.append(_flat(unit, unit.number * FLATS + len(unit.flats), kind, members, context))
    return unit.flats


def lay_out(model: nn.Module, groups: Sequence[Group], context: BuildContext, device: torch.device) -> list[Unit]:
    """The units as they will be built, for their sizes alone: no parameter is touched and nothing allocated."""
    units, wide = [Unit(group.name, number, group.entries) for number, group in enumerate(groups)], _normalised(model)
    for group, unit in zip(groups, units, strict=True):
        flats_of(group, unit, wide, context, device)
    return units


def forget_laid_out(units: Sequence[Unit]) -> None:
    """Flats and their specs refer to each other: those that are not built would hold the model until the collector comes."""
    for flat in [flat for unit in units for flat in unit.flats]:
        flat.specs.clear()
        flat.params.clear()


def on_meta(group: Group) -> bool:
    """The group's parameters are still to be made."""
    return any(param.device.type == "meta" for param in group.params.values())


def scratch_for(groups: Sequence[Group], context: BuildContext, device: torch.device) -> Scratch:
    """Room for the largest group with its padding, or for one flat buffer of it; none where full buffers stay anyway."""
    world = context.comm.world.axis.world
    sizes = [sum(part_numel(p) * p.element_size() + 256 for p in group.params.values()) + 256 * world for group in groups]
    sizes = [size if on_meta(group) else min(size, context.pool.bound) for size, group in zip(sizes, groups, strict=True)]
    moves = context.store is not None or (context.table.gathers_at_use and context.comm.shard.axis.world > 1)
    return Scratch(max(sizes) if moves else 0, device)


def _normalised(model: nn.Module) -> set[int]:
    """Parameters of batch and instance norms: they stay in their own dtype beside their running statistics."""
    return {id(p) for m in model.modules() if isinstance(m, _NormBase) for p in m.parameters(recurse=False)}


def _flat(unit: Unit, number: int, kind: Kind, members: Sequence[tuple[str, nn.Parameter]], context: BuildContext) -> Flat:
    comm, table = context.comm, context.table
    replicated = not table.shards_optimizer
    resident = table.keeps_gathered(kind.tiers)
    world = comm.shard.axis.world
    long = len(members) == 1 and not context.cut.admits(kind, part_numel(members[0][1]))
    undivided = replicated or long or (resident and kind.master == kind.compute)
    layout = flat_layout(
        [part_numel(param) for _, param in members],
        world=world,
        itemsize=kind.narrow,
        align_bytes=context.cut.align_nbytes,
        max_numel=None if undivided else context.policy.units.max_numel,
    )
    if len(unit.flats) >= FLATS:
        raise AttachError(
            f"unit {unit.name}: expected at most {FLATS} flat buffers, found more: its parameters are cut at "
            f"{shown(context.pool.bound)}. Raise [comm] buffer, or make smaller units ([units] names)."
        )
    suffix = "" if not unit.flats else f"#{len(unit.flats)}"
    flat = Flat(
        f"{unit.name}{suffix}",
        number,
        kind,
        layout,
        replicated=replicated,
        resident=resident,
        transport=comm.shard,
        pool=context.pool,
        links=context.links,
    )
    for index, (name, param) in enumerate(members):
        flat.params.append(param)
        flat.specs.append(ParamShard(name, param, flat.group, index, flat.group.pieces(index), kind.device))
    return flat


@torch.no_grad()
def _place(flat: Flat, scratch: Scratch) -> Tensor:
    """The full buffer at attach, with parameters that are on meta put there: they need no memory of their own."""
    numel, dtype = flat.layout.padded, flat.kind.master
    full = torch.zeros(numel, dtype=dtype, device=flat.kind.device) if flat.buffer.in_full else scratch.zeros(numel, dtype)
    for spec, start, param in zip(flat.specs, flat.layout.starts, flat.params, strict=True):
        if param.device.type == "meta":
            swap_memory(param, spec.wrap(spec.within(full, start)))
    return full


@torch.no_grad()
def _fill(flat: Flat, full: Tensor, context: BuildContext) -> None:
    """Move parameters into the full buffer, giving up their own memory one by one, and make ranks equal."""
    for spec, start, param in zip(flat.specs, flat.layout.starts, flat.params, strict=True):
        place, part = spec.within(full, start), part_of(param)
        if part.data_ptr() != place.data_ptr():
            part.data = place.copy_(part)
    if context.sync:
        context.comm.world.broadcast(Call(CONTROL, "broadcast parameters", flat.name, flat.number), full)
        if context.comm.tp.axis.world > 1:
            for spec, start, numel in zip(flat.specs, flat.layout.starts, flat.layout.numels, strict=True):
                if spec.place is None and numel:
                    call = Call(CONTROL, "broadcast over tp", spec.name, flat.number)
                    context.comm.tp.broadcast(call, full[start : start + numel])


def _pass(flat: Flat, context: BuildContext) -> None:
    """Shard a parameter that is larger than any buffer may be, chunk by chunk."""
    world = context.comm.world
    parts = [part_of(param) for param in flat.params]
    spread(flat, parts, flat.buffer.overwritten(), world.broadcast if context.sync else None)


def _swap_in(flat: Flat, index: int, param: nn.Parameter) -> None:
    """Make ``param`` the sharded tensor, keeping identity, gradient, hooks and the user's attributes."""
    spec = flat.specs[index]
    kind: Any = ShardedTensor if spec.division is None else ShardedOverTp
    made: Any = nn.Parameter(kind(flat.part(index), spec, bound=flat), param.requires_grad)
    made._bound = flat
    for key, value in param.__dict__.items():
        setattr(made, key, value)
    bare: Any = param
    hooks, post = bare._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
    spec.hooks = hooks if hooks is not None else spec.hooks
    spec.post_hooks = post if post is not None else spec.post_hooks
    grad = None if param.grad is None else ShardedTensor(spec.take(param.grad).clone(), spec)
    own_grad, param.grad = param.grad, None
    _drop_hooks(param)
    try:
        torch.utils.swap_tensors(param, made)
    except RuntimeError as error:
        bare._backward_hooks, bare._post_accumulate_grad_hooks, bare.grad = hooks, post, own_grad
        raise AttachError(
            f"parameter {spec.name}: expected nothing else to refer to its memory, found: {str(error).splitlines()[0]} "
            "Drop graphs (loss, outputs) of earlier forwards before attach."
        ) from error
    if grad is not None:
        param.grad = grad


def _drop_hooks(param: Any) -> None:
    """Forget hooks that went with the other tensor of a swap, so that registering starts anew."""
    param._backward_hooks = param._post_accumulate_grad_hooks = None


# Back to plain.


@torch.no_grad()
def plain_unit(unit: Unit, optimizers: Iterable[torch.optim.Optimizer], *, narrow: bool = False) -> None:
    """Make the parameters of ``unit``, their gradients and optimizer states plain and full again.  Collective.

    ``narrow``: states were kept wider than the parameters, which a plain optimizer could not use; they take their dtype.
    """
    optimizers = list(optimizers)
    for flat in unit.flats:
        if not flat.holds:
            continue  # plain already, or attach raised before this one held anything
        for optimizer in optimizers:
            _plain_states(flat, optimizer, narrow)
        grads = [param.grad for param in flat.params]
        held = [isinstance(grad, ShardedTensor) for grad in grads]
        full_grads = _as_before(flat, grads) if any(held) else []
        values = _as_before(flat, flat.shard)
        for index, param in enumerate(flat.params):
            if not isinstance(param, ShardedTensor):
                continue
            plain = nn.Parameter(values[index], param.requires_grad)
            _swap_out(flat.specs[index], param, plain)
            if any(held) and held[index]:
                param.grad = full_grads[index]
        flat.holds, flat.ask = False, None
        # A forward without a backward left its node, which refers to the flat: a circle that no collector sees.
        flat.end_graph()


def _as_before(flat: Flat, ranges: Ranges) -> list[Tensor]:
    """Full values as the model had them: what was a DTensor is one.  Collective."""
    return [spec.wrap(part) for spec, part in zip(flat.specs, all_copies(flat, ranges), strict=True)]


def _swap_out(spec: ParamShard, param: nn.Parameter, plain: nn.Parameter) -> None:
    for key, value in param.__dict__.items():
        if key not in ("_at", "_on", "_spec", "_bound"):
            setattr(plain, key, value)
    param.grad = None
    torch.utils.swap_tensors(param, plain)
    rehook(param, spec)


def _plain_states(flat: Flat, optimizer: torch.optim.Optimizer, narrow: bool) -> None:
    for key in state_keys(flat, optimizer):
        states = [optimizer.state.get(param, {}).get(key) for param in flat.params]
        values = _as_before(flat, states)
        for param, state, value in zip(flat.params, states, values, strict=True):
            if isinstance(state, ShardedTensor):
                wide = narrow and value.is_floating_point()
                optimizer.state[param][key] = value.to(flat.kind.master) if wide else value


def shard_states(unit: Unit, optimizer: torch.optim.Optimizer, context: BuildContext) -> None:
    """Cut the states an optimizer already holds down to this rank's ranges: all of the unit's, or none.  Collective."""
    made: list[tuple[nn.Parameter, str, ShardedTensor]] = []
    with all_or_none(context.comm.stage, "attach"):
        for param, spec in [pair for flat in unit.flats for pair in zip(flat.params, flat.specs, strict=True)]:
            for key, value in (optimizer.state.get(param) or {}).items():
                plain = isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
                if plain and value.shape == spec.shape and value.dim():
                    made.append((param, key, ShardedTensor(spec.take(value).clone(), spec)))
    for param, key, state in made:
        optimizer.state[param][key] = state


def relayout(
    model: nn.Module,
    units: Sequence[Unit],
    context: BuildContext,
    optimizers: Sequence[torch.optim.Optimizer],
    laid: Callable[[Flat], None],
    *,
    before: BuildContext | None = None,
) -> None:
    """Lay units out anew whose parameters were frozen or unfrozen; gradients and states follow.  Collective.

    Args:
        laid: called with each new flat.
        before: lay all units out, for the policy has changed since they were laid out on this.
    Raises:
        BudgetError, TierError: there is no room for a unit on some rank; that one and those after it are laid out as they were.
    """
    wide = _normalised(model)
    try:
        for unit in units:
            if before is not None or any(p.requires_grad != flat.kind.trainable for flat in unit.flats for p in flat.params):
                _relayout_unit(unit, context, optimizers, wide, before)
                for flat in unit.flats:
                    laid(flat)
    finally:
        find_slots(model, units)


@torch.no_grad()
def _relayout_unit(
    unit: Unit,
    context: BuildContext,
    optimizers: Sequence[torch.optim.Optimizer],
    wide: set[int],
    before: BuildContext | None,
) -> None:
    kinds: dict[Kind, list[Member]] = {}
    kinds_before: dict[Kind, list[Member]] = {}
    carried: list[tuple[nn.Parameter, Any, str, Tensor]] = []
    for flat in unit.flats:
        for value, param, spec in zip(all_copies(flat, flat.shard), flat.params, flat.specs, strict=True):
            kind = kind_of(spec.name, param, context.policy, flat.kind.device, wide=id(param) in wide)
            kinds.setdefault(kind, []).append((spec.name, param, value))
            kinds_before.setdefault(flat.kind, []).append((spec.name, param, value))
        carried.extend(_carried(flat, optimizers))
        flat.release()
        flat.end_graph()
        flat.buffer.drop()
    hooks = {id(p): (s.hooks, s.post_hooks) for flat in unit.flats for p, s in zip(flat.params, flat.specs, strict=True)}
    asked = any(flat.node_asked for flat in unit.flats)
    try:
        _lay_out(unit, kinds, context)
    except Exception:
        # Its values are here and nowhere else: the room they had a moment ago takes them back.
        _lay_out(unit, kinds_before, before or context)
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


Member = tuple[str, nn.Parameter, Tensor]
"""A parameter's name, the parameter, and its full value."""


def _lay_out(unit: Unit, kinds: dict[Kind, list[Member]], context: BuildContext) -> None:
    """New flats for a unit whose parameters are sharded already.  Collective: there is room on all ranks, or on none."""
    unit.flats = []
    cut = list(pieces(kinds, context.cut, part_numel))
    try:
        with all_or_none(context.comm.stage, "lay out"):
            for kind, members in cut:
                named = [(name, param) for name, param, _ in members]
                unit.flats.append(_flat(unit, unit.number * FLATS + len(unit.flats), kind, named, context))
                unit.flats[-1].buffer.reserve()
    except BaseException:
        for flat in unit.flats:
            flat.buffer.drop()
        unit.flats = []
        raise
    for flat, (kind, members) in zip(unit.flats, cut, strict=True):
        full = torch.zeros(flat.layout.padded, dtype=kind.master, device=kind.device)
        for spec, start, (_, _, value) in zip(flat.specs, flat.layout.starts, members, strict=True):
            spec.within(full, start).copy_(value)
        flat.adopt(full)
        flat.holds = True
        for index, (spec, (_, param, _)) in enumerate(zip(flat.specs, members, strict=True)):
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
