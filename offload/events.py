"""Owns the event interface: what the runtime says about itself while it works, and who hears it.

The runtime emits through a `Bus`; profilers, progress bars and tests listen as observers. It never prints, never
writes a file, and never lets an observer's mistake reach the training loop; it uses the standard library only.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Literal, Protocol

__all__ = ["Bus", "Event", "Kind", "Observer", "Recorder", "leave", "listen", "state_all"]

Kind = Literal["begin", "end", "instant", "counter", "hold"]


@dataclass(frozen=True, slots=True)
class Event:
    """One fact about the run.

    Attributes:
        kind: "begin" and "end" bound a span; "instant" is a point in time; "counter" says that a level is now ``nbytes``;
            "hold" says that the memory ``subject`` is held for ``key`` from now on, until it is freed or held for something
            else.  The level of a quantity is the sum of what each bus last said, as two runs in one process may give units the
            same name.
        what: the verb or the quantity, such as "gather".
        key: what it happened to, such as a unit's name.
        nbytes: bytes moved (span, instant) or held (counter); 0 where bytes mean nothing.
        time_ns: a monotonic clock, comparable between processes of one host, never with the wall clock.
        subject: the storage that a "hold" is about, or the bus whose level a "counter" states, for the duration of the call; an
            observer may keep a weak reference to it.
    """

    kind: Kind
    what: str
    key: str
    nbytes: int
    time_ns: int
    subject: object = field(default=None, compare=False, repr=False)


class Observer(Protocol):
    """Anything that listens; called on the thread that emitted the event, including autograd's own threads."""

    def on_event(self, event: Event) -> None:
        """Take one event.  Must be quick, because the training step waits for it."""


class Memory(Protocol):
    """A storage, as far as is known here: its size, and that it can be referred to weakly."""

    def nbytes(self) -> int: ...


class Bus:
    """Hands events to observers in the order they were attached.

    ``active`` is true while anybody listens. Emitting callers test it before they build a key or count bytes, so that a
    run nobody watches pays one attribute test an event.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.active = False
        self._clock = clock
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
            self.active = True
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

    def begin(self, what: str, key: str, nbytes: int = 0) -> None:
        """Open a span."""
        if self.active:
            self._emit("begin", what, key, nbytes)

    def end(self, what: str, key: str, nbytes: int = 0) -> None:
        """Close the innermost open span of the same ``what`` and ``key``."""
        if self.active:
            self._emit("end", what, key, nbytes)

    def instant(self, what: str, key: str, nbytes: int = 0) -> None:
        """Mark a point in time."""
        if self.active:
            self._emit("instant", what, key, nbytes)

    def counter(self, what: str, key: str, nbytes: int = 0) -> None:
        """State the level of a quantity."""
        if self.active:
            self._emit("counter", what, key, nbytes, self)

    def hold(self, what: str, key: str, storage: Memory) -> None:
        """State what a storage is held for, e.g. "parameter on device"; that it is free again shows when it dies."""
        if self.active:
            self._emit("hold", what, key, storage.nbytes(), storage)

    def _emit(self, kind: Kind, what: str, key: str, nbytes: int, subject: object = None) -> None:
        event = Event(kind, what, key, nbytes, self._clock(), subject)
        failed: tuple[tuple[Observer, Exception], ...] = ()
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception as error:
                failed = (*failed, (observer, error))
        # Reported after the loop: a warning filter that raises must not keep the event from the other observers.
        for observer, raised in failed:
            if self._remove(observer):
                warnings.warn(
                    f"observer {type(observer).__name__} raised {type(raised).__name__}: {raised} "
                    f"on {kind} {what} {key}; it is detached and hears no further events",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _remove(self, observer: Observer) -> bool:
        with self._change:
            before = self._observers
            self._observers = tuple(known for known in before if known is not observer)
            self.active = bool(self._observers)
            return len(self._observers) < len(before)


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

    Attributes:
        events: the events so far, in the order heard.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

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
