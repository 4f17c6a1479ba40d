"""Owns the rows on their way from the threads that record to the trace: taken at once, written by whoever is inside.

The recorder makes one, puts every row into it, and has it written. It never decides what is recorded or when it is written.

Note: [Cost of an event]
    The emitting thread makes one tuple, appends it, and puts it into the tail, a mapped file that outlives a kill; a thread of
    ours encodes and writes, at least every second. Where rows come faster than it takes them, the emitter waits for it, but
    no longer than `LONGEST_WAIT_S`: a file system may hang, or the file be rewritten. From then on rows are dropped and
    counted, until the thread has taken what waits.

Note: [Who may be inside]
    The collector runs anywhere, and with it the callbacks of storages that die: also while this very thread writes. What they
    record is appended, and never waits or writes; nobody enters the writing twice on one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from zprof.rows import Row, RowKind

if TYPE_CHECKING:
    from zprof.trace.tail import Tail
    from zprof.trace.writer import Writer

__all__ = ["LONGEST_WAIT_S", "MOST_WAITING", "Queue"]

#: Rows that may wait for the writing thread before the emitter waits, too.
MOST_WAITING = 1 << 18
#: The writer is woken each time so many rows more were recorded, lest the tail go round first; one less than a power of two.
_WAKE_ROWS = (1 << 13) - 1
_BEAT_S = 0.002
#: How long an emitter waits for the writing thread, once for each time that it is late, before rows are dropped.
LONGEST_WAIT_S = 5.0
_FREE = int(RowKind.FREE)


class Queue:
    """The rows that wait, and the writer they wait for.

    Attributes:
        writer, tail: where rows go; None where there is none.
        thread: the one that writes, for which others may wait.
        wake: set where that thread should look sooner.
        late: somebody has waited for another thread to leave the writer, in vain.
        dropped: rows that were not taken, because the writer was late; told to it when it is back.
    """

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.tail: Tail | None = None
        self.thread: threading.Thread | None = None
        self.wake = threading.Event()
        self._rows: list[tuple[int, str, str, int, int, int, int]] = []
        self._threads: dict[int, int] = {}
        self._numbers = count()
        self._taken = 0
        self.late = False
        self.dropped = self._told = 0
        self._dropping = False
        self._counting = threading.RLock()  # the collector may record here, too
        self._writing = threading.Lock()
        self._inside = 0  # the thread that writes now

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def put_so_far(self) -> int:
        """Rows that were put, those that were dropped not counted."""
        return self._taken + len(self._rows)

    @property
    def threads(self) -> int:
        """How many have put rows."""
        return len(self._threads)

    def number_of(self, ident: int) -> int:
        """The number of a thread that has put rows; -1 of any other."""
        return self._threads.get(ident, -1)

    def put(
        self, kind: int, what: str, key: str, nbytes: int, time_ns: int, ident: int, lane: int | None = None
    ) -> None:
        """Take a row of this thread's, or of a lane of the device's."""
        mine = threading.get_ident()
        thread = self._threads.get(mine) if lane is None else lane
        if thread is None:
            thread = self._threads.setdefault(mine, next(self._numbers))
        if self._dropping and len(self._rows) > MOST_WAITING:
            with self._counting:
                self.dropped += 1
            return
        self._rows.append((kind, what, key, nbytes, time_ns, thread, ident))
        if self.tail is not None and not self.tail.put(kind, what, key, nbytes, time_ns, thread, ident) & _WAKE_ROWS:
            self.wake.set()
        if len(self._rows) > MOST_WAITING and kind != _FREE:
            self._wait_for_writer(mine)

    def _wait_for_writer(self, mine: int) -> None:
        """Wait for the writing thread; not where that could be waiting for this one, see [Who may be inside]."""
        thread = self.thread
        if thread is None or mine in (thread.ident, self._inside):
            return
        pause, until = threading.Event(), time.monotonic() + LONGEST_WAIT_S
        while len(self._rows) > MOST_WAITING and self.writer is not None and thread.is_alive() and not self._dropping:
            self.wake.set()
            if time.monotonic() > until:
                self._dropping = True
            pause.wait(_BEAT_S)

    @contextmanager
    def alone(self) -> Iterator[Writer | None]:
        """The writer, for this thread only; None where there is none, this thread is inside already, or another one is for
        longer than `LONGEST_WAIT_S`."""
        mine = threading.get_ident()
        if self.writer is None or self._inside == mine:
            yield None
            return
        # Who has waited in vain once, does not again.
        if not self._writing.acquire(timeout=0.0 if self.late else LONGEST_WAIT_S):
            self.late = True
            yield None
            return
        self.late = False
        try:
            self._inside = mine
            yield self.writer
        finally:
            self._inside = 0
            self._writing.release()

    def write(self, writer: Writer) -> None:
        """Write what waits; for who is `alone`."""
        # Cut, not swapped: another thread may hold the list it is about to append to.
        length = len(self._rows)
        rows = self._rows[:length]
        if rows:
            # Not before the writer has them: for want of memory it may take none.
            writer.rows(_as_rows(rows))
            del self._rows[:length]
            self._taken += length
            writer.flush()
            if self.tail is not None:
                self.tail.written(self._taken - writer.waiting)
        self._dropping = False
        with self._counting:
            lost, self._told = self.dropped - self._told, self.dropped
        if lost:
            writer.lose(lost)

    def go_on(self, writer: Writer, tail: Tail | None) -> None:
        """All that was written is in the file of ``writer`` now, which the rows to come are for; for who is `alone`."""
        before, self.writer, self.tail = self.tail, writer, tail
        # What waits is not in the new tail.
        self._taken = -len(self._rows)
        if before is not None:
            before.close()

    def clear(self) -> None:
        """Nobody will write what waits."""
        self._rows.clear()

    def end_tail(self) -> None:
        """Take the tail away: all is in the trace."""
        tail, self.tail = self.tail, None
        if tail is not None:
            tail.close()

    def forget(self) -> None:
        """In a forked child: the file, the tail and the thread are its parent's."""
        if self.tail is not None:
            self.tail.leave()
        self.writer = self.thread = self.tail = None
        self._rows.clear()


def _as_rows(rows: list[tuple[int, str, str, int, int, int, int]]) -> Sequence[Row]:
    """The plain tuples are rows in all but name; to name a million of them would cost a second."""
    return rows  # type: ignore[return-value]
