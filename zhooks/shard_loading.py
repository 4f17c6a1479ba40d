"""From one rank's shard file back into the run: everything is checked first, then everything is loaded.

``sharded_checkpoint.py`` calls ``check`` on every rank, and ``Loading.apply`` when all ranks found nothing wrong.  ``check``
changes nothing; ``apply`` writes one tensor of one flat buffer at a time, to whatever tier it rests on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.arena import Use
from offload.block import Part
from offload.errors import CheckpointError
from offload.lease import Mode
from offload.shard_file import ShardReader
from zhooks.flat import Flat
from zhooks.rng import check as check_generators
from zhooks.rng import restore
from zhooks.shard_contents import (
    DOCUMENT,
    SHARDED,
    Live,
    buffer_name,
    buffers_of,
    extra_states,
    group_names,
    tensor_name,
)
from zhooks.sharded import ShardedTensor
from zhooks.state_tree import Unpacker

#: Stands in a parameter's state for a tensor that lies in a flat buffer of the file.
_COMING = object()


@dataclass(frozen=True, slots=True)
class States:
    """What one optimizer shall hold: options group by group, and each parameter's state in order."""

    optimizer: torch.optim.Optimizer
    options: Sequence[dict[str, Any]]
    entries: Mapping[nn.Parameter, dict[Any, Any]]
    loose: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Coming:
    """One kind of state of one flat buffer: the tensor in the file, and which parameters have it."""

    states: States
    key: Any
    name: str
    held: Sequence[int]


@dataclass(frozen=True, slots=True)
class Loading:
    """A file that fits the run, ready to be applied.  Made by ``check``."""

    live: Live
    reader: ShardReader
    buffers: Mapping[str, ShardReader]
    gradients: Sequence[Sequence[int] | None]
    partials: Sequence[Sequence[bool] | None]
    states: Sequence[States]
    coming: Mapping[int, Sequence[Coming]]
    modules: Mapping[str, Any]
    objects: Mapping[str, Any]
    rng: dict[str, Any]
    rounding: Mapping[str, Any]
    extra: dict[str, Any]

    def apply(self) -> None:
        """Load everything, the random states last.

        Raises:
            CheckpointError: the file cannot be read a second time, or an object refuses its state; the run is partly loaded.
        """
        bus = self.live.bus
        with torch.inference_mode(False), torch.no_grad():
            for number, flat in enumerate(self.live.flats):
                nbytes = flat.shard_numel * flat.kind.master.itemsize
                bus.begin("load", flat.name, nbytes)
                self._flat(number, flat)
                self.live.landed(flat)
                bus.end("load", flat.name, nbytes)
            for name, buffer in buffers_of(self.live.model).items():
                buffer.copy_(self.buffers[name].tensor(buffer_name(name)))
            for name, module in extra_states(self.live.model).items():
                module.set_extra_state(self.modules[name])
        for name, state in self.objects.items():
            (self.live.objects or {})[name].load_state_dict(state)
        for states in self.states:
            _finish_optimizer(states, self.live)
        restore(self.rng, self.live.devices)
        if self.live.rounding is not None and self.rounding:
            self.live.rounding.restore(self.rounding)

    def _flat(self, number: int, flat: Flat) -> None:
        shard = flat.overwritten()
        _pour(self.reader, tensor_name(number, "value"), [(0, shard)])
        del shard
        flat.written()
        with torch._C.DisableTorchFunctionSubclass():
            for param in flat.params:
                param.grad = None
            self._partial(number, flat)
            self._gradient(number, flat)
        for coming in self.coming.get(number, ()):
            self._state(flat, coming)
        for states in self.states:
            for param in flat.params:
                states.optimizer.state.pop(param, None)
                if param in states.entries:
                    states.optimizer.state[param] = states.entries[param]

    def _gradient(self, number: int, flat: Flat) -> None:
        held, name = self.gradients[number], tensor_name(number, "gradient")
        if held is None:
            return
        gradient = self.live.reducer.gradients.get(flat.number)
        if gradient is not None and gradient.free():
            shard = gradient.shard if gradient.block is None else gradient.block.tensor(Mode.WRITE_ALL)
            _pour(self.reader, name, [(0, shard)])
            del shard
            for index in held:
                flat.params[index].grad = gradient.tensor(index)
            gradient.hand_over()
            return
        grads = {index: _new(flat, index, flat.kind.master) for index in held}
        _pour(self.reader, name, [(flat.span(index)[0], grad._local) for index, grad in grads.items()])
        for index, grad in grads.items():
            flat.params[index].grad = grad

    def _partial(self, number: int, flat: Flat) -> None:
        """What ``no_sync`` had held back: the next backward adds to it."""
        gradient, present = self.live.reducer.gradients.get(flat.number), self.partials[number]
        if gradient is None:
            return
        if gradient.partial is not None:
            gradient.give_back(gradient.partial)
            gradient.partial, gradient.present, gradient.reserved = None, [False] * len(flat.params), False
        if present is not None:
            partial = self.live.reducer.pool.take(flat.layout.padded, flat.kind.reduce, flat.kind.device, Use.SUMS)
            _pour(self.reader, tensor_name(number, "partial"), [(0, partial)])
            gradient.partial, gradient.present = partial, list(present)

    def _state(self, flat: Flat, coming: Coming) -> None:
        """One kind of state: into the tensors that exist, else into new ones."""
        dtype = self.reader.entry(coming.name).dtype
        made: list[tuple[int, ShardedTensor]] = []
        for index in coming.held:
            param = flat.params[index]
            held = coming.states.optimizer.state.get(param, {}).get(coming.key)
            fits = isinstance(held, ShardedTensor) and held.dtype == dtype and held._spec is flat.specs[index]
            made.append((index, held if fits else _new(flat, index, dtype)))
            coming.states.entries[param][coming.key] = made[-1][1]
        if len(made) == len(flat.params):
            # All of it is overwritten: what a failed disk has lost is not asked for.
            for block in {state._at.block for _, state in made if isinstance(state._at, Part)}:
                block.tensor(Mode.WRITE_ALL).zero_()
        _pour(self.reader, coming.name, [(flat.span(index)[0], state._local) for index, state in made])


