"""Full state of an attached model: state dicts, whole values inside a block, and what torch's own state functions find.

Values are streamed flat by flat to rank 0; no other rank holds more than its shards and one flat.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.errors import CapabilityError, CheckpointError
from offload.text import counted
from zhooks import tree
from zhooks.checkpoint.full_optimizer_state import load_packed, make_whole, packed_state
from zhooks.checkpoint.whole_values import (
    check_alike,
    check_left_out,
    check_own,
    check_writable,
    checksums_of,
    from_first,
    is_first,
    left_out_names,
    plain_of,
    spread_values,
    whole_values,
)
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.compiled import plain_name
from zhooks.grad import Asked, Scaling, full_state_asked
from zhooks.layout import Division, Ignored, flats_of, is_divided, part_of, whole_of
from zhooks.optim import about_state, mapped, of_another_layout
from zhooks.run import Inert, Runtime
from zhooks.tensor import ShardedTensor
from zhooks.unit import Unit

_CPU = torch.device("cpu")


def _cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@torch.no_grad()
def full_state(
    model: nn.Module, units: Sequence[Unit], comm: Comm, optimizer: Optimizer | None, ignored: Ignored
) -> dict[str, Any]:
    """See ``Attachment.state_dict``."""
    flats, wanted = flats_of(units), is_first(comm)
    ours = {id(param) for flat in flats for param in flat.params}

    def check() -> None:
        held = [param for group in optimizer.param_groups for param in group["params"]] if optimizer is not None else []
        if any(isinstance(param, ShardedTensor) and id(param) not in ours for param in held):
            raise CheckpointError(
                f"state_dict expected an optimizer of only this attachment's parameters, found {type(optimizer).__name__} with "
                "some of another attachment. Build one for each attachment, or use save() of both."
            )

    ControlPlane(comm.stage, "state_dict", "the optimizer").run(check)
    check_alike(model, ignored, comm, "state_dict", optimizer)
    values: dict[int, Tensor] = {}
    for flat in flats:
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
    # The plain model's own state dict, order and aliases included.
    state = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    left_out = left_out_names(model, ignored)
    whole = {
        name: values[id(value)] if id(value) in values else value if isinstance(value, nn.Parameter) else _cpu(value)
        for name, value in state.items()
        if name not in left_out
    }
    return {"model": whole, **out}


@torch.no_grad()
def load_full_state(
    model: nn.Module,
    units: Sequence[Unit],
    comm: Comm,
    state: dict[str, Any],
    optimizer: Optimizer | None,
    scaling: Scaling,
    ignored: Ignored,
) -> None:
    """See ``Attachment.load_state_dict``."""
    verb = "load_state_dict"
    ranks = ControlPlane(comm.stage, verb, "the state")
    ranks.run(lambda: check_own(ignored, verb))
    flats, left = flats_of(units), left_out_names(model, ignored)
    whole: dict[str, Tensor] = dict(tree.named_buffers(model))
    whole |= ranks.run(lambda: plain_of(ignored, verb))
    kept = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    ranks.run(lambda: check_writable(verb, {name: whole[name] for name in whole if name in kept}))

    def read() -> tuple[dict[str, Any], Any, Tensor | None]:
        """Rank 0's values; its loss scale, whether there is an optimizer's state, and checksums; that state.  Nothing has been
        changed yet."""
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f'load_state_dict expected {{"model": ..., "optimizer": ...}} as state_dict() returns it, found '
                f"{type(state).__name__}. Ranks other than the first may pass {{}}."
            )
        if not is_first(comm):
            return {}, None, None
        if "model" not in state:
            raise CheckpointError(
                'load_state_dict expected {"model": ..., "optimizer": ...} as state_dict() returns it, found '
                f"{', '.join(list(map(str, state))[:3]) or 'nothing'}. Pass a plain model's state as {{\"model\": state}}."
            )
        values = _checked_values(model, state["model"], left)
        given, left_out = state.get("optimizer"), state.get("left_out", {})
        packed = None if optimizer is None or given is None else packed_state(given, optimizer, flats)
        check_left_out(ignored, left_out, verb)
        if optimizer is None and given is not None:
            raise CheckpointError(
                'load_state_dict expected the optimizer whose state is under "optimizer", found none known to the attachment. '
                'Pass optimizer=..., or a state without "optimizer" to load only the model.'
            )
        scaled = {key: value for key, value in state.items() if key == "loss_scale"}
        return values, (scaled, packed is not None, left_out), packed

    values, about, packed = ranks.run(read)
    scaled, has_states, left_out = ranks.on_first(lambda: about)
    if ignored.frozen:
        ranks.run(lambda: check_left_out(ignored, left_out, verb))
    follow = scaling.checked(scaled)
    if optimizer is not None and has_states:
        load_packed(packed, state.get("optimizer"), optimizer, flats, comm)
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


def _checked_values(model: nn.Module, given: Any, left_out: frozenset[str]) -> dict[str, Any]:
    """The values by name, which are all of this model's.

    Raises:
        CheckpointError: names or shapes are another model's, or values are not here.
    """
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise CheckpointError(
            f"load_state_dict expected \"model\" to be a dict of tensors by name, found {kind}. Pass a state_dict()."
        )
    values = {plain_name(str(name)): value for name, value in given.items()}
    wanted = {
        plain_name(name): tuple(tensor.shape)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and plain_name(name) not in left_out
    }
    problems: dict[str, list[str]] = {
        "missing": sorted(set(wanted) - set(values)), "unknown": sorted(set(values) - set(wanted)),
        "of another shape": [], "not plain dense tensors": [],
    }  # fmt: skip
    for name in wanted:
        value = values.get(name)
        if name in values and getattr(value, "shape", None) != wanted[name]:
            problems["of another shape"].append(name)
        elif name in values and not (
            isinstance(value, Tensor)
            and not isinstance(value, ShardedTensor)
            and not is_divided(value)
            and value.layout is torch.strided
            and value.device.type != "meta"
        ):
            problems["not plain dense tensors"].append(name)
    found = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"load_state_dict expected the names and shapes of this model, found {'; '.join(found)}. Load a state of the "
            "same model."
        )
    return values


@contextmanager
def gathered(
    units: Sequence[Unit], runtime: Runtime, comm: Comm, parameters: Sequence[Tensor], write: bool, ignored: Ignored
) -> Iterator[list[Tensor]]:
    """See ``Attachment.gathered``."""
    runtime.finish_backward()
    wanted = {id(param) for param in parameters}
    touched = [unit for unit in units if any(id(param) in wanted for flat in unit.flats for param in flat.params)]
    values: dict[int, Tensor] = {}
    for flat in flats_of(touched):
        mine = [index for index, param in enumerate(flat.params) if id(param) in wanted]
        for param, value in zip(flat.params, whole_values(flat, flat.shard, mine, flat.kind.device), strict=True):
            if value is not None:
                values[id(param)] = value
    left = next((name for name, param in ignored.params.items() if id(param) in wanted), None)
    if left is not None and write:
        raise CheckpointError(
            f"gathered(write=True) expected attached parameters, found {left}, which is in [units] ignore and "
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
    slots = [(unit, slot, unit.flats[slot.flat].params[slot.index]) for unit in touched for slot in unit.slots]
    slots = [each for each in slots if id(each[2]) in wanted]
    for unit, slot, param in slots:
        slot.table[slot.key] = values[id(param)]
        unit.lent = True
    try:
        yield [values[id(param)] for param in parameters]
    finally:
        for unit, slot, param in slots:
            slot.table[slot.key] = param
            unit.lent = False
    if write:
        with torch.no_grad():
            for flat in flats_of(touched):
                for index, (param, spec) in enumerate(flat.members()):
                    if id(param) in values:
                        value = values[id(param)]
                        comm.stage.broadcast(Call(CONTROL, "write", spec.name, flat.number), value)
                        flat.local(index, flat.shard).copy_(spec.take(value))
                        flat.written()


# What torch's own state functions find: ``load_state_dict`` of the model and of its optimizers, and
# ``torch.distributed.checkpoint.state_dict`` where it is asked for full values.

class StockState:
    """One attachment's answer to torch's state functions.

    Args:
        units: the attachment's own list.
        ignored: what of the model stays as it is.
        finish_backward: finishes a backward that is still open.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], comm: Comm, finish_backward: Callable[[], None], ignored: Ignored
    ) -> None:
        self._ignored = ignored
        self._model, self._units, self._comm, self._finish_backward = model, units, comm, finish_backward
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Be called by every ``state_dict`` and ``load_state_dict`` of the model from now on."""
        for _, module in self._ignored.named_modules(self._model):
            root = module is self._model
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self, root=root, loads=True)))
            self._handles.append(module.register_state_dict_post_hook(_Hook(self, root=root, loads=False)))

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._watched.clear()

    # Into the model.

    def loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *, assign: bool) -> None:
        """The state dict of ``module`` is about to be loaded; of ranges of another layout it gets the whole.  Collective.

        Raises:
            CheckpointError: parameters would be replaced, or ranks load different states; nothing has been changed.
        """
        if assign or torch.__future__.get_swap_module_params_on_conversion():
            how = "assign=True" if assign else "torch.__future__.set_swap_module_params_on_conversion(True)"
            raise CheckpointError(
                f"load_state_dict expected values to be copied into the parameters, found {how}, which would replace them "
                "with parameters that are not sharded. Load without it, or load before attach."
            )
        self._finish_backward()
        # What is ignored is copied as torch does it, and may differ from rank to rank.
        left = self._ignored.identities() | self._ignored.buffers()
        named = {name: value for name, value in module.state_dict(keep_vars=True).items() if id(value) not in left}
        given = {name: state[prefix + name] for name in named if isinstance(state.get(prefix + name), Tensor)}
        about = "\n".join(f"{name} {about_state(value)}" for name, value in given.items())
        if not ControlPlane(self._comm.stage, "load_state_dict", "the model").agree(about):
            raise CheckpointError(
                "load_state_dict expected every rank to load a state dict with the same names, shapes and dtypes, found "
                "that they differ. Load the same file on all ranks, or pass rank 0's to attachment.load_state_dict({'model': "
                "...})."
            )
        both = [(name, value, named[name]) for name, value in given.items()]
        ranges = [row for row in both if isinstance(row[1], ShardedTensor) and isinstance(row[2], ShardedTensor)]
        for name, value in of_another_layout(ranges, self._comm.stage):
            state[prefix + name] = value

    def check_autocast(self) -> None:
        """Accelerate wraps autocast around a model it prepares, and around none that is marked as prepared already."""
        accelerate: Any = sys.modules.get("accelerate.state")
        about = vars(self._model)
        if accelerate is None or not about.get("_is_accelerate_prepared") or "_original_forward" in about:
            return
        asked = accelerate.AcceleratorState._shared_state.get("_mixed_precision")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": None}.get(str(asked), torch.float32)
        if dtype is torch.float32 or any(flat.kind.compute is dtype for flat in flats_of(self._units)):
            return
        raise CapabilityError(
            f'Accelerate (or Trainer) with mixed_precision = "{asked}" expected its autocast around the attached model, found '
            "the model marked as prepared (_is_accelerate_prepared), which Accelerate leaves in the dtype it has. Set it in "
            'the policy ([precision] param = "bf16"), or set mixed_precision = "no" (Trainer: bf16=False).'
        )

    def watch(self, optimizer: Optimizer) -> None:
        """Be called by its ``state_dict`` from now on."""
        if optimizer in self._watched:
            return
        self._watched.add(optimizer)
        me = weakref.ref(self)

        def whole(found: Optimizer, state: dict[str, Any]) -> None:
            stock, asked = me(), full_state_asked(sys._getframe())
            if stock is not None and asked is not None:
                stock.whole_states(found, state, asked)

        self._handles.append(optimizer.register_state_dict_post_hook(whole))

    # Out of both, where full values are asked for.

    def whole_model(self, state: dict[str, Any], asked: Asked) -> None:
        """Put whole values in place of ranges in the state dict of the model or of a module of it.  Collective."""
        self._finish_backward()
        check_alike(self._model, self._ignored, self._comm, "state_dict")
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, ShardedTensor):
                names.setdefault(id(value.local_shard.spec), []).append(name)
        for flat in flats_of(self._units):
            wanted = [index for index, spec in enumerate(flat.specs) if id(spec) in names]
            if wanted:
                here = wanted if asked.here else ()
                values = whole_values(flat, flat.shard, here, asked.device or flat.kind.device)
                for spec, value in zip(flat.specs, values, strict=True):
                    if value is not None:
                        state.update(dict.fromkeys(names[id(spec)], value))

    def whole_states(self, optimizer: Optimizer, packed: dict[str, Any], asked: Asked) -> None:
        """Put whole values in place of ranges in an optimizer's state dict, never in its own states.  Collective."""
        self._finish_backward()
        check_alike(self._model, self._ignored, self._comm, "state_dict", optimizer)
        every = range(self._comm.shard.axis.world)
        make_whole(optimizer, packed["state"], self._units, self._comm, every, asked.device, here=asked.here)


class _Hook:
    """Before a module's ``load_state_dict``, or after its ``state_dict``; a copied model has nothing in its place."""

    def __init__(self, stock: StockState, *, root: bool, loads: bool) -> None:
        # Whoever wraps the hook copies its attributes: they must not keep an attachment.
        self._stock, self._root, self._loads = weakref.ref(stock), root, loads

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, about: Mapping[str, Any], *_: Any) -> None:
        # Inside a call for the whole attached model, its other modules are not asked again.
        stock = self._stock() if self._root or not prefix else None
        if stock is None:
            return
        if self._loads:
            stock.loading(module, state, prefix, assign=bool(about.get("assign_to_params_buffers")))
        elif (asked := full_state_asked(sys._getframe())) is not None:
            stock.whole_model(state, asked)
