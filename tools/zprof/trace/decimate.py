"""Owns how a trace that grew too large is made smaller: what lies away from the peaks is thinned out, what is held stays true.

The writer calls `smaller` with the older part of its file and puts the newer part behind the result. It never changes the file
it reads, and holds a few chunks of it in memory.

Note: [What stays]
    The run is cut into buckets of some chunks. At a bucket's end and where a tier held most and least in it, the level of
    every series is stated anew; so it is at the peaks of the whole: of each tier, of each category on it, and of each series.
    The rows about each tier's peak stay as they are. Storages that lived then or still live stay storages; what the others
    add up to is stated as one storage without number (ident 0). Of samples the first, last, lowest and highest of a bucket
    stay; of spans those of steps, and those open about a peak or still open. Where levels fall and rise at one moment, the
    falls are written first, so that no sum is ever higher than it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zprof.rows import PLACES, QUEUED, TIERS, RowKind
from zprof.trace.columns import Rows, packed_columns
from zprof.trace.frames import MOST_ROWS, FrameKind, most, sealed
from zprof.trace.levels import TIER_OF, Levels, Open, Walk, extremes, walked
from zprof.trace.reader import Trace

__all__ = ["EFFORTS", "Effort", "smaller"]

_Int64s = NDArray[np.int64]
#: Rows kept whole on each side of a tier's peak.
_ABOUT = 512
_STEPS = ("step", "forward", "backward")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is thinned out: chunks a bucket, whether each series has its peak stated, and which spans and storages stay."""

    chunks: int
    series_peaks: bool = False
    spans: tuple[str, ...] = _STEPS
    storages: bool = True


#: From the gentlest; the next is tried where one does not save enough.
EFFORTS = (
    Effort(4, series_peaks=True),
    Effort(16),
    Effort(64),
    Effort(256, spans=("step",)),
    Effort(1 << 31, spans=(), storages=False),
)


def smaller(trace: Trace, chunks: int, effort: Effort, write: Callable[[bytes], None]) -> int:
    """Write the first ``chunks`` chunks of ``trace``, thinned out, as frames; how many rows were dropped.

    Raises:
        TraceError: a chunk cannot be read; the writer's own file has none such.
    """
    moments, about = _Peaks(trace, chunks).moments(effort)
    kept = _kept(trace, chunks, about) if effort.storages else np.zeros(0, np.int64)
    out = _Out(trace, write)
    thinning = _Thinning(trace, effort, about, kept)
    first = 0
    for index in range(chunks):
        rows = trace.chunk(index)
        begin, end = np.searchsorted(moments, (first, first + len(rows)))
        thinning.take(rows, first, moments[begin:end] - first)
        first += len(rows)
        if index + 1 == chunks or (index + 1) % effort.chunks == 0 or thinning.waiting > 16 * MOST_ROWS:
            out.rows(thinning.drain(), trace.sequence(index))
    out.flush()
    return first - out.count


class _Peaks:
    """The first pass: where levels were highest and lowest."""

    def __init__(self, trace: Trace, chunks: int) -> None:
        self._ends: list[int] = []
        self._series, self._places, self._tiers = _Highest(0), _Highest(len(PLACES)), _Highest(len(TIERS))
        #: Of each chunk and tier: the highest level and its row, the lowest and its row; row -1 where nothing changed.
        self._of_chunks = np.full((chunks, 4, len(TIERS)), -1, np.int64)
        levels = Levels(trace.strings)
        first = 0
        for index in range(chunks):
            rows = trace.chunk(index)
            changes = levels.take(rows)
            change, row = changes.change, changes.at + first
            self._series.grow(len(levels))
            self._series.take(changes.series, change, row)
            self._places.take(changes.place, change, row)
            walk = self._tiers.take(TIER_OF.take(changes.place), change, row)
            self._of_chunks[index][:, walk.group] = walk.top, row[walk.top_at], walk.bottom, row[walk.bottom_at]
            first += len(rows)
            self._ends.append(first)

    def moments(self, effort: Effort) -> tuple[_Int64s, list[tuple[int, int]]]:
        """(rows after which every level is stated, ascending; ranges of rows that stay whole)."""
        count = len(self._ends)
        chosen = [self._ends[min(bucket + effort.chunks, count) - 1] - 1 for bucket in range(0, count, effort.chunks)]
        if effort.chunks < count:
            for bucket in range(0, count, effort.chunks):
                chosen += _rows_of(self._of_chunks[bucket : bucket + effort.chunks])
        for highest in (self._tiers, self._places, *([self._series] if effort.series_peaks else [])):
            chosen += highest.rows()
        last = self._ends[-1]
        peaks = [(max(row - _ABOUT, 0), min(row + _ABOUT + 1, last)) for row in self._tiers.rows()]
        about = _joined(peaks) if effort.storages else []
        rows = np.unique(np.array(chosen, np.int64))
        for begin, end in about:
            # Rows that stay whole need no statement among them, only one of what was true before.
            rows = rows[(rows < begin) | (rows >= end)]
            rows = np.append(rows, begin - 1) if begin else rows
        return np.unique(rows), about


