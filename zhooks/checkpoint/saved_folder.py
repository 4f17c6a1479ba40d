"""Saved folders as this rank reads them: files verified in turns, the run's parameters by name, and values run by run.

``save_load.py`` opens them, ``check_shard.py`` looks up in them what a run needs, and ``pour`` copies it.  A rank reads the
ranges it owns, a bounded chunk at a time; nothing here writes to the run.

Note: [Who verifies]
    Checksums are of whole tensors, and a rank that owns other ranges reads but a part of them.  So ranks share the work:
    every file is read to its end by one rank, or by several, each some tensors, where there are more ranks than files.
    Nothing is changed before all of them have found nothing wrong.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK, Entry, Manifest, Part, SavedLayout, ShardReader
from zhooks.checkpoint.saved_ranges import ParamRanges, difference, ranges_of
from zhooks.checkpoint.shard_contents import DOCUMENT, RunState, tensor_name
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.comm import Comm
from zhooks.tensor import ParamShard, ShardedVector, VectorShard

__all__ = [
    "GAP",
    "InFlat",
    "Place",
    "Present",
    "Run",
    "Saved",
    "SavedFolder",
    "another",
    "check_alike",
    "expect",
    "find_params",
    "pour",
    "refuse_folders",
    "require",
    "runs",
    "tensors_in",
]

Present = Mapping[int, Part]
"""Of files that are not here whole, by rank: what is."""
#: So many files, and documents of them, are held at once.
_OPEN = 16
#: Bytes between two runs that are read rather than skipped.
GAP = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is in its run.

    Attributes:
        data: its place among the ranks that hold the same part of the model.
        stage: its place on pp.
    """

    replicate: int
    tp: int
    tp_world: int
    data: int
    data_world: int
    stage: int

    @classmethod
    def of(cls, comm: Comm) -> Place:
        """That of this process."""
        tp, data = comm.tp.axis, comm.world.axis
        return cls(comm.replicate.axis.rank, tp.rank, tp.world, data.rank, data.world, comm.pp.axis.rank)


class Reader(Protocol):
    """What one rank saved, wherever it lies, as ``ShardReader`` reads a file."""

    path: Path

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def entry(self, name: str) -> Entry: ...

    def tensor(self, name: str) -> Tensor: ...

    def elements(self, name: str, start: int, numel: int) -> Tensor: ...

    def verify(self, names: Iterable[str] | None = None) -> None: ...

    def close(self) -> None: ...


