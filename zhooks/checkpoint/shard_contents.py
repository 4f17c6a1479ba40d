"""What one rank's shard file holds: its values, gradients, optimizer states, buffers and random states, tensor by tensor.

``save_load.py`` writes what ``contents`` lists, in its order; ``load_shard.py`` reads it back.  Values are opened
one tensor of one flat buffer at a time, from whatever tier they are on; it never touches a file.

Note: [Document]
    The last tensor of the file is JSON: which parameters hold gradients, the optimizers' groups and everything that is not
    sharded like the parameters, the user's objects, the random states, and where the tensors of all that are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.events import Bus
from offload.shards import Entry, digest
from offload.store import BlockRange
from offload.text import shown
from offload.tier import Tier
from zhooks import tree
from zhooks.checkpoint.ignored_values import checksums_of, plain_of
from zhooks.checkpoint.rng import generators
from zhooks.checkpoint.state_tree import Packer
from zhooks.comm import Comm
from zhooks.grad import Reducer, Scaling
from zhooks.layout import Ignored, flats_of, part_of
from zhooks.optim import OwnedStates, Rounding, sharded_states, states_of
from zhooks.tensor import ParamShard, ShardedTensor, StoredTensor
from zhooks.unit import Flat, Unit

DOCUMENT = "document"
SHARDED = {"sharded": True}

Optimizers = tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True, slots=True)
class RunState:
    """The training run on this rank: what is saved, and what is loaded into.

    ``scaling`` keeps the loss scale, which the manifest holds.  ``landed`` is called with each flat buffer whose values,
    gradients and states have been loaded, so that new states can go to their tier before the next flat's are made; before
    anything is loaded ``check_room`` is asked whether their tiers take so many bytes of new states.
    ``model_only`` is what the caller asked for: without it, states that are saved have an optimizer to go to, or are refused.
    """

    model: nn.Module
    units: Sequence[Unit]
    comm: Comm
    reducer: Reducer
    bus: Bus
    optimizers: Optimizers
    objects: Mapping[str, Any] | None
    about: Mapping[str, Any]
    scaling: Scaling
    landed: Callable[[Flat], None]
    check_room: Callable[[Mapping[Tier, int]], None]
    rounding: Rounding
    ignored: Ignored = field(default_factory=Ignored)
    model_only: bool = False

    @property
    def flats(self) -> list[Flat]:
        return flats_of(self.units)

    @property
    def devices(self) -> list[torch.device]:
        """Where the model computes, each device once."""
        return list(dict.fromkeys(flat.kind.device for flat in self.flats))


Piece = Tensor | BlockRange
"""A run of a tensor to be written: values in memory, or where a tier keeps them."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor to be written, its values opened only then; ``key`` names the flat buffer in events."""

    entry: Entry
    pieces: Callable[[], Iterable[Piece]]
    key: str = ""

    def chunks(self) -> Iterator[Tensor]:
        """Its values in order, in memory; a chunk on disk is open until the next is asked for."""
        return (opened(piece) for piece in self.pieces())


def opened(piece: Piece) -> Tensor:
    """Its values in memory."""
    if isinstance(piece, BlockRange):
        return piece.open()
    return piece.plain() if isinstance(piece, StoredTensor) else piece


def tensor_name(number: int, what: str) -> str:
    """What a tensor of flat buffer ``number`` is called in the file."""
    return f"{number:04d}/{what}"


def state_name(number: int, optimizer: int, key: Any, dtype: torch.dtype) -> str:
    """What a kind of state of flat buffer ``number`` is called in the file."""
    return tensor_name(number, f"optimizer{optimizer}/{key}/{str(dtype).removeprefix('torch.')}")


def buffer_name(name: str) -> str:
    """What a buffer is called in the file."""
    return f"buffer/{name}"


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, each once; of one divided over tp, the local tensor."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in tree.named_modules(model):
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{prefix}.{key}" if prefix else key] = part_of(buffer)
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that have several, and the name that each is saved under."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    buffers = (
        (f"{prefix}.{key}" if prefix else key, buffer)
        for prefix, module in tree.named_modules(model, remove_duplicate=False)
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    )
    for name, tensor in (*tree.named_parameters(model, remove_duplicate=False), *buffers):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


