"""Owns the operators and kernels of an export for Perfetto: slices on a track for each thread and stream, and arrows between.

`zprof.show.exports.perfetto` calls it for each rank. It keeps them to a bound: where a file would grow too large the shortest
of each kind are left out, and counted.

Note: [Arrows]
    A flow begins and ends inside of slices: "s" at the begin of the call that launched a kernel, "f" with the binding point "e"
    at the kernel's. From an operator to the node of its backward it is the same, by another name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zprof.analysis.operators import steps_in
from zprof.show.exports.exported import fairly, rows_of, text
from zprof.trace.operators import KINDS, PASSES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.operators import Operators, Window

__all__ = ["OperatorLines"]

#: Of an event beside its names, and of an arrow.
_EVENT_NBYTES, _ARROW_NBYTES = 200, 230
_MOST_TRACKS = 480
_NODE, _MARK = KINDS.index("node"), KINDS.index("mark")
_FORWARD, _LAUNCH = "forward to backward", "launch"

#: Threads first, as Perfetto lists them: of a device or not, name, number, and which of its rows.
Row = tuple[bool, str, int, int]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What is drawn of one window.

    Attributes:
        rows: each with its events, in order. cause: of each event the one that an arrow comes from, -1 for none.
    """

    window: Window
    rows: dict[Row, list[int]]
    cause: NDArray[np.int64]


class OperatorLines:
    """The events of one rank's windows, as lines of JSON.

    Args:
        pid: of the rank's process. first_tid: of the first track. shift: what to add to times. most: bytes that they may take.
    Attributes:
        tracks: (thread, name) of each.
        written, left_out: how many there are in `lines`, and how many more there were.
    """

    def __init__(self, found: Operators, pid: int, first_tid: int, shift: int, most: int) -> None:
        self._pid, self._shift = pid, shift
        self._names: dict[str, str] = {}
        self._drawn = [self._draw(window, most // len(found.windows)) for window in found.windows]
        rows = sorted({row for drawn in self._drawn for row in drawn.rows})[:_MOST_TRACKS]
        self._tids = {row: first_tid + place for place, row in enumerate(rows)}
        self.tracks = [(tid, _named(row)) for row, tid in self._tids.items()]
        events = [len(places) for drawn in self._drawn for row, places in drawn.rows.items() if row in self._tids]
        wanted = sum(int((window.events.kind != _MARK).sum()) for window in found.windows)
        self.written, self.left_out = sum(events), wanted - sum(events)

    def _draw(self, window: Window, most: int) -> _Drawn:
        events = window.events
        lengths = np.array([*(len(self._json(name).encode()) for name in events.strings), 0], np.int64)
        # What runs a node is one, too: an arrow to the outer says it.
        inner = (events.kind == _NODE) & (events.parent >= 0) & (events.kind[events.parent] == _NODE)
        cause = np.where(inner, -1, events.cause)
        costs = _EVENT_NBYTES + lengths[events.name] + lengths[events.module] + lengths[events.line]
        costs += np.where(cause < 0, 0, _ARROW_NBYTES)
        order = fairly(events.kind, events.duration_ns)
        order = order[events.kind[order] != _MARK]
        kept = np.zeros(len(events), np.bool_)
        kept[order] = np.cumsum(costs[order]) <= most
        found: dict[Row, list[int]] = {}
        for number, track in enumerate(window.tracks):
            places = np.flatnonzero(kept & (events.track == number)).tolist()
            rows, _ = rows_of(events.begin_ns, events.end_ns, places, nested=True)
            for row, mine in enumerate(rows, 1):
                found.setdefault((track.kind == "stream", track.name, track.number, row), []).extend(mine)
        return _Drawn(window, found, cause)

    def lines(self) -> Iterator[str]:
        """Each event's slice, and the arrow that leads to it."""
        for drawn in self._drawn:
            yield from self._window(drawn)

    def _window(self, drawn: _Drawn) -> Iterator[str]:
        window, events = drawn.window, drawn.window.events
        step, strings = steps_in(window).tolist(), [self._json(name) for name in events.strings]
        place = [""] * len(events)
        for row, places in drawn.rows.items():
            for event in places if row in self._tids else ():
                place[event] = f'"pid":{self._pid},"tid":{self._tids[row]}'
        begins = [_us(begin) for begin in (events.begin_ns + self._shift).tolist()]
        for row, places in drawn.rows.items():
            for event in places if row in self._tids else ():
                args = f'"pass":"{PASSES[int(events.doing[event])]}"'
                for name in ("module", "line"):
                    at = int(getattr(events, name)[event])
                    args += f',"{name}":{strings[at]}' if at >= 0 else ""
                args += f',"step":{step[event]}' if step[event] >= 0 else ""
                name = strings[int(events.name[event])] if events.name[event] >= 0 else '"(no name)"'
                kind, lasted = int(events.kind[event]), _us(int(events.duration_ns[event]))
                times = f'"ts":{begins[event]},"dur":{lasted}'
                yield f'{{"ph":"X","name":{name},"cat":"{KINDS[kind]}",{place[event]},{times},"args":{{{args}}}}}'
                cause = int(drawn.cause[event])
                if cause >= 0 and place[cause]:
                    what = _FORWARD if kind == _NODE else _LAUNCH
                    arrow = f'"name":"{what}","cat":"{what}","id":"{self._pid}.{window.number}.{event}"'
                    yield f'{{"ph":"s",{arrow},{place[cause]},"ts":{begins[cause]}}}'
                    yield f'{{"ph":"f","bp":"e",{arrow},{place[event]},"ts":{begins[event]}}}'

    def _json(self, name: str) -> str:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = json.dumps(text(name), ensure_ascii=False)
        return known


def _named(row: Row) -> str:
    on_device, name, number, which = row
    thread = f"{name} (thread {number})" if number >= 0 else name
    beside = f" ({which})" if which > 1 else ""
    return (f"stream {number} of {name}" if on_device else f"{thread}: operators") + beside


def _us(time_ns: int) -> str:
    """Microseconds to the nanosecond, which a float would round."""
    return f"{time_ns // 1000}.{time_ns % 1000:03}"
