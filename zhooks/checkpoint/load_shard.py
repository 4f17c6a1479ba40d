"""From one rank's shard file back into the run: everything is checked first, then everything is loaded.

``save_load.py`` calls ``check`` on every rank, and ``Loading.apply`` when all ranks found nothing wrong.  ``check``
changes nothing; ``apply`` writes one tensor of one flat buffer at a time, to whatever tier it is on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.shards import ShardReader
from offload.store import Mode
from zhooks.checkpoint.ignored_values import check_left_out, plain_of
from zhooks.checkpoint.rng import check as check_generators
from zhooks.checkpoint.rng import restore
from zhooks.checkpoint.shard_contents import (
    DOCUMENT,
    SHARDED,
    RunState,
    buffer_name,
    extra_states,
    gradient_name,
    group_names,
    kept_whole,
    param_names,
    state_name,
    tensor_name,
)
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.layout import part_of
from zhooks.optim import OwnedStates, vectors_in
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

#: Stands in a parameter's state for a tensor that lies in a flat buffer of the file.
_IN_FILE = object()
#: Options of torch's optimizers that are None, True or False.
_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What one optimizer shall hold: options group by group, and each parameter's state in order.

    Attributes:
        owned: reads the states of a parameter that is updated whole.
    """

    optimizer: torch.optim.Optimizer
    options: Sequence[dict[str, Any]]
    entries: Mapping[nn.Parameter, dict[Any, Any]]
    owned: Mapping[nn.Parameter, Callable[[], OwnedStates]]
    loose: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class FlatState:
    """One kind of state of one flat buffer: the tensor in the file, and which parameters have it."""

    states: OptimizerStates
    key: Any
    name: str
    held: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loading:
    """A file that fits the run, ready to be applied.  Made by ``check``."""

    run: RunState
    reader: ShardReader
    buffers: Mapping[str, ShardReader]
    ignored: Sequence[str]
    gradients: Sequence[Sequence[int] | None]
    partials: Sequence[Sequence[bool] | None]
    states: Sequence[OptimizerStates]
    flat_states: Mapping[int, Sequence[FlatState]]
    modules: Mapping[str, Any]
    objects: Mapping[str, Any]
    rng: dict[str, Any]
    rounding: Mapping[str, Any]
    extra: dict[str, Any]

    def hand_over(self) -> Callable[[], None]:
        """Give objects and modules their own states: they alone can refuse what was checked.  Returns what undoes that.

        Raises:
            CheckpointError: one refused; all have what they had.
        """
        given = self.run.objects or {}
        pairs: list[tuple[str, Any, Any, Any]] = [
            (f"objects[{name!r}]", given[name].state_dict, given[name].load_state_dict, state)
            for name, state in self.objects.items()
        ]
        for name, module in extra_states(self.run.model).items():
            pairs.append((f"extra state of {name}", module.get_extra_state, module.set_extra_state, self.modules[name]))
        done: list[tuple[Any, Any]] = []

        def undo() -> None:
            while done:
                put, old = done.pop()
                put(old)

        for name, get, put, state in pairs:
            old = copy.deepcopy(get())
            try:
                put(state)
            except Exception as error:
                with suppress(Exception):
                    # Who refuses one state half-way may refuse its own, too.
                    put(old)
                undo()
                raise CheckpointError(
                    f"{self.reader.path}: expected states that their owners take, found that {name} refuses its own: "
                    f"{type(error).__name__}: {error}. Pass the objects that were saved, or load another checkpoint."
                ) from error
            done.append((put, old))
        return undo

    def apply(self) -> None:
        """Load everything else, the random states last.

        Raises:
            CheckpointError: the file cannot be read a second time; the run is partly loaded.
        """
        bus = self.run.bus
        with torch.inference_mode(False), torch.no_grad():
            for number, flat in enumerate(self.run.flats):
                nbytes = flat.shard_numel * flat.kind.master.itemsize
                bus.begin("load", flat.name, nbytes)
                self._flat(number, flat)
                self.run.landed(flat)
                bus.end("load", flat.name, nbytes)
            for name, value in kept_whole(self.run, "load").items():
                value.copy_(self.buffers[name].tensor(buffer_name(name)))
            for name, param in plain_of(self.run.ignored, "load").items():
                param.grad = None
                if name in self.ignored:
                    param.grad = torch.empty_like(param)
                    part_of(param.grad).copy_(self.reader.tensor(gradient_name(name)))
        for states in self.states:
            _finish_optimizer(states, self.run)
        restore(self.rng, self.run.devices)
        if self.rounding:
            self.run.rounding.restore(self.rounding)

    def _flat(self, number: int, flat: Flat) -> None:
        shard = flat.buffer.overwritten()
        _pour(self.reader, tensor_name(number, "value"), [(0, shard)])
        del shard
        flat.written()
        with torch._C.DisableTorchFunctionSubclass():
            for param in flat.params:
                param.grad = None
            self._partial(number, flat)
            self._gradient(number, flat)
        for saved in self.flat_states.get(number, ()):
            self._state(flat, saved)
        for states in self.states:
            for param in flat.params:
                states.optimizer.state.pop(param, None)
                if param in states.owned:
                    states.optimizer.state[param] = states.owned[param]()
                elif param in states.entries:
                    states.optimizer.state[param] = states.entries[param]

    def _gradient(self, number: int, flat: Flat) -> None:
        held, name = self.gradients[number], tensor_name(number, "gradient")
        if held is None:
            return
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is not None and gradient.shard.reserve():
            try:
                _pour(self.reader, name, [(0, gradient.shard.overwritten())])
                for index in held:
                    flat.params[index].grad = gradient.shard.claim(index)
            finally:
                gradient.shard.hand_over()
            return
        grads = {index: _new(flat, index, flat.kind.master) for index in held}
        _pour(self.reader, name, [(flat.span(index)[0], grad._local) for index, grad in grads.items()])
        for index, grad in grads.items():
            flat.params[index].grad = grad

    def _partial(self, number: int, flat: Flat) -> None:
        """What ``no_sync`` had held back: the next backward adds to it."""
        gradient, present = self.run.reducer.gradients.get(flat.number), self.partials[number]
        if gradient is None:
            return
        gradient.resume(None, [False] * len(flat.params))
        if present is not None:
            partial = gradient.buffer(flat.layout.padded)
            _pour(self.reader, tensor_name(number, "partial"), [(0, partial)])
            gradient.resume(partial, present)

    def _state(self, flat: Flat, saved: FlatState) -> None:
        """One kind of state: into the tensors that exist, else into new ones."""
        dtype = self.reader.entry(saved.name).dtype
        made: list[tuple[int, ShardedTensor]] = []
        for index in saved.held:
            param = flat.params[index]
            held = saved.states.optimizer.state.get(param, {}).get(saved.key)
            fits = isinstance(held, ShardedTensor) and held.dtype == dtype and held._spec is flat.specs[index]
            made.append((index, held if fits else _new(flat, index, dtype)))
            saved.states.entries[param][saved.key] = made[-1][1]
        if len(made) == len(flat.params):
            # All of it is overwritten: what a failed disk has lost is not asked for.
            for block in {block for _, state in made if (block := state._block) is not None}:
                block.tensor(Mode.WRITE_ALL).zero_()
        _pour(self.reader, saved.name, [(flat.span(index)[0], state._local) for index, state in made])


