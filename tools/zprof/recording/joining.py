"""Owns how events of torch.profiler come to belong to modules, passes and each other, in one walk over them and our log.

`zprof.recording.operators` calls `joined` when a window has ended. It asks neither torch nor a clock, so that what a GPU's
events become can be tried without one.

Note: [Whose event]
    An operator belongs to the module in whose forward its thread is by our log; inside a node of a backward, to the one whose
    forward made that node: autograd numbers the nodes of a thread, and the log has the number at each begin and end of a
    module. A node that adds up a gradient has no such number: it belongs to whom the node before it on its thread does. A
    forward that begins inside a node computes again. What a device does belongs to the operator that launched it, by the
    correlation of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from zprof.recording.kineto import KERNEL, MARK, MEMCPY, MEMSET, MODULE, NODE, OPERATOR, RUNTIME, Seen
from zprof.trace.operators import MOST_DURATION_NS, MOST_EVENTS, PASSES, Events

__all__ = ["Passage", "joined"]

_OUTSIDE, _FORWARD, _BACKWARD, _RECOMPUTE, _STEP, _EVALUATION = range(len(PASSES))
_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "AccumulateGrad"
_ON_DEVICE = frozenset({KERNEL, MEMCPY, MEMSET, MARK})
#: What lies between the end of a forward's last operation and that of the forward as we hear it, beside clocks that are apart.
_SLACK_NS = 2_000


class Passage(NamedTuple):
    """A module's forward, or an optimizer's step, has begun or ended on a thread.

    Attributes:
        lane: the system's number of the thread. sequence: of the node that autograd makes next on it.
        path: of the module; "" of an optimizer. doing: the number in `PASSES` of what begins; -1 where something ends.
    """

    time_ns: int
    lane: int
    sequence: int
    path: str
    doing: int


class _Lane:
    """The log of one thread, as what it was doing from each time on."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.sequences: list[int] = []
        self.doing: list[int] = []
        self.paths: list[str] = []
        self.spans: list[tuple[int, int, str, int]] = []
        self._open: list[tuple[int, str, int]] = []

    def take(self, passage: Passage) -> None:
        if passage.doing >= 0:
            self._open.append((passage.time_ns, passage.path, passage.doing))
        else:
            while self._open:
                began, path, doing = self._open.pop()
                if path:
                    self.spans.append((began, passage.time_ns, path, doing))
                # Of forwards that an exception ended unheard, too.
                if path == passage.path:
                    break
        self.times.append(passage.time_ns)
        self.sequences.append(passage.sequence)
        self.doing.append(self._open[-1][2] if self._open else _OUTSIDE)
        self.paths.append(self._open[-1][1] if self._open else "")

    def close(self, end_ns: int) -> None:
        while self._open:
            began, path, doing = self._open.pop()
            if path:
                self.spans.append((began, end_ns, path, doing))

    def made(self, sequence: int) -> str | None:
        """In whose forward the node of that number was made; None from before the log."""
        at = bisect_right(self.sequences, sequence) - 1
        return self.paths[at] if at >= 0 else None


def joined(seen: Seen, log: Sequence[Passage], most: int = MOST_EVENTS) -> tuple[Events, list[tuple[int, int]], int]:
    """The events; of each track the (device, lane) it is, the host's device being -1; and how many are beyond ``most``.

    Of too many, those that began last are left out.
    """
    lanes: dict[int, _Lane] = {}
    for passage in log:
        lanes.setdefault(passage.lane, _Lane()).take(passage)
    columns, spans = _Columns(seen), []
    for number, lane in lanes.items():
        lane.close(seen.end_ns)
        spans += [(number, *span) for span in lane.spans]
    columns.add_modules(spans)
    order = columns.order(most)
    left_out = len(columns.begin) - len(order)
    walk = _Walk(seen, columns, lanes)
    walk.host(order)
    walk.device(order)
    return walk.events(order), columns.tracks, left_out


class _Columns:
    """What the walk goes over: the events of torch.profiler, then those of modules; lists, for it goes one by one."""

    def __init__(self, seen: Seen) -> None:
        self.name, self.kind = list(seen.name), list(seen.kind)
        self.begin, self.end = list(seen.begin), list(seen.end)
        #: Of events that went on in another thread: they hold nothing, and nothing holds them.
        self.apart = [there not in (0, here) for here, there in zip(seen.thread, seen.end_thread, strict=True)]
        self.places = [(device, lane) for device, lane in zip(seen.device, seen.lane, strict=True)]
        self.doing_of_module: dict[int, int] = {}
        self.tracks: list[tuple[int, int]] = []
        self.track: list[int] = []

    def add_modules(self, spans: Sequence[tuple[int, int, int, str, int]]) -> None:
        for lane, begin, end, path, doing in spans:
            self.doing_of_module[len(self.name)] = doing
            self.name.append(path)
            self.kind.append(MODULE)
            self.begin.append(begin)
            self.end.append(max(begin, end))
            self.apart.append(False)
            self.places.append((-1, lane))

    def order(self, most: int) -> list[int]:
        self.tracks = sorted(set(self.places))
        numbers = {place: number for number, place in enumerate(self.tracks)}
        self.track = [numbers[place] for place in self.places]
        track, begin, end = (np.array(each, np.int64) for each in (self.track, self.begin, self.end))
        kept = np.arange(len(begin)) if len(begin) <= most else np.sort(np.argsort(begin, kind="stable")[:most])
        # Modules before what begins with them: they hold it.
        inner = np.array([kind != MODULE for kind in self.kind], np.int64)
        found: list[int] = kept[np.lexsort((inner[kept], -end[kept], begin[kept], track[kept]))].tolist()
        return found


