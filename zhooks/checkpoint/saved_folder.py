"""Saved folders as this rank reads them: files verified in turns, the run's parameters by name, and values run by run.

A rank reads the ranges it owns, a bounded chunk at a time; nothing here writes to the run.

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
from pydantic import ValidationError
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK, Entry, Manifest, Part, SavedLayout, ShardReader
from zhooks.checkpoint.saved_ranges import ParamRanges, difference, ranges_of
from zhooks.checkpoint.shard import DOCUMENT, Document, RunState, tensor_name
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.comm import Comm
from zhooks.tensor import ParamShard, ShardedVector, VectorShard

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
        self.path, self.manifest, self.place, self.extra = path, manifest, place, extra
        self._present, self._opened = present, opened or self._in_folder
        self.layout = kept = SavedLayout.of(manifest)
        self.members = tuple(map(ranges_of, kept.flats))
        self.params = {param.name: param for members in self.members for param in members}
        self._readers: OrderedDict[int, Reader] = OrderedDict()
        self._documents: OrderedDict[int, Document] = OrderedDict()
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

    def document(self, rank: int) -> Document:
        """What the file of one rank says of itself.

        Raises:
            ValueError: it is none that a save wrote.
        """
        found = self._documents.get(rank)
        if found is None:
            read = json.loads(bytes(self.reader(rank).tensor(DOCUMENT).numpy()))
            try:
                found = self._documents[rank] = Document.model_validate(read)
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}") from None
            if len(self._documents) > _OPEN:
                self._documents.popitem(last=False)
        return found

    @property
    def own(self) -> Document:
        """The document of the counterpart."""
        return self.document(self.counterpart)

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

    def expect(self, rank: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor of one file is of this kind."""
        entry = self.reader(rank).entry(name)
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(
                f"Cannot load {self.reader(rank).path}. Expected {name} of {dtype} and shape {list(shape)}, found "
                f"{entry.dtype} and {list(entry.shape)}. Build the same model and attach it with as many tp ranks, or load "
                "another checkpoint."
            )


# Where a tensor of a parameter is, and its way into the run.


@dataclass(frozen=True, slots=True)
class InFlat:
    """A parameter's value, gradient or state in flat tensors of the files, all of one name and dtype."""

    folder: SavedFolder
    param: ParamRanges
    name: str

    @property
    def dtype(self) -> torch.dtype:
        return self.folder.reader(self.folder.counterpart).entry(self.name).dtype

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
        name, names = _vectors(self.folder.document(rank))[self.number]
        if names[: len(self.before) + 1] != [param.name for param in (*self.before, self.param)]:
            raise ValueError("vectors of different parameters on different ranks")
        dtype = self.folder.reader(rank).entry(name).dtype
        if dtype is not self.dtype:
            raise ValueError(f"vectors of {dtype} and of {self.dtype}")
        start = sum(param.span(shard)[1] for param in self.before)
        return name, start + offset - self.param.span(shard)[0]


def _vectors(document: Document) -> list[tuple[str, list[str]]]:
    """The vectors among the states of optimizers, in their order: the tensor's name and the parameters'."""
    packed = [[one.entries, one.loose] for one in document.optimizers]
    return [(str(found["vector"]), list(found["parts"])) for found in tagged("vector", packed)]


def tagged(tag: str, packed: Any) -> Iterator[dict[str, Any]]:
    """What ``Packer`` made of a "tensor" or a "vector", wherever it is in this."""
    if isinstance(packed, dict) and tag in packed:
        yield packed
        return
    for item in packed.values() if isinstance(packed, dict) else packed if isinstance(packed, (list, tuple)) else ():
        yield from tagged(tag, item)


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
    most = CHUNK // 8
    held: list[Run] = []
    for run in items:
        for at in range(0, run.out.numel(), most):
            piece = run._replace(start=run.start + at, out=run.out[at : at + most])
            if held and not _together(held, piece):
                _copy(held)
                held = []
            held.append(piece)
    if held:
        _copy(held)


def _together(held: Sequence[Run], run: Run) -> bool:
    first, last = held[0], held[-1]
    gap = run.start - last.start - last.out.numel()
    same = (first.folder, first.rank, first.name) == (run.folder, run.rank, run.name)
    return same and 0 <= gap * 8 <= GAP and run.start + run.out.numel() - first.start <= CHUNK // 8


