"""Whether saved folders can be loaded into the run: everything is read and compared, nothing is changed.

``save_load.py`` calls ``check`` on every rank, and ``check_stages`` once each stage of a pipeline has found its own; what
``check`` returns, ``load_shard.py``, is applied when all ranks found nothing wrong.

Note: [By name]
    A parameter's value, gradient and states are looked for by its name, whatever flat buffer, file or folder they lie in.
    What is each rank's own (buffers, random states, objects) comes from the file that stands for this rank, of the folder of
    its stage; what is a parameter's but not divided (a step), from that file of the parameter's folder.

Note: [Own folders or common ones]
    Either each stage loads folders of its own and takes all that is in them, or all stages load the same ones and divide what
    is in them.  A stage sees only what it takes itself: what none takes, or two take for theirs, shows in the sum over stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.errors import BudgetError, CheckpointError
from offload.shards import CHUNK
from zhooks.checkpoint.check_optimizers import IN_FILE, check_optimizers, state_dtype
from zhooks.checkpoint.ignored_values import check_left_out, check_writable, plain_of
from zhooks.checkpoint.load_shard import FlatState, Loading, OptimizerStates
from zhooks.checkpoint.rng import check as check_generators
from zhooks.checkpoint.rng import derived
from zhooks.checkpoint.saved_folder import (
    InFlat,
    Saved,
    SavedFolder,
    another,
    check_alike,
    expect,
    find_params,
    refuse_folders,
    require,
)
from zhooks.checkpoint.saved_ranges import ParamRanges
from zhooks.checkpoint.shard_contents import (
    RunState,
    buffer_name,
    extra_states,
    gradient_name,
    kept_whole,
    state_name,
    tensor_name,
)
from zhooks.comm import CONTROL, Call, Comm, text_digest
from zhooks.layout import part_of
from zhooks.tensor import ParamShard

__all__ = ["check", "check_stages"]


def check(run: RunState, folders: Sequence[SavedFolder]) -> tuple[Loading, int]:
    """Read and compare everything that says whether the folders can be loaded here; nothing is changed.

    Returns:
        What is to be loaded, and the bytes of the files that this rank verified.
    Raises:
        CheckpointError: they cannot.
    """
    saved = find_params(run, folders)
    nbytes = 0
    for folder in folders:
        wanted = {param.flat.number for found, param in saved.params.values() if found is folder}
        skip = [flat.number for flat in folder.layout.flats if flat.number not in wanted]
        axis = run.comm.stage.axis
        nbytes += folder.verify(axis.rank, axis.world, skip)
    check_alike(saved)
    left_out = {name: value for folder in folders for name, value in folder.own.get("left out", {}).items()}
    if _in_stages(saved):
        left_out = {name: value for name, value in left_out.items() if name in run.ignored.frozen}
    check_left_out(run.ignored, left_out, "load")
    states = check_optimizers(saved)
    modules = _check_modules(saved)
    extra = saved.main.extra(saved.unpacker(saved.main))
    loading = Loading(
        run=run,
        folders=folders,
        values={
            name: InFlat(folder, param, tensor_name(param.flat.number, "value"))
            for name, (folder, param) in saved.params.items()
        },
        buffers=_check_buffers(saved),
        ignored=_check_ignored(saved),
        gradients=_check_gradients(saved),
        partials=_check_partials(saved),
        states=states,
        flat_states=_check_flat_states(saved, states),
        modules=modules,
        objects=_check_objects(saved),
        rng=_check_random(saved),
        rounding=_check_rounding(saved),
        extra=extra,
    )
    _check_narrower(loading)
    check_writable("load", kept_whole(run, "load"))
    try:
        run.check_room(loading.new_states())
    except BudgetError as error:
        raise CheckpointError(
            f"Cannot load {folders[0].path}. Expected memory for the optimizer's states on their tiers, found: {error}. "
            "Nothing was loaded."
        ) from error
    return loading, nbytes


def _same_names(what: str, saved: Iterable[str], here: Iterable[str], advice: str, *, part: bool = False) -> None:
    saved, here = set(saved), set(here)
    if part:
        saved &= here
    if saved != here:
        sides = ((saved - here, "in the checkpoint"), (here - saved, "here"))
        found = [f"{', '.join(sorted(only))} only {where}" for only, where in sides]
        found = [text for text in found if not text.startswith(" only")]
        raise CheckpointError(f"load expected the same {what} here as in the checkpoint, found {'; '.join(found)}. {advice}")


def _in_stages(saved: Saved) -> bool:
    """Names may be those of other stages."""
    return saved.run.comm.pp.axis.world > 1


def _check_buffers(saved: Saved) -> dict[str, tuple[SavedFolder, int]]:
    """Where each buffer and ignored parameter is: folder and file."""
    run = saved.run
    buffers = kept_whole(run, "load")
    where: dict[str, tuple[SavedFolder, int]] = {}
    for folder in saved.folders:
        for name, own in folder.own["buffers"].items():
            require(type(own) is bool, "a flag per buffer")
            at = folder, folder.counterpart if own else 0
            if name in where and _digest(*where[name], name) != _digest(*at, name):
                raise refuse_folders(f"buffer {name} in two of them, with different values")
            where.setdefault(name, at)
    what, advice = "buffers", "Build the same model."
    if run.ignored:
        what, advice = "buffers and ignored parameters", "Build the same model, with the same [units] ignore."
    _same_names(what, where, buffers, advice, part=_in_stages(saved))
    where = {name: where[name] for name in buffers}
    for name in plain_of(run.ignored, "load"):
        folder = where[name][0]
        every = range(folder.manifest.world)
        if not folder.as_many and len({_digest(folder, rank, name) for rank in every}) > 1:
            raise _of_each_rank(folder, f"parameters in [units] ignore ({name})")
    for name, buffer in buffers.items():
        folder, rank = where[name]
        expect(folder, rank, buffer_name(name), buffer.dtype, tuple(buffer.shape))
        kept = folder.layout
        if kept.tp != folder.place.tp_world:
            data = next(row.index(rank) for row in kept.data if rank in row)
            if len({_digest(folder, kept.data[tp][data], name) for tp in range(kept.tp)}) > 1:
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected the same buffers on all {kept.tp} tp ranks, because buffers are not "
                    f"resharded, found different values of {name}. Load it with as many tp ranks."
                )
    return where


def _of_each_rank(folder: SavedFolder, what: str) -> CheckpointError:
    """Other ranks than saved cannot each have what was a rank's own."""
    data, place = folder.layout.data, folder.place
    return CheckpointError(
        f"Cannot load {folder.path}. Expected as many ranks as saved, {len(data[0])} x {len(data)} (data x tp), because each "
        f"rank has its own {what}, found {place.data_world} x {place.tp_world}. Load it on as many."
    )


