"""Owns the ledger of one trace: which bytes were held, for what, where and by whom, at any moment of the run.

Reports, pages, checks and exports make one with `Ledger.of` and ask it. It reads the trace once, then at most a few chunks a
question; it never loses a byte: at every moment the sum over the series is the total.

Note: [Named after it was made]
    A storage that changes its category is freed and allocated again, often in the rows right after its allocation: a gradient
    is known as one when it has been made. So a peak is the place after the highest row and after all such pairs that follow
    it, where the tier is as full and all that is known of what it holds has been said. They are looked for in the rows
    themselves, for they may lie in any chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zprof.analysis.curves import By, Curves, drawn, group_of
from zprof.analysis.samples import thinned
from zprof.analysis.tally import STRETCH_ROWS, Log, Moment, Tally
from zprof.rows import CATEGORIES, PLACES, TIERS
from zprof.trace.levels import TIER_OF

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.remainder import Remainder
    from zprof.trace.columns import Rows
    from zprof.trace.reader import Trace

    Int64s = NDArray[np.int64]

__all__ = ["Ledger", "Moment", "Series"]


@dataclass(frozen=True, slots=True)
class Series:
    """Bytes of one category on one tier for one key: a unit, a module path or a block."""

    category: str
    tier: str
    key: str


class Ledger:
    """What was held, over one trace; made by `Ledger.of`.

    Attributes:
        trace: where it was read from.
        series: every combination of category, tier and key there was.
        count: rows read, of all kinds.
        begin_ns, end_ns: the trace's span on its monotonic clock.
        made_ns: when the last storage was allocated; None where none was.
    """

    def __init__(self, trace: Trace, tally: Tally, points: int) -> None:
        self.trace = trace
        levels = tally.levels
        self.series = [
            Series(*PLACES[place], trace.strings[key])
            for place, key in zip(levels.place.tolist(), levels.key.tolist(), strict=True)
        ]
        self.count, self.made_ns = tally.count, tally.made_ns
        self.begin_ns = trace.header.mono_ns
        self.end_ns = tally.chunk_ns[-1] if tally.chunk_ns else self.begin_ns
        self._tally = tally
        self._log = tally.log()
        self._points = points
        self._tier_of_series = TIER_OF[levels.place]
        self._chunk_rows = np.array(tally.chunk_rows, np.int64)
        self._chunk_ns = np.array(tally.chunk_ns, np.int64)

    @classmethod
    def of(cls, trace: Trace, *, points: int = 2000, also: Callable[[Rows], None] | None = None) -> Ledger:
        """Read ``trace`` once.

        Args:
            points: about how many points a curve over the whole run can have.
            also: sees every chunk in the same pass, for whoever else needs all rows.
        Raises:
            TraceError: a row speaks of impossible sizes; chunks that cannot be read are left out, see `damage`.
        """
        tally = Tally(trace, max(1, min(STRETCH_ROWS, trace.count // points)))
        for rows in tally.run():
            if also is not None:
                also(rows)
        return cls(trace, tally, points)

    @property
    def damage(self) -> str | None:
        """What of the trace could not be read, in one line."""
        damages = self._tally.damages
        if not damages or self.trace.damage:
            return self.trace.damage
        others = f", and {len(damages) - 1} more chunks" if len(damages) > 1 else ""
        return f"{damages[0].removeprefix(f'{self.trace.path}: ')}{others}: everything else was read"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that anything was held on."""
        used = {series.tier for series in self.series}
        return tuple(tier for tier in TIERS if tier in used)

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories that anything was held for."""
        used = {series.category for series in self.series}
        return tuple(category for category in CATEGORIES if category in used)

    # Moments.

    def peak(self, tier: str, category: str | None = None) -> Moment:
        """When ``tier`` held most, of ``category`` or in all; the first such place in the file, see Note: [Named after it was
        made]."""
        if category is None:
            return self._named(self._tally.tier_peaks[TIERS.index(tier)], TIERS.index(tier), self.count)
        return self._tally.place_peaks[PLACES.index((category, tier))]

    def peak_between(self, tier: str, begin_ns: int, end_ns: int, category: str | None = None) -> Moment:
        """As `peak`, within a part of the run, its beginning and end included."""
        begin, end = self._rows_until(begin_ns - 1), self._rows_until(end_ns)
        log, number = self._log, TIERS.index(tier)
        if category is not None:
            mine = np.array([(each.category, each.tier) == (category, tier) for each in self.series], np.bool_)
            start = Moment(begin_ns, int(self._levels(begin)[mine].sum()), begin)
            return _highest([start, *self._walked(mine, begin, end)])
        on = self._on(number)
        whole = log.rows[log.whole]
        first, last = np.searchsorted(whole, begin), np.searchsorted(whole, end, side="right") - 1
        candidates: list[Moment] = [Moment(begin_ns, int(self._levels(begin)[on].sum()), begin)]
        if first > last:
            return self._named(_highest(candidates + self._walked(on, begin, end)), number, end)
        inside = (log.rows >= whole[first]) & (log.rows <= whole[last])
        totals = self._totals(number)
        candidates += self._walked(on, begin, int(whole[first]))
        candidates += [
            Moment(int(log.time_ns[at]), int(totals[at]), int(log.rows[at]))
            for at in [int(np.flatnonzero(inside)[np.argmax(totals[inside])])]
        ]
        return self._named(_highest(candidates + self._walked(on, int(whole[last]), end)), number, end)

    # Levels.

    def at(self, when: int | Moment) -> Int64s:
        """Bytes of each series, [len(series)]: after the last row up to a time, or exactly at a `Moment`."""
        return self._levels(when.rows if isinstance(when, Moment) else self._rows_until(when))

    def total(self, when: int | Moment, tier: str | None = None) -> int:
        """Bytes in all, or on one tier."""
        levels = self.at(when)
        return int(levels.sum() if tier is None else levels[self._on(TIERS.index(tier))].sum())

    def roughly(self, time_ns: Int64s, *tiers: str) -> Int64s:
        """Bytes on ``tiers`` at many times at once: each as it was at the last point of the log, at most 4096 rows before."""
        point = np.searchsorted(self._log.time_ns, time_ns, side="right")
        levels = sum((self._totals(TIERS.index(tier)) for tier in tiers), np.zeros(len(self._log.rows), np.int64))
        return np.concatenate(([0], levels))[point]

    def table(self, when: int | Moment, by: By, tier: str | None = None) -> dict[str, int]:
        """Bytes of each group at a moment, the largest first; groups that hold nothing are left out."""
        totals: dict[str, int] = {}
        for series, nbytes in zip(self.series, self.at(when).tolist(), strict=True):
            if tier in (None, series.tier) and nbytes:
                name = group_of(by, series.category, series.tier, series.key, self.trace.header.rank)
                totals[name] = totals.get(name, 0) + nbytes
        return dict(sorted(((name, nbytes) for name, nbytes in totals.items() if nbytes), key=lambda pair: (-pair[1], pair[0])))

    def curves(self, by: By = "category", tier: str | None = None, points: int | None = None) -> Curves:
        """Bytes of each group over time; at each point the groups sum to the total, and the peak of each tier is a point."""
        chosen = [at for at, series in enumerate(self.series) if tier in (None, series.tier)]
        names = [
            group_of(by, series.category, series.tier, series.key, self.trace.header.rank)
            for series in map(self.series.__getitem__, chosen)
        ]
        group = np.full(len(self.series), -1, np.int64)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        group[chosen] = [numbers[name] for name in names]
        tiers = [TIERS.index(each) for each in self.tiers if tier in (None, each)]
        totals = [self._totals(number) for number in tiers]
        return drawn(self._log, group, list(numbers), totals, points or self._points)

    # What samplers said.

    def samples(self, what: str, points: int | None = None) -> dict[str, tuple[Int64s, Int64s]]:
        """key -> (time_ns, value) of a sampled quantity such as "rss", thinned so that the highest stays."""
        strings = self.trace.strings
        found = {} if what not in strings else self._tally.samples.of(strings.index(what), strings)
        return {key: thinned(*pair, points or self._points) for key, pair in found.items()}

    def sampled(self) -> list[str]:
        """The names of the sampled quantities there are."""
        return sorted(self.trace.strings[what] for what in self._tally.samples.whats())

    def remainder(self, time_ns: int) -> list[Remainder]:
        """What allocator or process hold and the ledger does not explain, about ``time_ns``; see `zprof.analysis.remainder`."""
        from zprof.analysis.remainder import remainders

        return remainders(self, time_ns)

    # From rows to levels.

    def _on(self, tier: int) -> NDArray[np.bool_]:
        on: NDArray[np.bool_] = self._tier_of_series == tier
        return on

    def _rows_until(self, time_ns: int) -> int:
        """How many rows there are up to ``time_ns``, that included."""
        chunk = int(np.searchsorted(self._chunk_ns, time_ns, side="right"))
        if chunk == len(self._chunk_ns):
            return self.count
        begin, since_ns = self._chunk_start(chunk)
        times = self._tally.times(self._chunk(chunk).time_ns, since_ns)
        return begin + int(np.searchsorted(times, time_ns, side="right"))

    def _chunk_start(self, chunk: int) -> tuple[int, int]:
        """Rows before a chunk that holds any, and the time then."""
        return (0, self.begin_ns) if chunk == 0 else (int(self._chunk_rows[chunk - 1]), int(self._chunk_ns[chunk - 1]))

    def _chunk(self, chunk: int) -> Rows:
        return self.trace.chunk(self._tally.chunk_at[chunk])

    def _state(self, rows: int) -> tuple[Int64s, Int64s, int]:
        """(what storages hold, what counters state) of each series after the last piece within ``rows`` rows; its end."""
        log: Log = self._log
        pieces = int(np.searchsorted(log.rows, rows, side="right"))
        state = np.zeros(2 * len(self.series), np.int64)
        if not pieces:
            return state[0::2], state[1::2], 0
        entries = int(log.entries[pieces - 1])
        np.add.at(state, log.code[:entries], log.change[:entries])
        return state[0::2], state[1::2], int(log.rows[pieces - 1])

    def _levels(self, rows: int) -> Int64s:
        stored, counted, done = self._state(rows)
        levels = stored + counted
        if done < rows:
            for _, _, series, change in self._changes(done, rows, counted):
                np.add.at(levels, series, change)
        return levels

    def _changes(self, begin: int, end: int, counters: Int64s) -> list[tuple[Int64s, Int64s, NDArray[np.int32], Int64s]]:
        """(row, time, series, change) of rows ``begin`` to ``end``, read again; ``counters`` as before the first of them."""
        found = []
        for chunk in range(int(np.searchsorted(self._chunk_rows, begin, side="right")), len(self._chunk_rows)):
            first, since_ns = self._chunk_start(chunk)
            if first >= end:
                break
            rows = self._chunk(chunk)
            times = self._tally.times(rows.time_ns, since_ns)
            held = self._tally.levels.again(rows.take(slice(max(begin - first, 0), end - first)), counters)
            at = held.at + max(begin - first, 0)
            found.append((first + at, times[at], held.series, held.change))
        return found

    def _walked(self, on: NDArray[np.bool_], begin: int, end: int) -> list[Moment]:
        """The highest moments of rows ``begin`` to ``end``, from the rows themselves."""
        if begin >= end:
            return []
        stored, counted, done = self._state(begin)
        moments = []
        level = int((stored + counted)[on].sum())
        for at, times, series, change in self._changes(done, end, counted):
            levels = level + np.cumsum(np.where(on[series], change, 0))
            level = int(levels[-1]) if len(levels) else level
            inside = np.flatnonzero(at >= begin)
            if len(inside):
                top = inside[np.argmax(levels[inside])]
                moments.append(Moment(int(times[top]), int(levels[top]), int(at[top]) + 1))
        return moments

    def _named(self, peak: Moment, tier: int, end: int) -> Moment:
        """``peak``, after the pairs of rows that follow it at once; see Note: [Named after it was made]."""
        end = min(end, peak.rows + STRETCH_ROWS)
        if not peak.nbytes or peak.rows >= end:
            return peak
        _, counted, done = self._state(peak.rows)
        freed = 0
        for at, times, series, change in self._changes(done, end, counted):
            mine = np.flatnonzero(self._on(tier)[series] & (change != 0) & (at >= peak.rows))
            for row, time_ns, nbytes in zip(at[mine].tolist(), times[mine].tolist(), change[mine].tolist(), strict=True):
                if freed + nbytes == 0:
                    peak, freed = Moment(time_ns, peak.nbytes, row + 1), 0
                elif freed:
                    return peak
                else:
                    freed = nbytes
        return peak

    def _totals(self, tier: int) -> Int64s:
        """Bytes on a tier at the end of each piece."""
        log = self._log
        change = np.where(self._on(tier)[log.code >> 1], log.change, 0)
        return np.concatenate(([0], np.cumsum(change)))[log.entries]


def _highest(moments: list[Moment]) -> Moment:
    return max(moments, key=lambda moment: (moment.nbytes, -moment.rows))
