"""Reads the files of a ZeRO checkpoint, or of a universal one, into what `SavedRun` describes.

Every size is compared with the shapes that the checkpoint states before anything is read by them.

Note: [Stages 1 and 2]
    Each group of the optimizer is one flat vector of its parameters, in the order in which their shapes are listed, cut into
    as many partitions as ranks; each rank's file has its partition of the fp32 masters and of each state.  It says where
    parameters are, too (``param_slice_mappings``), but under ``round_robin_gradients`` as if they had not been reordered: that
    is not believed.  Frozen parameters are in the model states: whole at stage 2 on their own, at stage 1 among the module's.

Note: [Stage 3]
    Each parameter is cut into as many partitions as ranks, all of ceil(numel / ranks) elements, the last ones padded.  A rank's
    sub-group is one flat vector of its partitions of the sub-group's parameters, in their order.

Note: [Universal]
    A universal checkpoint has a folder a parameter, with its master and each state whole.  What the shapes of the model states
    name is opened, and nothing else.

Source: ZeRO, arXiv:1910.02054, and Universal Checkpointing, arXiv:2406.18820; the files as DeepSpeed 0.19 writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.deepspeed.folder import Files, find, is_file_of_rank, list_files, refused
from offload.deepspeed.saved import VALUE, SavedRun, SavedTensor, Values, plain_data
from offload.torchfiles import Made, PickleError, Stored, TorchFile

__all__ = ["read"]

_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info",
})  # fmt: skip
_NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32)
#: Partitions begin on multiples of so many elements.
_ALIGNED = 2
#: Elements at either end of a parameter that are compared with the module's.
_COMPARED = 64
#: What model states of one save say alike.
_STEPS = ("global_steps", "global_samples", "skipped_steps")
_ABOUT = ("ds_version", "global_steps", "global_samples", "skipped_steps", "lr_scheduler")


def read(folder: Path) -> SavedRun:
    """What the checkpoint in ``folder`` holds, or the one there that ``latest`` names; no values are read.

    Raises:
        CheckpointError: there is none, it contradicts itself, or it is of a kind that is not read.
    """
    path = find(folder)
    files = list_files(path)
    try:
        return _read(files)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, PickleError) as error:
        raise refused(path, f"files that contradict themselves ({type(error).__name__}: {error})"[:300]) from error


def _read(files: Files) -> SavedRun:
    models = [TorchFile(path) for path in files.model]
    model = models[0].root
    if not isinstance(model, dict) or not isinstance(model.get("module"), dict) or model.get("param_shapes") is None:
        raise refused(files.path, f"{files.model[0].name} without a module and shapes of a ZeRO optimizer's parameters")
    shapes = [_shapes(group) for group in model["param_shapes"]]
    for other in models[1:]:
        if [_shapes(group) for group in other.root["param_shapes"]] != shapes:
            raise refused(files.path, f"different parameters in {other.path.name} and in {files.model[0].name}")
        if any(_step(other.root, key) != _step(model, key) for key in _STEPS):
            raise refused(files.path, f"{other.path.name} of a different step than {files.model[0].name}")
    trained = {name for group in shapes for name in group}
    if sum(map(len, shapes)) != len(trained):
        raise refused(files.path, "a parameter that is listed twice")
    if files.universal:
        stage, params, groups, opened = _universal(files, shapes)
    else:
        opened = [TorchFile(path) for path in files.optim]
        stage, params, groups = _optimizer(files, opened, shapes)
    # An archive says what its file was called when it was written: two ranks' files that have changed places would be
    # loaded without a word else, where partitions are of one length.
    for file in [*models, *(() if files.universal else opened)]:
        if is_file_of_rank(f"{file.archive}.pt") and file.archive != file.path.stem:
            raise refused(files.path, f"{file.path.name}, which was written as {file.archive}.pt")
    for param in params.values():
        _compare(files, param, model["module"].get(param.name))
    frozen = _frozen(files, models, trained, stage)
    params |= {name: param for name, param in frozen.items() if name not in params}
    buffers = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
    if not all(isinstance(buffer, Stored) for buffer in buffers.values()):
        raise refused(files.path, "buffers that are not tensors")
    about = {key: plain_data(model.get(key)) for key in _ABOUT}
    client = {str(key): plain_data(value) for key, value in model.items() if key not in _OWN}
    tied = dict(model.get("shared_params") or {})
    ranks = model["dp_world_size"] if files.universal else len(files.optim)
    if type(ranks) is not int or not all(isinstance(of, str) for of in tied.values()):
        raise ValueError("an invalid number of ranks, or invalid tied names")
    return SavedRun(
        files.path, stage, files.universal, ranks, params, buffers, tied, groups, client, about, [*models, *opened]
    )


def _step(root: Any, key: str) -> int | None:
    found = root.get(key)
    return found if type(found) is int else None


def _shapes(group: Any) -> dict[str, tuple[int, ...]]:
    for name, shape in group.items():
        known = isinstance(name, str) and isinstance(shape, (tuple, list)) and len(shape) <= 64
        if not known or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
            raise ValueError("invalid shapes")
    return {name: tuple(shape) for name, shape in group.items()}


# The optimizer.


def _optimizer(
    files: Files, opened: Sequence[TorchFile], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[int, dict[str, SavedTensor], list[dict[str, Any]]]:
    """The stage, parameters by name and options of groups; see Note [Stages 1 and 2] and Note [Stage 3]."""
    states, ranks = [file.root["optimizer_state_dict"] for file in opened], len(opened)
    counts: set[Any] = set()
    for each in states:
        count = each["partition_count"]
        counts |= set(count) if isinstance(count, list) else {count}
    if not all(type(each) is int and 0 < each < 2**31 for each in counts):
        raise ValueError("an invalid count of partitions")
    if counts != {ranks}:
        raise refused(files.path, f"partitions over {sorted(counts)} ranks in {ranks} files of optimizer states")
    stage = _stage(states[0])
    if any(_stage(each) != stage for each in states):
        raise refused(files.path, "files of several stages")
    cut = stage == 3
    if cut and any("ds_zero_partition_groups" in each for each in states):
        raise refused(files.path, "experts, which are partitioned over fewer ranks")
    inner = [each["optimizer_state_dict" if cut else "base_optimizer_state"] for each in states]
    if not all(isinstance(each, dict) for each in inner):
        raise refused(files.path, "an elastic checkpoint, which DeepSpeed no longer supports")
    groups, owner = _groups(inner[0], set(range(len(shapes))))
    params: dict[str, SavedTensor] = {}
    for number, group in enumerate(shapes):
        masters = [each["fp32_flat_groups" if cut else "single_partition_of_fp32_groups"][number] for each in states]
        vectors, numbers = _vectors(files, masters, [each["state"].get(number, {}) for each in inner])
        paddings = None if cut else states[0].get("param_alignment_paddings")
        gaps = paddings[number] if paddings is not None else [0] * len(group)
        if not all(type(gap) is int and gap >= 0 for gap in gaps):
            raise ValueError("invalid paddings")
        # At stages 1 and 2 the last partition comes without its padding.
        partition, at = masters[0].numel, 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            numel = math.prod(shape)
            if cut:
                places = [(rank, at, count) for rank, count in enumerate(_shares(numel, ranks)) if count]
                at += -(-numel // ranks)
            else:
                places = list(_partitions(at, numel, partition, ranks))
                if sum(count for _, _, count in places) != numel:
                    raise refused(files.path, f"{partition} elements a partition of group {number}, too few for {name}")
                at += numel + gap
            values = {
                key: Values(tuple(_part(files, name, ones[rank], start, count) for rank, start, count in places))
                for key, ones in vectors.items()
            }
            for key, found in values.items():
                if found.numel != numel or len({each.dtype for each in found.parts}) > 1:
                    raise refused(files.path, f"{found.numel} elements of {name} ({key}) where its shape has {numel}")
            params[name] = SavedTensor(name, shape, owner[number], values, numbers)
        if not cut and ranks > 1 and not 0 <= partition * ranks - at < _ALIGNED * ranks:
            raise refused(files.path, f"{ranks} partitions of {partition} elements for the {at} of group {number}")
        for key, ones in vectors.items() if cut else ():
            if any(one.numel != at for one in ones):
                raise refused(files.path, f"{ones[0].numel} elements of {key} in sub-group {number}, where {at} should be")
    return stage, params, groups


def _shares(numel: int, ranks: int) -> list[int]:
    """The elements of a parameter that each rank has at stage 3."""
    most = -(-numel // ranks)
    return [max(0, min(most, numel - rank * most)) for rank in range(ranks)]


def _partitions(at: int, numel: int, partition: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """In which partitions elements of a flat vector are: (rank, start, numel)."""
    end = at + numel
    while at < end and partition and at // partition < ranks:
        rank, start = divmod(at, partition)
        count = min(partition - start, end - at)
        yield rank, start, count
        at += count


def _stage(state: Mapping[str, Any]) -> int:
    """BF16_Optimizer, which is stage 1, does not say."""
    found = state.get("zero_stage", 1)
    number = found.args[0] if isinstance(found, Made) and str(found.what).endswith(".ZeroStageEnum") else found
    if type(number) is not int or number not in (1, 2, 3):
        raise ValueError("an invalid stage")
    return number


def _groups(inner: Mapping[str, Any], numbers: set[int]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The options of each group, and the group of each flat vector."""
    options: list[dict[str, Any]] = []
    owner: dict[int, int] = {}
    for number, group in enumerate(inner["param_groups"]):
        vectors = group["params"]
        if not isinstance(vectors, list) or not all(type(each) is int for each in vectors):
            raise ValueError("a group of the optimizer whose vectors are not numbers")
        owner |= dict.fromkeys(vectors, number)
        options.append({str(key): plain_data(value) for key, value in group.items() if key != "params"})
    if owner.keys() != numbers:
        raise ValueError(f"groups of the vectors {sorted(owner)[:8]} where there are {len(numbers)}")
    return options, owner


