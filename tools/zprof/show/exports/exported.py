"""Owns what the exports share: the one pass over each rank's trace, one clock for all ranks, the tracks of spans, and units.

The modules of the formats call it. It writes nothing, and holds of each rank no more spans than a file can take, the longest
of each verb.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zprof.analysis.analysis import Analysis
from zprof.analysis.bandwidth import VERBS
from zprof.analysis.coverage import Unseen
from zprof.analysis.ranks import Lane, clocks, lane_of
from zprof.analysis.spans import FIRST_LANE, SpanTable
from zprof.gpu.vendors import BOUNDS, quantity_of
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.coverage import Coverage
    from zprof.analysis.ledger import Ledger
    from zprof.analysis.operators import Operators
    from zprof.analysis.spans import Instants
    from zprof.trace.header import Header

    Ints = NDArray[np.int64]
    Codes = NDArray[np.int32]
    Order = NDArray[np.intp]

__all__ = [
    "MOST_SPANS", "Read", "Track", "Written", "afford", "fairly", "full", "lost", "one_by_one", "read",
    "rows_of", "shifts", "text", "tracks", "unit_of",
]  # fmt: skip

#: Spans kept of one rank; a file that a browser opens holds fewer.
MOST_SPANS = 250_000
#: Tracks of one rank, and how many of them spans of one thread or one verb may take that cannot share one.
MOST_TRACKS = 256
_MOST_BESIDE = 16


class Written(NamedTuple):
    """What an export says: how much it wrote and what opens it, and a line for whatever of a trace is not in it."""

    said: str
    lost: Sequence[str]


@dataclass(frozen=True, slots=True)
class Read:
    """What the exports take of a rank's analysis: its ledger, and those of its spans that a file can hold.

    Attributes:
        table: the longest spans of each verb, those still open at the end included; in the order of begin, of those that
            begin together the longest first.
        unfinished: of each span, whether it was still open.
        count: spans there were. unlisted_ns: the longest of those that are not in the table.
        spent_ns: (what, key) -> the time in all its spans.
        lane: what ranks are compared by. lanes: the device's streams, by what stands for a thread in the table.
        operators: torch's, where they were recorded.
    """

    trace: Trace
    ledger: Ledger
    covered: Coverage
    lane: Lane
    failures: Instants
    lanes: dict[int, str]
    operators: Operators | None
    table: SpanTable
    unfinished: NDArray[np.bool_]
    count: int
    unlisted_ns: int
    spent_ns: dict[tuple[str, str], int]

    @property
    def header(self) -> Header:
        return self.trace.header


@dataclass(frozen=True, slots=True)
class Track:
    """Spans that can be drawn in one row: each pair of them is disjoint, or, on a thread's, one holds the other.

    Attributes:
        name: "thread 0", "compute" of a device's stream, "gather", and with a number from 2 on for what the first could not
            take.
        on_thread: spans of one thread or stream, which nest.
        places: of its spans in the table, in the table's order.
    """

    name: str
    on_thread: bool
    places: list[int]


def one_by_one(paths: Iterable[Path]) -> Iterator[Trace]:
    """The traces, each closed before the next is opened: a job's may be more than there may be open files."""
    for path in paths:
        trace = Trace.open(path)
        try:
            yield trace
        finally:
            trace.close()


def lost(trace: Trace, damage: str | None) -> list[str]:
    """What of ``trace`` cannot be in an export: ``damage``, and rows that were never written."""
    count = trace.dropped
    thinned = f"{count:,} rows were thinned out or lost while it was recorded: short events are missing" if count else ""
    return [f"{trace.path}: {line}" for line in (damage, thinned) if line]


def read(trace: Trace, *, points: int = 2000) -> Read:
    """Read ``trace`` once.

    Raises:
        TraceError: the file is not what it should be.
    """
    analysis = Analysis.of(trace, spans=None, points=points)
    closed = analysis.table
    parts = [closed, *([closed.open] if closed.open is not None else [])]
    names = [np.concatenate([part.what for part in parts]), np.concatenate([part.key for part in parts])]
    begin_ns = np.concatenate([part.begin_ns for part in parts])
    end_ns = np.concatenate([part.end_ns for part in parts])
    nbytes, thread = np.concatenate([part.nbytes for part in parts]), np.concatenate([part.thread for part in parts])
    spent = _spent(trace.strings, names[0], names[1], end_ns - begin_ns)
    kept, unlisted = np.split(fairly(names[0], end_ns - begin_ns), [MOST_SPANS])
    unlisted_ns = int((end_ns[unlisted] - begin_ns[unlisted]).max(initial=0))
    kept = kept[np.lexsort((-end_ns[kept], begin_ns[kept]))]
    moved = (begin_ns[kept], end_ns[kept], nbytes[kept], thread[kept])
    table = SpanTable(trace.strings, names[0][kept], names[1][kept], *moved)
    operators = None if isinstance(analysis.operators, Unseen) else analysis.operators
    facts = (trace, analysis.ledger, analysis.covered, lane_of(analysis), analysis.failures, analysis.lanes, operators)
    return Read(*facts, table, kept >= len(closed), len(begin_ns), unlisted_ns, spent)