def kept_whole(run: RunState, verb: str) -> dict[str, Tensor]:
    """What every rank has whole: buffers, and parameters that are ignored."""
    return buffers_of(run.model) | {name: part_of(param).detach() for name, param in plain_of(run.ignored, verb).items()}


def whole_digests(run: RunState) -> dict[str, str]:
    """A checksum of each: ranks whose values equal the first rank's do not write them again."""
    return {name: digest([value]) for name, value in kept_whole(run, "save").items()}


def gradient_name(name: str) -> str:
    """What the gradient of an ignored parameter is called in the file."""
    return f"gradient/{name}"


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep a state of their own beside parameters and buffers."""
    plain = nn.Module.get_extra_state
    return {name: module for name, module in tree.named_modules(model) if type(module).get_extra_state is not plain}


def grads_of(flat: Flat) -> list[ShardedTensor | None]:
    """The gradients the parameters hold now.

    Raises:
        CheckpointError: one of them is a plain tensor.
    """
    found: list[ShardedTensor | None] = []
    for param, spec in flat.members():
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        if grad is not None and not isinstance(grad, ShardedTensor):
            raise CheckpointError(
                f"save expected a sharded gradient in {spec.name}.grad, found a plain tensor. Set it to None, or save after "
                "the step."
            )
        found.append(grad)
    return found


def contents(run: RunState, extra: Mapping[str, Any], first: Mapping[str, str]) -> list[FileTensor]:
    """Every tensor of this rank's file in the order it is written; ``first``: the first rank's digests of what all have whole.

    Raises:
        CheckpointError: something cannot be saved without pickle.
    """
    packer = Packer()
    tensors: list[FileTensor] = []
    document: dict[str, Any] = {"gradients": [], "partials": [], "states": []}
    for number, flat in enumerate(run.flats):
        shape = (flat.shard_numel,)
        tensors.append(FileTensor(Entry(tensor_name(number, "value"), flat.kind.master, shape), _shard(flat), flat.name))
        for what, found in (("gradients", _gradient(number, flat)), ("partials", _partial(number, flat, run.reducer))):
            document[what].append(None if found is None else found[0])
            tensors.extend([] if found is None else [found[1]])
        for index, optimizer in enumerate(run.optimizers):
            for key, dtype, held in _sharded_states(flat, optimizer):
                name = state_name(number, index, key, dtype)
                document["states"].append([number, index, packer.pack(key, "optimizer"), name, held])
                tensors.append(FileTensor(Entry(name, dtype, shape), _state_chunks(flat, optimizer, key, held), flat.name))
    where = "optimizer {}".format
    document["optimizers"] = [_optimizer(run, one, packer, where(index)) for index, one in enumerate(run.optimizers)]
    own = _buffers(run, first)
    document["buffers"] = {name: name in own for name in kept_whole(run, "save")}
    ignored = {
        name: part_of(param.grad) for name, param in plain_of(run.ignored, "save").items() if param.grad is not None
    }
    document["ignored gradients"] = list(ignored)
    document["left out"] = checksums_of(run.ignored)
    document["tied"] = tied_names(run.model)
    document["modules"] = {
        name: packer.pack(module.get_extra_state(), f"extra state of {name}")
        for name, module in extra_states(run.model).items()
    }
    objects = run.objects or {}
    document["objects"] = {name: packer.pack(one.state_dict(), f"objects[{name!r}]") for name, one in objects.items()}
    document["rng"] = packer.pack(generators(run.devices), "random states")
    document["rounding"] = run.rounding.state()
    document["extra"] = packer.pack(dict(extra), "extra")
    # Wide elements first, so that every tensor of the file is aligned.
    plain = {**packer.tensors, **{buffer_name(name): buffer for name, buffer in own.items()}}
    plain |= {gradient_name(name): _strided(name, grad) for name, grad in ignored.items()}
    for name, value in sorted(plain.items(), key=lambda item: -item[1].dtype.itemsize):
        tensors.append(FileTensor(Entry(name, value.dtype, tuple(value.shape)), _one_chunk(value)))
    raw = torch.frombuffer(bytearray(json.dumps(document, separators=(",", ":")).encode()), dtype=torch.uint8)
    tensors.append(FileTensor(Entry(DOCUMENT, torch.uint8, (raw.numel(),)), _one_chunk(raw)))
    return tensors


def check_handed(verb: str, objects: object, extra: object) -> None:
    """What a save is to write beside the model, or a load to fill.

    Raises:
        CheckpointError: it is of another kind than named objects with states, and plain data by name.
    """
    for what, value in (("objects", objects), ("extra", extra)):
        if value is not None and not isinstance(value, Mapping):
            found = type(value).__name__
            raise CheckpointError(f"{verb} expected a mapping or None as {what}, found {found}. Pass a dict by name.")
    for name, one in (objects or {}).items() if isinstance(objects, Mapping) else ():
        if not isinstance(name, str):
            raise CheckpointError(f"{verb} expected strings as keys of objects, found {shown(name)}. Use e.g. \"scheduler\".")
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise CheckpointError(
                f"{verb} expected an object with state_dict and load_state_dict in objects[{shown(name)}], found "
                f"{type(one).__name__}. Plain data goes into extra."
            )


# The layout, which the manifest lists and `offload/shards/saved_layout.py` reads back.


def describe(run: RunState) -> list[dict[str, Any]]:
    """Every flat buffer's name, dtype, segments and parameters."""
    return [
        {
            "name": flat.name,
            "dtype": str(flat.kind.master).removeprefix("torch."),
            "padded": flat.layout.padded,
            "shard_numel": flat.shard_numel,
            "align": flat.layout.align,
            "segments": [[segment.start, segment.numel] for segment in flat.layout.segments],
            "params": [
                {"name": spec.name, "shape": list(spec.shape), "stride": list(spec.stride), "start": start} | _over_tp(spec)
                for spec, start in zip(flat.specs, flat.layout.starts, strict=True)
            ],
        }
        for flat in run.flats
    ]


