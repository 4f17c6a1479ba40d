"""Where the gradients, the sums of ``no_sync`` and the states of the run's parameters are in saved folders, all checked.

``check_shard.py`` calls it once parameters have been found.  It compares headers and documents, and reads values only
where they are converted to a narrower dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.shards import CHUNK
from zhooks.checkpoint.check_optimizers import IN_FILE, require
from zhooks.checkpoint.check_whole_states import state_dtype
from zhooks.checkpoint.load_shard import FlatState, Loading, OptimizerStates
from zhooks.checkpoint.saved_files import InFlat, SavedFolder
from zhooks.checkpoint.saved_layout import ParamRanges
from zhooks.checkpoint.saved_run import Saved, another, expect, own_numel
from zhooks.checkpoint.shard_contents import state_name, tensor_name
from zhooks.tensor import ParamShard

__all__ = ["check_flat_states", "check_gradients", "check_narrower", "check_partials"]


def _indices(folder: SavedFolder, number: Any, indices: Any) -> list[ParamRanges]:
    """The parameters of a saved flat buffer that these are.

    Raises:
        ValueError: it has no such.
    """
    require(type(number) is int and 0 <= number < len(folder.layout.flats), "the number of a unit")
    members = folder.members[number]
    inside = isinstance(indices, list) and all(type(index) is int and 0 <= index < len(members) for index in indices)
    if not inside or sorted(set(indices)) != indices:
        raise ValueError(f"parameters {indices} of {len(members)} in unit {number}")
    return [members[index] for index in indices]


def check_gradients(saved: Saved) -> dict[str, InFlat]:
    """The gradients that were held, by name of the parameter."""
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        rows = saved.document(folder)["gradients"]
        require(len(rows) == len(folder.layout.flats), "a row a unit")
        for number, held in enumerate(rows):
            name = tensor_name(number, "gradient")
            for param in [] if held is None else _indices(folder, number, held):
                if param.name in saved.params:
                    expect(folder, folder.counterpart, name, param.flat.dtype, (own_numel(param),))
                    found[param.name] = InFlat(folder, param, name)
    return found


def check_partials(saved: Saved) -> dict[str, InFlat]:
    """The sums that ``no_sync`` held back on the rank at this place.

    Raises:
        CheckpointError: there is another number of ranks, whose sums would mean another thing.
    """
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        kept, place = folder.layout.places, folder.place
        names = [tensor_name(number, "partial") for number in range(len(folder.layout.flats))]
        any_held = any(name in record.tensors for record in folder.manifest.files for name in names)
        if any_held and not folder.as_many:
            raise CheckpointError(
                f"Cannot load {folder.path}. Expected as many ranks as saved, {len(kept.data[0])} x {kept.tp} (data x tp), "
                f"because gradients accumulated inside no_sync differ per rank, found {place.data_world} x {place.own.tp}. "
                "Load it on as many, or save after an accumulation has ended."
            )
        rows = saved.document(folder)["partials"]
        require(len(rows) == len(folder.layout.flats), "a row a unit")
        for number, present in enumerate(rows):
            if present is None:
                continue
            members = folder.members[number]
            flags = isinstance(present, list) and len(present) == len(members) and all(type(one) is bool for one in present)
            require(flags, "a flag per parameter")
            name = tensor_name(number, "partial")
            entry = folder.entry(folder.counterpart, name)
            whole = entry.shape == (members[0].flat.padded,) and entry.dtype.is_floating_point
            require(whole, f"{name} of the whole unit")
            for param, there in zip(members, present, strict=True):
                if there and param.name in saved.params:
                    spec = saved.specs[param.name]
                    same = spec.place is None if param.saved.dim is None else spec.place is not None
                    if not same or (spec.place is not None and spec.place[0::2] != (param.saved.dim, param.saved.count)):
                        raise another(saved.folders, f"partial sums of {param.name}, which is divided differently over tp")
                    found[param.name] = InFlat(folder, param, name)
    return found


def check_flat_states(saved: Saved, states: Sequence[OptimizerStates]) -> dict[int, list[FlatState]]:
    """Match the flat tensors of states with the places that wait for them."""
    if not states:
        return {}
    run = saved.run
    waiting = {
        (number, id(param), key)
        for number, one in enumerate(states)
        for param, entry in one.entries.items()
        for key, value in entry.items()
        if value is IN_FILE
    }
    where = {spec.name: (number, index) for number, flat in enumerate(run.flats) for index, spec in enumerate(flat.specs)}
    found: dict[tuple[int, int, Any, torch.dtype], dict[int, InFlat]] = {}
    for folder in saved.folders:
        unpacker = saved.unpacker(folder)
        for number, which, packed, name, held in saved.document(folder)["states"]:
            key, dtype = unpacker.unpack(packed), folder.entry(folder.counterpart, name).dtype
            require(name == state_name(number, which, key, dtype), f"the name of a state of {dtype}")
            for param in _indices(folder, number, held):
                if param.name not in saved.params:
                    continue
                expect(folder, folder.counterpart, name, dtype, (own_numel(param),))
                here, index = where[param.name]
                flat = run.flats[here]
                waiting.remove((which, id(flat.params[index]), key))
                kept = state_dtype(run, dtype, param.flat.dtype, flat.kind.master)
                found.setdefault((here, which, key, kept), {})[index] = InFlat(folder, param, name)
    if waiting:
        raise CheckpointError(
            f"Cannot load {saved.main.path}. Expected a tensor for every optimizer state, found {len(waiting)} without. The "
            "file is damaged."
        )
    out: dict[int, list[FlatState]] = {}
    for (here, which, key, dtype), held in found.items():
        out.setdefault(here, []).append(FlatState(states[which], key, dtype, dict(sorted(held.items()))))
    return out


def check_narrower(loading: Loading) -> None:
    """What is converted to a dtype of a smaller range fits it, this rank's ranges of values, gradients and states.

    Raises:
        CheckpointError: a finite number would become infinite.
    """
    for number, flat in enumerate(loading.run.flats):
        master = flat.kind.master
        for index, spec in enumerate(flat.specs):
            found = [(each[spec.name], master) for each in (loading.values, loading.gradients) if spec.name in each]
            states = loading.flat_states.get(number, ())
            found += [(state.held[index], state.dtype) for state in states if index in state.held]
            for where, dtype in found:
                _check_fits(where, spec, dtype)


def _check_fits(where: InFlat, spec: ParamShard, dtype: torch.dtype) -> None:
    folder = where.folder
    saved = folder.entry(folder.counterpart, where.name).dtype
    if not (saved.is_floating_point and dtype.is_floating_point) or torch.finfo(dtype).max >= torch.finfo(saved).max:
        return
    most = CHUNK // saved.itemsize
    for tp, shard, offset, numel in where.param.runs(spec):
        reader = folder.reader(folder.rank_at(tp, shard))
        for at in range(0, numel, most):
            values = reader.elements(where.name, offset + at, min(most, numel - at))
            if bool((values.to(dtype).isinf() & values.isfinite()).any()):
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected numbers that {dtype} can hold, found larger ones in {where.name} of "
                    f"{spec.name}, saved as {saved}. Attach a model in a dtype with that range."
                )