def _digest(folder: SavedFolder, rank: int, name: str) -> str | None:
    tensors = folder.manifest.files[rank].tensors
    return tensors.get(buffer_name(name)) or folder.manifest.files[0].tensors.get(buffer_name(name))


def _check_ignored(saved: Saved) -> dict[str, SavedFolder]:
    """Which ignored parameters have gradients, and where."""
    params = plain_of(saved.run.ignored, "load")
    found: dict[str, SavedFolder] = {}
    for folder in saved.folders:
        names = folder.own.get("ignored gradients", [])
        known = isinstance(names, list) and (_in_stages(saved) or params.keys() >= set(names))
        require(known, "gradients of ignored parameters")
        held = any(name.startswith(gradient_name("")) for record in folder.manifest.files for name in record.tensors)
        if held and not folder.as_many:
            raise _of_each_rank(folder, "gradients of parameters in [units] ignore")
        found |= {name: folder for name in names if name in params}
    for name, folder in found.items():
        part = part_of(params[name])
        expect(folder, folder.counterpart, gradient_name(name), part.dtype, tuple(part.shape))
    return found


def _check_modules(saved: Saved) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for folder in saved.folders:
        unpacker = saved.unpacker(folder)
        for name, packed in folder.own["modules"].items():
            if name in found:
                raise refuse_folders(f"an extra state of {name or 'the root'} in two of them")
            found[name] = unpacker.unpack(packed)
    here = extra_states(saved.run.model)
    _same_names("extra states of modules", found, here, "Build the same model.", part=_in_stages(saved))
    return {name: found[name] for name in here}


