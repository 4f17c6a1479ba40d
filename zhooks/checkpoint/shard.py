"""What one rank's file holds: its values, gradients, optimizer states, buffers and random states, tensor by tensor.

Note: [Document]
    The last tensor of the file is JSON, a `Document`: which parameters hold gradients and states, the optimizers' groups, and
    everything that is not sharded like the parameters, whose tensors lie in the file by the names that it has for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.events import Bus
from offload.shards import Entry, digest
from offload.store import BlockRange
from offload.text import shown
from offload.tier import Tier
from zhooks import tree
from zhooks.checkpoint.state_tree import Packer
from zhooks.checkpoint.whole_values import checksums_of, plain_of
from zhooks.comm import Comm
from zhooks.grad import Reducer, Scaling
from zhooks.layout import Ignored, flats_of, part_of
from zhooks.optim import OwnedStates, Rounding, sharded_states
from zhooks.rng import generators
from zhooks.tensor import ParamShard, ShardedTensor, StoredTensor
from zhooks.unit import Flat, Unit

DOCUMENT = "document"
SHARDED = {"sharded": True}


@dataclass(frozen=True, slots=True)
class RunState:
    """The training run on this rank: what is saved, and what is loaded into.

    Attributes:
        scaling: keeps the loss scale, which the manifest holds.
        landed: called with each flat buffer whose values, gradients and states have been loaded, so that new states can go to
            their tier before the next flat's are made.
        check_room: asked before anything is loaded whether their tiers take so many bytes of new states.
        model_only: what the caller asked for; without it states that are saved have an optimizer to go to, or are refused.
    """

    model: nn.Module
    units: Sequence[Unit]
    comm: Comm
    reducer: Reducer
    bus: Bus
    optimizers: tuple[torch.optim.Optimizer, ...]
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


# The document, as it is read; what `Packer` made is compared when it is unpacked.

_Count = Annotated[int, Field(strict=True, ge=0)]
_Flag = Annotated[bool, Field(strict=True)]
_Name = Annotated[str, Field(strict=True)]


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True)


class SavedGroup(_Read):
    """A parameter group: the parameters' names ("" of another model's), and its options, packed."""

    params: list[_Name]
    options: Any


class SavedOptimizer(_Read):
    """An optimizer.

    Attributes:
        entries: (group, place in it, states): a parameter's states as pairs of packed keys and packed values; `SHARDED` stands
            for what lies in a flat tensor.
        owners: (group, place in it, owner): of the parameters that are updated whole, the place on shard of who does.
        loose: its states without a parameter, packed.
    """

    type: _Name
    groups: list[SavedGroup]
    entries: list[tuple[_Count, _Count, list[tuple[Any, Any]]]]
    owners: list[tuple[_Count, _Count, _Count | None]] = []
    loose: Any


class SavedRounding(_Read):
    """How often parameters were rounded, as ``Rounding.state`` says it."""

    seed: _Count
    counts: dict[_Name, _Count]


class Document(_Read):
    """See Note [Document].  Older files lack what has a default.

    Attributes:
        gradients: by flat buffer, the places of the parameters whose gradients are held.
        partials: by flat buffer, whether ``no_sync`` holds back a sum of each parameter.
        states: (flat buffer, optimizer, packed key, tensor, places of the parameters that have it).
        buffers: whether this file has the buffer, or ignored parameter; else the first rank's has it.
        left_out: checksums of frozen tensor subclasses.
    """

    gradients: list[list[_Count] | None]
    partials: list[list[_Flag] | None]
    states: list[tuple[_Count, _Count, Any, _Name, list[_Count]]]
    optimizers: list[SavedOptimizer]
    buffers: dict[_Name, _Flag]
    ignored_gradients: list[_Name] = Field([], alias="ignored gradients")
    left_out: dict[_Name, _Name] = Field({}, alias="left out")
    modules: dict[_Name, Any]
    objects: dict[_Name, Any]
    rounding: Annotated[dict[str, Any], Field(max_length=0)] | SavedRounding = {}
    rng: Any = None
    extra: Any = None


# Names of tensors.


def tensor_name(number: int, what: str) -> str:
    """What a tensor of flat buffer ``number`` is called in the file."""
    return f"{number:04d}/{what}"


def state_name(number: int, optimizer: int, key: Any, dtype: torch.dtype) -> str:
    """What a kind of state of flat buffer ``number`` is called in the file."""
    return tensor_name(number, f"optimizer{optimizer}/{key}/{str(dtype).removeprefix('torch.')}")


def buffer_name(name: str) -> str:
    """What a buffer is called in the file."""
    return f"buffer/{name}"


def gradient_name(name: str) -> str:
    """What the gradient of an ignored parameter is called in the file."""
    return f"gradient/{name}"


# What the run has that is not sharded.


def _persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in tree.named_modules(model, remove_duplicate=remove_duplicate):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that have several, and the name that each is saved under."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    buffers = _persistent_buffers(model, remove_duplicate=False)
    for name, tensor in (*tree.named_parameters(model, remove_duplicate=False), *buffers):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


def kept_whole(run: RunState, verb: str) -> dict[str, Tensor]:
    """What every rank has whole: buffers of the model's state, each once, and parameters that are ignored; of what is divided
    over tp the local tensor."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in _persistent_buffers(run.model):
        found.setdefault(id(buffer), (name, part_of(buffer)))
    return dict(found.values()) | {name: part_of(param).detach() for name, param in plain_of(run.ignored, verb).items()}