class _Highest:
    """Levels of some groups over all chunks, and the row where each was highest."""

    def __init__(self, groups: int) -> None:
        self._now = np.zeros(groups, np.int64)
        self._top = np.zeros(groups, np.int64)
        self._row = np.zeros(groups, np.int64)

    def grow(self, groups: int) -> None:
        more = np.zeros(groups - len(self._now), np.int64)
        self._now, self._top, self._row = (np.append(each, more) for each in (self._now, self._top, self._row))

    def take(self, group: NDArray[np.signedinteger[Any]], change: _Int64s, row: _Int64s) -> Walk:
        walk = walked(group, change, self._now)
        better = walk.top > self._top[walk.group]
        self._top[walk.group[better]] = walk.top[better]
        self._row[walk.group[better]] = row[walk.top_at[better]]
        return walk

    def rows(self) -> list[int]:
        """Of each group that ever held anything."""
        found: list[int] = self._row[self._top > 0].tolist()
        return found


def _rows_of(chunks: _Int64s) -> list[int]:
    """Where each tier was highest and lowest over some chunks, [chunks, 4, tiers]."""
    found = []
    for tier in range(chunks.shape[2]):
        top, top_row, bottom, bottom_row = chunks[chunks[:, 1, tier] >= 0, :, tier].T
        if len(top):
            found += [int(top_row[np.argmax(top)]), int(bottom_row[np.argmin(bottom)])]
    return found


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _kept(trace: Trace, chunks: int, about: list[tuple[int, int]]) -> _Int64s:
    """The second pass: rows of spans and storages that were there in a range of ``about``, or still are; ascending."""
    spans, storages = Open(), Open()
    found: list[_Int64s] = []
    first = 0
    for index in range(chunks):
        rows = trace.chunk(index)
        span = np.flatnonzero(rows.kind <= RowKind.END)
        group = rows.what[span].astype(np.int64) << 32 | rows.key[span]
        pairs = [spans.match(group, span + first, rows.kind[span] == RowKind.BEGIN)]
        held = np.flatnonzero((rows.kind >= RowKind.ALLOC) & (rows.ident > 0) & (rows.place >= 0))
        pairs.append(storages.match(rows.ident[held], held + first, rows.kind[held] == RowKind.ALLOC))
        for opening, closing in pairs:
            there = np.zeros(len(opening), np.bool_)
            for begin, end in about:
                there |= (opening < end) & (closing >= begin)
            found += [opening[there], closing[there]]
        first += len(rows)
    return np.sort(np.concatenate([*found, spans.row, storages.row]))


