"""Whether one rank's shard file can be loaded into the run: everything is read and compared, nothing is changed.

``save_load.py`` calls ``check`` on every rank; what it returns, ``load_shard.py``, is applied when all ranks found nothing
wrong.  It never writes to the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import ShardReader
from zhooks.checkpoint.check_optimizers import IN_FILE, check_optimizers, require
from zhooks.checkpoint.ignored_values import check_left_out, plain_of
from zhooks.checkpoint.load_shard import FlatState, Loading, OptimizerStates
from zhooks.checkpoint.rng import check as check_generators
from zhooks.checkpoint.shard_contents import (
    DOCUMENT,
    RunState,
    buffer_name,
    extra_states,
    gradient_name,
    kept_whole,
    state_name,
    tensor_name,
)
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.layout import part_of
from zhooks.unit import Flat

__all__ = ["check"]


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
    states = check_optimizers(run, document["optimizers"], unpacker, Unpacker(partial(_unread, reader), torch.device("meta")))
    rng = unpacker.unpack(document["rng"])
    check_generators(rng, run.devices)
    modules = {name: unpacker.unpack(packed) for name, packed in document["modules"].items()}
    _same_names("extra states of modules", modules, extra_states(run.model), "Build the same model.")
    extra = unpacker.unpack(document["extra"])
    require(isinstance(extra, dict), "extra as a dict")
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
            require(len(present) == len(flat.params) and all(type(one) is bool for one in present), "a flag a parameter")
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
    require(isinstance(saved, list) and params.keys() >= set(saved), "gradients of ignored parameters")
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


def _check_rounding(saved: Any) -> dict[str, Any]:
    """How often parameters were rounded, as ``Rounding.state`` says it."""
    require(isinstance(saved, dict), "the state of rounding")
    if saved:
        require(saved.keys() == {"seed", "counts"} and isinstance(saved["counts"], dict), "the state of rounding")
        require(all(type(count) is int and count >= 0 for count in (saved["seed"], *saved["counts"].values())), "counts")
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
        if value is IN_FILE
    }
    flats = run.flats
    for number, which, packed, name, held in saved:
        require(type(number) is int and 0 <= number < len(flats), "the number of a unit")
        flat, key = flats[number], unpacker.unpack(packed)
        _check_indices(flat, held)
        for index in held:
            waiting.remove((which, id(flat.params[index]), key))
        dtype = reader.entry(name).dtype
        _expect(reader, name, dtype, (flat.shard_numel,))
        require(name == state_name(number, which, key, dtype), f"the name of a state of {dtype}")
        found.setdefault(number, []).append(FlatState(states[which], key, name, held))
    if waiting:
        raise CheckpointError(
            f"{reader.path}: expected a tensor for every optimizer state, found {len(waiting)} without. The file is damaged."
        )
    return found


def _unread(reader: ShardReader, name: str) -> Tensor:
    """A tensor of the file without its values."""
    entry = reader.entry(name)
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
