"""Parameters to padded flat ranges: which element of which parameter lives at which place on which rank.

The arithmetic of law 1 of the design, on integers alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import LayoutError

ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A consecutive piece of the flat buffer that is split evenly over the ranks: ``[start, start + numel)``."""

    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Piece:
    """``numel`` consecutive elements held by one rank: from ``start`` of the parameter, at ``local`` of the shard."""

    start: int
    local: int
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every parameter of one flat buffer starts, and how the buffer is cut over ``world`` ranks.

    All figures are elements.  ``numel`` counts the parameters alone; ``padded`` counts the buffer; parameters and ranges
    start on multiples of ``align``.
    """

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    segments: tuple[Segment, ...]
    world: int
    align: int = 1
    padded: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked many times a step.
        object.__setattr__(self, "padded", sum(segment.numel for segment in self.segments))

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def shard_numel(self) -> int:
        return self.padded // self.world

    @property
    def padding(self) -> int:
        return self.padded - self.numel

    def undivided(self) -> Layout:
        """The same buffer where every rank has all of it."""
        return replace(self, segments=(Segment(0, self.padded),) if self.padded else (), world=1)

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The ``(start, stop)`` of the flat buffer that ``rank`` owns, one a segment, in the order of its shard."""
        out = []
        for segment in self.segments:
            step = segment.numel // self.world
            out.append((segment.start + rank * step, segment.start + (rank + 1) * step))
        return tuple(out)

    def pieces(self, index: int, rank: int) -> tuple[Piece, ...]:
        """What ``rank`` holds of parameter ``index``; consecutive in its shard, several where segments cut it."""
        begin, end = self.starts[index], self.starts[index] + self.numels[index]
        out, local = [], 0
        for start, stop in self.ranges(rank):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                out.append(Piece(low - begin, local + low - start, high - low))
            local += stop - start
        return tuple(out)

    def holders(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Who has ``[start, stop)`` of the flat buffer, run by run: ``(rank, place in its shard, numel)``."""
        first = bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        for segment in self.segments[max(0, first) :]:
            step = segment.numel // self.world
            low, high = max(start, segment.start), min(stop, segment.start + segment.numel)
            if low >= high:
                return
            while low < high:
                rank, at = divmod(low - segment.start, step)
                numel = min(step - at, high - low)
                # Segments follow each other, and a rank has one part in ``world`` of each.
                yield rank, segment.start // self.world + at, numel
                low += numel


def flat_layout(
    numels: Sequence[int], *, world: int, itemsize: int, align_bytes: int = ALIGN_BYTES, max_numel: int | None = None
) -> Layout:
    """Lay parameters one after the other, each on ``align_bytes``, padded so that every rank's range is aligned too.

    Args:
        numels: elements of each parameter in storage order; 0 is allowed.
        world: ranks that share the buffer.
        itemsize: bytes of one element.
        max_numel: above this many elements the buffer is cut into segments of at most that (rounded up to one row of
            aligned ranges), each split evenly; None keeps one segment.
    Raises:
        LayoutError: ``world`` or ``itemsize`` is below 1, or ``max_numel`` is.
    """
    if world < 1 or itemsize < 1 or (max_numel is not None and max_numel < 1):
        raise LayoutError(
            f"layout needs world, itemsize and max_numel of at least 1, found {world}, {itemsize} and {max_numel}. "
            "Raise [units] max_numel."
        )
    align = max(1, align_bytes // itemsize)
    starts, offset = [], 0
    for numel in numels:
        starts.append(offset)
        offset += _round_up(numel, align)
    row = world * align
    total = _round_up(offset, row)
    bound = total if max_numel is None else max(row, max_numel // row * row)
    segments, start = [], 0
    while start < total:
        size = min(bound, total - start)
        segments.append(Segment(start, size))
        start += size
    return Layout(tuple(numels), tuple(starts), tuple(segments), world, align)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