class SavedFolder:
    """One checkpoint: its manifest, and its files as they are asked for.

    Args:
        present: of files that are not in the folder whole, by rank: what was brought there, verified.
        opened: what the rank of this number saved, where that is no file of the folder.
        extra: of another library's, which have no random states either: what the user gave to the save.
    Attributes:
        counterpart: the file of what each rank has for itself (buffers, random states): of this rank's place, else of one
            that stands for it.
        same_place: it is of this rank's place.
        as_many: as many data ranks and places on tp saved as load.
        members: the parameters of each flat buffer, and ``params`` all of them by name.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        place: Place,
        *,
        present: Present | None = None,
        opened: Callable[[int], Reader] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.manifest, self.place = path, manifest, place
        self._present, self._opened, self._extra = present, opened or self._in_folder, extra
        self.layout = SavedLayout.of(manifest)
        self.members = tuple(map(ranges_of, self.layout.flats))
        self.params = {param.name: param for members in self.members for param in members}
        self._readers: OrderedDict[int, Reader] = OrderedDict()
        self._documents: OrderedDict[int, dict[str, Any]] = OrderedDict()
        kept = self.layout
        self._tp = place.tp % kept.tp
        data = kept.data[self._tp]
        self.counterpart = data[place.data % len(data)]
        self.same_place = place.data < len(data)
        self.as_many = (len(data), kept.tp) == (place.data_world, place.tp_world)

    def _in_folder(self, rank: int) -> ShardReader:
        return ShardReader(self.path, self.manifest.files[rank], (self._present or {}).get(rank))

    def close(self) -> None:
        """Idempotent."""
        while self._readers:
            self._readers.popitem()[1].close()

    def reader(self, rank: int) -> Reader:
        """The file of one rank.

        Raises:
            CheckpointError: it is missing, or not what the manifest describes.
        """
        found = self._readers.get(rank) or self._opened(rank)
        self._readers[rank] = found
        self._readers.move_to_end(rank)
        if len(self._readers) > _OPEN:
            self._readers.popitem(last=False)[1].close()
        return found

    def document(self, rank: int) -> dict[str, Any]:
        """What the file says of itself: see Note [Document] in shard_contents.py."""
        found = self._documents.get(rank)
        if found is None:
            read = json.loads(bytes(self.reader(rank).tensor(DOCUMENT).numpy()))
            if not isinstance(read, dict):
                raise ValueError("a document of another kind")
            found = self._documents[rank] = read
            if len(self._documents) > _OPEN:
                self._documents.popitem(last=False)
        return found

    @property
    def own(self) -> dict[str, Any]:
        """The document of the counterpart."""
        return self.document(self.counterpart)

    def extra(self, unpacker: Unpacker) -> dict[str, Any]:
        """What the user gave to the save."""
        return self._plain("extra", unpacker) if self._extra is None else self._extra

    def random_states(self, unpacker: Unpacker) -> dict[str, Any] | None:
        """Those of the counterpart's generators; None where such files never have any."""
        return self._plain("rng", unpacker) if self._extra is None else None

    def _plain(self, key: str, unpacker: Unpacker) -> dict[str, Any]:
        found = unpacker.unpack(self.own[key])
        if not isinstance(found, dict):
            raise ValueError(f"{key}: not a dict")
        return found

    def entry(self, rank: int, name: str) -> Entry:
        """What one file's header says of a tensor."""
        return self.reader(rank).entry(name)

    def tensor(self, rank: int, name: str) -> Tensor:
        """A whole tensor of one file, its checksum compared."""
        return self.reader(rank).tensor(name)

    def rank_at(self, tp: int | None, shard: int | None) -> int:
        """Whose file has a range: of the replica and the place on tp that are nearest to this rank's, where all have it."""
        kept = self.layout
        part = self._tp if tp is None else tp
        if shard is None:
            data = kept.data[part]
            return data[self.place.data % len(data)]
        return kept.ranks[shard, self.place.replicate % kept.replicate, part]

    def shard_of(self, rank: int) -> int:
        """The place on shard of whose file this is."""
        return next(place for place, found in self.layout.ranks.items() if found == rank)[0]

    def verify(self, rank: int, world: int, skip: Iterable[int]) -> int:
        """This rank's share of all files, of ``world`` that share them; returns the bytes of the files it looked into.

        Args:
            skip: numbers of flat buffers that nobody here loads.
        Raises:
            CheckpointError: bytes are not those that were written.
        """
        if self._present is not None:
            return 0
        prefixes = tuple(tensor_name(number, "") for number in skip)
        files, nbytes = self.manifest.files, 0
        for number in range(rank % len(files), len(files), world):
            sharing = range(number, world, len(files)) if world > len(files) else range(rank, rank + 1)
            names = [name for name in self.reader(number).entries if not name.startswith(prefixes)]
            self.reader(number).verify(names[sharing.index(rank) :: len(sharing)])
            nbytes += files[number].nbytes
        return nbytes


# Where a tensor of a parameter is.


@dataclass(frozen=True, slots=True)
class InFlat:
    """A parameter's value, gradient or state in flat tensors of the files, all of one name."""

    folder: SavedFolder
    param: ParamRanges
    name: str

    def at(self, rank: int, offset: int) -> tuple[str, int]:
        return self.name, offset


@dataclass(frozen=True, slots=True)
class InVector:
    """A parameter's ranges in a vector of many parameters' ranges, by file: its name there, and where they begin."""

    folder: SavedFolder
    param: ParamRanges
    number: int
    before: Sequence[ParamRanges]
    dtype: torch.dtype

    def at(self, rank: int, offset: int) -> tuple[str, int]:
        shard = self.folder.shard_of(rank)
        name, parts = vectors_in_tree(self.folder.document(rank)["optimizers"])[self.number]
        if parts[: len(self.before) + 1] != [param.name for param in (*self.before, self.param)]:
            raise ValueError("vectors of different parameters on different ranks")
        if self.folder.entry(rank, name).dtype is not self.dtype:
            raise ValueError(f"vectors of {self.folder.entry(rank, name).dtype} and of {self.dtype}")
        start = sum(param.span(shard)[1] for param in self.before)
        return name, start + offset - self.param.span(shard)[0]


