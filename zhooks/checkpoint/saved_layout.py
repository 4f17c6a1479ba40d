"""What a manifest says of this run's layout, and where the elements of a saved parameter are, by file and place.

``save_load.py`` writes ``describe`` and ``places``, which ``offload/shards/saved_layout.py`` reads back; ``saved_files.py``
asks for ranges.  It looks at no values and opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offload.shards import SavedFlat, SavedParam
from zhooks.checkpoint.saved_ranges import Laid, cuts_of, part_runs
from zhooks.checkpoint.shard_contents import RunState
from zhooks.comm import Comm
from zhooks.layout import Layout, Segment
from zhooks.tensor import ParamShard

__all__ = ["ParamRanges", "describe", "difference", "places", "ranges_of"]


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
    """The place of each rank of the model on shard, replicate and tp: see Note [Which file is whose] there."""
    axes = (comm.shard.axis, comm.replicate.axis, comm.tp.axis)
    return [[axis.place(rank) for axis in axes] for rank in comm.stage.axis.ranks]


# Read.


@dataclass(frozen=True, slots=True)
class ParamRanges:
    """One parameter of a checkpoint, and which elements of it each place on shard saved.

    Attributes:
        layout: of its flat buffer, over one rank where each had all of it.
        index: its place in the buffer.
    """

    saved: SavedParam
    flat: SavedFlat
    layout: Layout
    index: int

    @property
    def name(self) -> str:
        return self.saved.name

    @property
    def laid(self) -> Laid:
        return Laid(self.saved.part_stride, self.saved.dim, self.saved.count)

    def span(self, shard: int) -> tuple[int, int]:
        """Where a rank's range of it begins in what that rank saved, and its elements."""
        pieces = self.layout.pieces(self.index, shard if self.flat.sharded else 0)
        return (pieces[0].local if pieces else 0), sum(piece.numel for piece in pieces)

    def runs(self, spec: ParamShard) -> Iterator[tuple[int | None, int | None, int, int]]:
        """Where the elements that this rank owns are, in its order: (place on tp, place on shard, offset, numel).

        None stands for any place: all of them have it.
        """
        cuts = cuts_of(self.saved.shape, laid_of(spec), self.laid)
        assert cuts is not None, f"{self.name} was compared"
        here, saved = cuts
        index = 0 if spec.place is None else spec.place[1]
        divided, sharded = self.saved.dim is not None, self.flat.sharded
        for piece in spec.pieces:
            for part, start, numel in part_runs(here, index, piece.start, piece.start + piece.numel, saved):
                begin = self.saved.start + start
                for shard, offset, count in self.layout.holders(begin, begin + numel):
                    yield part if divided else None, shard if sharded else None, offset, count


def laid_of(spec: ParamShard) -> Laid:
    """How this run has a parameter."""
    if spec.place is None:
        return Laid(tuple(spec.part_stride))
    return Laid(tuple(spec.part_stride), spec.place[0], spec.place[2])


def ranges_of(flat: SavedFlat) -> tuple[ParamRanges, ...]:
    """The parameters of one flat buffer."""
    numels, starts = [math.prod(param.part_shape) for param in flat.params], [param.start for param in flat.params]
    segments = [Segment(start, numel) for start, numel in flat.segments]
    layout = Layout(tuple(numels), tuple(starts), tuple(segments), flat.world)
    laid = layout if flat.sharded else layout.undivided()
    return tuple(ParamRanges(param, flat, laid, index) for index, param in enumerate(flat.params))


# Compared.


def difference(found: ParamRanges | None, spec: ParamShard) -> str:
    """What of a parameter of this run differs from the one that was saved, in words; "" where it can be loaded."""
    if found is None:
        return f"parameter {spec.name} of shape {list(spec.shape)}, which the checkpoint does not have"
    for what in ("shape", "stride"):
        one, other = list(getattr(found.saved, what)), list(getattr(spec, what))
        if one != other:
            return f"parameter {spec.name} of {what} {other} where the checkpoint has {one}"
    if cuts_of(spec.shape, laid_of(spec), found.laid) is None:
        return (
            f"parameter {spec.name} whose tp part is stored with strides {list(spec.part_stride)} where the "
            f"checkpoint has {list(found.laid.stride)}"
        )
    return ""
