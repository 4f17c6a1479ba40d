"""The event interface: what the runtime says about itself while it works, and who hears it.

The runtime emits through a `Bus`; profilers, progress bars and tests listen as observers, whose mistakes never reach the
training loop.  The standard library is all that is needed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import MethodType
from typing import Final, Literal, Protocol

from offload.user_warnings import warn_user

__all__ = [
    "CAPTURED", "FAILED", "HERE", "VERB", "Bus", "During", "Event", "Here", "Kind", "KnownTime", "Observer", "Recorder",
    "Streams", "TimeMark", "leave", "listen", "now_ns", "state_all",
]  # fmt: skip

Kind = Literal["begin", "end", "instant", "counter", "hold"]
#: Why a mark is lost that was to be made while its stream is captured into a graph, and does nothing.
CAPTURED = "captured"
#: The span of a call of the user's that is about the whole model, by the call's name, and the instant at which one raises.
VERB, FAILED = "attachment", "attachment failed"
#: The clock of events unless a bus is given another: monotonic, comparable between processes of one host.
now_ns = time.perf_counter_ns


class TimeMark(Protocol):
    """A point of a device's stream, whose time is known once the stream has come to it.

    Attributes:
        lane: the stream's name, e.g. "compute".
        beside: it is none that computes: nobody stands still who waits there.
        lost: why its time will never be known; "" where it will.
    """

    @property
    def lane(self) -> str: ...
    @property
    def beside(self) -> bool: ...
    @property
    def lost(self) -> str: ...

    def time_ns(self) -> int | None:
        """When that was, on the clock of the events; None as long as it is not known.  Never waits, and never raises.

        Only for a thread that hears events of the device, while it does: another one may look at a wrong moment.
        """


@dataclass(frozen=True, slots=True)
class KnownTime:
    """A mark whose time was known when it was made."""

    lane: str
    ns: int
    beside: bool = True
    lost: str = ""

    def time_ns(self) -> int:
        return self.ns


@dataclass(frozen=True, slots=True)
class During:
    """When a stream really did what a span is about, whoever noticed when.

    Attributes:
        begin: None where that is not known better than it was when the span began.
    """

    begin: TimeMark | None
    end: TimeMark


class Streams(Protocol):
    """A device whose host queues work for it and goes on (``offload.device``)."""

    def mark(self) -> TimeMark:
        """The point that this thread's current stream has been given work up to."""


class Here(Enum):
    """Where a span begins or ends: at the point that the current stream has been given work up to."""

    HERE = "here"


HERE: Final = Here.HERE


@dataclass(frozen=True, slots=True)
class Event:
    """One fact about the run.

    Attributes:
        kind: "begin" and "end" bound a span; "instant" is a point in time; "counter" sets a level to ``nbytes``; "hold" means
            that the memory ``subject`` is held for ``key`` from now on, until it is freed or held for something else.  The
            level of a quantity is the sum of the last counters of all buses, because two runs in one process may give units
            the same name.
        what: the operation or the quantity, such as "gather".
        key: its subject, such as a unit's name.
        nbytes: bytes moved (span, instant) or held (counter); 0 where bytes have no meaning.
        time_ns: a monotonic clock, comparable between processes of one host, never with the wall clock.
        subject: the storage that a "hold" is about, or the bus whose level a "counter" states, for the duration of the call; an
            observer may keep a weak reference to it.
        mark: when the device does what the host only queued at ``time_ns``: a point on one of its streams, or the two points
            between which it runs. None if the host itself does it, or no observer keeps time.
    """

    kind: Kind
    what: str
    key: str
    nbytes: int
    time_ns: int
    subject: object = field(default=None, compare=False, repr=False)
    mark: TimeMark | During | None = field(default=None, compare=False, repr=False)


class Observer(Protocol):
    """Anything that receives events, on the thread that emitted them, including autograd's own threads.

    An observer whose attribute ``keeps_time`` is true gets the device's marks with events; without such an observer, none are
    made.
    """

    def on_event(self, event: Event) -> None:
        """Receive one event.  Must be quick, because the training step waits for it."""


