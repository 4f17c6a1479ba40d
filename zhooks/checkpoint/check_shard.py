"""Whether saved folders can be loaded into the run: everything is read and compared, nothing is changed.

``save_load.py`` calls ``check`` on every rank; what it returns, ``load_shard.py``, is applied when all ranks found nothing
wrong.  It never writes to the run.

Note: [By name]
    A parameter's value, gradient and states are looked for by its name, whatever flat buffer, file or folder they lie in.
    What is each rank's own (buffers, random states, objects) comes from the file that stands for this rank, of the folder of
    its stage; what is a parameter's but not divided (a step), from that file of the parameter's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from offload.errors import BudgetError, CheckpointError
from zhooks.checkpoint.check_optimizers import Source, check_optimizers, require
from zhooks.checkpoint.check_states import check_flat_states, check_gradients, check_narrower, check_partials
from zhooks.checkpoint.ignored_values import check_left_out, check_writable, plain_of
from zhooks.checkpoint.load_shard import Loading
from zhooks.checkpoint.rng import check as check_generators
from zhooks.checkpoint.rng import derived
from zhooks.checkpoint.saved_files import InFlat, SavedFolder, refuse_folders
from zhooks.checkpoint.saved_run import Saved, check_alike, expect, find_params
from zhooks.checkpoint.shard_contents import (
    RunState,
    buffer_name,
    extra_states,
    gradient_name,
    kept_whole,
    tensor_name,
)
from zhooks.layout import part_of

__all__ = ["check"]


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
    check_left_out(run.ignored, _only_here(run, _union(saved, "left out", {}), run.ignored.frozen), "load")
    states = check_optimizers(run, [_source(saved, folder) for folder in folders])
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
        gradients=check_gradients(saved),
        partials=check_partials(saved),
        states=states,
        flat_states=check_flat_states(saved, states),
        modules=modules,
        objects=_check_objects(saved),
        rng=_check_random(saved),
        rounding=_check_rounding(saved),
        extra=extra,
    )
    check_narrower(loading)
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


def _union(saved: Saved, what: str, missing: Any = None) -> dict[str, Any]:
    """What the folders say by name, one after the other."""
    found: dict[str, Any] = {}
    for folder in saved.folders:
        document = saved.document(folder)
        found |= document[what] if missing is None else document.get(what, missing)
    return found


def _only_here(run: RunState, found: dict[str, Any], here: Iterable[str]) -> dict[str, Any]:
    names = set(here)
    return {name: value for name, value in found.items() if name in names} if run.comm.pp.axis.world > 1 else found


def _check_buffers(saved: Saved) -> dict[str, tuple[SavedFolder, int]]:
    """Where each buffer and ignored parameter is: folder and file."""
    run = saved.run
    buffers = kept_whole(run, "load")
    where: dict[str, tuple[SavedFolder, int]] = {}
    for folder in saved.folders:
        for name, own in saved.document(folder)["buffers"].items():
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
        kept = folder.layout.places
        if kept.tp != folder.place.own.tp:
            data = next(row.index(rank) for row in kept.data if rank in row)
            if len({_digest(folder, kept.data[tp][data], name) for tp in range(kept.tp)}) > 1:
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected the same buffers on all {kept.tp} tp ranks, because buffers are not "
                    f"resharded, found different values of {name}. Load it with as many tp ranks."
                )
    return where


def _of_each_rank(folder: SavedFolder, what: str) -> CheckpointError:
    """Other ranks than saved cannot each have what was a rank's own."""
    data, place = folder.layout.places.data, folder.place
    return CheckpointError(
        f"Cannot load {folder.path}. Expected as many ranks as saved, {len(data[0])} x {len(data)} (data x tp), because each "
        f"rank has its own {what}, found {place.data_world} x {place.own.tp}. Load it on as many."
    )


def _digest(folder: SavedFolder, rank: int, name: str) -> str | None:
    tensors = folder.manifest.files[rank].tensors
    return tensors.get(buffer_name(name)) or folder.manifest.files[0].tensors.get(buffer_name(name))


def _check_ignored(saved: Saved) -> dict[str, SavedFolder]:
    """Which ignored parameters have gradients, and where."""
    params = plain_of(saved.run.ignored, "load")
    found: dict[str, SavedFolder] = {}
    for folder in saved.folders:
        names = saved.document(folder).get("ignored gradients", [])
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
        for name, packed in saved.document(folder)["modules"].items():
            if name in found:
                raise refuse_folders(f"an extra state of {name or 'the root'} in two of them")
            found[name] = unpacker.unpack(packed)
    here = extra_states(saved.run.model)
    _same_names("extra states of modules", found, here, "Build the same model.", part=_in_stages(saved))
    return {name: found[name] for name in here}


def _check_objects(saved: Saved) -> dict[str, Any]:
    given, kept = saved.run.objects, saved.document(saved.main)["objects"]
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
        state = saved.document(folder).get("rounding", {})
        require(isinstance(state, dict), "the state of rounding")
        if state:
            require(state.keys() == {"seed", "counts"} and isinstance(state["counts"], dict), "the state of rounding")
            require(all(type(count) is int and count >= 0 for count in (state["seed"], *state["counts"].values())), "counts")
            seeds.add(state["seed"])
            counts |= state["counts"]
    if len(seeds) > 1:
        raise refuse_folders(f"stochastic rounding with different seeds {sorted(seeds)}")
    return {"seed": seeds.pop(), "counts": counts} if seeds else {}


def _source(saved: Saved, folder: SavedFolder) -> Source:
    return Source(folder, saved.document(folder)["optimizers"], saved.unpacker)
