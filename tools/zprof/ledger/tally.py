"""Owns the one pass over a trace that the ledger stands on: from rows to levels, peaks and a log of changes that is small.

`ledger` runs it and asks it afterwards. It never loops over rows in Python, and never holds more than a batch of them.

Note: [Order of rows]
    Threads write rows whose times may be slightly unsorted. Levels follow the order of the file, in which the recorder took the
    rows; the time of a row is then the latest time of any row up to it, so that "at time t" means one place in the file.

Note: [The log]
    Rows are cut into stretches, each also cut where a tier's total is highest in it. For each piece the log holds the net
    change of the series that changed in it. The levels at the end of any piece are a sum over the log; between, one chunk is
    read again. So every peak is a level of the log, and the log is exact at every point that it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zprof.ledger.samples import Samples, highest, starts_of
from zprof.rows import CATEGORIES, TIERS, RowKind, TraceError, placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.trace.columns import Rows
    from zprof.trace.reader import Trace

    Int64s = NDArray[np.int64]
    Int32s = NDArray[np.int32]

__all__ = ["PLACES", "TIER_OF", "Held", "Log", "Moment", "Tally"]

#: (category, tier) by number.
PLACES = tuple((category, tier) for category in CATEGORIES for tier in TIERS)
#: The tier of each place, by number.
TIER_OF = np.array([TIERS.index(tier) for _, tier in PLACES], np.int8)
_NUMBERS = {place: number for number, place in enumerate(PLACES)}

#: Rows worked on at once: enough that numpy's cost a call is nothing, few enough that they stay in a cache.
BATCH_ROWS = 1 << 15
#: Longest stretch of rows between two points of the log.
STRETCH_ROWS = 4096
#: No row may speak of more: a batch of the largest still sums within 64 bits.
MOST_NBYTES = 1 << 47
MOST_HELD = 1 << 62

_COUNTER, _FREE = int(RowKind.COUNTER), int(RowKind.FREE)


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the file where ``nbytes`` were held: after ``rows`` rows, at ``time_ns`` on the trace's monotonic clock."""

    time_ns: int
    nbytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Log:
    """The pieces of the trace, in file order, and what changed in each; see Note: [The log].

    Attributes:
        rows: rows up to the end of each piece.
        time_ns: the time then.
        entries: how many entries up to the end of each piece.
        whole: the end of a stretch, where every peak of the stretch has been passed.
        code: of each entry, twice the series' number, plus one where counters changed it rather than storages.
        change: of each entry, the net bytes.
    """

    rows: Int64s
    time_ns: Int64s
    entries: Int64s
    whole: NDArray[np.bool_]
    code: Int32s
    change: Int64s


class Held(NamedTuple):
    """The rows of a batch that the ledger counts."""

    at: Int64s
    place: NDArray[np.int8]
    series: Int32s
    change: Int64s
    counts: NDArray[np.bool_]


