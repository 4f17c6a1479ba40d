"""Owns levels: what each row changes of what is held, and the arithmetic on them that whoever folds a trace needs.

The ledger's pass, `zprof.trace.decimate` and who follows a growing trace call it, chunk by chunk. It knows no file, and never
loops over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zprof.rows import CATEGORIES, PLACES, TIERS, RowKind
from zprof.trace.columns import Rows

__all__ = ["TIER_OF", "Changes", "Levels", "Open", "Walk", "extremes", "nesting", "starts_of", "walked"]

_Int64s = NDArray[np.int64]
_Int32s = NDArray[np.int32]
_Bools = NDArray[np.bool_]

#: The tier of each place, a number of `TIERS`.
TIER_OF: NDArray[np.int8] = np.array([TIERS.index(tier) for _, tier in PLACES], np.int8)
#: Places in the order in which series that appear together are numbered: by category, as legends list them.
_BY_CATEGORY = np.array([CATEGORIES.index(category) * len(TIERS) + TIERS.index(tier) for category, tier in PLACES])


@dataclass(frozen=True, slots=True)
class Changes:
    """What the rows of one chunk that speak of what is held changed; all [changes].

    Attributes:
        at: the row's position in its chunk. series: whose level changed. place: int8, of the series.
        change: by how many bytes. counts: a counter stated the level, and no storage did.
    """

    at: _Int64s
    series: _Int32s
    place: NDArray[np.int8]
    change: _Int64s
    counts: _Bools

    @property
    def counter(self) -> _Int64s:
        """By how much the stated level moved; 0 for storages."""
        return np.where(self.counts, self.change, 0)

    @property
    def stored(self) -> _Int64s:
        """By how much the storages did; 0 for counters."""
        return np.where(self.counts, 0, self.change)


class Levels:
    """Numbers the series of a trace, a place and a key each, as they come, and knows the last counter of each.

    Attributes:
        place, what, key: of each series: its number in `zprof.rows.PLACES`, and positions in the trace's strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.place = np.zeros(0, np.int8)
        self.what = np.zeros(0, np.int64)
        self.key = np.zeros(0, np.int64)
        self._strings = strings
        self._counter = np.zeros(0, np.int64)
        #: The number of the series of a place and a key, at the place's start plus the key; -1 for none yet.
        self._series = np.zeros(0, np.int32)
        self._starts = np.full(len(PLACES), -1, np.int64)
        self._width = 0

    def __len__(self) -> int:
        return len(self.place)

    def take(self, rows: Rows) -> Changes:
        """What ``rows`` changed; each chunk is taken once, in order."""
        at = np.flatnonzero(rows.place >= 0)
        place = rows.place.take(at)
        return self._changes(rows, at, place, self._number(rows, at, place), self._counter)

    def again(self, rows: Rows, counters: _Int64s) -> Changes:
        """The same of rows that were taken before, wherever they lie.

        Args:
            counters: the last counter of each series before them; moves on to the last of these rows.
        """
        at = np.flatnonzero(rows.place >= 0)
        place = rows.place.take(at)
        return self._changes(rows, at, place, self._series.take(self._starts.take(place) + rows.key.take(at)), counters)

    def _changes(self, rows: Rows, at: _Int64s, place: NDArray[np.int8], series: _Int32s, counters: _Int64s) -> Changes:
        kind, change = rows.kind.take(at), rows.nbytes.take(at)
        counts = kind == RowKind.COUNTER
        np.negative(change, out=change, where=kind == RowKind.FREE)
        counted = np.flatnonzero(counts)
        if len(counted):
            _as_changes(change, series, counted, counters)
        return Changes(at, series, place, change, counts)

    def _number(self, rows: Rows, at: _Int64s, place: NDArray[np.int8]) -> _Int32s:
        """The series of each row at ``at``; those that are new get a number."""
        used = np.flatnonzero(np.bincount(place, minlength=len(PLACES)))
        if self._width < len(self._strings) or bool((self._starts[used] < 0).any()):
            self._widen(used)
        cell = self._starts.take(place) + rows.key.take(at)
        series = self._series.take(cell)
        if len(series) and int(series.min()) < 0:
            new = np.flatnonzero(series < 0)
            cells, first = np.unique(cell[new], return_index=True)
            first = new[first]
            self._series[cells] = np.arange(len(self), len(self) + len(cells))
            self.place = np.append(self.place, place[first])
            self.what = np.append(self.what, rows.what[at[first]])
            self.key = np.append(self.key, rows.key[at[first]])
            self._counter = np.append(self._counter, np.zeros(len(cells), np.int64))
            series = self._series.take(cell)
        return series

    def _widen(self, used: _Int64s) -> None:
        """Grow to all strings there are, beside each place that is used."""
        starts, width, series, strings = self._starts, self._width, self._series, len(self._strings)
        # Twice what is needed: strings come a few a chunk, and a copy each time would be quadratic.
        self._width = width if width >= strings else 2 * strings
        places = np.union1d(np.flatnonzero(starts >= 0), used)
        places = places[np.argsort(_BY_CATEGORY[places])]
        self._starts = np.full(len(PLACES), -1, np.int64)
        self._starts[places] = np.arange(len(places)) * self._width
        self._series = np.full(len(places) * self._width, -1, np.int32)
        for place in np.flatnonzero(starts >= 0).tolist():
            begin = self._starts[place]
            self._series[begin : begin + width] = series[starts[place] : starts[place] + width]


def _as_changes(change: _Int64s, series: _Int32s, counted: _Int64s, counters: _Int64s) -> None:
    """Turn counters, which state a level, into the changes they make, in ``change``; ``counters`` moves on."""
    of = series[counted]
    # Small numbers sort by radix, several times faster.
    order = np.argsort(of.astype(np.uint16) if len(counters) < 1 << 16 else of, kind="stable")
    of, counted = of[order], counted[order]
    level = change[counted]
    first = starts_of(of)
    before = np.empty_like(level)
    before[1:] = level[:-1]
    before[first] = counters[of[first]]
    change[counted] = level - before
    last = np.append(first[1:], len(of)) - 1
    counters[of[last]] = level[last]


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the levels of some groups were highest and lowest over one chunk; all [groups that changed].

    Attributes:
        top_at, bottom_at: positions among the changes, the first of equal ones.
    """

    group: NDArray[np.signedinteger[Any]]
    top: _Int64s
    top_at: _Int64s
    bottom: _Int64s
    bottom_at: _Int64s


def walked(group: NDArray[np.signedinteger[Any]], change: _Int64s, now: _Int64s) -> Walk:
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


def starts_of(values: NDArray[np.signedinteger[Any]]) -> _Int64s:
    """Where each run of equal values begins."""
    new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new)
