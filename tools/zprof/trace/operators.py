"""Owns how the operators of torch.profiler lie in a trace: columns of events in notes, bounded, and read back checked.

The recording packs them and `zprof.analysis.operators` reads them. It knows no torch, and no file: what it returns are bodies
of notes, and what it takes may be forged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zprof.trace.columns import MOST_TIME, bounded, narrow, wide

__all__ = [
    "EVENTS", "KINDS", "MOST_DURATION_NS", "MOST_EVENTS", "PASSES", "WINDOW", "Events", "Track", "bodies", "events_of",
    "tracks_of",
]  # fmt: skip

#: The note that says which steps were recorded, and those that hold the events of one.
WINDOW, EVENTS = "operators", "operator events"
#: What an event is.
KINDS = ("operator", "node", "annotation", "module", "runtime", "kernel", "memcpy", "memset", "mark")
#: In which pass it ran.
PASSES = ("outside", "forward", "backward", "recompute", "step", "evaluation")
#: Events of one trace, at most: some 30 MB of it.
MOST_EVENTS = 1 << 20
#: Of one event, so that those of a trace sum within 64 bits; over an hour.
MOST_DURATION_NS = 1 << 42
#: Of one note, which stays small enough that its numbers need not be told from lists and maps.
_MOST_OF_NOTE = 1 << 13
_MOST_NAMES = 1 << 17
_MOST_TRACKS = 1 << 12

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Track:
    """Where events run: a thread of the host, or a stream of a device.

    Attributes:
        kind: "thread" or "stream".
        name: of the thread, or "cuda:0".
        number: of a thread that in rows, -1 where it has put none; of a stream its own.
    """

    kind: str
    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Events:
    """Events as columns of one length, by track and then by when they began; enclosing ones first.

    Attributes:
        name, module, line: positions in ``strings``; -1 for none.
        kind: in `KINDS`. doing: in `PASSES`. track: number of the track.
        begin_ns: the trace's monotonic clock. duration_ns: how long.
        parent: the event it runs inside of, on its track; -1 for none.
        cause: of what a device does, the call or operator that launched it; of a node of a backward, the operator of the
            forward that made it; -1 for none.
    """

    strings: list[str]
    name: _Int64s
    module: _Int64s
    line: _Int64s
    kind: _Int64s
    doing: _Int64s
    track: _Int64s
    begin_ns: _Int64s
    duration_ns: _Int64s
    parent: _Int64s
    cause: _Int64s

    def __len__(self) -> int:
        return len(self.name)

    @property
    def end_ns(self) -> _Int64s:
        return self.begin_ns + self.duration_ns

    def columns(self) -> dict[str, _Int64s]:
        """By name, without the strings."""
        return {each.name: getattr(self, each.name) for each in fields(self)[1:]}


_NAMED = ("name", "module", "line")
#: From the lowest value to below the highest; those of events are bounded by how many there are.
_BOUNDS = {
    "kind": (0, len(KINDS)),
    "doing": (0, len(PASSES)),
    "track": (0, _MOST_TRACKS),
    "begin_ns": (0, MOST_TIME >> 1),
    "duration_ns": (0, MOST_DURATION_NS),
    "parent": (0, MOST_EVENTS),
    "cause": (-1, MOST_EVENTS),
}


def bodies(events: Events, window: int) -> Iterator[dict[str, object]]:
    """Bodies of the notes `EVENTS` that hold ``events``, each with names of its own."""
    columns = events.columns()
    # As how many events before: small numbers.
    columns["parent"] = np.where(events.parent < 0, 0, np.arange(len(events)) - events.parent)
    for first in range(0, len(events), _MOST_OF_NOTE):
        part = {name: column[first : first + _MOST_OF_NOTE] for name, column in columns.items()}
        used = np.unique(np.concatenate([part[name] for name in _NAMED]))
        used = used[used >= 0]
        for name in _NAMED:
            part[name] = np.where(part[name] < 0, -1, np.searchsorted(used, part[name]))
        yield {
            "window": window,
            "first": first,
            "count": len(part["name"]),
            "names": [bounded(events.strings[at]) for at in used.tolist()],
            "columns": {name: narrow(column) for name, column in part.items()},
        }


def events_of(notes: Sequence[Mapping[str, Any]]) -> Events:
    """The events of one window, from the bodies of its notes in their order.

    Raises:
        ValueError: they are not what `bodies` makes; what is missing at the end is no error.
    """
    strings: list[str] = []
    known: dict[str, int] = {}
    parts: dict[str, list[_Int64s]] = {each.name: [] for each in fields(Events)[1:]}
    total = 0
    for body in notes:
        first, count, names, columns = (body.get(key) for key in ("first", "count", "names", "columns"))
        if type(first) is not int or type(count) is not int or not 0 < count <= _MOST_OF_NOTE or first != total:
            raise ValueError("a note of operators is missing, or out of order")
        if total + count > MOST_EVENTS:
            raise ValueError(f"over {MOST_EVENTS:,} operators")
        if not isinstance(names, list) or not all(type(name) is str for name in names) or len(names) > 3 * count:
            raise ValueError("its table of names is invalid")
        if not isinstance(columns, dict):
            raise ValueError("it has no columns")
        found = {
            name: wide(columns.get(name), count, name, *_BOUNDS.get(name, (-1, len(names)))) for name in parts
        }
        for name in names:
            if known.setdefault(name, len(known)) == len(strings):
                strings.append(name)
        if len(strings) > _MOST_NAMES:
            raise ValueError("it has too many names")
        position = np.array([*(known[name] for name in names), -1], np.int64)
        for name, column in found.items():
            parts[name].append(position[column] if name in _NAMED else column)
        total += count
    joined = {name: np.concatenate([np.zeros(0, np.int64), *each]) for name, each in parts.items()}
    # In a note that was lost.
    joined["cause"][joined["cause"] >= total] = -1
    # An event runs inside an earlier one: who follows it comes to an end.
    before = np.arange(total) - joined["parent"]
    joined["parent"] = np.where((joined["parent"] == 0) | (before < 0), -1, before)
    return Events(strings, **joined)


def tracks_of(value: object) -> tuple[Track, ...]:
    """The tracks that a window's note lists.

    Raises:
        ValueError: it lists something else.
    """
    if not isinstance(value, list) or len(value) > _MOST_TRACKS:
        raise ValueError("it lists no tracks")
    found = []
    for each in value:
        kind, name, number = each if isinstance(each, list) and len(each) == 3 else (None, None, None)
        if kind not in ("thread", "stream") or type(name) is not str or type(number) is not int or not -1 <= number < 1 << 62:
            raise ValueError("it lists no tracks")
        found.append(Track(kind, bounded(name), number))
    return tuple(found)
