"""Where the elements of a saved parameter are, by file and place, for a run that divides it otherwise: integers alone.

Note: [Storage order]
    A range of a parameter is one of its elements in the order in which they lie in memory.  A part of a tensor that is
    divided along one dim has, in that order, ``row`` elements of every ``row * count`` of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.shards import SavedFlat, SavedParam
from zhooks.layout import Layout, Segment
from zhooks.tensor import ParamShard

__all__ = ["Cut", "Laid", "ParamRanges", "cuts_of", "difference", "part_runs", "ranges_of"]


@dataclass(frozen=True, slots=True)
class Laid:
    """How one place on tp has a tensor: the part's strides, and the dim that is divided by ``count`` places, if one is."""

    stride: tuple[int, ...]
    dim: int | None = None
    count: int = 1

    def part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part."""
        return tuple(size // self.count if dim == self.dim else size for dim, size in enumerate(shape))


@dataclass(frozen=True, slots=True)
class Cut:
    """See Note [Storage order]; of a tensor that is not divided one row, which is all of it."""

    row: int
    count: int

    def to_whole(self, index: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where in the whole ``[start, stop)`` of part ``index`` is, run by run: (start, numel)."""
        while start < stop:
            number, at = divmod(start, self.row)
            numel = min(self.row - at, stop - start)
            yield (number * self.count + index) * self.row + at, numel
            start += numel

    def to_parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """In which parts ``[start, stop)`` of the whole is, run by run: (index, start, numel)."""
        while start < stop:
            place, at = divmod(start, self.row)
            number, index = divmod(place, self.count)
            numel = min(self.row - at, stop - start)
            yield index, number * self.row + at, numel
            start += numel


def part_runs(here: Cut, index: int, start: int, stop: int, saved: Cut) -> Iterator[tuple[int, int, int]]:
    """In which saved parts ``[start, stop)`` of this run's part ``index`` is, in its order: (index, start, numel)."""
    if here == saved:
        yield index, start, stop - start
        return
    for begin, numel in here.to_whole(index, start, stop):
        yield from saved.to_parts(begin, begin + numel)


def cuts_of(shape: Sequence[int], here: Laid, saved: Laid) -> tuple[Cut, Cut] | None:
    """The two ways in which a tensor of this global shape is divided; None where its parts lie in memory in other orders."""
    order = _common_order(shape, [here, saved])
    return None if order is None else (_cut(shape, order, here), _cut(shape, order, saved))


def _common_order(shape: Sequence[int], ways: Sequence[Laid]) -> list[int] | None:
    """The dims from the outermost to the innermost, as all parts lie; dims of one element are anywhere."""
    rest = [_order(laid.part(shape), laid.stride) for laid in ways]
    left, found = list(range(len(shape))), []
    while left:
        # The next is one that no part has further in than another that is left.
        dim = next((dim for dim in left if all(dim not in order or dim == order[0] for order in rest)), None)
        if dim is None:
            return None
        found.append(dim)
        left.remove(dim)
        rest = [[each for each in order if each != dim] for order in rest]
    return found


def _order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [dim for dim in sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)) if shape[dim] > 1]


def _cut(shape: Sequence[int], order: Sequence[int], laid: Laid) -> Cut:
    if laid.dim is None:
        return Cut(max(1, math.prod(shape)), 1)
    inner = math.prod(shape[dim] for dim in order[order.index(laid.dim) + 1 :])
    return Cut(max(1, shape[laid.dim] // laid.count * inner), laid.count)


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
