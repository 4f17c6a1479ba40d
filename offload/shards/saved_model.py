"""The model in a folder of shard files, read without the program that saved it: parameters whole, a flat buffer at a time.

``zprof checkpoint`` opens folders with it.  It reads manifests, headers and tensors, verifying what it reads; it never runs
anything a folder holds, needs no other rank, and knows neither modules nor policies.

Note: [Places]
    A manifest says of every file which place on the axes shard, replicate and tp its rank had.  Older ones do not: then the
    ranks of one replica follow each other, which checksums of replicas confirm; where parameters are divided over tp,
    nothing would, and the folder is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards.file import CODES, Entry, ShardReader
from offload.shards.manifest import Manifest, read_manifest

__all__ = ["SavedFlat", "SavedModel", "SavedParam"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_DOCUMENT, _BUFFER = "document", "buffer/"
#: Bytes of the JSON in a file.
_DOCUMENT_MOST = 512 << 20


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter: its global shape and strides, where its part starts in the flat buffer, and how it is divided over tp.

    ``dim`` is None where every place has all of it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    part_stride: tuple[int, ...]
    dim: int | None = None
    count: int = 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SavedFlat:
    """One flat buffer: the masters of parameters, in ranges over ``world`` files; (start, numel) of each segment."""

    number: int
    name: str
    dtype: torch.dtype
    padded: int
    world: int
    segments: tuple[tuple[int, int], ...]
    params: tuple[SavedParam, ...]

    @property
    def tensor(self) -> str:
        """What its values are called in the files."""
        return f"{self.number:04d}/value"

    def put(self, full: Tensor, rank: int, own: Tensor) -> None:
        """The range of one rank goes where it belongs in the buffer."""
        at = 0
        for start, numel in self.segments:
            step = numel // self.world
            full[start + rank * step : start + (rank + 1) * step] = own[at : at + step]
            at += step


class SavedModel:
    """What one folder holds.

    Attributes:
        places: (shard, replicate, tp) of each file's rank, in the order of files; a guess where the manifest does not say.
    Raises:
        CheckpointError: there is no manifest, or it is none that a save wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        try:
            self.flats = tuple(_flat(number, each) for number, each in enumerate(self.manifest.about["flats"]))
            self.places, self._unknown = _places(self.manifest, self.flats)
            names = [param.name for flat in self.flats for param in flat.params]
            if len(set(names)) != len(names):
                raise ValueError("two parameters of one name")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise self._refused(f"a manifest that contradicts itself ({type(error).__name__}: {error})"[:300]) from error

    @property
    def mesh(self) -> dict[str, int]:
        """The size of each axis; nothing where nobody can know it."""
        if self._unknown:
            return {}
        sizes = [1 + max(place[axis] for place in self.places) for axis in range(3)]
        return dict(zip(("shard", "replicate", "tp"), sizes, strict=True))

    def reader(self, rank: int) -> ShardReader:
        """One file, its size and header compared with the manifest.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return ShardReader(self.path, self.manifest.files[rank])

    def document(self, rank: int = 0) -> dict[str, Any]:
        """What a rank's file says beside tensors: optimizers, objects, extra, what is left out.

        Raises:
            CheckpointError: the file is damaged, or holds none.
        """
        with closing(self.reader(rank)) as reader:
            if reader.entry(_DOCUMENT).nbytes > _DOCUMENT_MOST:
                raise self._refused(f"{reader.entry(_DOCUMENT).nbytes} bytes of JSON")
            raw = bytes(reader.tensor(_DOCUMENT).numpy())
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._refused("a document of another kind")
        return found

    def entries(self) -> list[Entry]:
        """Every tensor of the whole model: parameters, buffers, and parameters that were ignored, as ``tensors`` gives them.

        Raises:
            CheckpointError: not all of it is here, or nobody can say how its parts belong together.
        """
        left = self.document().get("left out")
        if left:
            found = f"{next(iter(left))} and {len(left) - 1} more that are quantised, of which it has checksums alone"
            raise self._refused(found)
        if self._unknown:
            raise self._refused(self._unknown)
        entries = [Entry(param.name, flat.dtype, param.shape) for flat in self.flats for param in flat.params]
        names = {entry.name for entry in entries}
        for name, entry in self._buffers().items():
            if name in names:
                raise self._refused(f"two tensors called {name}")
            entries.append(Entry(name, entry.dtype, entry.shape))
        return entries

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each of ``entries``, in their order, row-major; in memory is one flat buffer at a time.

        Raises:
            CheckpointError: bytes are not those that were written.
        """
        for flat in self.flats:
            fulls: dict[int, Tensor] = {}
            for param in flat.params:
                places = range(param.count) if param.dim is not None else range(1)
                for place in places:
                    if place not in fulls:
                        fulls[place] = self._full(flat, place)
                yield param.name, _joined(param, [_part(param, fulls[place]) for place in places])
        with closing(self.reader(0)) as reader:
            for name in self._buffers():
                yield name, reader.tensor(_BUFFER + name)

    def _full(self, flat: SavedFlat, tp: int) -> Tensor:
        full = torch.empty(flat.padded, dtype=flat.dtype)
        for shard in range(flat.world):
            with closing(self.reader(self.places.index((shard, 0, tp)))) as reader:
                entry = reader.entry(flat.tensor)
                if (entry.dtype, entry.shape) != (flat.dtype, (flat.padded // flat.world,)):
                    raise self._refused(f"{flat.tensor} of {entry.dtype} and shape {list(entry.shape)} in {reader.path.name}")
                flat.put(full, shard, reader.tensor(flat.tensor))
        return full

    def _buffers(self) -> dict[str, Entry]:
        """By name, without what the file calls them."""
        with closing(self.reader(0)) as reader:
            found = {name.removeprefix(_BUFFER): entry for name, entry in reader.entries.items() if name.startswith(_BUFFER)}
        if self.mesh["tp"] > 1:
            for rank, (_, _, tp) in enumerate(self.places):
                other = next((name for name in found if tp and _BUFFER + name in self.manifest.files[rank].tensors), None)
                if other is not None:
                    raise self._refused(f"buffer {other}, which differs over tp")
        return found

    def _refused(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: expected a checkpoint that attachment.save() wrote, with the whole model, found {found}. Load it "
            "with the program that saved it, and call attachment.save_full()."
        )


def _part(param: SavedParam, full: Tensor) -> Tensor:
    return full.as_strided(param.part_shape, param.part_stride, param.start)


def _joined(param: SavedParam, parts: Sequence[Tensor]) -> Tensor:
    return (parts[0] if param.dim is None else torch.cat(list(parts), param.dim)).contiguous()


def _flat(number: int, about: Mapping[str, Any]) -> SavedFlat:
    padded, shard = _int(about["padded"]), _int(about["shard_numel"])
    segments = tuple((_int(start), _int(numel)) for start, numel in about["segments"])
    world = padded // shard if shard else 1
    ends = [0]
    for start, numel in segments:
        if start != ends[-1] or numel % world:
            raise ValueError(f"segments of buffer {number}")
        ends.append(start + numel)
    if ends[-1] != padded or shard * world != padded:
        raise ValueError(f"buffer {number} of {padded} elements in ranges of {shard}")
    params = tuple(_param(each, padded) for each in about["params"])
    return SavedFlat(number, str(about["name"]), _DTYPES[about["dtype"]], padded, world, segments, params)


def _param(about: Mapping[str, Any], padded: int) -> SavedParam:
    name = about["name"]
    shape, stride = tuple(map(_int, about["shape"])), tuple(map(_int, about["stride"]))
    dim, count = map(_int, about["tp"]) if "tp" in about else (None, 1)
    part = tuple(size // max(1, count) if at == dim else size for at, size in enumerate(shape))
    # Of a divided one older manifests do not say how a part lies; it is not read then.
    usual = stride if dim is None else tuple(math.prod(part[at + 1 :]) for at in range(len(part)))
    part_stride = tuple(map(_int, about.get("part_stride", usual)))
    if not isinstance(name, str) or not len(shape) == len(stride) == len(part_stride):
        raise ValueError(f"parameter {str(name)[:80]}")
    if dim is not None and not (dim < len(shape) and count > 1 and shape[dim] % count == 0):
        raise ValueError(f"parameter {name} in {count} parts along dim {dim}")
    param = SavedParam(name, shape, stride, _int(about["start"]), part_stride, dim, count)
    # Strides are a permutation's: every element once, none beyond the part.
    size = 1
    for step, length in sorted(zip(part_stride, part, strict=True)):
        if length < 2:
            continue
        if step != size:
            raise ValueError(f"parameter {name} of shape {list(shape)} and strides {list(part_stride)}")
        size *= length
    if param.start + math.prod(part) > padded:
        raise ValueError(f"parameter {name} beyond its buffer")
    return param


def _places(manifest: Manifest, flats: Sequence[SavedFlat]) -> tuple[list[tuple[int, int, int]], str]:
    """Those of all files, and why nobody can know them, or ""; see Note [Places]."""
    world = manifest.world
    counts = {param.count for flat in flats for param in flat.params if param.dim is not None}
    worlds = {flat.world for flat in flats if flat.world > 1}
    told = "places" in manifest.about
    if told:
        rows = [tuple(map(_int, row)) for row in manifest.about["places"]]
        places = [(shard, replicate, tp) for shard, replicate, tp in rows]
    else:
        tp, shard = max(counts, default=1), max(worlds, default=1)
        places = [(rank // tp % shard, rank // tp // shard, rank % tp) for rank in range(world)]
    sizes = [1 + max(place[axis] for place in places) for axis in range(3)]
    if len(places) != world or len(set(places)) != world or math.prod(sizes) != world:
        raise ValueError(f"places of {len(places)} ranks that are no mesh of {world}")
    if not worlds <= {sizes[0]} or not counts <= {sizes[2]}:
        raise ValueError(f"buffers over {sorted(worlds)} ranks and parts of {sorted(counts)} on a mesh of {sizes}")
    silent = "an older manifest that does not say which place on the mesh each rank had"
    if not told and counts:
        return places, f"parameters divided over tp, and {silent}"
    for rank, (shard, replicate, tp) in enumerate(places):
        first = places.index((shard, 0, tp))
        for flat in flats if replicate else ():
            if manifest.files[rank].tensors.get(flat.tensor) != manifest.files[first].tensors.get(flat.tensor):
                found = f"replicas that differ in {flat.tensor}: ranks {first} and {rank}"
                if told:
                    raise ValueError(found)
                return places, f"{found}, and {silent}"
    return places, ""


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]} in the place of a number")
    return value
