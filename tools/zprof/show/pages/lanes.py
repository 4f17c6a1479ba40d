"""Owns what a timeline shows as lanes: which spans share a lane, and how few of them still show what a screen can.

`timeline` hands it the spans of every rank at once, so that one budget bounds the page. It reads no trace and
knows no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import filter
from typing import TYPE_CHECKING, Any, TypeAlias

from zprof.show.pages.page import packed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["LANES", "MOST_SPANS", "Kept", "Lane", "Spans", "Windows", "keep"]

#: Stretches of time, [n, 2] of (begin, end).
Windows: TypeAlias = "Sequence[tuple[int, int]]"

#: Spans in a page, over all ranks: at most some 4.5 MiB of it.
MOST_SPANS = 120_000
#: Kinds of spans in a lane: a byte numbers them.
_MOST_WHATS = 250


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of a rank: its name in the page, the spans it takes, and how many rows those may need side by side."""

    name: str
    whats: tuple[str, ...]
    rows: int = 1

    def of(self, strings: Sequence[str]) -> Lane:
        """The lane with its globs replaced by those of ``strings`` they match."""
        found = [name for what in self.whats for name in (sorted(set(filter(strings, what))) if "*" in what else [what])]
        return replace(self, whats=tuple(found[:_MOST_WHATS]))


