"""Owns spans: which END of a trace closes which BEGIN, found on whole arrays, chunk by chunk.

Steps, stalls, bandwidths, pages and exports take their spans from here. It keeps the spans that were asked for and those
still open, never rows, and an end whose begin was not recorded is counted and left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zprof.analysis.intervals import Ints
from zprof.rows import QUEUED, RowKind, TraceError
from zprof.trace.levels import nesting

if TYPE_CHECKING:
    from zprof.trace.reader import Rows, Trace

__all__ = ["FIRST_LANE", "Instants", "Pairing", "SpanTable", "lanes_of"]

Codes: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]

#: Rows paired at once: enough that a pass over arrays costs little a row, few enough that they stay in the cache.
_BLOCK = 1 << 15
#: Rows kept for the next block, because a thread may hand over an earlier row later.
_LATE = 1 << 12
#: Begins that may wait for their end. More are taken for lost: a trace of begins alone must not fill the memory.
_MOST_OPEN = 1 << 20
#: Of any clock, so that differences stay within 64 bits; 73 years.
_LATEST_NS = 1 << 61
#: Of one span, so that those of a run sum within 64 bits.
_MOST_NBYTES = 1 << 47
#: In place of a thread, the number of a lane above it: threads are fewer.
FIRST_LANE = 1 << 30
_MOST_LANES = 1000


@dataclass(frozen=True, slots=True)
class _Block:
    """BEGIN and END rows as columns."""

    is_begin: Flags
    what: Codes
    key: Codes
    nbytes: Ints
    time_ns: Ints
    thread: Codes

    def take(self, which: NDArray[np.intp] | Flags | slice) -> _Block:
        return _Block(**{column.name: getattr(self, column.name)[which] for column in fields(self)})

    @classmethod
    def joined(cls, blocks: Sequence[_Block]) -> _Block:
        names = [column.name for column in fields(cls)]
        return cls(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in names})


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Closed spans in the order they began; columns of equal length.

    Attributes:
        what, key: numbers of ``strings``.
        begin_ns, end_ns: the trace's monotonic clock.
        nbytes: the larger of what begin and end said, for some know it only at the end.
        thread: on which the span began; from `FIRST_LANE` on the lane of a device's stream.
        open: spans that had not ended when the recording did; their ``end_ns`` is the last time recorded.
        lost_ends: ends whose begin is not in the trace.
    """

    strings: Sequence[str]
    what: Codes
    key: Codes
    begin_ns: Ints
    end_ns: Ints
    nbytes: Ints
    thread: Codes
    open: SpanTable | None = None
    lost_ends: int = 0
    _by_what: list[tuple[NDArray[np.intp], Ints]] = field(default_factory=list, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.what)

    @property
    def duration_ns(self) -> Ints:
        return self.end_ns - self.begin_ns

    def by_host(self, *whats: str) -> SpanTable:
        """The spans of ``whats`` as the host began and ended them: where a device did them later, when they were queued."""
        queued = self.of(*(f"{QUEUED}{what}" for what in whats))
        return queued if len(queued) else self.of(*whats)

    def of(self, *whats: str) -> SpanTable:
        """The spans of ``whats``, names or beginnings such as "wait *"; without open ones."""
        order, starts = self._sorted_by_what()
        codes = np.flatnonzero(_matching(self.strings, whats)[: len(starts) - 1])
        parts = [order[starts[code] : starts[code + 1]] for code in codes.tolist() if starts[code] < starts[code + 1]]
        if len(parts) == 1:
            return self.where(parts[0])
        return self.where(np.sort(np.concatenate([np.zeros(0, np.intp), *parts])))

    def where(self, which: Flags | NDArray[np.intp]) -> SpanTable:
        """The spans chosen by ``which``, flags or places in rising order; without open ones."""
        places = np.flatnonzero(which) if which.dtype == np.bool_ else which
        names = (self.what.take(places), self.key.take(places))
        moved = (self.begin_ns.take(places), self.end_ns.take(places), self.nbytes.take(places))
        return SpanTable(self.strings, *names, *moved, self.thread.take(places))

    def _sorted_by_what(self) -> tuple[NDArray[np.intp], Ints]:
        """Places in the order of what, then of begin, and where each what's begin; made when first asked for."""
        if not self._by_what:
            most = int(self.what.max()) if len(self.what) else -1
            narrow = self.what.astype(np.uint16) if most < 1 << 16 else self.what
            counts = np.bincount(self.what, minlength=most + 1) if most >= 0 else np.zeros(0, np.int64)
            self._by_what.append((np.argsort(narrow, kind="stable"), np.concatenate(([0], np.cumsum(counts)))))
        return self._by_what[0]


