"""The layout of a saved model as its manifest describes it: flat buffers, the parameters in them, and the place of each file.

``saved_model.py`` reads whole parameters by it, ``zhooks/checkpoint`` the ranges that a rank needs.  It knows names and
integers; it opens no file, and never takes a number that contradicts another.
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

__all__ = ["SavedFlat", "SavedLayout", "SavedParam"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


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
class SavedLayout:
    """What a manifest describes: flat buffers, and which file is of which place on the mesh.

    Attributes:
        shard, replicate, tp: the sizes of the axes.
        ranks: the files' ranks by place on shard, replicate and tp.
        data: those of one place on tp, in order.
    """

    flats: tuple[SavedFlat, ...]
    shard: int
    replicate: int
    tp: int
    ranks: Mapping[tuple[int, int, int], int]
    data: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, manifest: Manifest) -> SavedLayout:
        """Read and compared.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, IndexError: it contradicts itself, or is none that a save wrote.
        """
        flats = tuple(_flat(number, described) for number, described in enumerate(manifest.about["flats"]))
        names = [param.name for flat in flats for param in flat.params]
        if len(set(names)) != len(names):
            raise ValueError("two parameters with one name")
        rows = manifest.about["places"]
        ranks = {(_int(shard), _int(replicate), _int(tp)): rank for rank, (shard, replicate, tp) in enumerate(rows)}
        shard, replicate, tp = (1 + max(place[axis] for place in ranks) for axis in range(3))
        if not len(rows) == len(ranks) == manifest.world == shard * replicate * tp:
            raise ValueError(f"places of {len(rows)} ranks that do not form a mesh of {manifest.world}")
        worlds = {flat.world for flat in flats if flat.sharded}
        counts = {param.count for flat in flats for param in flat.params if param.dim is not None}
        if not worlds <= {shard} or not counts <= {tp}:
            mesh = f"{shard} x {replicate} x {tp}"
            raise ValueError(f"buffers over {sorted(worlds)} ranks and parts of {sorted(counts)} on a mesh of {mesh}")
        data = tuple(tuple(rank for place, rank in ranks.items() if place[2] == part) for part in range(tp))
        return cls(flats, shard, replicate, tp, ranks, data)

    def has_replicas(self, manifest: Manifest) -> bool:
        """By checksum, values are the same wherever they are not divided."""
        for (shard, _, part), rank in self.ranks.items():
            for flat in self.flats:
                # What is not divided is the same at all places on shard, too.
                first = self.ranks[shard if flat.sharded else 0, 0, part]
                if manifest.files[rank].tensors.get(flat.tensor) != manifest.files[first].tensors.get(flat.tensor):
                    return False
        return True


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
    align = _int(about["align"])
    if not starts or not align or _starts(numels, align) != starts:
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
    part_stride = stride if dim is None else tuple(map(_int, about["part_stride"]))
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


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]} in the place of a number")
    return value
