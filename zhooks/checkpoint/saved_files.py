"""The files of saved folders, as this rank reads them: verified in turns, opened when asked for, read run by run.

``save_load.py`` opens them, ``check_shard.py`` finds in them what a run needs, and ``pour`` copies it.  A rank reads the
ranges it owns, a bounded chunk at a time; it never decides what fits the run.

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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK, Entry, Manifest, Part, Places, SavedLayout, ShardReader
from zhooks.checkpoint.saved_layout import ParamRanges, places, ranges_of
from zhooks.checkpoint.shard_contents import DOCUMENT, tensor_name
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.comm import Comm
from zhooks.tensor import ParamShard

__all__ = [
    "GAP",
    "Files",
    "InFlat",
    "InVector",
    "Place",
    "Present",
    "Run",
    "SavedFolder",
    "in_folder",
    "pour",
    "refuse_folders",
    "runs",
    "vectors_in_tree",
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
        stage: its place on pp, and ``stages`` their number.
        own: the places of all ranks of the model.
    """

    shard: int
    shards: int
    replicate: int
    tp: int
    data: int
    data_world: int
    stage: int
    stages: int
    own: Places

    @classmethod
    def of(cls, comm: Comm) -> Place:
        """That of this process."""
        shard, data, pp = comm.shard.axis, comm.world.axis, comm.pp.axis
        return cls(
            shard.rank, shard.world, comm.replicate.axis.rank, comm.tp.axis.rank, data.rank, data.world, pp.rank, pp.world,
            Places.of(places(comm), comm.stage.axis.world),
        )  # fmt: skip


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


Document = Mapping[str, Any]


def _extra(document: Document, unpacker: Unpacker) -> dict[str, Any]:
    return _dict(unpacker.unpack(document["extra"]), "extra")


def _random_states(document: Document, unpacker: Unpacker) -> dict[str, Any] | None:
    return _dict(unpacker.unpack(document["rng"]), "random states")


def _dict(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{what}: not a dict")
    return found


@dataclass(frozen=True, slots=True)
class Files:
    """How the files of one checkpoint are read: from a folder, in parts that were fetched, from a peer, from another library's.

    Attributes:
        open: what the rank of this number saved.
        verified: all that can be read was compared with its checksum before.
        extra: what the user gave to the save, of a document.
        random_states: the states of the generators, of a document; None where such files never have any.
    """

    open: Callable[[int], Reader]
    verified: bool = False
    extra: Callable[[Document, Unpacker], dict[str, Any]] = _extra
    random_states: Callable[[Document, Unpacker], dict[str, Any] | None] = _random_states


def in_folder(path: Path, manifest: Manifest, present: Present | None = None) -> Files:
    """Files that lie in a folder; ``present``: what of them was brought there, verified, where they are not whole."""

    def opened(rank: int) -> ShardReader:
        return ShardReader(path, manifest.files[rank], (present or {}).get(rank))

    return Files(opened, verified=present is not None)


class SavedFolder:
    """One checkpoint: its manifest, and its files as they are asked for.

    Attributes:
        counterpart: the file of what each rank has for itself (buffers, random states): of this rank's place, else of one
            that stands for it.
        same_place: it is of this rank's place.
        as_many: as many data ranks and places on tp saved as load.
        members: the parameters of each flat buffer, and ``params`` all of them by name.
    """

    def __init__(self, path: Path, manifest: Manifest, place: Place, files: Files) -> None:
        self.path, self.manifest, self.place, self._files = path, manifest, place, files
        self.layout = SavedLayout.of(manifest, place.own)
        self.members = tuple(map(ranges_of, self.layout.flats))
        self.params = {param.name: param for members in self.members for param in members}
        self._readers: OrderedDict[int, Reader] = OrderedDict()
        self._documents: OrderedDict[int, dict[str, Any]] = OrderedDict()
        kept = self.layout.places
        self._tp = place.tp % kept.tp
        data = kept.data[self._tp]
        self.counterpart = data[place.data % len(data)]
        self.same_place = place.data < len(data)
        self.as_many = (len(data), kept.tp) == (place.data_world, place.own.tp)

    def close(self) -> None:
        """Idempotent."""
        while self._readers:
            self._readers.popitem()[1].close()

    def reader(self, rank: int) -> Reader:
        """The file of one rank.

        Raises:
            CheckpointError: it is missing, or not what the manifest describes.
        """
        found = self._readers.get(rank) or self._files.open(rank)
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

    def extra(self, unpacker: Unpacker) -> dict[str, Any]:
        """What the user gave to the save."""
        return self._files.extra(self.document(self.counterpart), unpacker)

    def random_states(self, unpacker: Unpacker) -> dict[str, Any] | None:
        """Those of the counterpart's generators; None where such files never have any."""
        return self._files.random_states(self.document(self.counterpart), unpacker)

    def entry(self, rank: int, name: str) -> Entry:
        """What one file's header says of a tensor."""
        return self.reader(rank).entry(name)

    def tensor(self, rank: int, name: str) -> Tensor:
        """A whole tensor of one file, its checksum compared."""
        return self.reader(rank).tensor(name)

    def rank_at(self, tp: int | None, shard: int | None) -> int:
        """Whose file has a range: of the replica and the place on tp that are nearest to this rank's, where all have it."""
        kept = self.layout.places
        part = self._tp if tp is None else tp
        if shard is None:
            data = kept.data[part]
            return data[self.place.data % len(data)]
        return kept.ranks[shard, self.place.replicate % kept.replicate, part]

    def shard_of(self, rank: int) -> int:
        """The place on shard of whose file this is."""
        return next(place for place, found in self.layout.places.ranks.items() if found == rank)[0]

    def verify(self, rank: int, world: int, skip: Iterable[int]) -> int:
        """This rank's share of all files, of ``world`` that share them; returns the bytes of the files it looked into.

        Args:
            skip: numbers of flat buffers that nobody here loads.
        Raises:
            CheckpointError: bytes are not those that were written.
        """
        if self._files.verified:
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