@dataclass(frozen=True, slots=True)
class Instants:
    """Points in time, in the order of time; columns of equal length."""

    strings: Sequence[str]
    what: Codes
    key: Codes
    time_ns: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.what)

    def of(self, *whats: str) -> Instants:
        """The points of ``whats``, names or beginnings."""
        mine = _matching(self.strings, whats)[self.what]
        return Instants(self.strings, self.what[mine], self.key[mine], self.time_ns[mine], self.nbytes[mine])


def _matching(strings: Sequence[str], whats: Collection[str] | None, since: int = 0) -> Flags:
    """Which of ``strings`` from number ``since`` on are asked for."""
    names = strings[since:]
    if whats is None:
        return np.ones(len(names), np.bool_)
    begins = tuple(what[:-1] for what in whats if what.endswith("*"))
    return np.array([name in whats or name.startswith(begins) for name in names], np.bool_)


def lanes_of(trace: Trace) -> dict[int, str]:
    """The names of a device's streams, by what stands for a thread in tables of spans."""
    notes = trace.notes("lanes")
    names = notes[-1].body.get("lanes") if notes else None
    if not isinstance(names, list):
        return {}
    return {FIRST_LANE + number: str(name)[:80] for number, name in enumerate(names[:_MOST_LANES])}


class Pairing:
    """Takes the chunks of a trace in order and gives its spans.

    Several may be fed in one pass over a trace. Rows count in the order of their times, those of one time in the order of
    the file.

    Args:
        trace: whose names may grow between chunks.
        whats: the spans to keep: names or beginnings; all where it is None.
        points: the instants to keep: names or beginnings.
    """

    def __init__(self, trace: Trace, whats: Collection[str] | None = None, points: Collection[str] = ()) -> None:
        self._name, self._strings = trace.path.name, trace.strings
        self._whats, self._points = whats, points
        self._spans_wanted: Flags = np.zeros(0, np.bool_)
        self._points_wanted: Flags = np.zeros(0, np.bool_)
        self._waiting: list[_Block] = []
        self._waiting_count = 0
        #: Spans still open, then late rows: what the next block begins with.
        self._carried: _Block | None = None
        self._open: list[_Block] = []
        self._closed: list[tuple[Codes, Codes, Ints, Ints, Ints, Codes]] = []
        self._instants: list[Instants] = []
        self._lost_ends = 0
        self._last_ns = 0

    def feed(self, rows: Rows) -> None:
        """Take the next chunk."""
        known = len(self._spans_wanted)
        if len(self._strings) > known:
            self._spans_wanted = np.concatenate((self._spans_wanted, _matching(self._strings, self._whats, known)))
            self._points_wanted = np.concatenate((self._points_wanted, _matching(self._strings, self._points, known)))
        if not len(rows.time_ns):
            return
        first_ns, last_ns = int(rows.time_ns.min()), int(rows.time_ns.max())
        if first_ns < 0 or last_ns > _LATEST_NS:
            raise TraceError(f"{self._name}: a row is of {first_ns} to {last_ns} ns, expected 0 to 2**61; record the run again")
        self._last_ns = max(self._last_ns, last_ns)
        self._feed_lanes(rows)
        chosen = np.flatnonzero((rows.kind <= RowKind.END) & self._spans_wanted[rows.what])
        if len(chosen):
            kind = rows.kind[chosen]
            names = (rows.what[chosen], rows.key[chosen])
            block = _Block(kind == RowKind.BEGIN, *names, rows.nbytes[chosen], rows.time_ns[chosen], rows.thread[chosen])
            if not 0 <= int(block.nbytes.min()) <= int(block.nbytes.max()) < _MOST_NBYTES:
                raise TraceError(f"{self._name}: a span moves less than 0 or over 2**47 bytes; record the run again")
            self._waiting.append(block)
            self._waiting_count += len(chosen)
        if self._points:
            self._keep_instants(rows, rows.kind == RowKind.INSTANT)
        if self._waiting_count >= _BLOCK:
            self._pair(last=False)

    def _feed_lanes(self, rows: Rows) -> None:
        """The device's spans are whole as they come."""
        whole = rows.kind == RowKind.SPAN
        if not whole.any():
            return
        chosen = np.flatnonzero(whole & self._spans_wanted[rows.what])
        begin_ns, nbytes = rows.time_ns[chosen], rows.nbytes[chosen]
        if len(chosen):
            # A length may be up to 2**62, so the sum still fits.
            end_ns = begin_ns + rows.ident[chosen]
            if int(end_ns.max()) > _LATEST_NS or not 0 <= int(nbytes.min()) <= int(nbytes.max()) < _MOST_NBYTES:
                raise TraceError(f"{self._name}: a span ends after 2**61 ns or moves over 2**47 bytes; record the run again")
            names = (rows.what[chosen], rows.key[chosen])
            lanes = (rows.thread[chosen] & (FIRST_LANE - 1)) | FIRST_LANE
            self._closed.append((*names, begin_ns, end_ns, nbytes, lanes.astype(np.int32)))
            self._last_ns = max(self._last_ns, int(end_ns.max()))
        if self._points:
            self._keep_instants(rows, whole)

    def _keep_instants(self, rows: Rows, among: Flags) -> None:
        chosen = np.flatnonzero(among & self._points_wanted[rows.what])
        if len(chosen):
            names = (rows.what[chosen], rows.key[chosen])
            self._instants.append(Instants(self._strings, *names, rows.time_ns[chosen], rows.nbytes[chosen]))

    def table(self) -> SpanTable:
        """The spans; nothing may be fed afterwards."""
        self._pair(last=True)
        columns: list[list[NDArray[Any]]] = [[part[index] for part in self._closed] for index in range(6)]
        self._closed.clear()
        closed = _columns(columns)
        opened = _Block.joined(self._open) if self._open else None
        left = None
        if opened is not None and len(opened.what):
            opened = opened.take(np.argsort(opened.time_ns, kind="stable"))
            end_ns = np.full(len(opened.what), self._last_ns, np.int64)
            left = SpanTable(
                self._strings, opened.what, opened.key, opened.time_ns, end_ns, opened.nbytes, opened.thread
            )
        return SpanTable(self._strings, *closed, open=left, lost_ends=self._lost_ends)

    def instants(self) -> Instants:
        """The points that were asked for."""
        def column(name: str, kind: type) -> NDArray[Any]:
            return np.concatenate([np.zeros(0, kind), *(getattr(part, name) for part in self._instants)])

        time_ns = column("time_ns", np.int64)
        order = np.argsort(time_ns, kind="stable")
        names = (column("what", np.int32)[order], column("key", np.int32)[order])
        return Instants(self._strings, *names, time_ns[order], column("nbytes", np.int64)[order])

    def _pair(self, *, last: bool) -> None:
        """Pair what waits, but for the latest rows and the begins whose end has not come."""
        parts = [*([self._carried] if self._carried is not None else []), *self._waiting]
        self._waiting, self._waiting_count, self._carried = [], 0, None
        if not parts:
            return
        block = _Block.joined(parts)
        if len(block.what) > 1 and bool((block.time_ns[1:] < block.time_ns[:-1]).any()):
            block = block.take(np.argsort(block.time_ns, kind="stable"))
        cut = len(block.what) if last else max(0, len(block.what) - _LATE)
        late = block.take(slice(cut, None))
        block = block.take(slice(0, cut))
        left = self._close(block)
        if last:
            self._open.append(left)
            return
        excess = max(0, len(left.what) - _MOST_OPEN)
        if excess:
            self._open.append(left.take(slice(0, excess)))
            left = left.take(slice(excess, None))
        self._carried = _Block.joined([left, late])

    def _close(self, block: _Block) -> _Block:
        """Keep the spans that end in ``block``, whose rows are in the order of time; returns the begins left open.

        Rows are brought together by what and key, then by how deep they lie: there a begin is followed by its own end.
        """
        row = _by_group(block)
        group = np.cumsum(_changes(block.what[row]) | _changes(block.key[row])) - 1
        is_begin = block.is_begin[row]
        depth, lost = nesting(group, is_begin)
        self._lost_ends += int(np.count_nonzero(lost))
        if lost.any():
            kept = ~lost
            row, group, is_begin, depth = row[kept], group[kept], is_begin[kept], depth[kept]
        if len(depth) and int(depth.max()) > 1:
            order = np.lexsort((depth, group))
            row, group, is_begin, depth = row[order], group[order], is_begin[order], depth[order]
        begins = np.flatnonzero(is_begin)
        ends = np.minimum(begins + 1, max(len(depth) - 1, 0))
        paired = ~is_begin[ends] & (group[ends] == group[begins]) & (depth[ends] == depth[begins])
        left = block.take(np.sort(row[begins[~paired]]))
        # By the row of the begin, so that the spans are in the order they began: each row holds its end's, or none.
        end_of = np.full(len(block.what), -1, np.int64)
        end_of[row[begins[paired]]] = row[ends[paired]]
        first = np.flatnonzero(end_of >= 0)
        last = end_of[first]
        nbytes = np.maximum(block.nbytes[first], block.nbytes[last])
        names = (block.what[first], block.key[first])
        self._closed.append((*names, block.time_ns[first], block.time_ns[last], nbytes, block.thread[first]))
        return left