def vectors_in_tree(packed: Any) -> list[tuple[str, list[str]]]:
    """The vectors in what ``Packer`` made, in its order: the tensor's name and the parameters'."""
    if isinstance(packed, dict) and "vector" in packed:
        return [(str(packed["vector"]), list(packed["parts"]))]
    inner = packed.values() if isinstance(packed, dict) else packed if isinstance(packed, list) else ()
    return [found for item in inner for found in vectors_in_tree(item)]


class Run(NamedTuple):
    """Consecutive elements of a file's tensor, and where they go: 1-D, as many."""

    folder: SavedFolder
    rank: int
    name: str
    start: int
    out: Tensor


def runs(found: InFlat | InVector, spec: ParamShard, out: Tensor) -> Iterator[Run]:
    """What this rank owns of a parameter, to be copied into ``out`` [1-D, as many elements]."""
    done = 0
    for tp, shard, offset, numel in found.param.runs(spec):
        rank = found.folder.rank_at(tp, shard)
        name, start = found.at(rank, offset)
        yield Run(found.folder, rank, name, start, out[done : done + numel])
        done += numel
    assert done == out.numel(), f"{found.param.name}: {done} elements of {out.numel()}"


def pour(items: Iterable[Run]) -> None:
    """Copy them; what lies close together in one tensor is read at once, in chunks of a bounded size."""
    held: list[Run] = []
    for run in items:
        for piece in _bounded(run):
            if held and not _together(held, piece):
                _copy(held)
                held = []
            held.append(piece)
    _copy(held)


def _bounded(run: Run) -> Iterator[Run]:
    """No longer than a chunk, whatever the element."""
    most = CHUNK // 8
    for at in range(0, run.out.numel(), most):
        yield run._replace(start=run.start + at, out=run.out[at : at + most])


def _together(held: Sequence[Run], run: Run) -> bool:
    first, last = held[0], held[-1]
    gap = run.start - last.start - last.out.numel()
    same = (first.folder, first.rank, first.name) == (run.folder, run.rank, run.name)
    return same and 0 <= gap * 8 <= GAP and run.start + run.out.numel() - first.start <= CHUNK // 8


def _copy(held: Sequence[Run]) -> None:
    if not held:
        return
    folder, rank, name, start, _ = held[0]
    stop = held[-1].start + held[-1].out.numel()
    reader = folder.reader(rank)
    if len(held) == 1 and isinstance(reader, ShardReader) and _takes(held[0].out, reader.entry(name).dtype):
        reader.read(name, start, held[0].out)
        return
    read = reader.elements(name, start, stop - start)
    with torch.no_grad():
        for run in held:
            run.out.copy_(read[run.start - start : run.start - start + run.out.numel()])


def _takes(out: Tensor, dtype: torch.dtype) -> bool:
    """A file can be read right into it."""
    return out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous() and not out.is_conj() and not out.is_neg()


def refuse_folders(what: str) -> CheckpointError:
    """Why several folders are no model."""
    return CheckpointError(
        f"load expected folders of the stages of one model, found {what}. Use the same module names in all stages and in the "
        "whole model, or load each stage's own folder."
    )


def require(holds: bool, what: str) -> None:
    """A file that was made by ``save`` says so.

    Raises:
        ValueError: it does not.
    """
    if not holds:
        raise ValueError(f"something other than {what}")


# The parameters of the run in the folders.


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
        found = vectors_in_tree(folder.own["optimizers"])
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
        foreign = next((name for name in where if name not in specs), None)
        if foreign is not None:
            shape = list(where[foreign].params[foreign].saved.shape)
            raise another(folders, f"no parameter {foreign}, which the checkpoint has, of shape {shape}")
    for folder, param in params.values():
        name = tensor_name(param.flat.number, "value")
        expect(folder, folder.counterpart, name, param.flat.dtype, (param.flat.shard_numel,))
    return Saved(run, folders, params, specs)


def another(folders: Sequence[SavedFolder], problem: str) -> CheckpointError:
    """Why this is not the model that was saved."""
    stage = folders[0].manifest.about.get("stage")
    return CheckpointError(
        f"Cannot load {folders[0].path}. Expected the model that was saved (stage {stage}), found {problem}. Build the same "
        "model, or load another checkpoint."
    )


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
        mine = folder.own
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
