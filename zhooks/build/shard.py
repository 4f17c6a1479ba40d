"""From a model to units: fill, make ranks equal, shard, and swap parameters.

``session/open.py`` calls it once, with a plan.  One unit at a time is whole, so the peak is the shards and one unit.  It
decides nothing about layouts, never runs a forward and installs no hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import AttachError
from zhooks.build.materialize import Materializer, swap_memory
from zhooks.build.restore import swap, swap_out
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.layout import FlatPlan, Group, Keeps, UnitPlan, part_of
from zhooks.plan import Plan
from zhooks.run import forget_idle_graphs
from zhooks.tensor import ParamShard, ShardedOverTp, ShardedTensor
from zhooks.unit import Flat, Links, Pool, Scratch, Unit, find_slots, loose_references, spread

__all__ = ["BuildContext", "build_units", "flat_of"]


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every flat of an attachment is built on."""

    comm: Comm
    pool: Pool
    links: Links

    def unlimited(self) -> AbstractContextManager[None]:
        """Inside no budget of a tier refuses what comes back to where it was."""
        return nullcontext() if self.links.store is None else self.links.store.unlimited()


def build_units(plan: Plan, context: BuildContext, units: list[Unit]) -> None:
    """Shard the model as planned.  Collective.

    Args:
        units: takes every unit before it is sharded, for whoever puts back what was done.
    """
    request = plan.request
    # Models that were dropped after a forward alone are freed before this one takes memory.
    forget_idle_graphs()
    with ControlPlane(context.comm.stage, "attach").all_or_none():
        scratch = scratch_for(plan.units, context.pool.bound, request.device)
    gives = not request.sync or context.comm.world.axis.rank == 0
    materializer = Materializer(request.model, request.device, request.init, request.sync, request.ignored, gives)
    with loose_references(request.model):
        for unit in plan.units:
            units.append(Unit(unit))
            build_unit(units[-1], context, materializer, scratch)
            for optimizer in request.known:
                shard_states(units[-1], optimizer, context)
    find_slots(request.model, units)
    materializer.buffers(context.comm)


def build_unit(unit: Unit, context: BuildContext, materializer: Materializer, scratch: Scratch) -> None:
    """Shard one unit: its parameters are sharded tensors afterwards, of the same identity.

    Collective over all ranks when ``sync`` is wanted: rank 0's values are broadcast.
    """
    scratch.reset()
    # A module of a meta model fills itself whole: its unit lies in the scratch buffer at once, others flat by flat.
    meta = on_meta(unit.plan.group)
    with ControlPlane(context.comm.stage, "attach").all_or_none():
        for plan in unit.plan.flats:
            unit.flats.append(flat_of(plan, unit.plan.params(plan), context))
            unit.flats[-1].storage.reserve()
        fulls = [_place(flat, scratch) for flat in unit.flats] if meta else []
        materializer.unit(unit.plan.group)
    for flat in unit.flats:
        if not meta:
            scratch.reset()
        if flat.long and not (flat.storage.in_full or meta or context.comm.tp.axis.world > 1):
            _pass(flat, context, sync=materializer.sync)
            flat.holds = True
            with ControlPlane(context.comm.stage, "attach").all_or_none():
                _swap_in(flat, 0, flat.params[0])
        else:
            _take(flat, fulls.pop(0) if meta else _place(flat, scratch), context, sync=materializer.sync)


def flat_of(plan: FlatPlan, params: Sequence[nn.Parameter], context: BuildContext) -> Flat:
    """The flat that is planned, without memory yet; ``params`` are as they were before, or sharded already."""
    flat = Flat(plan, transport=context.comm.shard, pool=context.pool, links=context.links)
    for index, (name, param) in enumerate(zip(plan.names, params, strict=True)):
        flat.params.append(param)
        flat.specs.append(ParamShard(name, param, flat.group, index, flat.group.pieces(index), plan.kind.device))
    return flat


def on_meta(group: Group) -> bool:
    """The group's parameters are still to be made."""
    return any(param.device.type == "meta" for param in group.params.values())


