"""The layout a checkpoint was saved in, as its manifest holds it: where the elements of every parameter are, by file and place.

``save_load.py`` writes ``describe`` and ``places``; ``saved_files.py`` reads them back, and asks for ranges.  It looks at no
values and opens no file.

Note: [Which file is whose]
    The manifest says of every file which place on shard, replicate and tp its rank had.  Older ones do not: they are taken to
    be of this run's mesh where the sizes of its axes are the same, else of one with the axes replicate, shard, tp, in that
    order.  Replicas whose values differ by checksum show that it was another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from offload.shards import CODES, Manifest
from zhooks.checkpoint.saved_ranges import Laid, cuts_of, part_runs
from zhooks.checkpoint.shard_contents import RunState, tensor_name
from zhooks.comm import Comm
from zhooks.layout import Axis, Layout, Segment
from zhooks.tensor import ParamShard

__all__ = ["Places", "SavedFlat", "SavedLayout", "SavedParam", "describe", "difference", "places"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


# Written.


def describe(run: RunState) -> list[dict[str, Any]]:
    """Every flat buffer's name, dtype, segments and parameters."""
    return [
        {
            "name": flat.name,
            "dtype": str(flat.kind.master).removeprefix("torch."),
            "padded": flat.layout.padded,
            "shard_numel": flat.shard_numel,
            "align": flat.layout.align,
            "segments": [[segment.start, segment.numel] for segment in flat.layout.segments],
            "params": [
                {"name": spec.name, "shape": list(spec.shape), "stride": list(spec.stride), "start": start} | _over_tp(spec)
                for spec, start in zip(flat.specs, flat.layout.starts, strict=True)
            ],
        }
        for flat in run.flats
    ]


def _over_tp(spec: ParamShard) -> dict[str, Any]:
    """The dim that is divided over tp, the number of parts, and how a part lies in memory; nothing where there is none."""
    if spec.place is None:
        return {}
    return {"tp": [spec.place[0], spec.place[2]], "part_stride": list(spec.part_stride)}


def places(comm: Comm) -> list[list[int]]:
    """The place of each rank of the model on shard, replicate and tp: see Note [Which file is whose]."""
    axes = (comm.shard.axis, comm.replicate.axis, comm.tp.axis)
    return [[_place(axis, rank) for axis in axes] for rank in comm.stage.axis.ranks]


def _place(axis: Axis, rank: int) -> int:
    return next((row.index(rank) for row in (*axis.siblings, axis.ranks) if rank in row), 0)


# Read.


@dataclass(frozen=True, slots=True)
class SavedFlat:
    """One flat buffer of a checkpoint; ``layout`` is over one rank where each had all of it."""

    number: int
    dtype: torch.dtype
    layout: Layout

    @property
    def sharded(self) -> bool:
        return self.layout.world > 1


@dataclass(frozen=True, slots=True)
class SavedParam:
    """One parameter of a checkpoint: global shape and strides, how it was divided, and where in its flat buffer it starts."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    laid: Laid
    flat: SavedFlat
    index: int

    @property
    def start(self) -> int:
        return self.flat.layout.starts[self.index]

    def span(self, shard: int) -> tuple[int, int]:
        """Where a rank's range of it begins in what that rank saved, and its elements."""
        pieces = self.flat.layout.pieces(self.index, shard if self.flat.sharded else 0)
        return (pieces[0].local if pieces else 0), sum(piece.numel for piece in pieces)

    def runs(self, spec: ParamShard) -> Iterator[tuple[int | None, int | None, int, int]]:
        """Where the elements that this rank owns are, in its order: (place on tp, place on shard, offset, numel).

        None stands for any place: all of them have it.
        """
        cuts = cuts_of(self.shape, laid_of(spec), self.laid)
        assert cuts is not None, f"{self.name} was compared"
        here, saved = cuts
        index = 0 if spec.place is None else spec.place[1]
        divided, sharded = self.laid.dim is not None, self.flat.sharded
        for piece in spec.pieces:
            for part, start, numel in part_runs(here, index, piece.start, piece.start + piece.numel, saved):
                begin = self.start + start
                for shard, offset, count in self.flat.layout.holders(begin, begin + numel):
                    yield part if divided else None, shard if sharded else None, offset, count


