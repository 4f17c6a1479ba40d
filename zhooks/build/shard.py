"""From a model to units and back: fill, make ranks equal, shard, swap parameters; and plain, full parameters again.

One unit at a time is whole, so the peak is the shards and one unit; on the way back, one flat.
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
from zhooks.checkpoint import plain_states
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.layout import FlatPlan, Group, Keeps, UnitPlan, part_of
from zhooks.optim import marked, state_keys, whole_vectors
from zhooks.plan import Plan
from zhooks.run import forget_idle_graphs, rehook
from zhooks.tensor import ParamShard, ShardedOverTp, ShardedTensor
from zhooks.unit import Flat, Links, Pool, Ranges, Scratch, Unit, all_copies, find_slots, loose_references, spread

__all__ = ["BuildContext", "build_units", "flat_of", "restore_units"]


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
    meta = _on_meta(unit.plan.group)
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


def _on_meta(group: Group) -> bool:
    """The group's parameters are still to be made."""
    return any(param.device.type == "meta" for param in group.params.values())


def scratch_for(units: Sequence[UnitPlan], bound: int, device: torch.device) -> Scratch:
    """Room for the largest flat that does not stay as it is laid out, of a unit on meta for all of its flats at once."""
    sizes = [0]
    for unit in units:
        moving = [flat.layout.padded * flat.kind.master.itemsize for flat in unit.flats if flat.keeps is not Keeps.FULL]
        if _on_meta(unit.group):
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
                _swap_out(spec, param, nn.Parameter(spec.wrap(value.clone()), param.requires_grad))
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
    # They go with the other tensor of a swap: registering starts anew.
    bare._backward_hooks = bare._post_accumulate_grad_hooks = None
    try:
        _swap(param, made)
    except RuntimeError as error:
        bare._backward_hooks, bare._post_accumulate_grad_hooks, bare.grad = hooks, post, own_grad
        raise AttachError(
            f"Cannot shard parameter {spec.name}. Expected nothing else to refer to its memory, found: "
            f"{str(error).splitlines()[0]} Drop graphs (loss, outputs) of earlier forwards before attach."
        ) from error
    if grad is not None:
        param.grad = grad


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


# The way back.


def restore_units(
    model: nn.Module, units: Sequence[Unit], optimizers: Sequence[torch.optim.Optimizer], *, narrow: bool
) -> None:
    """Make parameters, their gradients and optimizer states plain and full; nothing of units that are.  Collective.

    ``narrow``: states were kept wider than the parameters, which a plain optimizer could not use; they take their dtype.
    """
    for optimizer in optimizers:
        whole_vectors(optimizer)
    with loose_references(model):
        for unit in units:
            _restore_unit(unit, optimizers, narrow)


@torch.no_grad()
def _restore_unit(unit: Unit, optimizers: Sequence[torch.optim.Optimizer], narrow: bool) -> None:
    for flat in unit.flats:
        if not flat.holds:
            continue  # plain already, or attach raised before this one held anything
        for optimizer in optimizers:
            for key in state_keys(flat, optimizer):
                states = [optimizer.state.get(param, {}).get(key) for param in flat.params]
                for param, state, value in zip(flat.params, states, _as_before(flat, states), strict=True):
                    if isinstance(state, ShardedTensor):
                        wide = narrow and value.is_floating_point()
                        optimizer.state[param][key] = value.to(flat.kind.master) if wide else value
            plain_states(optimizer, flat.params, flat.transport)
        grads = [param.grad for param in flat.params]
        held = [isinstance(grad, ShardedTensor) for grad in grads]
        full_grads = _as_before(flat, grads) if any(held) else []
        values = _as_before(flat, flat.shard)
        for index, param in enumerate(flat.params):
            if not isinstance(param, ShardedTensor):
                continue
            plain = nn.Parameter(values[index], param.requires_grad)
            _swap_out(flat.specs[index], param, plain)
            if held[index]:
                param.grad = full_grads[index]
        flat.detach()


def _as_before(flat: Flat, ranges: Ranges) -> list[Tensor]:
    """Full values as the model had them: what was a DTensor is one.  Collective."""
    return [spec.wrap(part) for spec, part in zip(flat.specs, all_copies(flat, ranges), strict=True)]


def _swap_out(spec: ParamShard, param: nn.Parameter, plain: nn.Parameter) -> None:
    """Make ``param`` what ``plain`` is, keeping identity, hooks and the user's attributes."""
    marked(plain, param)
    param.grad = None
    _swap(param, plain)
    rehook(param, spec)


def _swap(param: nn.Parameter, made: nn.Parameter) -> None:
    """Exchange the tensors of two parameters, past what a sharded one answers itself.

    Of one that was frozen while a graph (an earlier loss) still refers to it, torch asks for the node of the graph that keeps
    it, which autograd gives of what requires grad alone.

    Raises:
        RuntimeError: something else refers to one of them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        kept = (
            param._use_count() > 1  # type: ignore[attr-defined]
            and not param.requires_grad
            and (param.is_floating_point() or param.is_complex())
        )
        if kept:
            param.requires_grad_(True)
        try:
            torch.utils.swap_tensors(param, made)
        except RuntimeError:
            if kept:
                param.requires_grad_(False)
            raise