def _copy(held: Sequence[Run]) -> None:
    folder, rank, name, start, out = held[0]
    reader = folder.reader(rank)
    alike = out.dtype == reader.entry(name).dtype and out.device.type == "cpu" and out.is_contiguous()
    if len(held) == 1 and isinstance(reader, ShardReader) and alike and not out.is_conj() and not out.is_neg():
        reader.read(name, start, out)
        return
    stop = held[-1].start + held[-1].out.numel()
    read = reader.elements(name, start, stop - start)
    with torch.no_grad():
        for run in held:
            run.out.copy_(read[run.start - start : run.start - start + run.out.numel()])


# The parameters of the run in the folders.


@dataclass(frozen=True, slots=True)
class Saved:
    """The folders, and the parameters of the run in them, by name.  Made by `find_params`.

    Attributes:
        masters: the dtype that each is kept in here.
    """

    run: RunState
    folders: Sequence[SavedFolder]
    params: Mapping[str, tuple[SavedFolder, ParamRanges]]
    specs: Mapping[str, ParamShard]
    masters: Mapping[str, torch.dtype]

    @property
    def main(self) -> SavedFolder:
        """That of this rank's stage."""
        return self.folders[self.folders[0].place.stage % len(self.folders)]

    @property
    def in_stages(self) -> bool:
        """Names in the folders may be those of other stages."""
        return self.run.comm.pp.axis.world > 1

    def unpacker(self, folder: SavedFolder, rank: int | None = None, *, unread: bool = False) -> Unpacker:
        """Unpacks what is in one file; ``unread``: tensors without values."""
        reader = partial(folder.reader, folder.counterpart if rank is None else rank)

        def without_values(name: str) -> Tensor:
            entry = reader().entry(name)
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

        if unread:
            return Unpacker(without_values, torch.device("meta"))
        return Unpacker(lambda name: reader().tensor(name), self.run.devices[0], partial(self._vector, folder))

    def _vector(self, folder: SavedFolder, name: str, names: Any) -> ShardedVector:
        """The ranges that this rank has of a vector that every rank saved its own ranges of."""
        if not (isinstance(names, list) and names and set(names) <= self.specs.keys()):
            raise ValueError("something other than a vector of parameters")
        before = [folder.params[part] for part in names]
        spec = VectorShard([self.specs[part] for part in names])
        number = [tensor for tensor, _ in _vectors(folder.own)].index(name)
        entry = folder.reader(folder.counterpart).entry(name)
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


def find_params(run: RunState, folders: Sequence[SavedFolder]) -> Saved:
    """Every parameter of the run in one of the folders, as it is here.

    Raises:
        CheckpointError: this is another model.
    """
    specs = {spec.name: spec for flat in run.flats for spec in flat.specs}
    where: dict[str, SavedFolder] = {}
    for folder in folders:
        for name in folder.params:
            if name in where:
                raise refuse_folders(f"parameter {name} in {where[name].path.name} and in {folder.path.name}")
            where[name] = folder
    for name, spec in specs.items():
        problem = difference(where[name].params[name] if name in where else None, spec)
        if problem:
            raise another(folders, problem)
    foreign = next((name for name in where if name not in specs), None)
    if foreign is not None and run.comm.pp.axis.world == 1:
        shape = list(where[foreign].params[foreign].saved.shape)
        raise another(folders, f"no parameter {foreign}, which the checkpoint has, of shape {shape}")
    params = {name: (where[name], where[name].params[name]) for name in specs}
    for folder, param in params.values():
        folder.expect(folder.counterpart, param.flat.tensor, param.flat.dtype, (param.flat.shard_numel,))
    masters = {spec.name: flat.kind.master for flat in run.flats for spec in flat.specs}
    return Saved(run, folders, params, specs, masters)


def another(folders: Sequence[SavedFolder], problem: str) -> CheckpointError:
    """Why this is not the model that was saved."""
    stage = folders[0].manifest.about.get("stage")
    return CheckpointError(
        f"Cannot load {folders[0].path}. Expected the model that was saved (stage {stage}), found {problem}. Build the same "
        "model, or load another checkpoint."
    )


def refuse_folders(what: str) -> CheckpointError:
    """Why several folders are no model."""
    return CheckpointError(
        f"load expected folders of the stages of one model, found {what}. Use the same module names in all stages and in the "
        "whole model, or load each stage's own folder."
    )