def whole_digests(run: RunState) -> dict[str, str]:
    """A checksum of each: ranks whose values equal the first rank's do not write them again."""
    return {name: digest([value]) for name, value in kept_whole(run, "save").items()}


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep a state of their own in addition to parameters and buffers."""
    plain = nn.Module.get_extra_state
    return {name: module for name, module in tree.named_modules(model) if type(module).get_extra_state is not plain}


def group_names(run: RunState, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters' names, group by group; an optimizer may hold others, which have none."""
    names = {id(param): name for name, param in run.ignored.params.items()}
    names |= {id(param): spec.name for flat in run.flats for param, spec in flat.members()}
    return [[names.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]


def check_handed(verb: str, objects: object, extra: object) -> None:
    """What a save is to write besides the model, or a load to fill.

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


# The tensors of the file.

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
        return map(opened, self.pieces())


def opened(piece: Piece) -> Tensor:
    """Its values in memory."""
    if isinstance(piece, BlockRange):
        return piece.open()
    return piece.plain() if isinstance(piece, StoredTensor) else piece


def contents(run: RunState, extra: Mapping[str, Any], first: Mapping[str, str]) -> list[FileTensor]:
    """Every tensor of this rank's file in the order it is written; ``first``: the first rank's digests of what all have whole.

    Raises:
        CheckpointError: something cannot be saved without pickle.
    """
    packer = Packer()
    document: dict[str, Any] = {"gradients": [], "partials": [], "states": []}
    tensors: list[FileTensor] = []
    for number, flat in enumerate(run.flats):
        tensors += _of_flat(run, number, flat, packer, document)
    document["optimizers"] = [_optimizer(run, one, packer, f"optimizer {index}") for index, one in enumerate(run.optimizers)]
    whole = kept_whole(run, "save")
    own = whole
    if run.comm.stage.axis.rank:
        digests = whole_digests(run)
        own = {name: value for name, value in whole.items() if digests[name] != first.get(name)}
    document["buffers"] = {name: name in own for name in whole}
    ignored = {
        name: part_of(param.grad) for name, param in plain_of(run.ignored, "save").items() if param.grad is not None
    }
    for name, grad in ignored.items():
        if grad.layout is not torch.strided:
            raise CheckpointError(
                f"save expected a dense gradient in {name}.grad, found layout {grad.layout}. Save after the step, with the "
                "gradient set to None."
            )
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
    plain = packer.tensors | {buffer_name(name): value for name, value in own.items()}
    plain |= {gradient_name(name): grad for name, grad in ignored.items()}
    rows = sorted(plain.items(), key=lambda row: -row[1].dtype.itemsize)
    raw = json.dumps(document, separators=(",", ":")).encode()
    rows.append((DOCUMENT, torch.frombuffer(bytearray(raw), dtype=torch.uint8)))
    return tensors + [FileTensor(Entry(name, value.dtype, tuple(value.shape)), partial(_one, value)) for name, value in rows]


def _one(value: Tensor) -> Iterable[Piece]:
    return (value,)


def _of_flat(run: RunState, number: int, flat: Flat, packer: Packer, document: dict[str, Any]) -> Iterator[FileTensor]:
    """The tensors of one flat buffer; ``document`` is told of which parameters they are."""
    master, numel, layout = flat.kind.master, flat.shard_numel, flat.layout
    spans = [flat.span(index) for index in range(len(flat.params))]

    def file_tensor(what: str, dtype: torch.dtype, pieces: Callable[[], Iterable[Piece]], numel: int = numel) -> FileTensor:
        return FileTensor(Entry(tensor_name(number, what), dtype, (numel,)), pieces, flat.name)

    def ranges(dtype: torch.dtype, held: Mapping[int, ShardedTensor]) -> Callable[[], Iterator[Piece]]:
        return partial(_laid, spans, numel, dtype, lambda index: held[index].local_shard.memory if index in held else None)

    yield file_tensor("value", master, lambda: (flat.storage.stored(),))
    grads = _grads(flat)
    document["gradients"].append(list(grads) or None)
    if grads:
        yield file_tensor("gradient", master, ranges(master, grads))
    gradient = run.reducer.gradients.get(flat.number)
    document["partials"].append(None)
    if gradient is not None and gradient.partial is not None and any(gradient.present):
        # What no_sync holds back: sums of this rank alone, of the whole buffer.
        sums, present, places = gradient.partial, list(gradient.present), list(zip(layout.starts, layout.numels, strict=True))

        def of_sums(index: int) -> Tensor | None:
            start, count = places[index]
            return sums[start : start + count] if present[index] else None

        document["partials"][-1] = present
        yield file_tensor("partial", sums.dtype, partial(_laid, places, layout.padded, sums.dtype, of_sums), layout.padded)
    for which, optimizer in enumerate(run.optimizers):
        kinds: dict[tuple[Any, torch.dtype], dict[int, ShardedTensor]] = {}
        for index, key, state in sharded_states(flat, optimizer):
            kinds.setdefault((key, state.dtype), {})[index] = state
        for (key, dtype), held in kinds.items():
            name = state_name(number, which, key, dtype)
            document["states"].append([number, which, packer.pack(key, "optimizer"), name, list(held)])
            yield FileTensor(Entry(name, dtype, (numel,)), ranges(dtype, held), flat.name)


def _laid(
    places: Sequence[tuple[int, int]], total: int, dtype: torch.dtype, take: Callable[[int], Piece | None]
) -> Iterator[Piece]:
    """Pieces of a flat tensor of ``total`` elements: ``take(index)`` at each place (start, numel), else zeros."""
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


def _grads(flat: Flat) -> dict[int, ShardedTensor]:
    """The gradients that parameters hold now, by place in the flat.

    Raises:
        CheckpointError: one of them is a plain tensor.
    """
    found: dict[int, ShardedTensor] = {}
    for index, (param, spec) in enumerate(flat.members()):
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        if isinstance(grad, ShardedTensor):
            found[index] = grad
        elif grad is not None:
            raise CheckpointError(
                f"save expected a sharded gradient in {spec.name}.grad, found a plain tensor. Set it to None, or save after "
                "the step."
            )
    return found


def _optimizer(run: RunState, optimizer: torch.optim.Optimizer, packer: Packer, where: str) -> dict[str, Any]:
    """A `SavedOptimizer`."""
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
            packed = [
                [packer.pack(key, where), SHARDED if isinstance(value, ShardedTensor) else packer.pack(value, f"{where} {key}")]
                for key, value in state.items()
            ]
            entries.append([number, index, packed])
            if isinstance(state, OwnedStates):
                owners.append([number, index, state.owner])
    loose = packer.pack({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}, where)
    return {"type": type(optimizer).__name__, "groups": groups, "entries": entries, "owners": owners, "loose": loose}


# What the manifest is about.


def about_run(run: RunState) -> dict[str, Any]:
    """What a manifest says of the run."""
    return {**run.about, **run.scaling.saved(), **describe(run), "torch": torch.__version__}


def describe(run: RunState) -> dict[str, Any]:
    """The layout, which ``offload.shards.SavedLayout`` reads back: flat buffers with dtype, segments and parameters, and the
    place of each rank of the model on shard, replicate and tp."""
    comm = run.comm
    axes = (comm.shard.axis, comm.replicate.axis, comm.tp.axis)
    flats = [
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
    return {"flats": flats, "places": [[axis.place(rank) for axis in axes] for rank in comm.stage.axis.ranks]}


def _over_tp(spec: ParamShard) -> dict[str, Any]:
    """The dim that is divided over tp, the number of parts, and how a part lies in memory; nothing where there is none."""
    if spec.place is None:
        return {}
    return {"tp": [spec.place[0], spec.place[2]], "part_stride": list(spec.part_stride)}
