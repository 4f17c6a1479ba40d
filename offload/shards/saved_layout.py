"""The layout of a saved model as its manifest describes it: flat buffers, the parameters in them, and the place of each file.

``saved_model.py`` reads whole parameters by it, ``zhooks/checkpoint`` the ranges that a rank needs.  It knows names and
integers; it opens no file, and never takes a number that contradicts another.

Note: [Which file is whose]
    The manifest says of every file which place on shard, replicate and tp its rank had.  Older ones do not: they are taken to
    be of the mesh that loads them where the sizes of its axes are the same, else of one with the axes replicate, shard, tp, in
    that order.  Replicas whose values differ by checksum show that it was another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from offload.shards.file import CODES
from offload.shards.manifest import Manifest

__all__ = ["Places", "SavedFlat", "SavedLayout", "SavedParam", "UnknownPlacesError", "read_flats"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


class UnknownPlacesError(ValueError):
    """An older manifest whose files cannot be told apart by their places on the mesh."""


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
    """One flat buffer: the masters of parameters, in ranges over ``world`` files; (start, numel) of each segment.

    ``world`` is 1 where every rank had all of it.
    """

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

    @property
    def shard_numel(self) -> int:
        return self.padded // self.world

    @property
    def sharded(self) -> bool:
        return self.world > 1


@dataclass(frozen=True, slots=True)
class Places:
    """Which file is of which place: see Note [Which file is whose].

    Attributes:
        ranks: the files' ranks by place on shard, replicate and tp.
        data: those of one place on tp, in order.
    """

    shard: int
    replicate: int
    tp: int
    ranks: Mapping[tuple[int, int, int], int]
    data: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Any, world: int) -> Places:
        """Those that a manifest lists.

        Raises:
            ValueError: they are no whole mesh of ``world`` ranks.
        """
        found = {(_int(shard), _int(replicate), _int(tp)): rank for rank, (shard, replicate, tp) in enumerate(rows)}
        sizes = [1 + max(place[axis] for place in found) for axis in range(3)]
        if len(rows) != world or len(found) != world or math.prod(sizes) != world:
            raise ValueError(f"places of {len(rows)} ranks that do not form a mesh of {world}")
        data = [tuple(rank for (_, _, tp), rank in found.items() if tp == place) for place in range(sizes[2])]
        return cls(sizes[0], sizes[1], sizes[2], found, tuple(data))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.shard, self.replicate, self.tp


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """What a manifest describes; ``told``: it says itself which file is of which place."""

    flats: tuple[SavedFlat, ...]
    places: Places
    told: bool

    @classmethod
    def of(cls, manifest: Manifest, here: Places | None = None) -> SavedLayout:
        """Read and compared; ``here`` are the places of the ranks that load it, if any do.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, IndexError: it contradicts itself, or is none that a save wrote.
        """
        about, flats = manifest.about, read_flats(manifest)
        worlds = {flat.world for flat in flats if flat.sharded}
        counts = {param.count for flat in flats for param in flat.params if param.dim is not None}
        told = "places" in about
        found = (
            Places.of(about["places"], manifest.world)
            if told
            else _usual_places(manifest, flats, max(counts, default=1), max(worlds, default=1), here)
        )
        if not worlds <= {found.shard} or not counts <= {found.tp}:
            raise ValueError(f"buffers over {sorted(worlds)} ranks and parts of {sorted(counts)} on a mesh of {found.sizes}")
        return cls(flats, found, told)

    def has_replicas(self, manifest: Manifest) -> bool:
        """By checksum, values are the same wherever they are not divided."""
        return _has_replicas(manifest, self.flats, self.places)


def read_flats(manifest: Manifest) -> tuple[SavedFlat, ...]:
    """The flat buffers that a manifest describes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError: it contradicts itself, or is none that a save wrote.
    """
    flats = tuple(_flat(number, described) for number, described in enumerate(manifest.about["flats"]))
    names = [param.name for flat in flats for param in flat.params]
    if len(set(names)) != len(names):
        raise ValueError("two parameters with one name")
    return flats


def _flat(number: int, about: Mapping[str, Any]) -> SavedFlat:
    padded, shard_numel = _int(about["padded"]), _int(about["shard_numel"])
    segments = tuple((_int(start), _int(numel)) for start, numel in about["segments"])
    world = padded // shard_numel if shard_numel else 1
    ends = [0, *(start + numel for start, numel in segments)]
    whole = ends[-1] == padded and [start for start, _ in segments] == ends[:-1]
    if not whole or world < 1 or shard_numel * world != padded or any(numel < 1 or numel % world for _, numel in segments):
        raise ValueError(f"buffer {number} of {padded} elements in ranges of {shard_numel} and segments {segments[:3]}")
    params = tuple(map(_param, about["params"]))
    starts, numels = [param.start for param in params], [math.prod(param.part_shape) for param in params]
    # Older manifests do not say; then one alignment must explain where all begin.
    ways = [_int(about["align"])] if about.get("align") is not None else [2**power for power in range(13)]
    if not any(_starts(numels, align) == starts for align in ways if starts and align):
        raise ValueError(f"parameters that start at {starts[:3]}")
    if starts[-1] + numels[-1] > padded:
        raise ValueError(f"parameters beyond {padded} elements")
    return SavedFlat(number, str(about["name"]), _DTYPES[about["dtype"]], padded, world, segments, params)


def _starts(numels: Sequence[int], align: int) -> list[int]:
    """Where parameters begin that follow each other on multiples of ``align``."""
    starts = [0]
    for numel, _ in pairwise(numels):
        starts.append(-(-(starts[-1] + numel) // align) * align)
    return starts


def _param(about: Mapping[str, Any]) -> SavedParam:
    name = about["name"]
    shape, stride = tuple(map(_int, about["shape"])), tuple(map(_int, about["stride"]))
    dim, count = map(_int, about["tp"]) if "tp" in about else (None, 1)
    if not isinstance(name, str) or len(shape) != len(stride):
        raise ValueError(f"parameter {str(name)[:80]} of shape {shape} and stride {stride}")
    if dim is not None and not (dim < len(shape) and count > 1 and shape[dim] % count == 0):
        raise ValueError(f"parameter {name} of shape {shape} in {count} parts along dim {dim}")
    whole = SavedParam(name, shape, stride, _int(about["start"]), stride, dim, count)
    if dim is None:
        part_stride = stride
    elif "part_stride" in about:
        part_stride = tuple(map(_int, about["part_stride"]))
    else:
        part_stride = _ordered_like(stride, whole.part_shape)
    if not _dense(shape, stride) or not _dense(whole.part_shape, part_stride):
        raise ValueError(f"parameter {name} of shape {shape} and strides {stride}, {part_stride}")
    return SavedParam(name, shape, stride, whole.start, part_stride, dim, count)


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Every element of the tensor has one place, without gaps."""
    if len(shape) != len(stride):
        return False
    size = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != size and 0 not in shape:
            return False
        size *= max(1, length)
    return True