def _new(flat: Flat, index: int, dtype: torch.dtype) -> ShardedTensor:
    local = torch.empty(flat.span(index)[1], dtype=dtype, device=flat.kind.device)
    return ShardedTensor(local, flat.specs[index])


def _pour(reader: ShardReader, name: str, places: Sequence[tuple[int, Tensor]]) -> None:
    """Copy a tensor of the file chunk by chunk into 1-D tensors that begin at these elements of it, in order."""
    first = 0
    for at, chunk in reader.chunks(name):
        end = at + chunk.numel()
        while first < len(places) and places[first][0] + places[first][1].numel() <= at:
            first += 1
        for start, out in places[first:]:
            if start >= end:
                break
            low, high = max(start, at), min(start + out.numel(), end)
            out[low - start : high - start].copy_(chunk[low - at : high - at])


def _finish_optimizer(states: OptimizerStates, run: RunState) -> None:
    """Parameters of other models, states without a parameter, and the groups' options as they were saved."""
    optimizer = states.optimizer
    own = {id(param) for flat in run.flats for param in flat.params}
    for key in [key for key in optimizer.state if id(key) not in own and not isinstance(key, ShardedTensor)]:
        del optimizer.state[key]
    optimizer.state.update({param: state for param, state in states.entries.items() if id(param) not in own})
    optimizer.state.update(states.loose)
    for group, options in zip(optimizer.param_groups, states.options, strict=True):
        group.update(options)