class _Walk:
    """The one walk over all events in their order."""

    def __init__(self, seen: Seen, columns: _Columns, lanes: Mapping[int, _Lane]) -> None:
        self._seen, self._columns, self._lanes = seen, columns, lanes
        count = len(columns.name)
        self._doing = [_OUTSIDE] * count
        self._path: list[str | None] = [None] * count
        self._parent = [-1] * count
        self._cause = [-1] * count
        #: torch's number of a thread -> the system's.
        self._threads = {
            thread: lane
            for thread, lane, device in zip(seen.thread, seen.lane, seen.device, strict=True)
            if device < 0 and thread
        }

    def host(self, order: Sequence[int]) -> None:
        columns, seen = self._columns, self._seen
        begin, end, kind, track, apart = columns.begin, columns.end, columns.kind, columns.track, columns.apart
        torchs, slack = len(seen.name), 2 * seen.error_ns + _SLACK_NS
        node_of = [-1] * len(begin)
        made_by: dict[tuple[int, int], int] = {}
        nodes: list[int] = []
        stack: list[int] = []
        last_node: str | None = None
        current, lane, at = -1, _Lane(), -1
        for event in order:
            if columns.places[event][0] >= 0:
                continue
            if track[event] != current:
                current, stack, at, last_node = track[event], [], -1, None
                lane = self._lanes.get(columns.places[event][1]) or _Lane()
            starts, ends = begin[event], end[event]
            while at + 1 < len(lane.times) and lane.times[at + 1] <= starts:
                at += 1
            if not apart[event]:
                while stack and end[stack[-1]] <= starts:
                    stack.pop()
                for outer in reversed(stack):
                    # A module holds what its forward called: the clocks are a little apart.
                    if kind[outer] != MODULE or not 0 < ends - end[outer] <= slack:
                        break
                    end[outer] = ends
                while stack and end[stack[-1]] < ends:
                    # An annotation that began inside and ended outside.
                    stack.pop()
            parent = stack[-1] if stack and not apart[event] else -1
            self._parent[event] = parent
            node = node_of[parent] if parent >= 0 else -1
            if event < torchs and (kind[event] == NODE or columns.name[event].startswith(_ENGINE)):
                kind[event] = NODE
                inside = node
                node, sequence = event, seen.sequence[event]
                path = None
                if sequence >= 0:
                    made = self._lanes.get(self._threads.get(seen.forward_thread[event], -1))
                    path = None if made is None else made.made(sequence)
                elif inside >= 0:
                    path = self._path[inside]
                elif _ACCUMULATE in columns.name[event]:
                    path = last_node
                last_node = self._path[event] = path
                self._doing[event] = _BACKWARD
                nodes.append(event)
            else:
                doing, path = (lane.doing[at], lane.paths[at]) if at >= 0 else (_OUTSIDE, "")
                if event >= torchs:
                    doing, path = columns.doing_of_module[event], columns.name[event]
                elif node >= 0 and not (doing != _OUTSIDE and lane.times[at] >= begin[node]):
                    doing, path = _BACKWARD, self._path[node] or ""
                self._doing[event], self._path[event] = doing, path or None
                if event < torchs and kind[event] == OPERATOR and seen.sequence[event] >= 0 and not seen.forward_thread[event]:
                    made_by[seen.thread[event], seen.sequence[event]] = event
            node_of[event] = node
            if not apart[event]:
                stack.append(event)
        for event in nodes:
            # The last operator that found the number free has used it.
            self._cause[event] = made_by.get((seen.forward_thread[event], seen.sequence[event]), -1)

    def device(self, order: Sequence[int]) -> None:
        columns, seen = self._columns, self._seen
        operators: dict[int, int] = {}
        calls: dict[int, int] = {}
        for event in order:
            if event < len(seen.name) and seen.device[event] < 0 and seen.id[event]:
                (calls if columns.kind[event] == RUNTIME else operators)[seen.id[event]] = event
        for event in order:
            if event >= len(seen.name) or (not seen.linked[event] and columns.kind[event] not in _ON_DEVICE):
                continue
            by = operators.get(seen.linked[event], -1) if seen.linked[event] else -1
            if seen.device[event] < 0:
                if self._parent[event] < 0 and by >= 0:
                    self._doing[event], self._path[event] = self._doing[by], self._path[by]
                continue
            call = calls.get(seen.id[event], -1)
            self._cause[event] = call if call >= 0 else by
            whose = by if by >= 0 else call
            if whose >= 0:
                self._doing[event], self._path[event] = self._doing[whose], self._path[whose]

    def events(self, order: Sequence[int]) -> Events:
        columns, seen = self._columns, self._seen
        strings: list[str] = []
        known: dict[str, int] = {}

        def number(text: str | None) -> int:
            if not text:
                return -1
            at = known.get(text)
            if at is None:
                at = known[text] = len(strings)
                strings.append(text)
            return at

        places = {event: place for place, event in enumerate(order)}
        lines = [*seen.line, *[""] * (len(columns.name) - len(seen.name))]

        def column(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.array([values[event] for event in order], np.int64)

        begin, end = column(columns.begin), column(columns.end)
        return Events(
            strings,
            name=np.array([number(columns.name[event] or "(no name)") for event in order], np.int64),
            module=np.array([number(self._path[event]) for event in order], np.int64),
            line=np.array([number(lines[event]) for event in order], np.int64),
            kind=column(columns.kind),
            doing=column(self._doing),
            track=column(columns.track),
            begin_ns=np.maximum(begin, 0),
            duration_ns=np.clip(end - begin, 0, MOST_DURATION_NS - 1),
            parent=np.array([places.get(self._parent[event], -1) for event in order], np.int64),
            cause=np.array([places.get(self._cause[event], -1) for event in order], np.int64),
        )