LANES = (
    Lane("steps", ("iteration",)),
    Lane("passes", ("forward", "backward"), rows=2),
    Lane("compute", ("compute",), rows=3),
    Lane("operations", ("operation",)),
    Lane("host operations", ("host operation",)),
    Lane("exposed waits", ("wait *",), rows=2),
    Lane("gathers", ("gather", "gather activation"), rows=3),
    Lane("reductions", ("reduce",), rows=3),
    Lane("other collectives", ("collective",)),
    Lane("host to device", ("copy h2d", "unstash"), rows=2),
    Lane("device to host", ("copy d2h", "stash"), rows=2),
    Lane("disk", ("disk read", "disk write"), rows=2),
    Lane("updates", ("step", "update"), rows=2),
    Lane("queued by the host", ("queued *",), rows=3),
    Lane("hidden waits", ("hidden wait *",), rows=2),
    Lane("save, load", ("save", "load", "snapshot", "export", "attachment"), rows=3),
)


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of one lane of one rank: ``what`` indexes the lane's whats, ``key`` the names of the page.

    All 1-D of one length; times in nanoseconds since the page's start.
    """

    lane: Lane
    what: Ints
    key: Ints
    begin_ns: Ints
    end_ns: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.begin_ns)


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of a lane: spans, some of which stand for many too short to be seen apart."""

    lane: Lane
    what: Ints
    key: Ints
    begin_ns: Ints
    end_ns: Ints
    nbytes: Ints
    #: How many spans each stands for, and for how long one of them was open, summed.
    count: Ints
    busy_ns: Ints
    row: list[int] = field(default_factory=list)

    def packed(self, tick_ns: int) -> dict[str, Any]:
        """The columns as the page's script reads them, times in ticks."""
        import numpy as np

        begin = self.begin_ns // tick_ns
        columns: dict[str, Any] = {
            "name": self.lane.name,
            "whats": self.lane.whats,
            "rows": max(self.row, default=0) + 1,
            "begin": packed(begin.astype(np.uint32)),
            "length": packed(np.maximum(self.end_ns // tick_ns - begin, 0).astype(np.uint32)),
            "key": packed(self.key.astype(np.uint32 if self.key.max(initial=0) > 0xFFFF else np.uint16)),
            "what": packed(self.what.astype(np.uint8)),
            "row": packed(np.array(self.row, dtype=np.uint8)),
        }
        if self.nbytes.any():
            columns["nbytes"] = packed(self.nbytes.astype(np.float64))
        if (self.count > 1).any():
            columns["count"] = packed(np.minimum(self.count, 0xFFFFFFFF).astype(np.uint32))
            columns["busy"] = packed(np.minimum(self.busy_ns // tick_ns, 0xFFFFFFFF).astype(np.uint32))
        return columns


def keep(
    lanes: Sequence[Spans], duration_ns: int, whole: Windows = (), *, most: int = MOST_SPANS
) -> tuple[list[Kept], int, int]:
    """The spans that fit the budget; the length below which neighbours were merged, 0 where none were; the windows kept.

    Spans at least that long all stay, so a long wait is never lost among short ones.

    Args:
        whole: windows in which every span should stay, the dearest first; as many as fit in half the budget.
    """
    if sum(map(len, lanes)) <= most:
        return [_kept(spans, _Cut(0, ())) for spans in lanes], 0, len(whole)
    fits = _fitting(lanes, whole, most // 2)
    cut = _Cut(max(1, duration_ns >> 18), whole[:fits])
    while sum(_remaining(spans, cut) for spans in lanes) > most and cut.merge_ns <= duration_ns:
        cut = _Cut(cut.merge_ns * 5 // 4 + 1, whole[:fits])
    return [_kept(spans, cut) for spans in lanes], cut.merge_ns, fits


def _fitting(lanes: Sequence[Spans], whole: Windows, most: int) -> int:
    """How many of the windows, from the first on, together hold at most so many spans."""
    import numpy as np

    begins = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *(spans.begin_ns for spans in lanes)]))
    bounds = np.array(whole, dtype=np.int64).reshape(-1, 2)
    held = np.searchsorted(begins, bounds[:, 1]) - np.searchsorted(begins, bounds[:, 0])
    return int(np.searchsorted(np.cumsum(held), most, side="right"))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which spans are merged: those shorter than ``merge_ns`` that do not begin in one of the windows."""

    merge_ns: int
    whole: Windows

    def buckets(self, spans: Spans) -> tuple[NDArray[np.bool_], Ints]:
        """Which spans are merged, and for each of those the stretch of time, and what, it is merged with."""
        import numpy as np

        merged = spans.end_ns - spans.begin_ns < self.merge_ns
        if self.whole:
            bounds = np.array(sorted(self.whole), dtype=np.int64)
            window = np.searchsorted(bounds[:, 0], spans.begin_ns, side="right") - 1
            merged &= (window < 0) | (spans.begin_ns >= bounds[window, 1])
        return merged, (spans.begin_ns[merged] // max(self.merge_ns, 1)) * len(spans.lane.whats) + spans.what[merged]


def _remaining(spans: Spans, cut: _Cut) -> int:
    import numpy as np

    short, bucket = cut.buckets(spans)
    return len(spans) - int(short.sum()) + len(np.unique(bucket))


def _kept(spans: Spans, cut: _Cut) -> Kept:
    import numpy as np

    short, bucket = cut.buckets(spans)
    long = ~short
    length = spans.end_ns - spans.begin_ns
    _, first, member = np.unique(bucket, return_index=True, return_inverse=True)
    groups = len(first)
    begin = np.full(groups, np.iinfo(np.int64).max)
    end = np.full(groups, np.iinfo(np.int64).min)
    nbytes, count, busy = (np.zeros(groups, dtype=np.int64) for _ in range(3))
    np.minimum.at(begin, member, spans.begin_ns[short])
    np.maximum.at(end, member, spans.end_ns[short])
    np.add.at(nbytes, member, spans.nbytes[short])
    np.add.at(count, member, 1)
    np.add.at(busy, member, length[short])
    # A merged span has the name of the longest in it: in order of length, the last one written stays.
    order = np.argsort(length[short], kind="stable")
    key = np.zeros(groups, dtype=np.int64)
    key[member[order]] = spans.key[short][order]
    columns = {
        "what": np.concatenate((spans.what[long], spans.what[short][first])),
        "key": np.concatenate((spans.key[long], key)),
        "begin_ns": np.concatenate((spans.begin_ns[long], begin)),
        "end_ns": np.concatenate((spans.end_ns[long], end)),
        "nbytes": np.concatenate((spans.nbytes[long], nbytes)),
        "count": np.concatenate((np.ones(int(long.sum()), dtype=np.int64), count)),
        "busy_ns": np.concatenate((length[long], busy)),
    }
    # What holds others comes before them, so that it lands in a row above.
    order = np.lexsort((-columns["end_ns"], columns["begin_ns"]))
    columns = {name: column[order] for name, column in columns.items()}
    return Kept(spans.lane, **columns, row=_rows(columns["begin_ns"], columns["end_ns"], spans.lane.rows))


def _rows(begin_ns: Ints, end_ns: Ints, rows: int) -> list[int]:
    """The first row that is free for each span; the last one takes what finds none, drawn over what is there."""
    free_at = [-1] * rows
    placed = []
    for begin, end in zip(begin_ns.tolist(), end_ns.tolist(), strict=True):
        row = next((row for row, free in enumerate(free_at) if free <= begin), rows - 1)
        free_at[row] = max(free_at[row], end)
        placed.append(row)
    return placed