def _check_objects(saved: Saved) -> dict[str, Any]:
    given, kept = saved.run.objects, saved.main.own["objects"]
    if given is None and kept:
        raise CheckpointError(
            f"load expected the objects that were saved ({', '.join(sorted(kept))}), found none. Pass the same objects= "
            "as to save(), or objects={} to skip them."
        )
    if not given:
        return {}
    _same_names("objects", kept, given, "Pass the same objects= as to save().")
    unpacker = saved.unpacker(saved.main)
    return {name: unpacker.unpack(packed) for name, packed in kept.items()}


def _check_random(saved: Saved) -> dict[str, Any]:
    """The states of the rank at this place; where there was none, states made of those of the one that stands for it.

    {} where the checkpoint has none at all.
    """
    main, place = saved.main, saved.main.place
    states = main.random_states(saved.unpacker(main))
    if states is None:
        return {}
    check_generators(states, saved.run.devices)
    new_stage = place.stage >= len(saved.folders) > 1
    if main.same_place and not new_stage:
        return states
    made = derived(states, saved.run.devices, f"data {place.data} stage {place.stage if new_stage else 0}")
    check_generators(made, saved.run.devices)
    return made


def _check_rounding(saved: Saved) -> dict[str, Any]:
    """How often parameters were rounded, as ``Rounding.state`` says it."""
    seeds: set[int] = set()
    counts: dict[str, int] = {}
    for folder in saved.folders:
        state = folder.own.get("rounding", {})
        require(isinstance(state, dict), "the state of rounding")
        if state:
            require(state.keys() == {"seed", "counts"} and isinstance(state["counts"], dict), "the state of rounding")
            require(all(type(count) is int and count >= 0 for count in (state["seed"], *state["counts"].values())), "counts")
            seeds.add(state["seed"])
            counts |= state["counts"]
    if len(seeds) > 1:
        raise refuse_folders(f"stochastic rounding with different seeds {sorted(seeds)}")
    return {"seed": seeds.pop(), "counts": counts} if seeds else {}


# Gradients and states.


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


def _check_gradients(saved: Saved) -> dict[str, InFlat]:
    """The gradients that were held, by name of the parameter."""
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        rows = folder.own["gradients"]
        require(len(rows) == len(folder.layout.flats), "a row a unit")
        for number, held in enumerate(rows):
            name = tensor_name(number, "gradient")
            for param in [] if held is None else _indices(folder, number, held):
                if param.name in saved.params:
                    expect(folder, folder.counterpart, name, param.flat.dtype, (param.flat.shard_numel,))
                    found[param.name] = InFlat(folder, param, name)
    return found


def _check_partials(saved: Saved) -> dict[str, InFlat]:
    """The sums that ``no_sync`` held back on the rank at this place.

    Raises:
        CheckpointError: there is another number of ranks, whose sums would mean another thing.
    """
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        kept, place = folder.layout, folder.place
        names = [tensor_name(number, "partial") for number in range(len(folder.layout.flats))]
        any_held = any(name in record.tensors for record in folder.manifest.files for name in names)
        if any_held and not folder.as_many:
            raise CheckpointError(
                f"Cannot load {folder.path}. Expected as many ranks as saved, {len(kept.data[0])} x {kept.tp} (data x tp), "
                f"because gradients accumulated inside no_sync differ per rank, found {place.data_world} x {place.tp_world}. "
                "Load it on as many, or save after an accumulation has ended."
            )
        rows = folder.own["partials"]
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