class Memory(Protocol):
    """A storage, as far as is known here: its size, and that it can be referred to weakly."""

    def nbytes(self) -> int: ...


class Bus:
    """Hands events to observers in the order they were attached.

    Attributes:
        active: anybody listens. Emitting callers test it before they build a key or count bytes, so that a run nobody watches
            pays one attribute test an event.
        timed: one of them keeps time, and the device has streams: callers make marks of their own for it.

    Args:
        clock: what events get their time from.
        streams: of a device whose host only queues work.
    """

    def __init__(self, clock: Callable[[], int] = now_ns, streams: Streams | None = None) -> None:
        self.active = self.timed = False
        self._clock, self._streams = clock, streams
        # A tuple replaced whole: emitting threads iterate over the one they saw, without a lock.
        self._observers: tuple[Observer, ...] = ()
        self._change = threading.Lock()
        self._state: Callable[[], Callable[[], None] | None] | None = None
        with _known:
            _buses.add(self)
            for observer in _everywhere:
                self.attach(observer)

    def attach(self, observer: Observer) -> None:
        """Start sending events to ``observer``, first what is held already; attaching it again changes nothing."""
        with self._change:
            new = not any(known is observer for known in self._observers)
            if new:
                self._observers = (*self._observers, observer)
            self._count()
        if new:
            self.restate()

    def stated_by(self, state: Callable[[], None]) -> None:
        """``state`` states everything that is held, as holds and counters: now if anybody listens, and to whoever comes.

        Stating it again must change nothing for those who have heard it. A method does not keep its object alive.
        """
        self._state = weakref.WeakMethod(state) if isinstance(state, MethodType) else lambda: state
        self.restate()

    def restate(self) -> None:
        """What is held has changed in many places at once: state all of it, if anybody listens."""
        state = self._state() if self.active and self._state is not None else None
        if state is not None:
            state()

    def detach(self, observer: Observer) -> None:
        """Stop sending events to ``observer``; if it is not attached, say because it raised, this changes nothing."""
        self._remove(observer)

    def begin(self, what: str, key: str, nbytes: int = 0, *, at: TimeMark | During | Here | None = None) -> None:
        """Open a span.

        Args:
            at: where the device begins what the host only queues: `HERE`, or a mark; or where it both begins and ends it, if
                that is marked already. None of what the host does itself; what is begun with a mark is ended with one.
        """
        if self.active:
            self._emit("begin", what, key, nbytes, at=at)

    def end(self, what: str, key: str, nbytes: int = 0, *, at: TimeMark | During | Here | None = None) -> None:
        """Close the innermost open span of the same ``what`` and ``key``.

        Args:
            at: where the device ends it; or where it both began and ended it, which is better than what `begin` was told.
        """
        if self.active:
            self._emit("end", what, key, nbytes, at=at)

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """A span `VERB` around a call of the user's, such as "detach"; an instant `FAILED` says so where it raises."""
        self.begin(VERB, name)
        try:
            yield
        except BaseException:
            self.instant(FAILED, name)
            raise
        finally:
            self.end(VERB, name)

    def instant(self, what: str, key: str, nbytes: int = 0, *, at: TimeMark | Here | None = None) -> None:
        """Mark a point in time; ``at`` as of `begin`."""
        if self.active:
            self._emit("instant", what, key, nbytes, at=at)

    def counter(self, what: str, key: str, nbytes: int = 0) -> None:
        """State the level of a quantity."""
        if self.active:
            self._emit("counter", what, key, nbytes, self)

    def hold(self, what: str, key: str, storage: Memory) -> None:
        """State what a storage is held for, e.g. "parameter on device"; that it is free again shows when it dies."""
        if self.active:
            self._emit("hold", what, key, storage.nbytes(), storage)

    def _emit(
        self,
        kind: Kind,
        what: str,
        key: str,
        nbytes: int,
        subject: object = None,
        at: TimeMark | During | Here | None = None,
    ) -> None:
        mark: TimeMark | During | None = None
        if at is not None and self.timed:
            assert self._streams is not None
            mark = self._streams.mark() if at is HERE else at
        event = Event(kind, what, key, nbytes, self._clock(), subject, mark)
        failed: tuple[tuple[Observer, Exception], ...] = ()
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception as error:
                failed = (*failed, (observer, error))
        # Reported after the loop: a warning filter that raises must not keep the event from the other observers.
        for observer, raised in failed:
            if self._remove(observer):
                warn_user(
                    f"observer {type(observer).__name__} raised {type(raised).__name__}: {raised} "
                    f"on {kind} {what} {key}; it is detached and receives no further events",
                    RuntimeWarning,
                    this_rank=True,
                )

    def _remove(self, observer: Observer) -> bool:
        with self._change:
            before = self._observers
            self._observers = tuple(known for known in before if known is not observer)
            self._count()
            return len(self._observers) < len(before)

    def _count(self) -> None:
        self.active = bool(self._observers)
        self.timed = self._streams is not None and any(getattr(each, "keeps_time", False) for each in self._observers)


