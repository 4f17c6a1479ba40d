"""The race detector on random programs, against an order that is found by looking for paths between all uses.

No tensor is made: a program is what a machine's listeners hear, so no process of its own is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from offload.virtual import ACCELERATOR, Access, Machine, Moment, Races, Stream
from tests.support.virtual import Flat

STREAMS, BUFFERS, MOMENTS, NBYTES = 3, 3, 3, 8
HOST = STREAMS

streams, buffers, moments = (st.integers(0, most - 1) for most in (STREAMS, BUFFERS, MOMENTS))
#: Halves of a buffer, or all of it.
places = st.sampled_from(((0, NBYTES), (0, NBYTES // 2), (NBYTES // 2, NBYTES)))
Step = tuple[object, ...]
steps = st.one_of(
    st.tuples(st.just("use"), st.one_of(streams, st.just(HOST)), buffers, places, st.booleans()),
    st.tuples(st.just("record"), moments, streams),
    st.tuples(st.just("wait"), moments, streams),
    st.tuples(st.just("synchronize"), moments),
    st.tuples(st.just("keep"), buffers, streams),
    st.tuples(st.just("take again"), buffers, streams),
)


@dataclass(eq=False)
class Node:
    """Something done on a timeline, after what it is known to come after."""

    after: list[Node]


def comes_before(first: Node, second: Node) -> bool:
    seen, left = set[int](), [second]
    while left:
        node = left.pop()
        if node is first:
            return True
        left += [one for one in node.after if id(one) not in seen]
        seen.update(id(one) for one in node.after)
    return False


@dataclass
class Buffer:
    """Memory that was taken on a stream: who has used it since, and which streams it is kept for."""

    owner: int
    uses: list[tuple[Node, int, tuple[int, int], bool]] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    #: What is over before anybody takes it again.
    over: list[Node] = field(default_factory=list)


class Paths:
    """What a program orders, as a graph: is there a race at this step?"""

    def __init__(self) -> None:
        self._last = [Node([]) for _ in range(STREAMS + 1)]
        self._moments: dict[int, Node] = {}
        self._buffers = [Buffer(0) for _ in range(BUFFERS)]
        self._given_back: dict[int, list[Buffer]] = {}

    def _next(self, timeline: int, *more: Node) -> Node:
        # Whatever a stream is given comes after all the host has done so far.
        self._last[timeline] = node = Node([self._last[timeline], self._last[HOST], *more])
        return node

    def step(self, step: Step) -> bool:
        match step:
            case ("use", int(timeline), int(number), (int(start), int(stop)), bool(writes)):
                node, buffer = self._next(timeline), self._buffers[number]
                races = [
                    one
                    for one, _, (begin, end), wrote in buffer.uses
                    if begin < stop and start < end and (wrote or writes) and not comes_before(one, node)
                ]
                buffer.uses.append((node, timeline, (start, stop), writes))
                return bool(races)
            case ("record", int(moment), int(timeline)):
                self._moments[moment] = self._last[timeline]
            case ("wait", int(moment), int(timeline)):
                self._last[timeline] = Node([self._last[timeline], self._moments.get(moment, self._last[timeline])])
            case ("synchronize", int(moment)):
                self._last[HOST] = Node([self._last[HOST], self._moments.get(moment, self._last[HOST])])
            case ("keep", int(number), int(timeline)):
                self._buffers[number].kept.add(timeline)
            case ("take again", int(number), int(timeline)):
                return self._take_again(number, timeline)
        return False

    def _take_again(self, number: int, timeline: int) -> bool:
        """A buffer is freed, and memory taken on a stream: what that had given back may be what is taken."""
        freed = self._buffers[number]
        freed.over = [self._last[one] for one in freed.kept]
        self._given_back.setdefault(freed.owner, []).append(freed)
        self._buffers[number] = Buffer(timeline)
        return any(
            not comes_before(node, Node([self._last[timeline], self._last[HOST], *buffer.over]))
            for buffer in self._given_back.pop(timeline, ())
            for node, _, _, _ in buffer.uses
        )


class Watched:
    """The same program as the race detector hears it."""

    def __init__(self) -> None:
        self.races, self._machine = Races(), Machine(Flat())
        self._machine.listeners.append(self.races)
        self._streams: list[Stream] = [*(self._machine.stream() for _ in range(STREAMS)), self._machine.host]
        self._moments = [Moment(self._machine) for _ in range(MOMENTS)]
        self._addresses, self._next = list[int](), 0
        for _ in range(BUFFERS):
            self._addresses.append(self._take(0))

    def _take(self, timeline: int) -> int:
        self._next += NBYTES
        with self._machine.using(self._streams[timeline]):
            self._machine.allocated(self._next, NBYTES, ACCELERATOR)
        return self._next

    def step(self, step: Step) -> bool:
        before = len(self.races.found)
        match step:
            case ("use", int(timeline), int(number), (int(start), int(stop)), bool(writes)):
                base = self._addresses[number]
                uses = [Access(base + start, base + stop, writes)]
                self._machine.do("use", self._streams[timeline], 1.0, NBYTES, uses)
            case ("record", int(moment), int(timeline)):
                self._moments[moment] = self._machine.moment(self._streams[timeline])
            case ("wait", int(moment), int(timeline)):
                self._streams[timeline].wait_event(self._moments[moment])
            case ("synchronize", int(moment)):
                self._moments[moment].synchronize()
            case ("keep", int(number), int(timeline)):
                base = self._addresses[number]
                self.races.kept(Access(base, base + NBYTES, writes=False), self._streams[timeline])
            case ("take again", int(number), int(timeline)):
                self._machine.freed(self._addresses[number], NBYTES, ACCELERATOR)
                self._addresses[number] = self._take(timeline)
        return len(self.races.found) > before


ALL = (0, NBYTES)


@given(st.lists(steps, max_size=40))
@example([("use", 0, 0, ALL, True), ("use", 1, 0, ALL, True)])
@example([("use", 0, 0, ALL, True), ("record", 0, 0), ("wait", 0, 1), ("use", 1, 0, ALL, True)])
@example([("use", 1, 0, ALL, False), ("take again", 0, 0)])
@example([("use", 1, 0, ALL, False), ("keep", 0, 1), ("take again", 0, 0)])
def test_the_first_race_of_a_program_is_found_where_it_is_and_none_before(program: Sequence[Step]) -> None:
    paths, watched = Paths(), Watched()
    for step in program:
        races = paths.step(step)
        assert watched.step(step) == races, step
        if races:
            return