def _vectors(
    files: Files, masters: Sequence[Stored], states: Sequence[Any]
) -> tuple[dict[str, list[Stored]], dict[str, float]]:
    """Of one flat vector, by name: the ranks' partitions, and states of one number."""
    vectors: dict[str, list[Stored]] = {VALUE: list(masters)}
    numbers: dict[str, float] = {}
    keys = [set(each) for each in states]
    if any(each != keys[0] for each in keys):
        raise refused(files.path, "different optimizer states on some ranks")
    for key in sorted(map(str, keys[0])):
        found = [each[key] for each in states]
        if key == VALUE:
            raise refused(files.path, f"an optimizer state called {key}")
        if all(isinstance(one, Stored) and one.shape for one in found):
            vectors[key] = found
            continue
        plain_numbers = {_number(one) for one in found}
        if len(plain_numbers) != 1:
            raise refused(files.path, f"{key} of the optimizer, which differs between ranks")
        numbers[key] = plain_numbers.pop()
    for key, ones in vectors.items():
        if not all(len(one.shape) == 1 and one.dtype.is_floating_point for one in ones):
            raise refused(files.path, f"{key} of the optimizer, which is not a flat vector of the parameters")
    return vectors, numbers


def _number(value: Any) -> float:
    if isinstance(value, Stored) and value.numel == 1 and value.dtype in _NUMBERS:
        return float(value.tensor().reshape(()))
    if type(value) in (int, float):
        return float(value)
    raise ValueError("a state that is neither a vector nor a number")