class _Thinning:
    """The last pass: takes chunks and gives the rows that stay, in order.

    Pieces are [8, rows]: the row they belong to, then the columns of `Rows`.
    """

    def __init__(self, trace: Trace, effort: Effort, about: list[tuple[int, int]], kept: _Int64s) -> None:
        self.waiting = 0
        self._strings = trace.strings
        self._spans = effort.spans
        self._about, self._kept = about, kept
        self._levels = Levels(trace.strings)
        self._pieces: list[_Int64s] = []
        self._samples = np.zeros((8, 0), np.int64)
        self._storages = np.zeros((8, 0), np.int64)
        self._level, self._stated, self._stored = (np.zeros(0, np.int64) for _ in range(3))

    def take(self, rows: Rows, first: int, ends: _Int64s) -> None:
        """``first`` is the number of the chunk's first row; ``ends`` the rows after which levels are stated."""
        changes = self._levels.take(rows)
        self._grow()
        all_of = np.stack([np.arange(first, first + len(rows)), *(getattr(rows, name).astype(np.int64) for name in _COLUMNS)])
        whole = np.zeros(len(rows), np.bool_)
        for begin, end in self._about:
            whole[max(begin - first, 0) : max(end - first, 0)] = True
        kept = np.zeros(len(rows), np.bool_)
        low, high = np.searchsorted(self._kept, (first, first + len(rows)))
        kept[self._kept[low:high] - first] = True
        self._add(all_of[:, whole | self._passes(rows, kept)])
        sampled = ~whole & (rows.kind == RowKind.COUNTER)
        sampled[changes.at] = False
        self._sample(all_of[:, sampled])
        kept &= ~whole & np.isin(rows.kind, (RowKind.ALLOC, RowKind.FREE))
        begin = 0
        counter, stored = changes.counter, changes.stored
        for end in [*ends.tolist(), len(rows)]:
            # The last one is the chunk's end, where nothing is stated: what changed after the last moment waits.
            upto = int(np.searchsorted(changes.at, end, side="right"))
            at, series = changes.at[begin:upto], changes.series[begin:upto]
            np.add.at(self._level, series, counter[begin:upto])
            np.add.at(self._stated, series, np.where(whole[at], 0, counter[begin:upto]))
            np.add.at(self._stored, series, np.where(whole[at] | kept[at], 0, stored[begin:upto]))
            self._storages = np.append(self._storages, all_of[:, at[kept[at]]], axis=1)
            if end < len(rows):
                self._state(first + end, int(rows.time_ns[end]))
            begin = upto

    def drain(self) -> _Int64s:
        """The rows so far."""
        samples = self._samples[:, extremes(_series_of(self._samples), self._samples[4])]
        whole = np.concatenate([*self._pieces, samples], axis=1)
        self._pieces, self.waiting, self._samples = [], 0, np.zeros((8, 0), np.int64)
        return whole[:, np.argsort(whole[0], kind="stable")]

    def _passes(self, rows: Rows, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Spans of steps, spans that are kept, and failed requests."""
        steps = [at for at, name in enumerate(self._strings) if name.removeprefix(QUEUED) in self._spans]
        oom = [at for at, name in enumerate(self._strings) if name == "oom"]
        span = (rows.kind <= RowKind.END) | (rows.kind == RowKind.SPAN)
        passes: NDArray[np.bool_] = span & (kept | np.isin(rows.what, steps))
        passes |= (rows.kind == RowKind.INSTANT) & np.isin(rows.what, oom)
        return passes

    def _sample(self, piece: _Int64s) -> None:
        self._samples = np.append(self._samples, piece, axis=1)
        if self._samples.shape[1] > 4 * MOST_ROWS:
            self._samples = self._samples[:, extremes(_series_of(self._samples), self._samples[4])]

    def _state(self, row: int, time_ns: int) -> None:
        """State what changed since the last moment: what fell first."""
        storages, stated, stored = self._storages, self._stated, self._stored
        freed = storages[1] == RowKind.FREE
        storages[0], storages[5] = row, time_ns
        self._add(storages[:, freed])
        for kind, series in (
            (RowKind.FREE, np.flatnonzero(stored < 0)),
            (RowKind.COUNTER, np.flatnonzero(stated < 0)),
            (RowKind.COUNTER, np.flatnonzero(stated > 0)),
            (RowKind.ALLOC, np.flatnonzero(stored > 0)),
        ):
            piece = np.zeros((8, len(series)), np.int64)
            piece[0], piece[1], piece[5] = row, kind, time_ns
            piece[2], piece[3] = self._levels.what[series], self._levels.key[series]
            piece[4] = self._level[series] if kind == RowKind.COUNTER else np.abs(stored[series])
            self._add(piece)
        self._add(storages[:, ~freed])
        self._storages = np.zeros((8, 0), np.int64)
        stated[:] = 0
        stored[:] = 0

    def _add(self, piece: _Int64s) -> None:
        if piece.shape[1]:
            self._pieces.append(piece)
            self.waiting += piece.shape[1]

    def _grow(self) -> None:
        more = np.zeros(len(self._levels) - len(self._level), np.int64)
        self._level, self._stated, self._stored = (np.append(each, more) for each in (self._level, self._stated, self._stored))


def _series_of(piece: _Int64s) -> _Int64s:
    series: _Int64s = piece[2] << 32 | piece[3]
    return series


class _Out:
    """Encodes pieces as chunks; ``count`` rows were written."""

    def __init__(self, trace: Trace, write: Callable[[bytes], None]) -> None:
        self.count = 0
        self._strings = trace.strings
        self._write = write
        self._waiting = np.zeros((8, 0), np.int64)
        self._sequence = 0

    def rows(self, piece: _Int64s, sequence: int) -> None:
        """Take rows that came from chunks up to ``sequence``."""
        self._sequence = sequence
        self._waiting = np.append(self._waiting, piece, axis=1)
        while self._waiting.shape[1] >= MOST_ROWS:
            self._chunk(self._waiting[:, :MOST_ROWS])
            self._waiting = self._waiting[:, MOST_ROWS:]

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting.shape[1]:
            self._chunk(self._waiting)
            self._waiting = self._waiting[:, :0]

    def _chunk(self, piece: _Int64s) -> None:
        numbers = dict(zip(_COLUMNS, piece[1:], strict=True))
        used = np.unique(piece[2:4])
        numbers["what"], numbers["key"] = np.searchsorted(used, piece[2]), np.searchsorted(used, piece[3])
        payload = packed_columns(numbers, [self._strings[at] for at in used.tolist()])
        count = piece.shape[1]
        if len(payload) > most(FrameKind.ROWS):
            self._chunk(piece[:, : count // 2])
            self._chunk(piece[:, count // 2 :])
            return
        self.count += count
        self._write(sealed(FrameKind.ROWS, payload, sequence=self._sequence, count=count))


_COLUMNS = ("kind", "what", "key", "nbytes", "time_ns", "thread", "ident")
