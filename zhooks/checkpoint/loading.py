"""Whether saved folders can be loaded into the run, and loading them: everything is read and compared before anything changes.

Note: [By name]
    A parameter's value, gradient and states are looked for by its name, whatever flat buffer, file or folder they lie in.
    What is each rank's own (buffers, random states, objects) comes from the file that stands for this rank, of the folder of
    its stage; what is a parameter's but not divided (a step), from that file of the parameter's folder.

Note: [Own folders or common ones]
    Either each stage loads folders of its own and takes all that is in them, or all stages load the same ones and divide what
    is in them.  A stage sees only what it takes itself: what none takes, or two take for theirs, shows in the sum over stages.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from offload.errors import BudgetError, CheckpointError
from offload.shards import CHUNK
from offload.tier import Tier
from zhooks.checkpoint.load_optimizers import check_optimizers, new_range
from zhooks.checkpoint.saved_folder import (
    InFlat,
    Run,
    Saved,
    SavedFolder,
    another,
    find_params,
    pour,
    refuse_folders,
    runs,
    tagged,
)
from zhooks.checkpoint.shard import (
    Document,
    RunState,
    SavedOptimizer,
    SavedRounding,
    buffer_name,
    extra_states,
    gradient_name,
    kept_whole,
    tensor_name,
)
from zhooks.checkpoint.whole_values import check_left_out, check_writable, plain_of
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import part_of
from zhooks.rng import check as check_generators
from zhooks.rng import derived, restore
from zhooks.tensor import ParamShard, ShardedTensor
from zhooks.unit import Flat


class Loading:
    """Folders that fit the run: found and compared when it is made, with nothing changed; then handed over and applied.

    Attributes:
        folders: all that are loaded from, the first one's loss scale too.
        nbytes: of the files that this rank verified.
        values, gradients, partials: where they are, by name of the parameter; of gradients those that are held.
        buffers: the folder and the file of each, by name.
        ignored: the folder of the gradient of each ignored parameter that has one.
        rng: the states of the rank at this place; {} leaves generators as they are.
        extra: what the user gave to the save.
    Raises:
        CheckpointError, ValueError, KeyError, TypeError, IndexError: they cannot be loaded here.
    """

    def __init__(self, run: RunState, folders: Sequence[SavedFolder]) -> None:
        self.run, self.folders = run, folders
        saved = find_params(run, folders)
        axis, self.nbytes = run.comm.stage.axis, 0
        for folder in folders:
            wanted = {param.flat.number for found, param in saved.params.values() if found is folder}
            skip = [flat.number for flat in folder.layout.flats if flat.number not in wanted]
            self.nbytes += folder.verify(axis.rank, axis.world, skip)
        _check_alike(saved)
        left_out = {name: value for folder in folders for name, value in folder.own.left_out.items()}
        if saved.in_stages:
            left_out = {name: value for name, value in left_out.items() if name in run.ignored.frozen}
        check_left_out(run.ignored, left_out, "load")
        self.optimizers = check_optimizers(saved)
        self.modules = _modules(saved)
        unpacker, main = saved.unpacker(saved.main), saved.main
        self.extra = _dict(unpacker.unpack(main.own.extra), "extra") if main.extra is None else main.extra
        self.values = {
            name: InFlat(folder, param, param.flat.tensor) for name, (folder, param) in saved.params.items()
        }
        self.buffers = _buffers(saved)
        self.ignored = _ignored_gradients(saved)
        self.gradients = _gradients(saved)
        self.partials = _partials(saved)
        self.objects = _objects(saved)
        self.rng = _random_states(saved)
        self.rounding = _rounding(saved)
        self._check_narrower()
        check_writable("load", kept_whole(run, "load"))
        try:
            run.check_room(self._new_states())
        except BudgetError as error:
            raise CheckpointError(
                f"Cannot load {folders[0].path}. Expected memory for the optimizer's states on their tiers, found: {error}. "
                "Nothing was loaded."
            ) from error

    def _new_states(self) -> Counter[Tier]:
        """Bytes of states that loading makes, by the tier that they go to."""
        needed = Counter[Tier]()
        for states in self.optimizers:
            held_here = states.optimizer.state
            for number, kinds in states.flats.items():
                flat = self.run.flats[number]
                for (key, dtype), held in kinds.items():
                    # Where one parameter's lies on the tier there is room for all of its flat buffer.
                    here = [held_here.get(flat.params[index], {}).get(key) for index in held]
                    if not any(isinstance(state, ShardedTensor) and state.local_shard.block is not None for state in here):
                        needed[flat.kind.tiers.optimizer] += flat.shard_numel * dtype.itemsize
            for param, nbytes in states.owned_nbytes.items():
                if param not in held_here:
                    tiers = [flat.kind.tiers.optimizer for flat in self.run.flats if any(param is one for one in flat.params)]
                    needed.update(dict.fromkeys(tiers, nbytes))
        return needed

    def _check_narrower(self) -> None:
        """What is converted to a dtype of a smaller range fits it, this rank's ranges of values, gradients and states."""
        for number, flat in enumerate(self.run.flats):
            kinds = [kind for states in self.optimizers for kind in states.flats.get(number, {}).items()]
            for index, spec in enumerate(flat.specs):
                found = [(each[spec.name], flat.kind.master) for each in (self.values, self.gradients) if spec.name in each]
                found += [(held[index], dtype) for (_, dtype), held in kinds if index in held]
                for where, dtype in found:
                    _check_fits(where, spec, dtype)

    def hand_over(self, undo: ExitStack) -> None:
        """Give objects and modules their own states, which they alone can refuse; ``undo`` gives back what they had.

        Raises:
            CheckpointError: one refused.
        """
        given = self.run.objects or {}
        pairs: list[tuple[str, Any, Any, Any]] = [
            (f"objects[{name!r}]", given[name].state_dict, given[name].load_state_dict, state)
            for name, state in self.objects.items()
        ]
        for name, module in extra_states(self.run.model).items():
            pairs.append((f"extra state of {name}", module.get_extra_state, module.set_extra_state, self.modules[name]))
        for name, get, put, state in pairs:
            old = copy.deepcopy(get())
            try:
                put(state)
            except Exception as error:
                with suppress(Exception):
                    # Who refuses one state half-way may refuse its own, too.
                    put(old)
                raise CheckpointError(
                    f"Cannot load {self.folders[0].path}. Expected states that their objects accept, found that {name} rejects "
                    f"its own: {type(error).__name__}: {error}. Pass the objects that were saved, or load another checkpoint."
                ) from error
            undo.callback(put, old)

    def apply(self) -> None:
        """Load everything else, the random states last.

        Raises:
            CheckpointError: the file cannot be read a second time; the run is partly loaded.
        """
        run, bus = self.run, self.run.bus
        with torch.inference_mode(False), torch.no_grad():
            for number, flat in enumerate(run.flats):
                nbytes = flat.shard_numel * flat.kind.master.itemsize
                bus.begin("load", flat.name, nbytes)
                values = {index: self.values[spec.name] for index, spec in enumerate(flat.specs)}
                _fill(flat.storage.overwritten(), flat, values)
                flat.written()
                with torch._C.DisableTorchFunctionSubclass():
                    for param in flat.params:
                        param.grad = None
                    self._load_partial(flat)
                    self._load_gradient(flat)
                for states in self.optimizers:
                    states.load_flat(number, flat)
                run.landed(flat)
                bus.end("load", flat.name, nbytes)
            for name, value in kept_whole(run, "load").items():
                folder, rank = self.buffers[name]
                value.copy_(folder.reader(rank).tensor(buffer_name(name)))
            for name, param in plain_of(run.ignored, "load").items():
                param.grad = None
                if name in self.ignored:
                    param.grad = torch.empty_like(param)
                    folder = self.ignored[name]
                    part_of(param.grad).copy_(folder.reader(folder.counterpart).tensor(gradient_name(name)))
        for states in self.optimizers:
            states.finish(run)
        if self.rng:
            restore(self.rng, run.devices)
        if self.rounding is not None:
            run.rounding.restore({"seed": self.rounding.seed, "counts": self.rounding.counts})

    def _load_gradient(self, flat: Flat) -> None:
        held = {index: self.gradients[spec.name] for index, spec in enumerate(flat.specs) if spec.name in self.gradients}
        if not held:
            return
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is not None and (shard := gradient.reserve()) is not None:
            try:
                _fill(shard.overwritten(), flat, held)
                for index in held:
                    flat.params[index].grad = gradient.claim(index)
            finally:
                gradient.hand_over()
            return
        grads = {index: new_range(flat, index, flat.kind.master) for index in held}
        pour(run for index, grad in grads.items() for run in runs(held[index], flat.specs[index], grad.local_shard.values))
        for index, grad in grads.items():
            flat.params[index].grad = grad

    def _load_partial(self, flat: Flat) -> None:
        """What ``no_sync`` had held back on this rank: the next backward adds to it."""
        gradient = self.run.reducer.gradients.get(flat.number)
        if gradient is None:
            return
        gradient.resume(None, [False] * len(flat.params))
        held = [self.partials.get(spec.name) for spec in flat.specs]
        if any(held):
            partial = gradient.buffer(flat.layout.padded).zero_()
            places = zip(held, flat.layout.starts, flat.layout.numels, strict=True)
            pour(
                Run(found.folder, found.folder.counterpart, found.name, found.param.saved.start, partial[start : start + numel])
                for found, start, numel in places
                if found is not None
            )
            gradient.resume(partial, [found is not None for found in held])