# Checking.


def check(run: RunState, reader: ShardReader, first: ShardReader) -> Loading:
    """Read and compare everything that says whether this file can be loaded here; nothing is changed.

    Args:
        reader: this rank's file.
        first: the first rank's, which holds what is the same on all ranks.
    Raises:
        CheckpointError: it cannot.
    """
    reader.verify()
    document = json.loads(bytes(reader.tensor(DOCUMENT).numpy()))
    specs = {spec.name: spec for flat in run.flats for spec in flat.specs}
    unpacker = Unpacker(reader.tensor, run.devices[0], specs)
    _check_flats(run, document, reader)
    check_left_out(run.ignored, document.get("left out", {}), "load")
    states = _check_optimizers(run, document["optimizers"], unpacker, Unpacker(partial(_unread, reader), torch.device("meta")))
    rng = unpacker.unpack(document["rng"])
    check_generators(rng, run.devices)
    modules = {name: unpacker.unpack(packed) for name, packed in document["modules"].items()}
    _same_names("extra states of modules", modules, extra_states(run.model), "Build the same model.")
    extra = unpacker.unpack(document["extra"])
    _require(isinstance(extra, dict), "extra as a dict")
    return Loading(
        run=run,
        reader=reader,
        buffers=_check_buffers(run, document["buffers"], reader, first),
        ignored=_check_ignored(run, document.get("ignored gradients", []), reader),
        gradients=document["gradients"],
        partials=document["partials"],
        states=states,
        flat_states=_check_flat_states(run, document["states"], states, reader, unpacker),
        modules=modules,
        objects=_check_objects(run, document["objects"], unpacker),
        rng=rng,
        rounding=_check_rounding(document.get("rounding", {})),
        extra=extra,
    )


def _check_flats(run: RunState, document: Mapping[str, Any], reader: ShardReader) -> None:
    rows = zip(run.flats, document["gradients"], document["partials"], strict=True)
    for number, (flat, held, present) in enumerate(rows):
        _expect(reader, tensor_name(number, "value"), flat.kind.master, (flat.shard_numel,))
        if held is not None:
            _check_indices(flat, held)
            _expect(reader, tensor_name(number, "gradient"), flat.kind.master, (flat.shard_numel,))
        if present is not None:
            _require(len(present) == len(flat.params) and all(type(one) is bool for one in present), "a flag a parameter")
            _expect(reader, tensor_name(number, "partial"), flat.kind.reduce, (flat.layout.padded,))


def _check_indices(flat: Flat, indices: Sequence[int]) -> None:
    inside = all(type(index) is int and 0 <= index < len(flat.params) for index in indices)
    if not inside or sorted(set(indices)) != list(indices):
        raise ValueError(f"parameters {list(indices)} of {len(flat.params)} in unit {flat.name}")