def _over_tp(spec: ParamShard) -> dict[str, Any]:
    """The dim that is divided over tp, the number of parts, and how a part lies in memory; nothing where there is none."""
    if spec.place is None:
        return {}
    return {"tp": [spec.place[0], spec.place[2]], "part_stride": list(spec.part_stride)}


def places(comm: Comm) -> list[list[int]]:
    """The place of each rank of the model on shard, replicate and tp."""
    axes = (comm.shard.axis, comm.replicate.axis, comm.tp.axis)
    return [[axis.place(rank) for axis in axes] for rank in comm.stage.axis.ranks]


# Tensors of one flat buffer, opened one at a time.


def _shard(flat: Flat) -> Callable[[], Iterable[Piece]]:
    return lambda: (flat.storage.stored(),)


def _one_chunk(value: Tensor) -> Callable[[], Iterable[Piece]]:
    return lambda: (value,)


def _laid(places: Sequence[tuple[int, int]], total: int, take: Callable[[int], Piece | None], dtype: torch.dtype) -> Any:
    """Pieces of a flat tensor of ``total`` elements: ``take(index)`` at each place, zeros where there is none."""

    def pieces() -> Iterator[Piece]:
        at = 0
        for index, (start, numel) in enumerate(places):
            if numel == 0:
                continue
            if start > at:
                yield torch.zeros(start - at, dtype=dtype, device="cpu")
            found = take(index)
            yield torch.zeros(numel, dtype=dtype, device="cpu") if found is None else found
            at = start + numel
        if total > at:
            yield torch.zeros(total - at, dtype=dtype, device="cpu")

    return pieces


def _spans(flat: Flat) -> list[tuple[int, int]]:
    return [flat.span(index) for index in range(len(flat.params))]