def _new(flat: Flat, index: int, dtype: torch.dtype) -> ShardedTensor:
    local = torch.empty(flat.span(index)[1], dtype=dtype, device=flat.kind.device)
    return ShardedTensor(local, flat.specs[index])


def _pour(reader: ShardReader, name: str, places: Sequence[tuple[int, Tensor]]) -> None:
    """Copy a tensor of the file piece by piece into 1-D tensors that begin at these elements of it, in order."""
    first = 0
    for at, piece in reader.chunks(name):
        end = at + piece.numel()
        while first < len(places) and places[first][0] + places[first][1].numel() <= at:
            first += 1
        for start, out in places[first:]:
            if start >= end:
                break
            low, high = max(start, at), min(start + out.numel(), end)
            out[low - start : high - start].copy_(piece[low - at : high - at])


def _finish_optimizer(states: States, live: Live) -> None:
    """Parameters of other models, states without a parameter, and the groups' options as they were saved."""
    optimizer = states.optimizer
    own = {id(param) for flat in live.flats for param in flat.params}
    for key in [key for key in optimizer.state if id(key) not in own]:
        del optimizer.state[key]
    optimizer.state.update({param: state for param, state in states.entries.items() if id(param) not in own})
    optimizer.state.update(states.loose)
    for group, options in zip(optimizer.param_groups, states.options, strict=True):
        group.update(options)


# Checking.


def check(live: Live, reader: ShardReader, first: ShardReader) -> Loading:
    """Read and compare everything that says whether this file can be loaded here; nothing is changed.

    Args:
        reader: this rank's file.
        first: the first rank's, which holds the buffers that are the same on all ranks.
    Raises:
        CheckpointError: it cannot.
    """
    reader.verify()
    document = json.loads(bytes(reader.tensor(DOCUMENT).numpy()))
    unpacker = Unpacker(reader.tensor, live.devices[0])
    _check_flats(live, document, reader)
    states = _check_optimizers(live, document["optimizers"], unpacker)
    rng = unpacker.unpack(document["rng"])
    check_generators(rng, live.devices)
    modules = {name: unpacker.unpack(packed) for name, packed in document["modules"].items()}
    _same_names("extra states of modules", modules, extra_states(live.model), "Build the same model.")
    return Loading(
        live=live,
        reader=reader,
        buffers=_check_buffers(live, document["buffers"], reader, first),
        gradients=document["gradients"],
        partials=document["partials"],
        states=states,
        coming=_check_coming(live, document["states"], states, reader, unpacker),
        modules=modules,
        objects=_check_objects(live, document["objects"], unpacker),
        rng=rng,
        rounding=document.get("rounding", {}),
        extra=unpacker.unpack(document["extra"]),
    )


def _check_flats(live: Live, document: Mapping[str, Any], reader: ShardReader) -> None:
    rows = zip(live.flats, document["gradients"], document["partials"], strict=True)
    for number, (flat, held, present) in enumerate(rows):
        _expect(reader, tensor_name(number, "value"), flat.kind.master, (flat.shard_numel,))
        if held is not None:
            _check_indices(flat, held)
            _expect(reader, tensor_name(number, "gradient"), flat.kind.master, (flat.shard_numel,))
        if present is not None:
            _check_indices(flat, range(len(present)))
            _expect(reader, tensor_name(number, "partial"), flat.kind.reduce, (flat.layout.padded,))