def _expect(reader: ShardReader, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    entry = reader.entry(name)
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise CheckpointError(
            f"{reader.path}: expected {name} of {dtype} and shape {list(shape)} as in this run, found {entry.dtype} and "
            f"{list(entry.shape)}. Build the same model with the same policy."
        )


def _same_names(what: str, saved: Iterable[str], here: Iterable[str], advice: str) -> None:
    saved, here = set(saved), set(here)
    if saved != here:
        found = [f"{', '.join(sorted(only))} only {where}" for only, where in ((saved - here, "saved"), (here - saved, "here"))]
        found = [text for text in found if not text.startswith(" only")]
        raise CheckpointError(f"load: expected the same {what} here as in the checkpoint, found {'; '.join(found)}. {advice}")


def _check_buffers(
    run: RunState, saved: Mapping[str, bool], reader: ShardReader, first: ShardReader
) -> dict[str, ShardReader]:
    buffers = kept_whole(run, "load")
    if run.ignored:
        _same_names("buffers and ignored parameters", saved, buffers, "Build the same model, with the same [units] ignore.")
    else:
        _same_names("buffers", saved, buffers, "Build the same model.")
    found = {name: reader if own else first for name, own in saved.items()}
    for name, buffer in buffers.items():
        _expect(found[name], buffer_name(name), buffer.dtype, tuple(buffer.shape))
    if first is not reader:
        first.verify(buffer_name(name) for name, source in found.items() if source is first)
    return found


def _check_ignored(run: RunState, saved: Any, reader: ShardReader) -> list[str]:
    """Which ignored parameters have gradients."""
    params = plain_of(run.ignored, "load")
    _require(isinstance(saved, list) and params.keys() >= set(saved), "gradients of ignored parameters")
    names: list[str] = saved
    for name in names:
        part = part_of(params[name])
        _expect(reader, gradient_name(name), part.dtype, tuple(part.shape))
    return names


def _check_objects(run: RunState, saved: Mapping[str, Any], unpacker: Unpacker) -> dict[str, Any]:
    given = run.objects
    if given is None and saved:
        raise CheckpointError(
            f"load: expected the objects that were saved ({', '.join(sorted(saved))}), found none. Pass objects= as to "
            "save(), or objects={} to leave theirs in the file."
        )
    if not given:
        return {}
    _same_names("objects", saved, given, "Pass objects= as to save().")
    return {name: unpacker.unpack(packed) for name, packed in saved.items()}


def _owned(name: str, owner: int | None, packed: Any, unpacker: Unpacker, *, here: bool) -> OwnedStates:
    """The states of one parameter, which may be on a tier before the next one's are read."""
    return OwnedStates(name, owner, {unpacker.unpack(key): unpacker.unpack(value) for key, value in packed}, here=here)


def _check_optimizers(
    run: RunState, saved: Sequence[Mapping[str, Any]], unpacker: Unpacker, unread: Unpacker
) -> list[OptimizerStates]:
    if not run.optimizers:
        return []
    kinds = [type(optimizer).__name__ for optimizer in run.optimizers]
    if [str(one["type"]) for one in saved] != kinds:
        raise CheckpointError(
            f"load: expected the optimizers of the checkpoint ({', '.join(str(one['type']) for one in saved) or 'none'}), "
            f"found {', '.join(kinds)}. Pass the same ones in the same order, or optimizer=() to load the model alone."
        )
    states, spec_names = [], param_names(run)
    for optimizer, one in zip(run.optimizers, saved, strict=True):
        named = group_names(run, optimizer)
        for number, names in enumerate(named):
            if len(one["groups"]) != len(named) or one["groups"][number]["params"] != names:
                raise CheckpointError(
                    f"load: expected {type(optimizer).__name__} with the parameter groups of the checkpoint, found others from "
                    f"group {number} on ({len(named)} groups here, {len(one['groups'])} there). Group parameters alike."
                )
        options = [unpacker.unpack(group["options"]) for group in one["groups"]]
        for group, option in zip(optimizer.param_groups, options, strict=True):
            _check_options(optimizer, group, option)
        loose = unpacker.unpack(one["loose"])
        _require(isinstance(loose, dict), "states without a parameter as a dict")
        owners = _check_owners(run, optimizer, one.get("owners", []))
        entries = _check_entries(optimizer, one["entries"], unpacker, unread, owners)
        packed = {optimizer.param_groups[group]["params"][index]: found for group, index, found in one["entries"]}
        owned = {}
        for param, owner in owners.items():
            here, name = owner is None or owner == run.comm.shard.axis.rank, spec_names.get(id(param), "")
            owned[param] = partial(_owned, name, owner, packed.get(param, []), unpacker, here=here)
            entries.pop(param, None)
        states.append(OptimizerStates(optimizer, options, entries, owned, loose))
    return states


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"something else than {what}")


def _check_options(optimizer: torch.optim.Optimizer, here: Mapping[str, Any], saved: Any) -> None:
    """The options of a group are those this optimizer has, each of the kind it has."""
    kind = type(optimizer).__name__
    _require(isinstance(saved, dict) and all(type(key) is str for key in saved) and "params" not in saved, f"options of {kind}")
    for key, usual in optimizer.defaults.items():
        if key not in here and key not in saved:
            continue  # torch adds defaults that no group has when it loads
        free = usual is None and key not in _FLAGS
        if key not in saved or not (free or _kind(saved[key], number=True) == _kind(usual, number=True)):
            raise CheckpointError(
                f"load: expected {kind}'s {key} to be like {str(here.get(key))[:80]} here, found {str(saved.get(key))[:80]} in "
                "the checkpoint. Make the optimizer as it was made there, or load another checkpoint."
            )


def _kind(value: Any, *, number: bool = False) -> Any:
    """What one state or option has in common with another it may stand for; ``number``: a tensor of one number is one."""
    if isinstance(value, Tensor):
        return "number" if number and value.dim() == 0 else ("tensor", value.dtype, value.dim() > 0)
    if value is None or isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, (list, tuple)):
        return ("row", *(_kind(item, number=number) for item in value))
    return type(value).__name__