def _fill(shard: Tensor, flat: Flat, held: Mapping[int, InFlat]) -> None:
    """Overwrite all of a shard-sized tensor: these parameters' ranges, and zeros where nothing is."""
    if len(held) < len(flat.params) or sum(flat.span(index)[1] for index in held) < shard.numel():
        shard.zero_()
    pour(run for index, found in held.items() for run in runs(found, flat.specs[index], flat.local(index, shard)))


def _check_fits(where: InFlat, spec: ParamShard, dtype: torch.dtype) -> None:
    folder, saved = where.folder, where.dtype
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


# What all files that ranges are read from have alike.


def _check_alike(saved: Saved) -> None:
    """They hold the same gradients and states, in tensors of the same kinds, and the same plain tensors among the states: of a
    rank's own range, nobody could divide these.

    Raises:
        CheckpointError: a file differs from the one that stands for this rank.
    """
    for folder in saved.folders:
        mine, counterpart, used, prefixes = folder.own, folder.counterpart, set[int](), set[str]()
        for name, (found, param) in saved.params.items():
            if found is folder:
                prefixes.add(tensor_name(param.flat.number, ""))
                used |= {folder.rank_at(tp, shard) for tp, shard, _, _ in param.runs(saved.specs[name])}
        # Sums inside no_sync are each rank's own.
        ranges = [
            (name, entry)
            for name, entry in folder.reader(counterpart).entries.items()
            if name.startswith(tuple(prefixes)) and not name.endswith("/partial")
        ]
        optimizers, files = _common(mine) if saved.run.optimizers else [], folder.manifest.files
        plain = [found["tensor"] for found in tagged("tensor", [one.entries for one in optimizers])]
        for rank in sorted(used - {counterpart}):
            theirs = folder.document(rank)
            for name, entry in ranges:
                folder.expect(rank, name, entry.dtype, entry.shape)
            differ = ""
            if any(files[rank].tensors.get(name) != files[counterpart].tensors.get(name) for name in plain):
                differ = "the same plain tensors among the states of an optimizer"
            if optimizers and _common(theirs) != optimizers:
                differ = "the same options and counts of optimizers"
            for what in ("states", "gradients"):
                if getattr(theirs, what) != getattr(mine, what):
                    differ = f"{what} of the same parameters"
            if differ:
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected all ranks to have saved {differ}, found a difference between rank "
                    f"{rank} and rank {counterpart}, so that it cannot be resharded. Load it on the mesh it was saved on."
                )


