"""Full state to and from global ranges: state dicts, and full values inside a block.

``session/state.py`` calls it for the Attachment's methods.  Values are streamed unit by unit to rank 0; no other rank holds
more than its shards and one unit.  It never decides what a checkpoint on tiers looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.text import counted
from zhooks import tree
from zhooks.checkpoint.full_optimizer_state import apply_plan, make_whole, plan_of
from zhooks.checkpoint.ignored_values import (
    check_alike,
    check_left_out,
    check_own,
    check_writable,
    checksums_of,
    left_out_names,
    plain_of,
)
from zhooks.checkpoint.rank0_values import from_first, is_first, spread_values, whole_values
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.compiled import plain_name
from zhooks.layout import Division, Ignored, flats_of, is_divided, part_of, whole_of
from zhooks.optim import mapped
from zhooks.run import Runtime
from zhooks.tensor import ShardedTensor
from zhooks.unit import Unit

_CPU = torch.device("cpu")


@torch.no_grad()
def full_state(
    model: nn.Module, units: Sequence[Unit], comm: Comm, optimizer: torch.optim.Optimizer | None, ignored: Ignored
) -> dict[str, Any]:
    """See ``Attachment.state_dict``."""
    ControlPlane(comm.stage, "state_dict", "the optimizer").run(lambda: _check_optimizer(optimizer, units))
    check_alike(model, ignored, comm, "state_dict", optimizer)
    wanted = is_first(comm)
    values: dict[int, Tensor] = {}
    for flat in flats_of(units):
        every = range(len(flat.params) if wanted else 0)
        for param, value in zip(flat.params, whole_values(flat, flat.shard, every, _CPU), strict=True):
            if value is not None:
                values[id(param)] = value
    for tensor in [*tree.buffers(model), *ignored.params.values()]:
        if is_divided(tensor):
            values[id(tensor)] = whole_of(tensor).to("cpu", copy=True)
    out: dict[str, Any] = {}
    if optimizer is not None:
        packed = optimizer.state_dict() if wanted else {"state": {}}
        made = make_whole(optimizer, packed["state"], units, comm, (0,), _CPU, here=wanted)
        states = mapped(packed["state"], lambda value: value if id(value) in made else _cpu(value))
        out["optimizer"] = {"state": states, "param_groups": packed["param_groups"]} if wanted else {}
    if not wanted:
        return {}
    values |= {id(param): _cpu(param) for param in plain_of(ignored, "state_dict").values() if id(param) not in values}
    if ignored.frozen:
        out = {"left_out": checksums_of(ignored), **out}
    return {"model": _model_state(model, values, left_out_names(model, ignored)), **out}


def _check_optimizer(optimizer: torch.optim.Optimizer | None, units: Sequence[Unit]) -> None:
    """Its states are here, or plain: none is a range that another attachment alone can make whole.

    Raises:
        CheckpointError: it holds parameters of another attachment, too.
    """
    ours = {id(param) for flat in flats_of(units) for param in flat.params}
    groups = () if optimizer is None else optimizer.param_groups
    if any(isinstance(param, ShardedTensor) and id(param) not in ours for group in groups for param in group["params"]):
        raise CheckpointError(
            f"state_dict expected an optimizer of only this attachment's parameters, found {type(optimizer).__name__} with "
            "some of another attachment. Build one for each attachment, or use save() of both."
        )


def _model_state(model: nn.Module, values: dict[int, Tensor], left_out: Collection[str]) -> dict[str, Any]:
    """The plain model's own state dict, order and aliases included, with full values."""
    state = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    state = {name: value for name, value in state.items() if name not in left_out}
    return {
        name: values[id(tensor)] if id(tensor) in values else tensor if isinstance(tensor, nn.Parameter) else _cpu(tensor)
        for name, tensor in state.items()
    }


def _cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _loss_scale_of(state: object) -> dict[str, Any]:
    """What a full state says of the loss scale.

    Raises:
        CheckpointError: it is no state.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f'load_state_dict expected {{"model": ..., "optimizer": ...}} as state_dict() returns it, found '
            f"{type(state).__name__}. Ranks other than the first may pass {{}}."
        )
    return {key: value for key, value in state.items() if key == "loss_scale"}


@torch.no_grad()
def load_full_state(
    model: nn.Module,
    units: Sequence[Unit],
    comm: Comm,
    state: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
    scale: Callable[[dict[str, Any]], Callable[[], None]],
    ignored: Ignored,
) -> None:
    """See ``Attachment.load_state_dict``.

    Args:
        scale: checks what the state says of the loss scale, and returns what follows it.
    """
    ranks = ControlPlane(comm.stage, "load_state_dict", "the state")
    ranks.run(lambda: check_own(ignored, "load_state_dict"))
    flats = flats_of(units)
    whole: dict[str, Tensor] = dict(tree.named_buffers(model))
    whole |= ranks.run(lambda: plain_of(ignored, "load_state_dict"))
    kept = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    ranks.run(lambda: check_writable("load_state_dict", {name: whole[name] for name in whole if name in kept}))

    def read() -> tuple[dict[str, Any], Any]:
        """Rank 0's values; what its loss scale is and its optimizer state consists of.  Nothing has been changed yet."""
        scaled = _loss_scale_of(state)
        if not is_first(comm):
            return {}, None
        problem = _mismatch(model, state["model"], left_out_names(model, ignored)) if "model" in state else _unwrapped(state)
        if problem:
            raise CheckpointError(problem)
        known = None if optimizer is None else plan_of(state.get("optimizer"), optimizer, flats)
        left_out = state.get("left_out", {})
        check_left_out(ignored, left_out, "load_state_dict")
        if optimizer is None and state.get("optimizer") is not None:
            raise CheckpointError(
                'load_state_dict expected the optimizer whose state is under "optimizer", found none known to the attachment. '
                'Pass optimizer=..., or a state without "optimizer" to load only the model.'
            )
        return {plain_name(name): value for name, value in state["model"].items()}, (scaled, known, left_out)

    values, about = ranks.run(read)
    scaled, plan, left_out = ranks.on_first(lambda: about)
    if ignored.frozen:
        ranks.run(lambda: check_left_out(ignored, left_out, "load_state_dict"))
    follow = scale(scaled)
    if optimizer is not None and plan is not None:
        apply_plan(plan, state.get("optimizer"), optimizer, flats, comm)
    names = {id(param): name for name, param in tree.named_parameters(model)}
    for flat in flats:
        tensors = [values.get(names[id(param)]) for param in flat.params]
        spread_values(comm, flat, tensors, flat.storage.overwritten())
        flat.written()
    for name, tensor in whole.items():
        division, local = Division.of(tensor), part_of(tensor)
        if division is not None and division.place is not None:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
            local.copy_(division.cut(from_first(comm, name, values.get(name), full)))
        else:
            from_first(comm, name, values.get(name), local)
    follow()