def _part(files: Files, name: str, tensor: Any, start: int, numel: int) -> Stored:
    if not isinstance(tensor, Stored) or start + numel > tensor.numel:
        raise refused(files.path, f"a partition without the {numel} elements of {name} at {start}")
    return tensor.part(start, numel)


def _compare(files: Files, param: SavedTensor, weight: Any) -> None:
    """The module's own weight, where it is there, is the master as the module's dtype has it: at both ends of each range.

    Ranks or names that were taken for each other would be loaded without a word else, where shapes allow it.
    """
    if not isinstance(weight, Stored) or weight.numel != param.numel:
        return
    master, starts, at = param.values[VALUE], dict[int, int](), 0
    for each in master.parts:
        numel = min(_COMPARED, each.numel)
        starts |= {at: numel, at + each.numel - numel: numel}
        at += each.numel
    for start, numel in starts.items():
        here, there = master.elements(start, numel).to(weight.dtype), weight.elements(start, numel)
        if not bool(((here == there) | (here.isnan() & there.isnan())).all()):
            raise refused(files.path, f"fp32 values of {param.name} that are not its weights in {files.model[0].name}")


# What is frozen.


def _frozen(files: Files, models: Sequence[TorchFile], trained: set[str], stage: int) -> dict[str, SavedTensor]:
    """Parameters that the optimizer has not: see Note [Stages 1 and 2]; at stage 3 they are partitioned like the others."""
    first = models[0].root
    found: dict[str, SavedTensor] = {}
    known = first.get("frozen_param_shapes")
    if known is None:
        tied, buffers = set(first.get("shared_params") or ()), set(first["buffer_names"])
        for name, tensor in first["module"].items():
            if isinstance(tensor, Stored) and name not in trained | tied | buffers and stage < 3:
                found[name] = _of_one(name, tensor)
        return found
    for name, shape in _shapes(known).items():
        pieces = [model.root["frozen_param_fragments"][name] for model in models]
        if not all(isinstance(piece, Stored) for piece in pieces):
            raise ValueError(f"{name}, which is not a tensor")
        if stage < 3:
            if pieces[0].shape != shape:
                raise refused(files.path, f"{name} of shape {list(pieces[0].shape)} where {list(shape)} is stated")
            found[name] = _of_one(name, pieces[0])
            continue
        counts = _shares(math.prod(shape), len(pieces))
        parts = [_part(files, name, piece, 0, count) for piece, count in zip(pieces, counts, strict=True) if count]
        found[name] = SavedTensor(name, shape, None, {VALUE: Values(tuple(parts))}, {})
    return found


