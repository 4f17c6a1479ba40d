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
from typing import TYPE_CHECKING

import numpy as np

from zprof.analysis.samples import Samples, highest
from zprof.rows import PLACES, TIERS, RowKind, TraceError
from zprof.trace.columns import Rows
from zprof.trace.levels import TIER_OF, Changes, Levels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.trace.reader import Trace

    Int64s = NDArray[np.int64]
    Int32s = NDArray[np.int32]

__all__ = ["Log", "Moment", "Tally"]

#: Rows worked on at once: enough that numpy's cost a call is nothing, few enough that they stay in a cache.
BATCH_ROWS = 1 << 15
#: Longest stretch of rows between two points of the log.
STRETCH_ROWS = 4096
#: No row may speak of more: a batch of the largest still sums within 64 bits.
MOST_NBYTES = 1 << 47
MOST_HELD = 1 << 62


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


class Tally:
    """Takes a trace's rows, batch by batch.

    Args:
        trace: whose rows they are.
        stretch: rows between two points of the log.
    """

    def __init__(self, trace: Trace, stretch: int = STRETCH_ROWS) -> None:
        begin_ns = trace.header.mono_ns
        self._trace = trace
        self.levels = Levels(trace.strings)
        self.samples = Samples()
        self.totals = [0] * len(TIERS)
        self.by_place = [0] * len(PLACES)
        self.tier_peaks = [Moment(begin_ns, 0, 0)] * len(TIERS)
        self.place_peaks = [Moment(begin_ns, 0, 0)] * len(PLACES)
        self.count = 0
        #: The time of the last allocation.
        self.made_ns: int | None = None
        #: Of each chunk that holds rows, rows up to its end and the time then.
        self.chunk_rows: list[int] = []
        self.chunk_ns: list[int] = []
        #: Its number in the trace: those that are empty or damaged are none of these.
        self.chunk_at: list[int] = []
        #: What was said of chunks that cannot be read; they are left out.
        self.damages: list[str] = []
        self._now_ns = begin_ns
        self._stretch = stretch
        self._pieces: list[tuple[Int64s, Int64s, Int64s, NDArray[np.bool_]]] = []
        self._entries: list[tuple[Int32s, Int64s]] = []
        self._entry_count = 0

    def run(self) -> Iterator[Rows]:
        """Take every chunk, and hand each on to whoever wants to see it in the same pass."""
        trace, waiting = self._trace, list[Rows]()
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
                self._take(waiting)
                waiting, ready = [], 0
        self._take(waiting)

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

    def _take(self, chunks: list[Rows]) -> None:
        chunks = [rows for rows in chunks if len(rows)]
        if not chunks:
            return
        rows = chunks[0] if len(chunks) == 1 else _joined(chunks)
        sampled = np.flatnonzero((rows.kind == RowKind.COUNTER) & (rows.place < 0))
        names = rows.what.take(sampled), rows.key.take(sampled)
        self.samples.take(*names, rows.nbytes.take(sampled), rows.time_ns.take(sampled))
        held = self.levels.take(rows)
        self._check(rows.nbytes.take(held.at))
        time_ns = self.times(rows.time_ns, self._now_ns)
        tiers = TIER_OF.take(held.place)
        used = np.flatnonzero(np.bincount(tiers, minlength=len(TIERS))).tolist()
        splits = [np.zeros(0, np.int64), *(self._tier(tier, np.flatnonzero(tiers == tier), held, time_ns) for tier in used)]
        if max(map(abs, self.totals)) > MOST_HELD:
            name = self._trace.path.name
            raise TraceError(f"{name}: levels beyond 2**62 bytes, expected sizes of a machine; record the run again")
        self._note(held, time_ns, np.concatenate(splits))
        for ends in np.cumsum([len(chunk) for chunk in chunks]).tolist():
            self.chunk_rows.append(self.count + ends)
            self.chunk_ns.append(int(time_ns[ends - 1]))
        made = np.flatnonzero(rows.kind == RowKind.ALLOC)
        if len(made):
            self.made_ns = int(time_ns[made[-1]])
        self.count += len(rows)
        self._now_ns = int(time_ns[-1])

    def _check(self, nbytes: Int64s) -> None:
        if len(nbytes) and not 0 <= int(nbytes.min()) <= int(nbytes.max()) < MOST_NBYTES:
            worst = min(int(nbytes.min()), 0) or int(nbytes.max())
            name = self._trace.path.name
            raise TraceError(f"{name}: a row holds {worst} bytes, expected 0 to 2**47; record the run again")

    def _tier(self, tier: int, mine: Int64s, held: Changes, time_ns: Int64s) -> Int64s:
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

    def _note(self, held: Changes, time_ns: Int64s, splits: Int64s) -> None:
        """Log the batch's pieces and what changed in each."""
        count = len(time_ns)
        edges = np.append(np.arange(self._stretch - self.count % self._stretch, count, self._stretch), count)
        ends = np.union1d(edges, splits)
        whole = np.zeros(len(ends), np.bool_)
        whole[np.searchsorted(ends, edges)] = True
        codes = 2 * len(self.levels)
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


def _joined(chunks: Sequence[Rows]) -> Rows:
    """Several chunks as one, without the columns that a level does not depend on."""
    return Rows(
        kind=np.concatenate([rows.kind for rows in chunks]),
        what=np.concatenate([rows.what for rows in chunks]),
        key=np.concatenate([rows.key for rows in chunks]),
        nbytes=np.concatenate([rows.nbytes for rows in chunks]),
        time_ns=np.concatenate([rows.time_ns for rows in chunks]),
        # Threads and storages play no part here, and would be a third of the work.
        thread=np.zeros(0, np.int32),
        ident=np.zeros(0, np.int64),
        place=np.concatenate([rows.place for rows in chunks]),
    )