def _common(document: Document) -> list[SavedOptimizer]:
    """What one file says of optimizers, but for what the owner of a parameter alone has."""
    out = []
    for one in document.optimizers:
        owned = {(group, index) for group, index, _ in one.owners}
        entries = [entry for entry in one.entries if (entry[0], entry[1]) not in owned]
        out.append(one.model_copy(update={"entries": entries, "loose": None}))
    return out


# What is no optimizer's, kind by kind.


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: not a dict")
    return value


def _same_names(what: str, saved: Iterable[str], here: Iterable[str], advice: str) -> None:
    saved, here = set(saved), set(here)
    if saved != here:
        sides = ((saved - here, "in the checkpoint"), (here - saved, "here"))
        found = "; ".join(f"{', '.join(sorted(only))} only {where}" for only, where in sides if only)
        raise CheckpointError(f"load expected the same {what} here as in the checkpoint, found {found}. {advice}")


def _buffers(saved: Saved) -> dict[str, tuple[SavedFolder, int]]:
    """Where each buffer and ignored parameter is: folder and file."""
    run = saved.run
    buffers, left = kept_whole(run, "load"), plain_of(run.ignored, "load")
    where: dict[str, tuple[SavedFolder, int]] = {}
    for folder in saved.folders:
        for name, own in folder.own.buffers.items():
            at = folder, folder.counterpart if own else 0
            if name in where and _digest(*where[name], name) != _digest(*at, name):
                raise refuse_folders(f"buffer {name} in two of them, with different values")
            where.setdefault(name, at)
    if saved.in_stages:
        where = {name: at for name, at in where.items() if name in buffers}
    what, advice = "buffers", "Build the same model."
    if run.ignored:
        what, advice = "buffers and ignored parameters", "Build the same model, with the same [units] ignore."
    _same_names(what, where, buffers, advice)
    for name, buffer in buffers.items():
        folder, rank = where[name]
        kept = folder.layout
        every = range(folder.manifest.world)
        if name in left and not folder.as_many and len({_digest(folder, each, name) for each in every}) > 1:
            raise _of_each_rank(folder, f"parameters in [units] ignore ({name})")
        folder.expect(rank, buffer_name(name), buffer.dtype, tuple(buffer.shape))
        if kept.tp != folder.place.tp_world:
            data = next(row.index(rank) for row in kept.data if rank in row)
            if len({_digest(folder, kept.data[tp][data], name) for tp in range(kept.tp)}) > 1:
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected the same buffers on all {kept.tp} tp ranks, because buffers are not "
                    f"resharded, found different values of {name}. Load it with as many tp ranks."
                )
    return where