def _unwrapped(state: dict[str, Any]) -> str:
    found = ", ".join(list(map(str, state))[:3]) or "nothing"
    return (
        f'load_state_dict expected {{"model": ..., "optimizer": ...}} as state_dict() returns it, found {found}. Pass a plain '
        'model\'s state as {"model": state}.'
    )


def _mismatch(model: nn.Module, values: Any, left_out: Collection[str]) -> str:
    if not isinstance(values, Mapping):
        kind = type(values).__name__
        return f"load_state_dict expected \"model\" to be a dict of tensors by name, found {kind}. Pass a state_dict()."
    values = {plain_name(str(name)): value for name, value in values.items()}
    wanted = {
        plain_name(name): tuple(tensor.shape)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and plain_name(name) not in left_out
    }
    missing, unknown = sorted(set(wanted) - set(values)), sorted(map(str, set(values) - set(wanted)))
    shapes = [name for name in wanted if name in values and getattr(values[name], "shape", None) != wanted[name]]
    unread = [name for name in wanted if name in values and name not in shapes and not _readable(values[name])]
    problems = missing, unknown, shapes, unread
    if not any(problems):
        return ""
    found = [
        f"{len(names)} {what} ({', '.join(names[:3])})"
        for what, names in zip(("missing", "unknown", "of another shape", "not plain dense tensors"), problems, strict=True)
        if names
    ]
    return (
        f"load_state_dict expected the names and shapes of this model, found {'; '.join(found)}. Load a state of the "
        "same model."
    )


def _readable(value: Any) -> bool:
    """A whole tensor whose values are here."""
    plain = isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and not is_divided(value)
    return plain and value.layout is torch.strided and value.device.type != "meta"


@contextmanager
def gathered(
    units: Sequence[Unit], runtime: Runtime, comm: Comm, parameters: Sequence[Tensor], write: bool, ignored: Ignored
) -> Iterator[list[Tensor]]:
    """See ``Attachment.gathered``."""
    runtime.finish_backward()
    wanted = {id(param) for param in parameters}
    touched = [unit for unit in units if any(id(param) in wanted for flat in unit.flats for param in flat.params)]
    values: dict[int, Tensor] = {}
    for unit in touched:
        for flat in unit.flats:
            mine = [index for index, param in enumerate(flat.params) if id(param) in wanted]
            for param, value in zip(flat.params, whole_values(flat, flat.shard, mine, flat.kind.device), strict=True):
                if value is not None:
                    values[id(param)] = value
    left = {name: param for name, param in ignored.params.items() if id(param) in wanted}
    if left and write:
        raise CheckpointError(
            f"gathered(write=True) expected attached parameters, found {next(iter(left))}, which is in [units] ignore and "
            "whole on every rank. Pass only attached parameters; write to that one directly, on every rank."
        )
    values |= {id(param): param.detach() for param in plain_of(ignored, "gathered").values() if id(param) in wanted}
    # What detach() leaves of a subclass is its library's affair.
    values |= {id(one.param): one.param for one in ignored.frozen.values() if id(one.param) in wanted}
    missing = [param for param in parameters if id(param) not in values]
    if missing:
        raise CheckpointError(
            f"gathered expected parameters of this model, found {counted(len(missing), 'other')}. Pass model.parameters() or "
            "some of them."
        )
    slots = [(unit, slot) for unit in touched for slot in unit.slots if id(unit.flats[slot.flat].params[slot.index]) in wanted]
    for unit, slot in slots:
        slot.table[slot.key] = values[id(unit.flats[slot.flat].params[slot.index])]
        unit.lent = True
    try:
        yield [values[id(param)] for param in parameters]
    finally:
        for unit, slot in slots:
            slot.table[slot.key] = unit.flats[slot.flat].params[slot.index]
            unit.lent = False
    if write:
        _write_back(touched, comm, values)


@torch.no_grad()
def _write_back(units: Sequence[Unit], comm: Comm, values: dict[int, Tensor]) -> None:
    for flat in flats_of(units):
        for index, (param, spec) in enumerate(flat.members()):
            value = values.get(id(param))
            if value is None:
                continue
            comm.stage.broadcast(Call(CONTROL, "write", spec.name, flat.number), value)
            flat.local(index, flat.shard).copy_(spec.take(value))
            flat.written()
