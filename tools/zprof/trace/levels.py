"""Owns the arithmetic that making a trace smaller needs: what each row changes, and which rows belong together.

`zprof.trace.decimate` calls it, chunk by chunk. It knows no file, and never loops over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zprof.rows import CATEGORIES, TIERS, RowKind, placement
from zprof.trace.columns import Rows

__all__ = ["PLACES", "Changes", "Levels", "Open", "Walk", "extremes", "nesting", "walked"]

#: How many combinations of category and tier there are; place // `CATEGORIES` is the tier.
PLACES = len(CATEGORIES) * len(TIERS)

_Int64s = NDArray[np.int64]
_Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Changes:
    """What the rows of one chunk that speak of what is held changed; all [changes].

    Attributes:
        at: the row's position in its chunk. series, place: whose level changed.
        counter: by how much the stated level moved. stored: by how much the storages did; one of the two is 0.
    """

    at: _Int64s
    series: _Int64s
    place: _Int64s
    counter: _Int64s
    stored: _Int64s


class Levels:
    """Numbers the series of a trace as they come, and knows the last counter of each.

    Attributes:
        what, key: of each series, positions in the trace's strings. place: of each series.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.what = np.zeros(0, np.int64)
        self.key = np.zeros(0, np.int64)
        self.place = np.zeros(0, np.int64)
        self._strings = strings
        self._place_of_what = np.zeros(0, np.int64)
        self._codes = np.zeros(0, np.int64)
        self._sorted = np.zeros(0, np.int64)
        self._counter = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.what)

    def places(self, rows: Rows) -> _Int64s:
        """Of each row the place its ``what`` names, or -1."""
        known = len(self._place_of_what)
        if known < len(self._strings):
            fresh = [_number(what) for what in self._strings[known:]]
            self._place_of_what = np.append(self._place_of_what, np.array(fresh, np.int64))
        places: _Int64s = self._place_of_what[rows.what]
        return places

    def take(self, rows: Rows) -> Changes:
        """What ``rows`` changed; each chunk is taken once, in order."""
        places = self.places(rows)
        at = np.flatnonzero((places >= 0) & (rows.kind >= RowKind.COUNTER))
        series = self._series(rows.what[at].astype(np.int64), rows.key[at].astype(np.int64))
        kind, nbytes = rows.kind[at], rows.nbytes[at]
        stored = np.where(kind == RowKind.COUNTER, 0, np.where(kind == RowKind.FREE, -nbytes, nbytes))
        counter = np.zeros(len(at), np.int64)
        stated = np.flatnonzero(kind == RowKind.COUNTER)
        if len(stated):
            order = stated[np.argsort(series[stated], kind="stable")]
            whose, level = series[order], nbytes[order]
            first = np.append(True, whose[1:] != whose[:-1])
            before = np.append(0, level[:-1])
            before[first] = self._counter[whose[first]]
            counter[order] = level - before
            last = np.append(first[1:], True)
            self._counter[whose[last]] = level[last]
        return Changes(at, series, self.place[series], counter, stored)

    def _series(self, what: _Int64s, key: _Int64s) -> _Int64s:
        codes = what << 32 | key
        distinct, inverse = np.unique(codes, return_inverse=True)
        new = distinct[~np.isin(distinct, self._codes)]
        if len(new):
            self._codes = np.append(self._codes, new)
            self._sorted = np.argsort(self._codes)
            self.what, self.key = self._codes >> 32, self._codes & 0xFFFFFFFF
            self.place = self._place_of_what[self.what]
            self._counter = np.append(self._counter, np.zeros(len(new), np.int64))
        found: _Int64s = self._sorted[np.searchsorted(self._codes[self._sorted], distinct)][inverse]
        return found


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the levels of some groups were highest and lowest over one chunk; all [groups that changed].

    Attributes:
        top_at, bottom_at: positions among the changes, the first of equal ones.
    """

    group: _Int64s
    top: _Int64s
    top_at: _Int64s
    bottom: _Int64s
    bottom_at: _Int64s


def walked(group: _Int64s, change: _Int64s, now: _Int64s) -> Walk:
    """Follow the levels of groups through changes; ``now`` [all groups] is the level before, and after it."""
    if not len(group):
        return Walk(*(np.zeros(0, np.int64) for _ in range(5)))
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.append(True, group[order][1:] != group[order][:-1]))
    groups = group[order][first]
    sums = np.cumsum(change[order])
    number = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
    before = now[groups] - np.append(0, sums[first[1:] - 1])
    level = sums + before[number]
    now[groups] = level[np.append(first[1:], len(order)) - 1]
    found = []
    for edge in (np.maximum.reduceat(level, first), np.minimum.reduceat(level, first)):
        there = np.flatnonzero(level == edge[number])
        _, which = np.unique(number[there], return_index=True)
        found += [edge, order[there[which]]]
    return Walk(groups, *found)


class Open:
    """Matches what opens with what closes it, within groups and innermost first, over any number of chunks.

    Attributes:
        group, row: of each opening that nothing has closed yet.
    """

    def __init__(self) -> None:
        self.group = np.zeros(0, np.int64)
        self.row = np.zeros(0, np.int64)

    def match(self, group: _Int64s, row: _Int64s, opens: _Bools) -> tuple[_Int64s, _Int64s]:
        """Take rows in their order; (opening row, closing row) of those that this closed."""
        opens = np.append(np.ones(len(self.group), np.bool_), opens)
        group, row = np.append(self.group, group), np.append(self.row, row)
        order = np.argsort(group, kind="stable")
        group, row, opens = group[order], row[order], opens[order]
        level, lost = nesting(np.cumsum(np.append(False, group[1:] != group[:-1])), opens)
        order = np.flatnonzero(~lost)
        order = order[np.lexsort((order, level[order], group[order]))]
        group, row, opens, level = group[order], row[order], opens[order], level[order]
        # Of one group and level an opening is followed by its closing, or by nothing.
        closed = np.flatnonzero(opens[:-1] & ~opens[1:] & (group[1:] == group[:-1]) & (level[1:] == level[:-1]))
        still = opens.copy()
        still[closed] = False
        place = np.argsort(row[still], kind="stable")
        self.group, self.row = group[still][place], row[still][place]
        return row[closed], row[closed + 1]


def nesting(number: _Int64s, opens: _Bools) -> tuple[_Int64s, _Bools]:
    """How many of its group are open at each row, its own included; and the closings that close nothing.

    Args:
        number: of each row's group: 0 first, and one more where the next begins.
    """
    count = len(opens)
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    running = np.cumsum(np.where(opens, 1, -1))
    first = np.flatnonzero(np.append(True, number[1:] != number[:-1]))
    level = running - (running[first] - np.where(opens[first], 1, -1))[number]
    # The least level of the group so far is the floor: a closing that sinks it has no opening. One running minimum serves
    # all groups, because each starts far below the one before.
    drop = number * (2 * count + 2)
    floor = np.minimum(np.minimum.accumulate(level - drop) + drop, 0)
    before = np.zeros(count, np.int64)
    before[1:] = floor[:-1]
    before[first] = 0
    lost = ~opens & (floor < before)
    return level - floor + np.where(opens, 0, 1), lost


def extremes(series: _Int64s, value: _Int64s) -> _Int64s:
    """Positions, ascending, of the first, last, lowest and highest value of each series."""
    if not len(series):
        return np.zeros(0, np.int64)
    order = np.argsort(series, kind="stable")
    edge = np.append(True, series[order][1:] != series[order][:-1])
    by_value = np.lexsort((value, series))
    last = np.append(edge[1:], True)
    return np.unique(np.concatenate([order[edge], order[last], by_value[edge], by_value[last]]))


def _number(what: str) -> int:
    place = placement(what)
    return -1 if place is None else TIERS.index(place[1]) * len(CATEGORIES) + CATEGORIES.index(place[0])