def scratch_for(units: Sequence[UnitPlan], bound: int, device: torch.device) -> Scratch:
    """Room for the largest flat that does not stay as it is laid out, of a unit on meta for all of its flats at once."""
    sizes = [0]
    for unit in units:
        moving = [flat.layout.padded * flat.kind.master.itemsize for flat in unit.flats if flat.keeps is not Keeps.FULL]
        if on_meta(unit.group):
            sizes.append(sum(-(-nbytes // Scratch.ALIGN) * Scratch.ALIGN for nbytes in moving))
        else:
            # What is longer than any buffer passes through one.
            sizes.append(max((nbytes for nbytes in moving if nbytes <= bound), default=0))
    return Scratch(max(sizes), device)


def _take(flat: Flat, full: Tensor, context: BuildContext, *, sync: bool) -> None:
    """Shard parameters by way of the full buffer; where that fails, on any rank, they are plain as before."""
    grads = [param.grad for param in flat.params]
    try:
        _fill(flat, full, context, sync=sync)
        with ControlPlane(context.comm.stage, "attach").all_or_none():
            flat.adopt(full)
            for index, param in enumerate(flat.params):
                _swap_in(flat, index, param)
    except BaseException:
        for spec, start, param, grad in zip(flat.specs, flat.layout.starts, flat.params, grads, strict=True):
            value = spec.within(full, start)
            if isinstance(param, ShardedTensor):
                swap_out(spec, param, nn.Parameter(spec.wrap(value.clone()), param.requires_grad))
                param.grad = grad
            elif part_of(param).data_ptr() == value.data_ptr():
                part_of(param).data = value.clone()
        raise
    flat.holds = True


@torch.no_grad()
def _place(flat: Flat, scratch: Scratch) -> Tensor:
    """The full buffer at attach, with parameters that are on meta put there: they need no memory of their own."""
    numel, dtype = flat.layout.padded, flat.kind.master
    full = torch.zeros(numel, dtype=dtype, device=flat.kind.device) if flat.storage.in_full else scratch.zeros(numel, dtype)
    for spec, start, param in zip(flat.specs, flat.layout.starts, flat.params, strict=True):
        if param.device.type == "meta":
            swap_memory(param, spec.wrap(spec.within(full, start)))
    return full


@torch.no_grad()
def _fill(flat: Flat, full: Tensor, context: BuildContext, *, sync: bool) -> None:
    """Move parameters into the full buffer, giving up their own memory one by one, and make ranks equal."""
    for spec, start, param in zip(flat.specs, flat.layout.starts, flat.params, strict=True):
        place, part = spec.within(full, start), part_of(param)
        if part.data_ptr() != place.data_ptr():
            part.data = place.copy_(part)
    if sync:
        context.comm.world.broadcast(Call(CONTROL, "broadcast parameters", flat.name, flat.number), full)
        for spec, start, numel in zip(flat.specs, flat.layout.starts, flat.layout.numels, strict=True):
            if spec.place is None and numel:
                call = Call(CONTROL, "broadcast over tp", spec.name, flat.number)
                context.comm.tp.broadcast(call, full[start : start + numel])


def _pass(flat: Flat, context: BuildContext, *, sync: bool) -> None:
    """Shard a parameter that is larger than any buffer may be, chunk by chunk."""
    world = context.comm.world
    parts = [part_of(param) for param in flat.params]
    spread(flat, parts, flat.storage.overwritten(), world.broadcast if sync else None)


def _swap_in(flat: Flat, index: int, param: nn.Parameter) -> None:
    """Make ``param`` the sharded tensor, keeping identity, gradient, hooks and the user's attributes."""
    spec = flat.specs[index]
    kind: Any = ShardedTensor if spec.division is None else ShardedOverTp
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = nn.Parameter(kind(flat.part(index), spec, owner=flat), param.requires_grad)
    made.local_shard.owner = flat
    spec.aliases.clear()  # torch made the parameter of one, and swaps nothing that has weak references
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
        swap(param, made)
    except RuntimeError as error:
        bare._backward_hooks, bare._post_accumulate_grad_hooks, bare.grad = hooks, post, own_grad
        raise AttachError(
            f"Cannot shard parameter {spec.name}. Expected nothing else to refer to its memory, found: "
            f"{str(error).splitlines()[0]} Drop graphs (loss, outputs) of earlier forwards before attach."
        ) from error
    if grad is not None:
        param.grad = grad


def _drop_hooks(param: Any) -> None:
    """Forget hooks that went with the other tensor of a swap, so that registering starts anew."""
    param._backward_hooks = param._post_accumulate_grad_hooks = None


def shard_states(unit: Unit, optimizer: torch.optim.Optimizer, context: BuildContext) -> None:
    """Narrow the states an optimizer already holds to this rank's ranges: all of the unit's, or none.  Collective."""
    made: list[tuple[nn.Parameter, str, ShardedTensor]] = []
    with ControlPlane(context.comm.stage, "attach").all_or_none():
        for param, spec in [pair for flat in unit.flats for pair in zip(flat.params, flat.specs, strict=True)]:
            for key, value in (optimizer.state.get(param) or {}).items():
                plain = isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
                if plain and value.shape == spec.shape and value.dim():
                    made.append((param, key, ShardedTensor(spec.take(value).clone(), spec)))
    for param, key, state in made:
        optimizer.state[param][key] = state