def laid_of(spec: ParamShard) -> Laid:
    """How this run has a parameter."""
    if spec.place is None:
        return Laid(tuple(spec.part_stride))
    return Laid(tuple(spec.part_stride), spec.place[0], spec.place[2])


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
        if len(rows) != world or len(found) != world or math.prod(sizes) != world or min(map(min, found)) < 0:
            raise ValueError(f"places of {len(rows)} ranks that are no mesh of {world}")
        data = [tuple(rank for (_, _, tp), rank in found.items() if tp == place) for place in range(sizes[2])]
        return cls(sizes[0], sizes[1], sizes[2], found, tuple(data))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.shard, self.replicate, self.tp


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """The flat buffers of one folder, its parameters by name and by flat, and the places of its files."""

    flats: tuple[SavedFlat, ...]
    params: Mapping[str, SavedParam]
    members: tuple[tuple[SavedParam, ...], ...]
    places: Places

    @classmethod
    def of(cls, manifest: Manifest, here: Places) -> SavedLayout:
        """What a manifest describes; ``here`` are the places of this run.

        Raises:
            ValueError, KeyError, TypeError: it contradicts itself, or is none that ``save`` wrote.
        """
        about = manifest.about
        flats: list[SavedFlat] = []
        params: dict[str, SavedParam] = {}
        rows: list[tuple[SavedParam, ...]] = []
        for number, described in enumerate(about["flats"]):
            members = [_member(one) for one in described["params"]]
            flat = _flat(number, described, [math.prod(laid.part(shape)) for _, shape, _, laid in members])
            flats.append(flat)
            for index, (name, shape, stride, laid) in enumerate(members):
                if name in params:
                    raise ValueError(f"two parameters {name}")
                params[name] = SavedParam(name, shape, stride, laid, flat, index)
            rows.append(tuple(params[name] for name, _, _, _ in members))
        worlds = {flat.layout.world for flat in flats if flat.sharded}
        counts = {param.laid.count for param in params.values() if param.laid.dim is not None}
        found = (
            Places.of(about["places"], manifest.world)
            if "places" in about
            else _usual_places(manifest, flats, max(counts, default=1), max(worlds, default=1), here)
        )
        if not worlds <= {found.shard} or not counts <= {found.tp}:
            raise ValueError(f"buffers over {sorted(worlds)} ranks and parts of {sorted(counts)} on a mesh of {found.sizes}")
        return cls(tuple(flats), params, tuple(rows), found)


def _member(described: Mapping[str, Any]) -> tuple[str, tuple[int, ...], tuple[int, ...], Laid]:
    name, shape, stride = described["name"], tuple(map(_int, described["shape"])), tuple(map(_int, described["stride"]))
    if not isinstance(name, str) or len(shape) != len(stride) or min(shape, default=0) < 0:
        raise ValueError(f"parameter {str(name)[:80]} of shape {shape} and stride {stride}")
    if "tp" not in described:
        return name, shape, stride, Laid(stride)
    dim, count = map(_int, described["tp"])
    part = tuple(map(_int, described.get("part_stride", stride)))
    if len(part) != len(shape) or not 0 <= dim < len(shape) or count < 2 or shape[dim] % count:
        raise ValueError(f"parameter {name} of shape {shape} in {count} parts along dim {dim}")
    return name, shape, stride, Laid(part, dim, count)