def _ordered_like(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of this shape whose dims lie as those of ``stride``."""
    found, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        found[dim], size = size, size * max(1, shape[dim])
    return tuple(found)


def _usual_places(manifest: Manifest, flats: Sequence[SavedFlat], tp: int, shard: int, here: Places | None) -> Places:
    """See Note [Which file is whose].

    Raises:
        UnknownPlacesError: replicas differ, so that it was another mesh.
    """
    world = manifest.world
    data = world // tp
    across = data if shard == 1 else shard
    usual = Places.of([[rank // tp % across, rank // tp // across, rank % tp] for rank in range(world)], world)
    fits = here is not None and here.tp == tp and math.prod(here.sizes) == world and shard in (1, here.shard)
    ways = [here, usual] if here is not None and fits else [usual]
    found = next((places for places in ways if _has_replicas(manifest, flats, places)), None)
    if found is None:
        why = "an older checkpoint of ranks that are not replicas of each other: load it on the mesh it was saved on"
        raise UnknownPlacesError(why)
    return found


def _has_replicas(manifest: Manifest, flats: Sequence[SavedFlat], found: Places) -> bool:
    for (shard, _, part), rank in found.ranks.items():
        for flat in flats:
            # What is not divided is the same at all places on shard, too.
            first = found.ranks[shard if flat.sharded else 0, 0, part]
            if manifest.files[rank].tensors.get(flat.tensor) != manifest.files[first].tensors.get(flat.tensor):
                return False
    return True


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]} in the place of a number")
    return value