def _digest(folder: SavedFolder, rank: int, name: str) -> str | None:
    files = folder.manifest.files
    return files[rank].tensors.get(buffer_name(name)) or files[0].tensors.get(buffer_name(name))


def _of_each_rank(folder: SavedFolder, what: str) -> CheckpointError:
    """Other ranks than saved cannot each have what was a rank's own."""
    data, place = folder.layout.data, folder.place
    return CheckpointError(
        f"Cannot load {folder.path}. Expected as many ranks as saved, {len(data[0])} x {len(data)} (data x tp), because each "
        f"rank has its own {what}, found {place.data_world} x {place.tp_world}. Load it on as many."
    )


def _ignored_gradients(saved: Saved) -> dict[str, SavedFolder]:
    """Which ignored parameters have gradients, and where."""
    params = plain_of(saved.run.ignored, "load")
    found: dict[str, SavedFolder] = {}
    for folder in saved.folders:
        held = any(name.startswith(gradient_name("")) for record in folder.manifest.files for name in record.tensors)
        if held and not folder.as_many:
            raise _of_each_rank(folder, "gradients of parameters in [units] ignore")
        for name in folder.own.ignored_gradients:
            if name in params:
                part = part_of(params[name])
                folder.expect(folder.counterpart, gradient_name(name), part.dtype, tuple(part.shape))
                found[name] = folder
            elif not saved.in_stages:
                raise ValueError(f"the gradient of {name}, which is not ignored")
    return found


def _modules(saved: Saved) -> dict[str, Any]:
    here, found = extra_states(saved.run.model), dict[str, Any]()
    for folder in saved.folders:
        unpacker = saved.unpacker(folder)
        for name, packed in folder.own.modules.items():
            if name in found:
                raise refuse_folders(f"an extra state of {name or 'the root'} in two of them")
            found[name] = unpacker.unpack(packed)
    if saved.in_stages:
        found = {name: state for name, state in found.items() if name in here}
    _same_names("extra states of modules", found, here, "Build the same model.")
    return found


def _objects(saved: Saved) -> dict[str, Any]:
    given, kept = saved.run.objects, saved.main.own.objects
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


def _random_states(saved: Saved) -> dict[str, Any]:
    """The states of the rank at this place; where there was none, states made of those of the one that stands for it.

    {} where the checkpoint has none at all.
    """
    main, place, devices = saved.main, saved.main.place, saved.run.devices
    if main.extra is not None:
        return {}
    states = _dict(saved.unpacker(main).unpack(main.own.rng), "rng")
    check_generators(states, devices)
    new_stage = place.stage >= len(saved.folders) > 1
    if main.same_place and not new_stage:
        return states
    made = derived(states, devices, f"data {place.data} stage {place.stage if new_stage else 0}")
    check_generators(made, devices)
    return made