def _check_indices(flat: Flat, indices: Sequence[int]) -> None:
    if not all(0 <= index < len(flat.params) for index in indices):
        raise ValueError(f"parameters {list(indices)} of {len(flat.params)} in unit {flat.name}")


def _expect(reader: ShardReader, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    entry = reader.entry(name)
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise CheckpointError(
            f"{reader.path}: expected {name} of {dtype} and shape {list(shape)} as in this run, found {entry.dtype} and "
            f"{list(entry.shape)}. Build the same model with the same policy."
        )


def _same_names(what: str, saved: Iterable[str], here: Iterable[str], mend: str) -> None:
    saved, here = set(saved), set(here)
    if saved != here:
        found = [f"{', '.join(sorted(only))} only {where}" for only, where in ((saved - here, "saved"), (here - saved, "here"))]
        found = [text for text in found if not text.startswith(" only")]
        raise CheckpointError(f"load: expected the same {what} here as in the checkpoint, found {'; '.join(found)}. {mend}")


def _check_buffers(
    live: Live, saved: Mapping[str, bool], reader: ShardReader, first: ShardReader
) -> dict[str, ShardReader]:
    buffers = buffers_of(live.model)
    _same_names("buffers", saved, buffers, "Build the same model.")
    found = {name: reader if own else first for name, own in saved.items()}
    for name, buffer in buffers.items():
        _expect(found[name], buffer_name(name), buffer.dtype, tuple(buffer.shape))
    if first is not reader:
        first.verify(buffer_name(name) for name, source in found.items() if source is first)
    return found


def _check_objects(live: Live, saved: Mapping[str, Any], unpacker: Unpacker) -> dict[str, Any]:
    given = live.objects
    if given is None and saved:
        raise CheckpointError(
            f"load: expected the objects that were saved ({', '.join(sorted(saved))}), found none. Pass objects= as to "
            "save(), or objects={} to leave theirs in the file."
        )
    if not given:
        return {}
    _same_names("objects", saved, given, "Pass objects= as to save().")
    return {name: unpacker.unpack(packed) for name, packed in saved.items()}


def _check_optimizers(live: Live, saved: Sequence[Mapping[str, Any]], unpacker: Unpacker) -> list[States]:
    if not live.optimizers:
        return []
    kinds = [type(optimizer).__name__ for optimizer in live.optimizers]
    if [str(one["type"]) for one in saved] != kinds:
        raise CheckpointError(
            f"load: expected the optimizers of the checkpoint ({', '.join(str(one['type']) for one in saved) or 'none'}), "
            f"found {', '.join(kinds)}. Pass the same ones in the same order, or optimizer=() to load the model alone."
        )
    states = []
    for optimizer, one in zip(live.optimizers, saved, strict=True):
        named = group_names(live, optimizer)
        for number, names in enumerate(named):
            if len(one["groups"]) != len(named) or one["groups"][number]["params"] != names:
                raise CheckpointError(
                    f"load: expected {type(optimizer).__name__} with the parameter groups of the checkpoint, found others from "
                    f"group {number} on ({len(named)} groups here, {len(one['groups'])} there). Group parameters alike."
                )
        entries: dict[nn.Parameter, dict[Any, Any]] = {}
        for group, index, packed in one["entries"]:
            entries[optimizer.param_groups[group]["params"][index]] = {
                unpacker.unpack(key): _COMING if value == SHARDED else unpacker.unpack(value) for key, value in packed
            }
        options = [unpacker.unpack(group["options"]) for group in one["groups"]]
        states.append(States(optimizer, options, entries, unpacker.unpack(one["loose"])))
    return states


def _check_coming(
    live: Live, saved: Sequence[Sequence[Any]], states: Sequence[States], reader: ShardReader, unpacker: Unpacker
) -> dict[int, list[Coming]]:
    """Match the flat tensors of states with the places that wait for them."""
    found: dict[int, list[Coming]] = {}
    if not states:
        return found
    waiting = {
        (number, id(param), key)
        for number, one in enumerate(states)
        for param, entry in one.entries.items()
        for key, value in entry.items()
        if value is _COMING
    }
    flats = live.flats
    for number, which, packed, name, held in saved:
        flat, key = flats[number], unpacker.unpack(packed)
        _check_indices(flat, held)
        for index in held:
            waiting.remove((which, id(flat.params[index]), key))
        if reader.entry(name).shape != (flat.shard_numel,):
            _expect(reader, name, reader.entry(name).dtype, (flat.shard_numel,))
        found.setdefault(number, []).append(Coming(states[which], key, name, held))
    if waiting:
        raise CheckpointError(
            f"{reader.path}: expected a tensor for every optimizer state, found {len(waiting)} without. The file is damaged."
        )
    return found
