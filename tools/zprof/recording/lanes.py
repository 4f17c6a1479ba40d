"""Owns the device's side of a recording: when its streams did what the host had queued, as rows that come once that is known.

The recorders hand it each event that carries a mark. It waits for no stream while something is recorded, and never makes up
a time: what is lost is counted, and readers are told which spans have none.

Note: [Queued, and done]
    The host's side of such a span is recorded at once, under another name: "queued gather". The device's side, "gather", is one
    row with begin and length, on the lane of its stream, written when the stream has passed its end and somebody looks: when
    the next event with a mark is heard, on the thread that emits it, see the note [Who may look] in
    ``offload/device/clock.py``. So a kill loses those under way; what the host queued is in the trace.

Note: [Hidden waits]
    A stream beside the one that computes may wait too, for what it brings; nobody stands still for that. Such a wait is named
    "hidden wait fetch", and is none of those that a run has to answer for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from offload.events import CAPTURED, During, Event, TimeMark
from zprof.recording.surroundings import device
from zprof.rows import QUEUED, RowKind

__all__ = ["LANES", "Lanes", "here"]

#: The note that says how lanes are called, and which spans have no time of the device's.
LANES = "lanes"
#: Spans whose end the device has not come to; more are given up, the oldest first.
_MOST_WAITING = 1 << 16
#: How long the end of a recording waits for the device to come to what was queued.
_LONGEST_S = 2.0
_BEAT_S = 0.001
_BEGIN, _END = int(RowKind.BEGIN), int(RowKind.END)

#: (kind, what, key, nbytes, time_ns): when the host queued it.
Queued = Callable[[int, str, str, int, int], None]
#: (what, key, nbytes, begin_ns, length_ns, lane): when the device did it.
Done = Callable[[str, str, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class _Span:
    """What the device may not have come to yet; a point where begin and end are one mark."""

    what: str
    key: str
    nbytes: int
    begin: TimeMark
    end: TimeMark


class Lanes:
    """Pairs marks, and finds their times.

    Args:
        queued, done: take the rows of the host's side and of the device's.
        note: takes the body of the note `LANES` each time that there is more to say.
    """

    def __init__(self, queued: Queued, done: Done, note: Callable[[Mapping[str, object]], None]) -> None:
        self._queued, self._done, self._note = queued, done, note
        self._open: dict[tuple[str, str], list[tuple[TimeMark, int]]] = {}
        self._waiting: deque[_Span] = deque()
        self._numbers: dict[str, int] = {}
        self._untimed: dict[str, str] = {}
        self._unknown = 0
        # Never waited for: who looks already, looks for all.
        self._looking = threading.Lock()

    def take(self, event: Event) -> None:
        """An event with a mark."""
        kind, what, key, mark = event.kind, event.what, event.key, event.mark
        if kind == "end":
            self._queued(_END, f"{QUEUED}{what}", key, event.nbytes, event.time_ns)
            begun = self._open.get((what, key))
            # None where both points were known when it began.
            if begun and mark is not None:
                begin, nbytes = begun.pop()
                end = mark
                if isinstance(mark, During):
                    begin, end = mark.begin or begin, mark.end
                assert not isinstance(end, During)
                self._wait_for(_Span(what, key, max(nbytes, event.nbytes), begin, end))
        elif mark is not None:
            begin, end = (mark.begin or mark.end, mark.end) if isinstance(mark, During) else (mark, mark)
            if kind == "begin":
                self._queued(_BEGIN, f"{QUEUED}{what}", key, event.nbytes, event.time_ns)
            if kind == "begin" and not isinstance(mark, During):
                self._open.setdefault((what, key), []).append((mark, event.nbytes))
            else:
                self._wait_for(_Span(what, key, event.nbytes, begin, end))
        self.poll()

    def untimed(self, what: str, why: str) -> None:
        """Spans of that name have no times of the device's that could be relied on."""
        if what not in self._untimed:
            self._untimed[what] = why
            self._say()

    def begun(self, what: str, key: str) -> bool:
        """Such a span has begun with a mark, and not ended."""
        return bool(self._open.get((what, key)))

    def poll(self) -> None:
        """Write the rows of what the device has done by now."""
        if not self._waiting or not self._looking.acquire(blocking=False):
            return
        try:
            while self._waiting:
                span = self._waiting[0]
                end_ns = span.end.time_ns()
                begin_ns = span.begin.time_ns() if end_ns is not None else None
                lost = span.end.lost or span.begin.lost
                # A signal may have ended the recording meanwhile.
                if (begin_ns is None and not lost) or not self._waiting or self._waiting[0] is not span:
                    return
                self._waiting.popleft()
                if end_ns is None or begin_ns is None:
                    self._lose(span, lost)
                    continue
                hidden = span.end.beside and span.what.startswith("wait ")
                what = f"hidden {span.what}" if hidden else span.what
                self._done(what, span.key, span.nbytes, begin_ns, max(0, end_ns - begin_ns), self.number(span.end.lane))
        finally:
            self._looking.release()

    def finish(self) -> None:
        """Nothing more comes: wait a little for what the device has been given, and count what it has not come to."""
        pause, until = threading.Event(), time.monotonic() + _LONGEST_S
        self.poll()
        while self._waiting and time.monotonic() < until:
            pause.wait(_BEAT_S)
            self.poll()
        self._unknown += len(self._waiting)
        self._waiting.clear()
        if self._unknown:
            self._say()

    def _wait_for(self, span: _Span) -> None:
        self._waiting.append(span)
        if len(self._waiting) > _MOST_WAITING and self._looking.acquire(blocking=False):
            try:
                self._waiting.popleft()
                self._unknown += 1
            finally:
                self._looking.release()

    def _lose(self, span: _Span, why: str) -> None:
        # What is captured does nothing now, and its replays are not heard of.
        if why != CAPTURED:
            self.untimed(span.what, why)

    def number(self, lane: str) -> int:
        """Of a lane, by its name; readers find it in the note."""
        number = self._numbers.get(lane)
        if number is None:
            number = self._numbers[lane] = len(self._numbers)
            self._say()
        return number

    def _say(self) -> None:
        self._note({"lanes": list(self._numbers), "untimed": dict(self._untimed), "unknown": self._unknown})


def here() -> TimeMark | None:
    """The point that this thread's stream of the device in use has been given work up to; None where there is none."""
    found = device()
    if found is None:
        return None
    try:
        import torch

        from offload.device import calls_of

        calls = calls_of(torch.device(found))
        return None if calls is None else calls.clock.mark()
    except (RuntimeError, AttributeError):
        # Another torch, or a device that failed: the script must not hear of it from here.
        return None
