"""Owns the writing of a trace file: one append a frame, so that a run killed at any moment leaves a file that reads.

The recorder calls it from any thread. After it has opened its file it never raises into the training loop: what it cannot
write it counts, and warns once.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from offload.budget import Machine
from offload.private_files import create
from offload.text import as_size, counted
from zprof.rows import Row, TraceError
from zprof.trace.frames import MAGIC, MOST_ROWS, FrameKind, most, packed, sealed
from zprof.trace.header import Header
from zprof.writing import replaceable

__all__ = ["LOST", "Writer"]

_MOST_REASON = 1000
_LEAST_LIMIT = 1 << 16
#: Rows that wait for memory to be encoded in, at most.
_MOST_PENDING = 1 << 18
#: What numpy maps when it is loaded, and more for each thread of its linear algebra; it was 123 MiB on two cores.
_NUMPY_NBYTES, _NUMPY_THREAD_NBYTES = 128 << 20, 48 << 20
#: Notes that are small and must not be missing.
_ALWAYS = ("oom", "clock", "lost", "end")
#: The note that says how many rows are not in the file, those thinned out among them, when some were dropped unwritten.
LOST = "lost"


class Writer:
    """Writes one run's rows and notes to a file of its own, mode 0600.

    Rows wait in memory until a chunk of `MOST_ROWS` is full, a note is written, or `flush`; a kill loses those that wait.
    A process forked from this one writes nothing. Past ``limit`` bytes the older part is thinned out, away from the peaks, on a
    thread of its own; meanwhile the disk holds up to two and a half times as much.

    Attributes:
        nbytes: size of the file. dropped_rows: rows that were taken and are not in it.
    Raises:
        TraceError: the file is there already and ``force`` is not given, or it cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header, *, force: bool = False, limit: int = 1 << 30) -> None:
        self.path = Path(path)
        self.nbytes = 0
        self.dropped_rows = 0
        self._limit = max(limit, _LEAST_LIMIT)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._turned = threading.Condition(self._lock)
        self._rewriting: threading.Thread | None = None
        self._notes_nbytes = 0
        self._pending: list[Row] = []
        self._lacking = ""
        self._sequence = 0
        self._thinned = 0
        self._warned: set[str] = set()
        # Read back at once: a header nobody could read is the caller's mistake, and would cost the whole run.
        fields = header.packed()
        Header.unpacked(fields, str(path))
        self._fd: int | None = _created(self.path, force)
        self._identity = _identity(self._fd)
        start = MAGIC + header.version.to_bytes(2, "little")
        if not self._append(start + sealed(FrameKind.HEADER, packed(fields))):
            raise TraceError(f"{self.path}: cannot be written: the disk is full; choose another place with -o")

    @property
    def waiting(self) -> int:
        """Rows that were taken and are not written yet."""
        return len(self._pending)

    def rows(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order they happened on each thread."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            while self._rewriting and self.nbytes > self._limit + self._limit // 4:
                # Rows come faster than old ones are thinned out: without waiting the file would have no bound.
                self._turned.wait()
            self._pending.extend(rows)
            self._chunks(MOST_ROWS)

    def lose(self, count: int) -> None:
        """So many rows never came here; noted at once, for the end may not be."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.dropped_rows += count
            self.note(LOST, {"rows": self.dropped_rows})
            self._warn("lost", f"dropped {counted(count, 'row')}, because writing the trace took too long; training went on")

    def note(self, name: str, body: Mapping[str, object]) -> None:
        """Write a named map of plain values after all rows taken so far; one of more than 16 MiB is dropped with a warning."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self.flush()
            try:
                payload = packed([name, dict(body)])
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                self._warn("plain", f"note {name} is not a map of plain values and was dropped: {str(error)[:80]}")
                return
            bound = most(FrameKind.NOTE)
            if len(payload) > bound:
                self._warn("large", f"note {name} of {as_size(len(payload))} is over {as_size(bound)} and was dropped")
                return
            frame = sealed(FrameKind.NOTE, payload)
            if name not in _ALWAYS:
                self._notes_nbytes += len(frame)
                if self._notes_nbytes > self._limit // 4:
                    self._warn("full", f"note {name} was dropped: notes fill a quarter of the bound of {as_size(self._limit)}")
                    return
            self._append(frame)

    def flush(self) -> None:
        """Write the rows that wait for a chunk to fill."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._chunks(1)

    def replace(self, other: Writer) -> None:
        """Take the place of ``other``: its path is this one's from now on, and it takes nothing more.

        Raises:
            OSError: it cannot be renamed; both are as they were.
        """
        with self._lock, other._lock:
            os.replace(self.path, other.path)
            self.path = other.path
            other._stop()

    def abandon(self) -> None:
        """The file is not wanted: it is closed and taken away."""
        with self._lock:
            self._stop()
            with suppress(OSError):
                self.path.unlink()

    def close(self, reason: str = "", exit: int = 0) -> None:
        """Write what waits, and how the run ended; rows that come later are counted as dropped. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            while self._rewriting:
                self._turned.wait()
            self.flush()
            if self._fd is None:
                return
            while self._rewriting:
                self._turned.wait()
            if self._pending:
                self.dropped_rows += len(self._pending)
                self._warn("rows", f"dropped {counted(len(self._pending), 'row')} for lack of memory ({self._lacking})")
            self._limit = 1 << 62
            self.note("end", {"exit": exit, "reason": reason[:_MOST_REASON], "dropped_rows": self.dropped_rows})
            self._stop()

    def _chunks(self, least: int) -> None:
        """Write what waits, but for a last chunk of less than ``least`` rows."""
        waiting, self._pending = self._pending, []
        if self._fd is None:
            self.dropped_rows += len(waiting)
            return
        for at in range(0, len(waiting), MOST_ROWS):
            rows = waiting[at : at + MOST_ROWS]
            if len(rows) < least:
                self._pending = rows
                return
            try:
                frames = self._frames(rows, self._sequence + 1)
            except (MemoryError, ImportError) as error:  # numpy, too, needs memory to be loaded
                # They wait until there is some again; what the script dies of is written in a note, which needs none of them.
                self._pending = waiting[at:][-_MOST_PENDING:]
                self.dropped_rows += len(waiting) - at - len(self._pending)
                self._lacking = type(error).__name__
                return
            self._sequence += 1
            for frame, count in frames:
                if not self._append(frame):
                    self.dropped_rows += count

    def _frames(self, rows: list[Row], sequence: int) -> list[tuple[bytes, int]]:
        """(frame, rows in it): one, or more where names are enormous; what does not fit into any is dropped and said."""
        if self._fd is None:
            self.dropped_rows += len(rows)
            return []
        if "numpy" not in sys.modules and not _numpy_fits():
            raise MemoryError("too little to load numpy, whose libraries would abort the process")
        # Only now: a script that is recorded may still want to say how numpy starts.
        from zprof.trace.columns import encoded, fits

        try:
            payload = encoded(rows)
        except (ValueError, TypeError, OverflowError) as error:
            right = [row for row in rows if fits(row)]
            lost = len(rows) if len(right) == len(rows) else len(rows) - len(right)
            frames = self._frames(right, sequence) if right and len(right) < len(rows) else []
            self.dropped_rows += lost
            self._warn("rows", f"dropped {counted(lost, 'row')} as invalid: {str(error)[:80]}")
            return frames
        if len(payload) > most(FrameKind.ROWS):
            # Only names of thousands of bytes each do this; a single row always fits.
            half = len(rows) // 2
            return self._frames(rows[:half], sequence) + self._frames(rows[half:], sequence)
        return [(sealed(FrameKind.ROWS, payload, sequence=sequence, count=len(rows)), len(rows))]

    def _ours(self) -> bool:
        """The descriptor is still the trace's: a script that closes all of them may open a file of its own under its number."""
        assert self._fd is not None
        try:
            found = os.fstat(self._fd)
        except OSError:
            found = None
        mine = found is not None and (found.st_dev, found.st_ino) == self._identity
        if not mine:
            self._fd = None
            self._end("its descriptor was closed by the script")
        return mine

    def _append(self, frame: bytes) -> bool:
        if self._fd is None or not self._ours():
            return False
        left = memoryview(frame)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            # Half a frame would read as damage; where it cannot be taken back, readers know it for what it is.
            with suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            self._end(error.strerror or str(error))
            return False
        except BaseException:
            # Interrupted in between: the frames to come must not follow half of this one.
            with suppress(OSError):
                os.ftruncate(self._fd, self.nbytes)
            raise
        self.nbytes += len(frame)
        if self.nbytes > self._limit and self._rewriting is None:
            self._rewriting = threading.Thread(target=self._rewrite, name="zprof-rewriting", daemon=True)
            try:
                self._rewriting.start()
            except RuntimeError:  # No memory for a thread: the next frame tries again.
                self._rewriting = None
        return True

    def _rewrite(self) -> None:
        """Make the file smaller, on a thread of its own."""
        from zprof.trace.bounding import Rewriting

        work: Rewriting | None = None
        try:
            work = Rewriting(self.path, self._limit, self._thinned)
            work.run()
            with self._lock:
                if self._fd is not None:
                    fd = work.finish()
                    os.close(self._fd)
                    self._fd, self.nbytes, self._identity = fd, work.nbytes, _identity(fd)
                    self.dropped_rows += work.dropped - self._thinned
                    self._thinned = work.dropped
                    if self.nbytes > self._limit - self._limit // 8:
                        self._end(f"the file cannot be kept below {as_size(self._limit)}: too much of it is still held")
        except Exception as error:
            # Whatever it was: without this the file has no bound, and the training loop must not hear of it.
            with self._lock:
                self._end(f"the file cannot be made smaller: {getattr(error, 'strerror', None) or error}")
        finally:
            with self._lock:
                if work is not None:
                    work.close()
                self._rewriting = None
                self._turned.notify_all()

    def _end(self, why: str) -> None:
        self._stop()
        self._warn("stopped", f"recording stopped after {as_size(self.nbytes)}, training goes on: {why}")

    def _stop(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _warn(self, kind: str, what: str) -> None:
        """Warn, once of each kind."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        # A filter that makes warnings errors must not reach the training loop from here.
        with suppress(Warning):
            warnings.warn(f"{self.path}: {what}", RuntimeWarning, stacklevel=4)


def _numpy_fits() -> bool:
    """Whether the limits of this process leave what numpy's libraries map; a linear algebra library that lacks it exits."""
    need = _NUMPY_NBYTES + _NUMPY_THREAD_NBYTES * (os.cpu_count() or 1)
    return all(bound.free >= need for bound in Machine().memory_bounds() if bound.of_process)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _created(path: Path, force: bool) -> int:
    try:
        if force:
            replaceable(path)
            # Removed, not emptied: whoever reads the old file keeps it whole.
            path.unlink(missing_ok=True)
        return create(path, os.O_WRONLY | os.O_APPEND)
    except FileExistsError:
        try:
            size = as_size(path.stat().st_size)
        except OSError:
            size = "unknown size"
        raise TraceError(f"{path}: expected no such file, found one of {size}; replace it with -f, or change -o") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be created: {reason}; name another file with -o") from None