_buses: weakref.WeakSet[Bus] = weakref.WeakSet()
_everywhere: tuple[Observer, ...] = ()
_known = threading.RLock()


def listen(observer: Observer) -> Callable[[], None]:
    """Send ``observer`` the events of every attachment of this process, including later ones.

    For tools that record a run they did not set up, such as a profiler that starts a user's script.  Listening again changes
    nothing.

    Returns:
        A function that ends it.
    """
    global _everywhere
    with _known:
        if not any(known is observer for known in _everywhere):
            _everywhere = (*_everywhere, observer)
        buses = tuple(_buses)
    # Not under the lock: what is held is stated by foreign code, and others make buses meanwhile.
    try:
        for bus in buses:
            bus.attach(observer)
    except BaseException:
        leave(observer)
        raise
    return lambda: leave(observer)


def leave(observer: Observer) -> None:
    """Stop sending events to ``observer``, from any attachment."""
    global _everywhere
    with _known:
        _everywhere = tuple(known for known in _everywhere if known is not observer)
        buses = tuple(_buses)
    for bus in buses:
        bus.detach(observer)


def state_all() -> None:
    """Every bus of this process states what is held: for an observer that knows of a change the runtime does not see, such
    as the states that an optimizer makes in its first step."""
    with _known:
        buses = tuple(_buses)
    for bus in buses:
        bus.restate()


class Recorder:
    """An observer that keeps every event in memory, for tests and short recordings; nothing is ever dropped.

    Args:
        keeps_time: events get the device's marks.
    Attributes:
        events: the events so far, in the order heard.
    """

    def __init__(self, *, keeps_time: bool = False) -> None:
        self.events: list[Event] = []
        self.keeps_time = keeps_time

    def on_event(self, event: Event) -> None:
        """Keep ``event``."""
        self.events.append(event)

    def clear(self) -> None:
        """Forget all events kept so far."""
        self.events.clear()

    def names(self, what: str | None = None) -> list[str]:
        """Return events as lines such as "begin gather layers.0", in the order heard.

        Args:
            what: only events of this kind; None for all.
        """
        return [f"{event.kind} {event.what} {event.key}" for event in self.events if what in (None, event.what)]

    def spans(self, what: str) -> list[tuple[str, int, int]]:
        """Return closed spans as (key, begin_ns, end_ns), in the order they began.

        An end closes the innermost open begin of its key.  Spans that are still open, and ends without a begin, are left out.

        Args:
            what: the kind of the spans, such as "gather".
        """
        opened: dict[str, list[int]] = {}
        closed: dict[int, tuple[str, int, int]] = {}
        for index, event in enumerate(self.events):
            if event.what != what:
                continue
            if event.kind == "begin":
                opened.setdefault(event.key, []).append(index)
            elif event.kind == "end" and opened.get(event.key):
                begin = opened[event.key].pop()
                closed[begin] = (event.key, self.events[begin].time_ns, event.time_ns)
        return [closed[index] for index in sorted(closed)]
