"""From a range of a parameter as this run divides it over tp to the ranges of the parts it was saved in: integers alone.

``saved_layout.py`` asks it where the elements of a parameter are that one rank owns.  It knows neither files nor tensors, and
which rank has which range of a flat buffer is for ``layout/flat_ranges.py`` to say.

Note: [Storage order]
    A range of a parameter is one of its elements in the order in which they lie in memory.  A part of a tensor that is
    divided along one dim has, in that order, ``row`` elements of every ``row * count`` of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Cut", "Laid", "cuts_of", "part_runs"]


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