def _gradient(number: int, flat: Flat) -> tuple[list[int], FileTensor] | None:
    grads = grads_of(flat)
    held = [index for index, grad in enumerate(grads) if grad is not None]
    if not held:
        return None

    def take(index: int) -> Piece | None:
        grad = grads[index]
        return None if grad is None else grad._at

    dtype = flat.kind.master
    entry = Entry(tensor_name(number, "gradient"), dtype, (flat.shard_numel,))
    return held, FileTensor(entry, _laid(_spans(flat), flat.shard_numel, take, dtype), flat.name)


def _partial(number: int, flat: Flat, reducer: Reducer) -> tuple[list[bool], FileTensor] | None:
    """What ``no_sync`` holds back on this rank: sums of this rank alone, of the whole buffer."""
    gradient = reducer.gradients.get(flat.number)
    if gradient is None or gradient.partial is None or not any(gradient.present):
        return None
    partial, present, layout = gradient.partial, list(gradient.present), flat.layout
    places = list(zip(layout.starts, layout.numels, strict=True))

    def take(index: int) -> Tensor | None:
        start, numel = places[index]
        return partial[start : start + numel] if present[index] else None

    entry = Entry(tensor_name(number, "partial"), partial.dtype, (layout.padded,))
    return present, FileTensor(entry, _laid(places, layout.padded, take, partial.dtype), flat.name)


def _sharded_states(flat: Flat, optimizer: torch.optim.Optimizer) -> list[tuple[Any, torch.dtype, list[int]]]:
    """States that lie like the parameters: (key, dtype, which parameters have it)."""
    found: dict[tuple[Any, torch.dtype], list[int]] = {}
    for index, key, state in sharded_states(flat, optimizer):
        found.setdefault((key, state.dtype), []).append(index)
    return [(key, dtype, held) for (key, dtype), held in found.items()]


def _state_chunks(flat: Flat, optimizer: torch.optim.Optimizer, key: Any, held: Sequence[int]) -> Any:
    states = states_of(flat, optimizer, key)

    def take(index: int) -> Piece | None:
        state: ShardedTensor | None = states[index] if index in held else None
        return None if state is None else state._at

    dtype = states[held[0]].dtype
    return _laid(_spans(flat), flat.shard_numel, take, dtype)


# What is not sharded.


def param_names(run: RunState) -> dict[int, str]:
    """Names of the model's parameters by identity; an optimizer may hold others, which have none."""
    names = {id(param): name for name, param in run.ignored.params.items()}
    return names | {id(param): spec.name for flat in run.flats for param, spec in flat.members()}


def group_names(run: RunState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters' names, group by group."""
    names = param_names(run)
    return [[names.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]


def _optimizer(run: RunState, optimizer: torch.optim.Optimizer, packer: Packer, where: str) -> dict[str, Any]:
    # Of another attachment's parameters that one saves the states.
    ours = {id(param) for flat in run.flats for param in flat.params}
    groups, entries, owners = [], [], []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, group_names(run, optimizer), strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": names, "options": packer.pack(options, where)})
        for index, param in enumerate(group["params"]):
            state = optimizer.state.get(param)
            if state is None or (isinstance(param, ShardedTensor) and id(param) not in ours):
                continue
            packed = [[packer.pack(key, where), _state(value, packer, f"{where} {key}")] for key, value in state.items()]
            entries.append([number, index, packed])
            if isinstance(state, OwnedStates):
                owners.append([number, index, state.owner])
    loose = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "entries": entries,
        "owners": owners,
        "loose": packer.pack(loose, where),
    }


def _state(value: Any, packer: Packer, where: str) -> Any:
    return SHARDED if isinstance(value, ShardedTensor) else packer.pack(value, where)


def _buffers(run: RunState, first: Mapping[str, str]) -> dict[str, Tensor]:
    """What goes into this file of all that ranks have whole: the first rank's, and what differs from it on others."""
    buffers = kept_whole(run, "save")
    if run.comm.stage.axis.rank == 0:
        return buffers
    own = whole_digests(run)
    return {name: buffer for name, buffer in buffers.items() if own[name] != first.get(name)}


def _strided(name: str, grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise CheckpointError(
            f"save expected a dense gradient in {name}.grad, found layout {grad.layout}. Save after the step, with the "
            "gradient set to None."
        )
    return grad