def _flat(number: int, described: Mapping[str, Any], numels: Sequence[int]) -> SavedFlat:
    padded, shard_numel = _int(described["padded"]), _int(described["shard_numel"])
    starts = [_int(one["start"]) for one in described["params"]]
    segments = [Segment(_int(start), _int(numel)) for start, numel in described["segments"]]
    world = padded // shard_numel if shard_numel > 0 else 1
    aligned = described.get("align")
    # Older manifests do not say; then one alignment must explain where all begin.
    ways = [_int(aligned)] if aligned is not None else [2**power for power in range(13)]
    ends = [segment.start + segment.numel for segment in segments]
    whole = [0, *ends][-1] == padded and [segment.start for segment in segments] == [0, *ends][:-1][: len(segments)]
    if not whole or world < 1 or shard_numel * world != padded or any(segment.numel % world for segment in segments):
        raise ValueError(f"a buffer of {padded} elements in ranges of {shard_numel} and segments {segments[:3]}")
    if min(segment.numel for segment in segments or [Segment(0, 1)]) < 1:
        raise ValueError("an empty segment")
    if not any(_starts(numels, align) == [*starts, starts[-1] + numels[-1]] for align in ways if starts and align > 0):
        raise ValueError(f"parameters that start at {starts[:3]}")
    if starts[-1] + numels[-1] > padded:
        raise ValueError(f"parameters beyond {padded} elements")
    layout = Layout(tuple(numels), tuple(starts), tuple(segments), world)
    return SavedFlat(number, _DTYPES[described["dtype"]], layout.undivided() if world == 1 else layout)


def _starts(numels: Sequence[int], align: int) -> list[int]:
    starts = [0]
    for one, _ in pairwise([*numels, 0]):
        starts.append(-(-starts[-1] // align) * align + one)
    begins = [-(-end // align) * align for end in starts[:-1]]
    return [*begins, starts[-1]]


def _usual_places(manifest: Manifest, flats: Sequence[SavedFlat], tp: int, shard: int, here: Places) -> Places:
    """See Note [Which file is whose].

    Raises:
        ValueError: replicas differ, so that it was another mesh.
    """
    world = manifest.world
    data = world // tp
    across = data if shard == 1 else shard
    usual = Places.of([[rank // tp % across, rank // tp // across, rank % tp] for rank in range(world)], world)
    ways = [here, usual] if here.tp == tp and math.prod(here.sizes) == world and shard in (1, here.shard) else [usual]
    found = next((places for places in ways if _has_replicas(manifest, flats, places)), None)
    if found is None:
        raise ValueError("an older checkpoint of ranks that are no replicas of each other: load it on the mesh it is of")
    return found


def _has_replicas(manifest: Manifest, flats: Sequence[SavedFlat], found: Places) -> bool:
    """By checksum, values are the same at all places on replicate."""
    names = [tensor_name(flat.number, "value") for flat in flats]
    for (own, replica, part), rank in found.ranks.items():
        one, first = (manifest.files[each].tensors for each in (rank, found.ranks[own, 0, part]))
        if replica and any(one.get(name) != first.get(name) for name in names):
            return False
    return True


def _int(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**62:
        raise ValueError(f"{str(value)[:80]} in the place of a number")
    return value


# Compared.


def difference(saved: SavedParam | None, spec: ParamShard) -> str:
    """What of a parameter of this run differs from the one that was saved, in words; "" where it can be loaded."""
    if saved is None:
        return f"parameter {spec.name} of shape {list(spec.shape)}, which the checkpoint does not have"
    for what in ("shape", "stride"):
        one, other = list(getattr(saved, what)), list(getattr(spec, what))
        if one != other:
            return f"parameter {spec.name} of {what} {other} where the checkpoint has {one}"
    if cuts_of(spec.shape, laid_of(spec), saved.laid) is None:
        return (
            f"parameter {spec.name} whose part over tp lies in memory with strides {list(spec.part_stride)} where the "
            f"checkpoint has {list(saved.laid.stride)}"
        )
    return ""