def _check_owners(run: RunState, optimizer: torch.optim.Optimizer, saved: Any) -> dict[nn.Parameter, int | None]:
    """Who owns the parameters that the optimizer updates whole."""
    owners: dict[nn.Parameter, int | None] = {}
    for group, index, owner in saved:
        _require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        _require(owner is None or (type(owner) is int and 0 <= owner < run.comm.shard.axis.world), "a rank")
        owners[optimizer.param_groups[group]["params"][index]] = owner
    return owners


def _unread(reader: ShardReader, name: str) -> Tensor:
    """A tensor of the file without its values."""
    entry = reader.entry(name)
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def _check_entries(
    optimizer: torch.optim.Optimizer, saved: Any, unpacker: Unpacker, unread: Unpacker,
    owners: Mapping[nn.Parameter, int | None],
) -> dict[nn.Parameter, dict[Any, Any]]:  # fmt: skip
    """The states of each parameter: of the kinds that they have here, or where there are none yet, all of one kind.

    Args:
        unread: unpacks those of parameters that have ``owners``, which are read later.
    """
    entries: dict[nn.Parameter, dict[Any, Any]] = {}
    kinds: dict[Any, Any] = {}
    for group, index, packed in saved:
        _require(type(group) is int and type(index) is int and min(group, index) >= 0, "places of parameters")
        param = optimizer.param_groups[group]["params"][index]
        _require(param not in entries, "one state a parameter")
        entries[param] = {}
        of = unread if param in owners else unpacker
        values = [(unpacker.unpack(key), value, of.unpack(value) if value != SHARDED else None) for key, value in packed]
        # How long lists of vectors are depends on how many steps there were.
        free = param in owners or bool(vectors_in([value for _, _, value in values]))
        for key, packed_value, value in values:
            _require(key not in entries[param], "one state of a name")
            if packed_value == SHARDED:
                _require(param not in owners, "ranges of what is updated whole")
                entries[param][key] = _IN_FILE
                continue
            entries[param][key] = value
            held = optimizer.state.get(param, {}).get(key)
            if free:
                continue  # as the parameter's shape will have it
            kind = kinds.setdefault(key, _kind(value)) if held is None or isinstance(held, ShardedTensor) else _kind(held)
            count = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            counts = key != "step" or (isinstance(count, (int, float)) and 0 <= count < float("inf"))
            if _kind(value) != kind or not counts:
                raise CheckpointError(
                    f"load: expected {type(optimizer).__name__}'s {str(key)[:80]} as it keeps it for every parameter, found "
                    f"{str(value)[:80]}. Load another checkpoint."
                )
    return entries


def _check_rounding(saved: Any) -> dict[str, Any]:
    """How often parameters were rounded, as ``Rounding.state`` says it."""
    _require(isinstance(saved, dict), "the state of rounding")
    if saved:
        _require(saved.keys() == {"seed", "counts"} and isinstance(saved["counts"], dict), "the state of rounding")
        _require(all(type(count) is int and count >= 0 for count in (saved["seed"], *saved["counts"].values())), "counts")
    return dict(saved)


def _check_flat_states(
    run: RunState, saved: Sequence[Sequence[Any]], states: Sequence[OptimizerStates], reader: ShardReader, unpacker: Unpacker
) -> dict[int, list[FlatState]]:
    """Match the flat tensors of states with the places that wait for them."""
    found: dict[int, list[FlatState]] = {}
    if not states:
        return found
    waiting = {
        (number, id(param), key)
        for number, one in enumerate(states)
        for param, entry in one.entries.items()
        for key, value in entry.items()
        if value is _IN_FILE
    }
    flats = run.flats
    for number, which, packed, name, held in saved:
        _require(type(number) is int and 0 <= number < len(flats), "the number of a unit")
        flat, key = flats[number], unpacker.unpack(packed)
        _check_indices(flat, held)
        for index in held:
            waiting.remove((which, id(flat.params[index]), key))
        dtype = reader.entry(name).dtype
        _expect(reader, name, dtype, (flat.shard_numel,))
        _require(name == state_name(number, which, key, dtype), f"the name of a state of {dtype}")
        found.setdefault(number, []).append(FlatState(states[which], key, name, held))
    if waiting:
        raise CheckpointError(
            f"{reader.path}: expected a tensor for every optimizer state, found {len(waiting)} without. The file is damaged."
        )
    return found
