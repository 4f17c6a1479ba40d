"""The parameters of the run in saved folders, by name, and whether all files that ranges of them are read from agree.

``check_shard.py`` and ``check_states.py`` look everything up here.  It reads documents and headers, and vectors of ranges; it
never writes to the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK
from zhooks.checkpoint.check_optimizers import require
from zhooks.checkpoint.saved_files import InVector, SavedFolder, pour, refuse_folders, runs, vectors_in_tree
from zhooks.checkpoint.saved_layout import ParamRanges, difference
from zhooks.checkpoint.shard_contents import RunState, tensor_name
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.tensor import ParamShard, ShardedVector, VectorShard

__all__ = ["Saved", "another", "check_alike", "expect", "find_params", "own_numel", "tensors_in"]


@dataclass(frozen=True, slots=True)
class Saved:
    """The folders, and the parameters of the run in them."""

    run: RunState
    folders: Sequence[SavedFolder]
    params: Mapping[str, tuple[SavedFolder, ParamRanges]]
    specs: Mapping[str, ParamShard]

    @property
    def main(self) -> SavedFolder:
        """That of this rank's stage."""
        return self.folders[self.folders[0].place.stage % len(self.folders)]

    def document(self, folder: SavedFolder) -> dict[str, Any]:
        return folder.document(folder.counterpart)

    def unpacker(self, folder: SavedFolder, rank: int | None = None, *, unread: bool = False) -> Unpacker:
        """Unpacks what is in one file; ``unread``: tensors without values."""
        at = folder.counterpart if rank is None else rank
        if unread:
            return Unpacker(partial(_unread, folder, at), torch.device("meta"))
        return Unpacker(partial(folder.tensor, at), self.run.devices[0], partial(self._vector, folder))

    def _vector(self, folder: SavedFolder, name: str, names: Any) -> ShardedVector:
        """The ranges that this rank has of a vector that every rank saved its own ranges of."""
        require(isinstance(names, list) and bool(names) and set(names) <= self.specs.keys(), "a vector of parameters")
        before = [folder.params[part] for part in names]
        spec = VectorShard([self.specs[part] for part in names])
        found = vectors_in_tree(self.document(folder)["optimizers"])
        number = [tensor for tensor, _ in found].index(name)
        entry = folder.entry(folder.counterpart, name)
        own = sum(part.span(folder.shard_of(folder.counterpart))[1] for part in before)
        if entry.shape != (own,):
            raise CheckpointError(
                f"load expected ranges of this model's parameters as one vector, found {list(entry.shape)} elements of "
                f"{str(names)[:80]}. Build the same model and optimizer, or load another checkpoint."
            )
        local = torch.empty(sum(piece.numel for piece in spec.pieces), dtype=entry.dtype, device="cpu")
        done = 0
        for index, part in enumerate(names):
            numel = sum(piece.numel for piece in self.specs[part].pieces)
            where = InVector(folder, before[index], number, before[:index], entry.dtype)
            pour(runs(where, self.specs[part], local[done : done + numel]))
            done += numel
        return ShardedVector(local, spec)


def _unread(folder: SavedFolder, rank: int, name: str) -> Tensor:
    """A tensor of the file without its values."""
    entry = folder.entry(rank, name)
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def find_params(run: RunState, folders: Sequence[SavedFolder]) -> Saved:
    """Every parameter of the run in one of the folders, as it is here."""
    params: dict[str, tuple[SavedFolder, ParamRanges]] = {}
    specs = {spec.name: spec for flat in run.flats for spec in flat.specs}
    where: dict[str, SavedFolder] = {}
    for folder in folders:
        for name, param in folder.params.items():
            if name in where:
                raise refuse_folders(f"parameter {name} in {where[name].path.name} and in {folder.path.name}")
            where[name] = folder
            if name in specs:
                params[name] = folder, param
    for name, spec in specs.items():
        found = params.get(name)
        problem = difference(None if found is None else found[1], spec)
        if problem:
            raise another(folders, problem)
    if not run.comm.pp.axis.world > 1:
        for name in foreign_names(run, folders):
            param = where[name].params[name]
            raise another(folders, f"no parameter {name}, which the checkpoint has, of shape {list(param.saved.shape)}")
    for folder, param in params.values():
        _expect_flat(folder, param)
    for folder in folders:
        _check_guess(folder)
    return Saved(run, folders, params, specs)


