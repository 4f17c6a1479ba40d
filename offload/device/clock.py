"""The times of streams: points of them as nanoseconds on the host's clock, found without waiting for any of them.

`StreamCalls.clock` is the one of a device: buses and copies ask it for marks while an observer keeps time. It orders nothing
that anybody uses, waits only when it is asked for the first mark, and drops what cannot be known instead of raising.

Note: [A device's time on the host's clock]
    An event of the device's says how many milliseconds after another one it passed. So one of them is a base whose time the
    host knows: recorded on a stream that has nothing else to do, it passes as it is recorded. The first base is waited for, the
    shortest of a few tries; all others are only recorded, a second after the last one, because clocks drift and milliseconds
    in 32 bits get coarse. A new base is where the old one leads to, so that what one stream does stays in order; the pace
    changes so that after another second it is where the host has it. Where streams share a queue of the hardware a base may be
    held up behind work, and a host may be while it makes one: either seems to be further off than clocks drift, and says
    nothing of the pace.

Note: [Who may look]
    A look at an event on another thread breaks the capture of a CUDA graph, and a thread that does not use the device would
    make it a context of its own. So marks are looked at by threads that hear the device's events, when one is heard, and
    neither made nor looked at while their stream is captured.

Note: [No stream waits for a time]
    When a collective on the backend's own stream is over could be marked on a stream beside it that waits for it. Streams share
    the few queues of the hardware (CUDA_DEVICE_MAX_CONNECTIONS), where one that waits holds up all behind it: the observer
    would take away the overlap that it is to show. So a collective ends where somebody has waited for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.events import CAPTURED, TimeMark

if TYPE_CHECKING:
    from offload.device.stream_device import StreamCalls

__all__ = ["StreamClock"]

#: How old a base gets.
_RENEW_NS = 1_000_000_000
#: How often the first is tried.
_TRIES = 5
#: A base that is not held up passes sooner, and clocks drift less.
_APART_NS = 200_000
_MOST_DRIFT = 1e-4
#: Between bases while nothing is marked.
_LONG_NS = 10 * _RENEW_NS


class _Base:
    """An event whose time is known, or follows from that of ``before`` once it has passed.

    Attributes:
        asked_ns: when the host recorded it.
        ns: its time; None as long as that is not known.
        pace: nanoseconds of the host's for one of the device's, from here on.

    Args:
        prompt: the host was not held up while it recorded it.
    """

    __slots__ = ("_before", "_prompt", "asked_ns", "event", "ns", "pace")

    def __init__(self, event: Any, asked_ns: int, before: _Base | None = None, *, prompt: bool = True) -> None:
        self.event, self.asked_ns, self._before, self._prompt = event, asked_ns, before, prompt
        self.ns: int | None = asked_ns if before is None else None
        self.pace = 1.0

    def time_of(self, event: Any) -> int:
        """When an event passed that came after this one; both have."""
        assert self.ns is not None
        return self.ns + round(_apart_ns(self.event, event) * self.pace)

    def known(self) -> bool:
        """Its time is known; not before it has passed."""
        before = self._before
        if before is not None and before.ns is not None and self.event.query():
            self._follow(before)
            self._before = None
        return self.ns is not None

    def _follow(self, before: _Base) -> None:
        """Note: [A device's time on the host's clock]."""
        apart_ns = _apart_ns(before.event, self.event)
        followed = before.time_of(self.event)
        off_ns = self.asked_ns - followed
        self.ns, self.pace = followed, before.pace
        if not self._prompt or abs(off_ns) > _APART_NS + _MOST_DRIFT * apart_ns:
            self.asked_ns = followed
        elif apart_ns > _LONG_NS:
            # No mark was made meanwhile, that could be out of order with what comes now.
            self.ns = self.asked_ns
        elif apart_ns > 0:
            self.pace = (self.asked_ns - before.asked_ns) / apart_ns + off_ns / _RENEW_NS


class _Mark:
    """A point of a stream; see `TimeMark`."""

    __slots__ = ("_clock", "base", "beside", "event", "lane", "lost", "ns")

    def __init__(self, clock: StreamClock, lane: str, beside: bool, event: Any, base: _Base) -> None:
        self._clock, self.event, self.base = clock, event, base
        self.ns: int | None = None
        self.lane, self.beside, self.lost = lane, beside, ""

    def time_ns(self) -> int | None:
        return self.ns if self.event is None else self._clock.resolve(self)


@dataclass(frozen=True, slots=True)
class _Lost:
    """A mark that could not be made, and why."""

    lost: str
    lane: str = ""
    beside: bool = False

    def time_ns(self) -> None:
        return None


_FAILED = _Lost("the device failed")
_CAPTURED = _Lost(CAPTURED)


class StreamClock:
    """The marks of one device's streams, whose events are used again."""

    def __init__(self, calls: StreamCalls) -> None:
        self._calls = calls
        self._idle: list[Any] = []
        self._base: _Base | None = None
        self._failed = False
        # Looking may run the collector, and with it observers that look.
        self._lock = threading.RLock()

    def mark(self) -> TimeMark:
        """The point that this thread's current stream has been given work up to; lost where that cannot be marked."""
        return self._marked(None, "")

    def on(self, stream: Any, lane: str) -> TimeMark:
        """The same of a stream that is known as ``lane`` and computes nothing."""
        return self._marked(stream, lane)

    def resolve(self, mark: _Mark) -> int | None:
        """The time of a mark, if its stream has come to it."""
        with self._lock:
            # Taken out: who looks from within this look, or after it, must not give the event back as well.
            event, mark.event = mark.event, None
            if event is None:
                return mark.ns
            try:
                if self._calls.capturing() or not event.query() or not mark.base.known():
                    mark.event = event
                    return None
                mark.ns = mark.base.time_of(event)
            except RuntimeError:
                self._failed, mark.lost = True, _FAILED.lost
                return None
            self._idle.append(event)
            return mark.ns

    def _marked(self, stream: Any, lane: str) -> TimeMark:
        with self._lock:
            if self._failed:
                return _FAILED
            try:
                if self._calls.capturing():
                    return _CAPTURED
                stream = self._calls.current() if stream is None else stream
                name, beside = (lane, True) if lane else self._calls.lane(stream)
                base = self._renewed()
                event = self._idle.pop() if self._idle else self._calls.timed_event()
                event.record(stream)
            except RuntimeError:
                # A device that has failed answers everything with its error, which is raised where a result is wanted.
                self._failed = True
                return _FAILED
            return _Mark(self, name, beside, event, base)

    def _renewed(self) -> _Base:
        """The base of marks made now. Note: [A device's time on the host's clock]."""
        base = self._base
        if base is None:
            base = self._base = self._first()
        elif base.known() and self._calls.now_ns() - base.asked_ns > _RENEW_NS:
            event, took_ns, asked_ns = self._asked(wait=False)
            base = self._base = _Base(event, asked_ns, base, prompt=took_ns <= _APART_NS)
        return base

    def _first(self) -> _Base:
        event, _, asked_ns = min((self._asked(wait=True) for _ in range(_TRIES)), key=lambda one: one[1])
        return _Base(event, asked_ns)

    def _asked(self, *, wait: bool) -> tuple[Any, int, int]:
        """An event on the stream that has nothing else to do; how long the host took for it, and when that was."""
        event, stream = self._calls.timed_event(), self._calls.side("clock")
        before_ns = self._calls.now_ns()
        event.record(stream)
        if wait:
            event.synchronize()
        after_ns = self._calls.now_ns()
        return event, after_ns - before_ns, (before_ns + after_ns) // 2


def _apart_ns(first: Any, second: Any) -> float:
    milliseconds: float = first.elapsed_time(second)
    return milliseconds * 1e6
