"""Owns what happens to a tail whose process is gone: its rows are brought into the trace, and it is taken away.

``zprof run`` calls `recover` when the script has ended, and `Trace.open` when it finds a tail. It never touches a trace that
may still be written, nor one of another run, and never brings a row twice.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.regular_files import open_regular
from zprof.rows import Row, TraceError
from zprof.trace.columns import bounded, encoded
from zprof.trace.frames import MOST_ROWS, FrameKind, packed, sealed
from zprof.trace.header import Header, here
from zprof.trace.tail import NBYTES, rows_of, run_of, tail_path

if TYPE_CHECKING:
    from zprof.trace.columns import Rows
    from zprof.trace.reader import Trace

__all__ = ["RECOVERED", "Recovered", "lacking", "recover", "tail_rows"]

#: The note that says how many rows came from a tail.
RECOVERED = "recovered"


@dataclass(frozen=True, slots=True)
class Recovered:
    """Rows added to the trace, and rows that were torn or overwritten before they could be."""

    rows: int
    torn: int


def recover(trace: Trace, *, ended: bool = False) -> Recovered | None:
    """Bring the rows of the tail beside ``trace`` into its file, and take the tail away; None where nothing was brought.

    Args:
        ended: the process that recorded is known to be gone; else nothing is done while it may live.
    """
    beside = tail_path(trace.path)
    try:
        fd = open_regular(beside, follow=False)
    except (OSError, ValueError):
        return None
    try:
        if os.fstat(fd).st_size != NBYTES or not (_locked(fd) or ended) or not (ended or _gone(trace.header)):
            return None
        block = os.pread(fd, NBYTES, 0)
        if len(block) != NBYTES or run_of(block) != (trace.header.pid, trace.header.mono_ns) or not _still(fd, beside):
            return None
        found = None
        if not any(trace.notes(name) for name in ("end", RECOVERED)):
            rows, torn = rows_of(block)
            new = lacking(rows, trace.chunks(), trace.strings)
            found = Recovered(len(new), torn)
            _append(trace, new, found)
        beside.unlink()
        return found
    except (OSError, TraceError, ValueError):
        return None  # The trace is as it was: it cannot be written to by who reads it, or the disk is full.
    finally:
        os.close(fd)


def tail_rows(trace: Trace) -> list[Row]:
    """The newest rows of a recording that still runs on this machine, some of which the trace may have; none without a tail.

    Nothing is changed, and the recording goes on meanwhile: a row that is written over while it is read is left out.
    """
    try:
        fd = open_regular(tail_path(trace.path), follow=False)
    except (OSError, ValueError):
        return []
    try:
        block = os.pread(fd, NBYTES, 0) if os.fstat(fd).st_size == NBYTES else b""
    except OSError:
        return []
    finally:
        os.close(fd)
    if len(block) != NBYTES or run_of(block) != (trace.header.pid, trace.header.mono_ns):
        return []
    return rows_of(block)[0]


def _locked(fd: int) -> bool:
    """Neither the recording process nor anybody who recovers has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _still(fd: int, beside: Path) -> bool:
    """Nobody has brought its rows meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), beside.lstat())
    except OSError:
        return False


def _gone(header: Header) -> bool:
    """The process that recorded ran here for certain, and is not there."""
    host, boot = here()
    if host != header.host or not boot:
        return False
    if boot != header.boot:
        return True
    try:
        os.kill(header.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def lacking(rows: Sequence[Row], chunks: Iterable[Rows], strings: Sequence[str]) -> list[Row]:
    """Those of ``rows`` that ``chunks`` do not have: one at the same nanosecond with the same fields is the same row."""
    if not rows:
        return []
    since = min(row.time_ns for row in rows)
    there: Counter[tuple[object, ...]] = Counter()
    for chunk in chunks:
        for at in (chunk.time_ns >= since).nonzero()[0].tolist():
            names = (strings[int(chunk.what[at])], strings[int(chunk.key[at])])
            numbers = (int(chunk.nbytes[at]), int(chunk.time_ns[at]), int(chunk.thread[at]), int(chunk.ident[at]))
            there[(int(chunk.kind[at]), *names, *numbers)] += 1
    new = []
    for row in rows:
        same = (int(row.kind), bounded(row.what), bounded(row.key), *row[3:])
        if there[same]:
            there[same] -= 1
        else:
            new.append(row)
    return new


def _append(trace: Trace, rows: list[Row], found: Recovered) -> None:
    """Write them behind the last whole frame."""
    sequence = max(trace.file.sequences, default=0)
    frames = []
    for at in range(0, len(rows), MOST_ROWS):
        some = rows[at : at + MOST_ROWS]
        sequence += 1
        frames.append(sealed(FrameKind.ROWS, encoded(some), sequence=sequence, count=len(some)))
    frames.append(sealed(FrameKind.NOTE, packed([RECOVERED, {"rows": found.rows, "torn": found.torn}])))
    fd = os.open(trace.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if trace.file.tail:
            # The frame that was being written: its rows are among these.
            size = trace.file.end
            os.ftruncate(fd, size)
        left = memoryview(b"".join(frames))
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)