def _check_guess(folder: SavedFolder) -> None:
    """An older folder does not say which file is of which place: what is whole on tp must be the same at all places there.

    Raises:
        CheckpointError: it is not, so that it was another mesh.
    """
    kept = folder.layout.places
    if folder.layout.told or kept.tp == 1 or kept.shard * kept.replicate == 1:
        return
    for param in folder.params.values():
        name = tensor_name(param.flat.number, "value")
        for shard in range(kept.shard if param.saved.dim is None else 0):
            start, numel = param.span(shard)
            ranks = [kept.ranks[shard, 0, tp] for tp in range(kept.tp)]
            # A chunk of each will do: in another order of axes they are of other shards.
            first, *others = (folder.reader(rank).elements(name, start, min(numel, CHUNK // 8)) for rank in ranks)
            if not all(torch.equal(first, other) for other in others):
                raise CheckpointError(
                    f"Cannot load {folder.path}. Expected an older checkpoint of a mesh whose last axis is tp, found different "
                    f"values of {param.name} on ranks {ranks}. Load it on the mesh it was saved on with the release that "
                    "wrote it, and save full state there."
                )


def foreign_names(run: RunState, folders: Sequence[SavedFolder]) -> list[str]:
    """Parameters that were saved and that the model on this rank does not have."""
    here = {spec.name for flat in run.flats for spec in flat.specs}
    return [name for folder in folders for name in folder.params if name not in here]


def another(folders: Sequence[SavedFolder], problem: str) -> CheckpointError:
    """Why this is not the model that was saved."""
    stage = folders[0].manifest.about.get("stage")
    return CheckpointError(
        f"Cannot load {folders[0].path}. Expected the model that was saved (stage {stage}), found {problem}. Build the same "
        "model, or load another checkpoint."
    )


def _expect_flat(folder: SavedFolder, param: ParamRanges) -> None:
    expect(folder, folder.counterpart, tensor_name(param.flat.number, "value"), param.flat.dtype, (own_numel(param),))


def own_numel(param: ParamRanges) -> int:
    """Elements of each file's tensor that its ranges lie in."""
    return param.flat.shard_numel


def expect(folder: SavedFolder, rank: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor of one file is of this kind.

    Raises:
        CheckpointError: it is not.
    """
    entry = folder.entry(rank, name)
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise CheckpointError(
            f"Cannot load {folder.reader(rank).path}. Expected {name} of {dtype} and shape {list(shape)}, found {entry.dtype} "
            f"and {list(entry.shape)}. Build the same model and attach it with as many tp ranks, or load another checkpoint."
        )


def check_alike(saved: Saved) -> None:
    """All files that ranges are read from hold the same gradients and states, in tensors of the same kinds.

    Raises:
        CheckpointError: a file differs from the one that stands for this rank.
    """
    used: dict[int, set[int]] = {}
    for name, (folder, param) in saved.params.items():
        seen = used.setdefault(id(folder), set())
        seen.update(folder.rank_at(tp, shard) for tp, shard, _, _ in param.runs(saved.specs[name]))
    for folder in saved.folders:
        mine = saved.document(folder)
        for rank in sorted(used.get(id(folder), set()) - {folder.counterpart}):
            theirs = folder.document(rank)
            _check_kinds(saved, folder, rank)
            for what in ("gradients", "states"):
                if theirs[what] != mine[what]:
                    raise _unlike(folder, rank, f"{what} of the same parameters")
            if saved.run.optimizers and _common(theirs["optimizers"]) != _common(mine["optimizers"]):
                raise _unlike(folder, rank, "the same options and counts of optimizers")
            _check_plain(folder, rank, mine["optimizers"] if saved.run.optimizers else [])


def _check_kinds(saved: Saved, folder: SavedFolder, rank: int) -> None:
    """Tensors of ranges have the dtype and the shape that they have in the file that stands for this rank."""
    numbers = {param.flat.number for found, param in saved.params.values() if found is folder}
    prefixes = tuple(tensor_name(number, "") for number in sorted(numbers))
    for name, entry in folder.reader(folder.counterpart).entries.items():
        # Sums inside no_sync are each rank's own.
        if name.startswith(prefixes) and not name.endswith("/partial"):
            expect(folder, rank, name, entry.dtype, entry.shape)


def _unlike(folder: SavedFolder, rank: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot load {folder.path}. Expected all ranks to have saved {what}, found a difference between rank {rank} and rank "
        f"{folder.counterpart}, so that it cannot be resharded. Load it on the mesh it was saved on."
    )


def _common(optimizers: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What one file says of optimizers, but for what the owner of a parameter alone has."""
    out = []
    for one in optimizers:
        owned = {(group, index) for group, index, _ in one.get("owners", [])}
        entries = [entry for entry in one["entries"] if (entry[0], entry[1]) not in owned]
        out.append([one["type"], one["groups"], entries, one.get("owners", [])])
    return out


def _check_plain(folder: SavedFolder, rank: int, optimizers: Sequence[Any]) -> None:
    """Plain tensors among the states are the same in both files: of a rank's own range, nobody could divide them."""
    records = folder.manifest.files[rank].tensors, folder.manifest.files[folder.counterpart].tensors
    for name in tensors_in([entries for _, _, entries, _ in _common(optimizers)]):
        if records[0].get(name) != records[1].get(name):
            raise _unlike(folder, rank, "the same plain tensors among the states of an optimizer")


def tensors_in(packed: Any) -> Iterator[str]:
    """The names of plain tensors in what ``Packer`` made."""
    if isinstance(packed, dict) and "tensor" in packed:
        yield str(packed["tensor"])
        return
    for item in packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else ():
        yield from tensors_in(item)