def _of_one(name: str, tensor: Stored) -> SavedTensor:
    return SavedTensor(name, tensor.shape, None, {VALUE: Values((tensor,))}, {})


# Universal checkpoints.


def _universal(
    files: Files, shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[int, dict[str, SavedTensor], list[dict[str, Any]], list[TorchFile]]:
    """See Note [Universal]: the stage it was converted from, parameters by name, options of groups, and the opened files."""
    about = TorchFile(files.path / "zero" / "optimizer_state.pt")
    opened, root = [about], about.root
    groups, owner = _groups(root, set(range(len(shapes))))
    params: dict[str, SavedTensor] = {}
    for vector, group in enumerate(shapes):
        # Stage 3's conversion leaves the steps where they were.
        kept = root["optimizer_state_dict"]["state"].get(vector, {}) if "optimizer_state_dict" in root else {}
        usual = {"step": _number(kept["step"])} if "step" in kept else {}
        for name, shape in group.items():
            values, numbers = {}, dict(usual)
            for path in _states(files, name):
                file = TorchFile(path)
                opened.append(file)
                found = file.root
                if path.stem == "step":
                    numbers["step"] = _number(found)
                    continue
                unknown = set(found) - {"param", "cat_dim"} if isinstance(found, dict) else set()
                if unknown:
                    raise refused(files.path, f"{min(map(str, unknown))} of {name}, a part over tensor parallel ranks")
                tensor = found["param"] if isinstance(found, dict) else found
                if not isinstance(tensor, Stored) or tensor.shape not in (shape, (math.prod(shape),)):
                    raise refused(files.path, f"{path.parent.name}/{path.name} of a shape other than {list(shape)}")
                values[VALUE if path.stem == "fp32" else path.stem] = Values((tensor,))
            if VALUE not in values:
                raise refused(files.path, f"{name} without its fp32.pt")
            params[name] = SavedTensor(name, shape, owner[vector], values, numbers)
    return _stage(root), params, groups, opened


def _states(files: Files, name: str) -> list[Path]:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"a parameter called {name!r}")
    folder = files.path / "zero" / name
    if not folder.is_dir() or folder.is_symlink():
        raise refused(files.path, f"no folder zero/{name}")
    return sorted(path for path in folder.iterdir() if path.suffix == ".pt")