def _check_flat_states(saved: Saved, states: Sequence[OptimizerStates]) -> dict[int, list[FlatState]]:
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
        for number, which, packed, name, held in folder.own["states"]:
            key, dtype = unpacker.unpack(packed), folder.entry(folder.counterpart, name).dtype
            require(name == state_name(number, which, key, dtype), f"the name of a state of {dtype}")
            for param in _indices(folder, number, held):
                if param.name not in saved.params:
                    continue
                expect(folder, folder.counterpart, name, dtype, (param.flat.shard_numel,))
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


def _check_narrower(loading: Loading) -> None:
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


# Stages of a pipeline.


def check_stages(comm: Comm, loading: Loading) -> None:
    """Whether stages take all of what they load between them: see Note [Own folders or common ones].  Collective over pp.

    Raises:
        CheckpointError: neither; on the ranks of every stage.
    """
    axis = comm.pp.axis
    if axis.world == 1:
        return
    rows = _rows(loading)
    each, left = _every_stage(comm, loading, sum(not taken for _, _, taken in rows))
    if sum(map(len, each)) == len(frozenset().union(*each)) and not left:
        return
    problem = "different folders on some stages" + (", with tensors that the loading stage does not have" if left else "")
    if len(set(each)) == 1:
        counts = torch.tensor([taken for _, _, taken in rows], dtype=torch.int64, device="cpu")
        comm.pp.all_reduce(Call(CONTROL, "load: names", "all stages"), counts, "sum")
        found = list(zip(rows, counts.tolist(), strict=True))
        lost = [f"{kind} {name} in no stage" for (kind, name, _), count in found if count == 0]
        twice = [f"parameter {name} in more than one stage" for (kind, name, _), n in found if n > 1 and kind == "parameter"]
        problem = next(iter(twice + lost), "")
    if problem:
        raise CheckpointError(
            f"Cannot load {loading.folders[0].path}. Expected each stage's own folder, or the same folders on all stages with "
            f"each parameter in one stage, under the name it was saved with, found {problem}. Use the same module names in all "
            "stages and in the whole model."
        )


def _every_stage(comm: Comm, loading: Loading, left: int) -> tuple[list[frozenset[int]], int]:
    """Which folders each stage loads, and how much is left over in all.  Collective over pp."""
    axis, call = comm.pp.axis, Call(CONTROL, "load: folders", "all stages")
    mine = [text_digest(folder.manifest.token) for folder in loading.folders]
    most = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
    comm.pp.all_reduce(call, most, "max")
    tokens = torch.zeros(axis.world, int(most.item()) + 2, dtype=torch.int64, device="cpu")
    tokens[axis.rank] = torch.tensor([left, len(mine), *mine, *[0] * (int(most.item()) - len(mine))], device="cpu")
    comm.pp.all_reduce(call, tokens, "sum")
    rows = tokens.tolist()
    return [frozenset(row[2 : 2 + row[1]]) for row in rows], sum(row[0] for row in rows)


def _rows(loading: Loading) -> list[tuple[str, str, bool]]:
    """What the folders hold that belongs to a stage: its kind, its name, and whether this stage takes it; in one order."""
    saved: dict[str, set[str]] = {"parameter": set(), "buffer": set(), "extra state": set()}
    for folder in loading.folders:
        saved["parameter"] |= folder.params.keys()
        saved["buffer"] |= folder.own["buffers"].keys()
        saved["extra state"] |= folder.own["modules"].keys()
    taken = {"parameter": loading.values, "buffer": loading.buffers, "extra state": loading.modules}
    return [(kind, name, name in taken[kind]) for kind, names in saved.items() for name in sorted(names)]