def _changes(values: Codes) -> Flags:
    """True at the first row and wherever the value is not the one before."""
    changed = np.ones(len(values), np.bool_)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _by_group(block: _Block) -> NDArray[np.intp]:
    """The order that brings equal (what, key) together and keeps the order of time within."""
    codes = [block.key, block.what]
    # numpy sorts numbers of 16 bits by radix, many times as fast.
    narrow = [code.astype(np.uint16) if len(code) and int(code.max()) < 1 << 16 else code for code in codes]
    return np.lexsort(narrow)


def _columns(parts: list[list[NDArray[Any]]]) -> tuple[Codes, Codes, Ints, Ints, Ints, Codes]:
    """One array a column, in the order of begin; each column's parts are let go as soon as they are joined."""
    kinds = (np.int32, np.int32, np.int64, np.int64, np.int64, np.int32)
    begins = np.concatenate([np.zeros(0, np.int64), *parts[2]])
    ordered = not len(begins) or bool((begins[1:] >= begins[:-1]).all())
    order = None if ordered else np.argsort(begins, kind="stable")
    joined: list[NDArray[Any]] = []
    for kind, column in zip(kinds, parts, strict=True):
        whole = np.concatenate([np.zeros(0, kind), *column])
        column.clear()
        joined.append(whole if order is None else whole[order])
    what, key, begin_ns, end_ns, nbytes, thread = joined
    return what, key, begin_ns, end_ns, nbytes, thread