def _rounding(saved: Saved) -> SavedRounding | None:
    found = [each for folder in saved.folders if isinstance(each := folder.own.rounding, SavedRounding)]
    seeds = {each.seed for each in found}
    if len(seeds) > 1:
        raise refuse_folders(f"stochastic rounding with different seeds {sorted(seeds)}")
    counts = {name: count for each in found for name, count in each.counts.items()}
    return SavedRounding(seed=found[0].seed, counts=counts) if found else None


def _gradients(saved: Saved) -> dict[str, InFlat]:
    """The gradients that were held, by name of the parameter."""
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        for number, (held, members) in enumerate(zip(folder.own.gradients, folder.members, strict=True)):
            for param in [members[index] for index in held or () if members[index].name in saved.params]:
                found[param.name] = where = InFlat(folder, param, tensor_name(number, "gradient"))
                folder.expect(folder.counterpart, where.name, param.flat.dtype, (param.flat.shard_numel,))
    return found


def _partials(saved: Saved) -> dict[str, InFlat]:
    """The sums that ``no_sync`` held back on the rank at this place; among other ranks they would mean another thing."""
    found: dict[str, InFlat] = {}
    for folder in saved.folders:
        kept, place = folder.layout, folder.place
        names = [tensor_name(number, "partial") for number in range(len(kept.flats))]
        if not folder.as_many and any(name in record.tensors for record in folder.manifest.files for name in names):
            raise CheckpointError(
                f"Cannot load {folder.path}. Expected as many ranks as saved, {len(kept.data[0])} x {kept.tp} (data x tp), "
                f"because gradients accumulated inside no_sync differ per rank, found {place.data_world} x {place.tp_world}. "
                "Load it on as many, or save after an accumulation has ended."
            )
        for name, present, members in zip(names, folder.own.partials, folder.members, strict=True):
            for param, there in zip(members, present or [False] * len(members), strict=True):
                if not there or param.name not in saved.params:
                    continue
                spec, where = saved.specs[param.name], InFlat(folder, param, name)
                here = (None, 1) if spec.place is None else spec.place[0::2]
                if here != (param.saved.dim, param.saved.count):
                    raise another(saved.folders, f"partial sums of {param.name}, which is divided differently over tp")
                folder.expect(folder.counterpart, name, where.dtype, (param.flat.padded,))
                if not where.dtype.is_floating_point:
                    raise ValueError(f"{name} of {where.dtype}")
                found[param.name] = where
    return found


# Stages of a pipeline.


def check_stages(comm: Comm, loading: Loading) -> None:
    """Whether stages take all of what they load between them: see Note [Own folders or common ones].  Collective over pp.

    Raises:
        CheckpointError: neither; on the ranks of every stage.
    """
    if comm.pp.axis.world == 1:
        return
    saved: dict[str, set[str]] = {"parameter": set(), "buffer": set(), "extra state": set()}
    for folder in loading.folders:
        saved["parameter"] |= folder.params.keys()
        saved["buffer"] |= folder.own.buffers.keys()
        saved["extra state"] |= folder.own.modules.keys()
    taken: dict[str, Mapping[str, Any]] = {
        "parameter": loading.values, "buffer": loading.buffers, "extra state": loading.modules
    }  # fmt: skip
    rows = [(kind, name) for kind, names in saved.items() for name in sorted(names)]
    mine = [[folder.manifest.token for folder in loading.folders], [int(name in taken[kind]) for kind, name in rows]]
    every = [json.loads(text) for text in ControlPlane(comm.pp, "load: folders", "all stages").texts(json.dumps(mine))]
    folders, flags = [frozenset(tokens) for tokens, _ in every], [flags for _, flags in every]
    left = not all(map(all, flags))
    if sum(map(len, folders)) == len(frozenset().union(*folders)) and not left:
        return
    problem = "different folders on some stages" + (", with tensors that the loading stage does not have" if left else "")
    if len(set(folders)) == 1:
        counts = list(zip(rows, map(sum, zip(*flags, strict=True)), strict=True))
        twice = [f"parameter {name} in more than one stage" for (kind, name), n in counts if n > 1 and kind == "parameter"]
        lost = [f"{kind} {name} in no stage" for (kind, name), count in counts if count == 0]
        problem = next(iter(twice + lost), "")
    if problem:
        raise CheckpointError(
            f"Cannot load {loading.folders[0].path}. Expected each stage's own folder, or the same folders on all stages with "
            f"each parameter in one stage, under the name it was saved with, found {problem}. Use the same module names in all "
            "stages and in the whole model."
        )