class Tally:
    """Takes a trace's rows, batch by batch.

    Args:
        name: of the trace, for errors.
        begin_ns: when the recording began; nothing is held then.
        stretch: rows between two points of the log.
    """

    def __init__(self, name: str, begin_ns: int, stretch: int = STRETCH_ROWS) -> None:
        self._name = name
        self.places: list[int] = []
        self.keys: list[int] = []
        self.samples = Samples()
        self.totals = [0] * len(TIERS)
        self.by_place = [0] * len(PLACES)
        self.tier_peaks = [Moment(begin_ns, 0, 0)] * len(TIERS)
        self.place_peaks = [Moment(begin_ns, 0, 0)] * len(PLACES)
        self.count = 0
        #: Of each chunk that holds rows, rows up to its end and the time then.
        self.chunk_rows: list[int] = []
        self.chunk_ns: list[int] = []
        #: Its number in the trace: those that are empty or damaged are none of these.
        self.chunk_at: list[int] = []
        #: What was said of chunks that cannot be read; they are left out.
        self.damages: list[str] = []
        self._now_ns = begin_ns
        self._stretch = stretch
        self._place = np.zeros(0, np.int8)
        #: The number of the series of a place and a key, at the place's start plus the key; -1 for none yet.
        self._series = np.zeros(0, np.int32)
        self._starts = np.full(len(PLACES), -1, np.int64)
        self._width = 0
        self._counters = np.zeros(0, np.int64)
        self._pieces: list[tuple[Int64s, Int64s, Int64s, NDArray[np.bool_]]] = []
        self._entries: list[tuple[Int32s, Int64s]] = []
        self._entry_count = 0

    def run(self, trace: Trace) -> Iterator[Rows]:
        """Take every chunk of ``trace``, and hand each on to whoever wants to see it in the same pass."""
        waiting: list[Rows] = []
        ready = 0
        for number in range(len(trace)):
            try:
                rows = trace.chunk(number)
            except TraceError as error:
                self.damages.append(str(error))
                continue
            yield rows
            if len(rows):
                self.chunk_at.append(number)
            waiting.append(rows)
            ready += len(rows)
            if ready >= BATCH_ROWS:
                self._take(waiting, trace)
                waiting, ready = [], 0
        self._take(waiting, trace)

    def log(self) -> Log:
        """What was logged; the pass is over."""
        ends, times, entries, whole = (
            (np.concatenate(column) for column in zip(*self._pieces, strict=True))
            if self._pieces
            else (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
        )
        code = np.concatenate([code for code, _ in self._entries] or [np.zeros(0, np.int32)])
        change = np.concatenate([change for _, change in self._entries] or [np.zeros(0, np.int64)])
        self._pieces, self._entries = [], []
        return Log(ends, times, entries, whole, code, change)

    def times(self, time_ns: Int64s, since_ns: int) -> Int64s:
        """The times of rows by Note: [Order of rows], when the latest before them was ``since_ns``."""
        return np.maximum(np.maximum.accumulate(time_ns), since_ns)

    def held(self, rows: Rows, counters: Int64s) -> Held:
        """The rows of ``rows`` that change a level, and by how much; all are rows that `run` has seen.

        Args:
            counters: the last counter of each series; moves on to the last of these rows.
        """
        at = np.flatnonzero(rows.kind >= _COUNTER)
        place = self._place.take(rows.what.take(at))
        at, place = _where(place >= 0, at, place)
        series = self._series.take(self._starts.take(place) + rows.key.take(at))
        return self._held(at, place, series, rows, counters)

    def _held(self, at: Int64s, place: NDArray[np.int8], series: Int32s, rows: Rows, counters: Int64s) -> Held:
        kind, change = rows.kind.take(at), rows.nbytes.take(at)
        if len(at) and not 0 <= int(change.min()) <= int(change.max()) < MOST_NBYTES:
            raise TraceError(f"{self._name}: a row holds {_worst(change)} bytes, expected 0 to 2**47; record the run again")
        counts = kind == _COUNTER
        np.negative(change, out=change, where=kind == _FREE)
        counted = np.flatnonzero(counts)
        if len(counted):
            _as_changes(change, series, counted, counters)
        return Held(at, place, series, change, counts)

    def _know(self, strings: Sequence[str]) -> None:
        """Learn which of the names that are new are places."""
        if len(self._place) < len(strings):
            fresh = [_NUMBERS.get(placement(text) or ("", ""), -1) for text in strings[len(self._place) :]]
            self._place = np.append(self._place, np.array(fresh, np.int8))

    def _number(self, place: NDArray[np.int8], key: Int32s, strings: int) -> Int32s:
        """The numbers of the series of ``place`` and ``key``; those that have none get one."""
        used = np.flatnonzero(np.bincount(place, minlength=len(PLACES)))
        if self._width < strings or bool((self._starts[used] < 0).any()):
            self._widen(used, strings)
        cell = self._starts.take(place) + key
        series = self._series.take(cell)
        if len(series) and int(series.min()) < 0:
            new = np.flatnonzero(series < 0)
            cells, first = np.unique(cell[new], return_index=True)
            self._series[cells] = np.arange(len(self.places), len(self.places) + len(cells))
            self.places += place[new[first]].tolist()
            self.keys += key[new[first]].tolist()
            self._counters = np.append(self._counters, np.zeros(len(cells), np.int64))
            series = self._series.take(cell)
        return series

    def _widen(self, used: Int64s, strings: int) -> None:
        """Make arrays large enough for all strings there are, beside each place that is used."""
        starts, width, series = self._starts, self._width, self._series
        # Twice what is needed: strings come a few a chunk, and a copy each time would be quadratic.
        self._width = width if width >= strings else 2 * strings
        places = np.union1d(np.flatnonzero(starts >= 0), used)
        self._starts = np.full(len(PLACES), -1, np.int64)
        self._starts[places] = np.arange(len(places)) * self._width
        self._series = np.full(len(places) * self._width, -1, np.int32)
        for place in np.flatnonzero(starts >= 0).tolist():
            begin = self._starts[place]
            self._series[begin : begin + width] = series[starts[place] : starts[place] + width]

    def _take(self, chunks: list[Rows], trace: Trace) -> None:
        chunks = [rows for rows in chunks if len(rows)]
        if not chunks:
            return
        rows = chunks[0] if len(chunks) == 1 else _joined(chunks)
        self._know(trace.strings)
        at = np.flatnonzero(rows.kind >= _COUNTER)
        place = self._place.take(rows.what.take(at))
        placed = place >= 0
        if not placed.all():
            others = at[~placed]
            self.samples.take(*(column.take(others[rows.kind.take(others) == _COUNTER]) for column in _sampled(rows)))
            at, place = _where(placed, at, place)
        series = self._number(place, rows.key.take(at), len(trace.strings))
        held = self._held(at, place, series, rows, self._counters)
        time_ns = self.times(rows.time_ns, self._now_ns)
        tiers = TIER_OF.take(place)
        used = np.flatnonzero(np.bincount(tiers, minlength=len(TIERS))).tolist()
        splits = [np.zeros(0, np.int64), *(self._tier(tier, np.flatnonzero(tiers == tier), held, time_ns) for tier in used)]
        if max(map(abs, self.totals)) > MOST_HELD:
            raise TraceError(f"{self._name}: levels beyond 2**62 bytes, expected sizes of a machine; record the run again")
        self._note(held, time_ns, np.concatenate(splits))
        for ends in np.cumsum([len(chunk) for chunk in chunks]).tolist():
            self.chunk_rows.append(self.count + ends)
            self.chunk_ns.append(int(time_ns[ends - 1]))
        self.count += len(rows)
        self._now_ns = int(time_ns[-1])

    def _tier(self, tier: int, mine: Int64s, held: Held, time_ns: Int64s) -> Int64s:
        """Bring one tier up to date; where its stretches are highest, as rows of the batch up to there."""
        at, change, place = held.at.take(mine), held.change.take(mine), held.place.take(mine)
        level = np.cumsum(change)
        level += self.totals[tier]
        self.totals[tier] = int(level[-1])
        self.tier_peaks[tier] = self._higher(self.tier_peaks[tier], level, at, time_ns)
        for number in np.flatnonzero(np.bincount(place)).tolist():
            of_place = np.flatnonzero(place == number)
            amounts = np.cumsum(change.take(of_place))
            amounts += self.by_place[number]
            self.by_place[number] = int(amounts[-1])
            self.place_peaks[number] = self._higher(self.place_peaks[number], amounts, at, time_ns, of_place)
        # Where each stretch of the batch begins among these rows; a stretch without any begins where the next does.
        edges = np.arange(-(self.count % self._stretch), int(at[-1]) + 1, self._stretch)
        starts = np.searchsorted(at, edges)
        return at.take(highest(level, starts[np.append(starts[1:] > starts[:-1], True)])) + 1

    def _higher(
        self, peak: Moment, level: Int64s, at: Int64s, time_ns: Int64s, chosen: NDArray[np.intp] | None = None
    ) -> Moment:
        """The higher of ``peak`` and the first highest level; ``at`` are the rows of the levels, or ``chosen`` of them are."""
        top = int(level.argmax())
        if level[top] <= peak.nbytes:
            return peak
        row = int(at[top if chosen is None else chosen[top]])
        return Moment(int(time_ns[row]), int(level[top]), self.count + row + 1)

    def _note(self, held: Held, time_ns: Int64s, splits: Int64s) -> None:
        """Log the batch's pieces and what changed in each."""
        count = len(time_ns)
        edges = np.append(np.arange(self._stretch - self.count % self._stretch, count, self._stretch), count)
        ends = np.union1d(edges, splits)
        whole = np.zeros(len(ends), np.bool_)
        whole[np.searchsorted(ends, edges)] = True
        codes = 2 * len(self.places)
        cell = np.searchsorted(ends, held.at, side="right") * codes
        cell += 2 * held.series
        cell += held.counts
        if len(ends) * codes <= 1 << 18:
            sums = np.zeros(len(ends) * codes, np.int64)
            np.add.at(sums, cell, held.change)
            cells = np.flatnonzero(sums)
            sums = sums[cells]
        else:
            cells, inverse = np.unique(cell, return_inverse=True)
            sums = np.zeros(len(cells), np.int64)
            np.add.at(sums, inverse, held.change)
        self._entries.append(((cells % max(codes, 1)).astype(np.int32), sums))
        entries = self._entry_count + np.searchsorted(cells, (np.arange(len(ends)) + 1) * codes)
        self._pieces.append((ends + self.count, time_ns[ends - 1], entries, whole))
        self._entry_count += len(cells)


def _where(kept: NDArray[np.bool_], at: Int64s, place: NDArray[np.int8]) -> tuple[Int64s, NDArray[np.int8]]:
    return (at, place) if kept.all() else (at[kept], place[kept])


def _sampled(rows: Rows) -> tuple[Int32s, Int32s, Int64s, Int64s]:
    return rows.what, rows.key, rows.nbytes, rows.time_ns


def _joined(chunks: Sequence[Rows]) -> Rows:
    """Several chunks as one, without the columns that a level does not depend on."""
    from zprof.trace.columns import Rows

    return Rows(
        kind=np.concatenate([rows.kind for rows in chunks]),
        what=np.concatenate([rows.what for rows in chunks]),
        key=np.concatenate([rows.key for rows in chunks]),
        nbytes=np.concatenate([rows.nbytes for rows in chunks]),
        time_ns=np.concatenate([rows.time_ns for rows in chunks]),
        # Threads and storages play no part here, and would be a third of the work.
        thread=np.zeros(0, np.int32),
        ident=np.zeros(0, np.int64),
    )


def _as_changes(change: Int64s, series: Int32s, counted: Int64s, counters: Int64s) -> None:
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


def _worst(change: Int64s) -> int:
    return min(int(change.min()), 0) or int(change.max())