def _spent(strings: Sequence[str], what: Codes, key: Codes, lasted: Ints) -> dict[tuple[str, str], int]:
    pairs, member = np.unique(what.astype(np.int64) << 32 | key, return_inverse=True)
    sums = np.zeros(len(pairs), np.int64)
    np.add.at(sums, member, lasted)
    named = [(strings[pair >> 32], strings[pair & 0xFFFFFFFF]) for pair in pairs.tolist()]
    return dict(zip(named, sums.tolist(), strict=True))


def fairly(group: Ints | Codes, lasted: Ints) -> Order:
    """The order in which spans are kept: the longest of each group, then the second of each, and so on.

    The longest of all would be those of one verb, and a wait is short beside a read that nobody waited for.
    """
    order = np.lexsort((-lasted, group))
    sorted_group = group[order]
    first = np.flatnonzero(np.append(True, sorted_group[1:] != sorted_group[:-1])[: len(order)])
    turn = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    kept: Order = order[np.lexsort((-lasted[order], turn))]
    return kept


def afford(reads: Sequence[Read], nbytes: Sequence[Ints], most: int) -> list[NDArray[np.bool_]]:
    """Which spans of each rank a file of ``most`` bytes takes, where they cost ``nbytes``: the longest of each verb."""
    lasted = np.concatenate([np.zeros(0, np.int64), *(one.table.duration_ns for one in reads)])
    groups = [one.table.what.astype(np.int64) + (number << 32) for number, one in enumerate(reads)]
    order = fairly(np.concatenate([np.zeros(0, np.int64), *groups]), lasted)
    kept = np.zeros(len(lasted), np.bool_)
    kept[order] = np.cumsum(np.concatenate([np.zeros(0, np.int64), *nbytes])[order]) <= most
    return np.split(kept, np.cumsum([len(one.table) for one in reads])[:-1])


def shifts(reads: Sequence[Read]) -> list[int]:
    """What to add to each rank's times so that all are of one clock on which the first thing known is at 0."""
    apart = [clock.offset_ns for clock in clocks([one.lane for one in reads])]
    begin = min(_begin_ns(one) + offset for one, offset in zip(reads, apart, strict=True))
    return [offset - begin for offset in apart]


def _begin_ns(one: Read) -> int:
    samples = [times for what in one.ledger.sampled() for times, _ in one.ledger.samples(what).values()]
    firsts = [column[0] for column in (one.table.begin_ns, one.failures.time_ns, *samples) if len(column)]
    firsts += [window.events.begin_ns.min() for window in (one.operators.windows if one.operators is not None else ())]
    return min([one.ledger.begin_ns, *map(int, firsts)])


def tracks(table: SpanTable, places: Order, lanes: Mapping[int, str]) -> tuple[list[Track], list[int]]:
    """The tracks of a rank's spans at ``places``, and those of them that found none.

    Transfers of one verb are under way together and hold nothing: each verb has tracks on which no two meet. All other spans
    are of a thread or of a device's stream, and nest; those that cross another there go to its next track.
    """
    groups: dict[tuple[bool, str], list[int]] = {}
    strings = table.strings
    columns = (places, table.what[places], table.thread[places])
    for place, what, thread in zip(*(column.tolist() for column in columns), strict=True):
        verb = strings[what]
        group = (False, verb) if verb in VERBS else (True, lanes.get(thread) or _threads_name(thread))
        groups.setdefault(group, []).append(place)
    found: list[Track] = []
    left: list[int] = []
    order = sorted(groups, key=lambda group: (not group[0], groups[group][0]))
    for on_thread, name in order:
        rows, beside = rows_of(table.begin_ns, table.end_ns, groups[on_thread, name], nested=on_thread)
        rows, over = rows[: MOST_TRACKS - len(found)], rows[MOST_TRACKS - len(found) :]
        found += [Track(f"{name} ({row})" if row > 1 else name, on_thread, mine) for row, mine in enumerate(rows, 1)]
        left += [place for mine in (beside, *over) for place in mine]
    return found, sorted(left)


def _threads_name(thread: int) -> str:
    return f"thread {thread}" if thread < FIRST_LANE else f"stream {thread - FIRST_LANE}"


def rows_of(begin_ns: Ints, end_ns: Ints, places: list[int], *, nested: bool) -> tuple[list[list[int]], list[int]]:
    """``places``, in the order of begin, by the first row that takes each, and those that no row takes."""
    begins, ends = begin_ns[places].tolist(), end_ns[places].tolist()
    rows: list[list[int]] = []
    #: Of each row, the ends of the spans that are open at its last begin, the outermost first.
    opened: list[list[int]] = []
    left: list[int] = []
    for place, begin, end in zip(places, begins, ends, strict=True):
        for row, stack in zip(rows, opened, strict=True):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or (nested and end <= stack[-1]):
                row.append(place)
                stack.append(end)
                break
        else:
            if len(rows) == _MOST_BESIDE:
                left.append(place)
            else:
                rows.append([place])
                opened.append([end])
    return rows, left


def full(what: str, key: str) -> str:
    """The whole name of a span or a quantity: "gather model.layers.3", "rss"."""
    return text(f"{what} {key}" if key else what)


def unit_of(what: str) -> str:
    """The unit of a sampled quantity; whatever is not known to be something else is bytes, as all levels are."""
    bounds = BOUNDS.get(quantity_of(what))
    return "bytes" if bounds is None else bounds.unit


def text(name: str) -> str:
    """``name`` as formats can hold it: not empty, and halves of surrogate pairs, which names of files may have, escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8") or "(no name)"
