"""Owns the reading of a trace file: its frames are found and checked here, its chunks decoded one at a time.

Every report opens one, also while the run still writes it. It never raises anything but `TraceError`, never allocates for what
a file merely claims, and reads around damage, which it states in one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from zprof.rows import TraceError
from zprof.trace.columns import Names, Rows, decoded
from zprof.trace.framefile import START, FrameFile
from zprof.trace.frames import MAGIC, FrameKind, unpacked
from zprof.trace.header import VERSION, Header
from zprof.trace.notes import Note, Notes
from zprof.trace.operators import WINDOW
from zprof.trace.tail import tail_path

__all__ = ["DROPPED", "Note", "Rows", "Trace", "header_of"]

#: The note that says how many rows were thinned out of a file.
DROPPED = "dropped"


class Trace:
    """A recorded run.

    Attributes:
        path, header: which file, and what it says of its run.
        strings: the names that ``what`` and ``key`` of `Rows` point to; grows while chunks are read, positions stay.
        file: its frames, for who rewrites it.
    """

    def __init__(self, path: Path, header: Header, file: FrameFile) -> None:
        self.path = path
        self.header = header
        self.file = file
        self._notes = Notes(file)
        self.names = Names()
        self.strings = self.names.strings
        self._given = 0
        self._given_sequence = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, ended: bool = False) -> Trace:
        """Read the header and find the chunks; their rows are read when asked for.

        What a process that was killed could not write any more is brought into the file first.

        Args:
            ended: the process that recorded is known to be gone.
        Raises:
            TraceError: this is no trace file, or its header cannot be read.
        """
        where = Path(path)
        trace = cls.growing(where)
        file = trace.file
        if os.path.lexists(tail_path(where)):
            from zprof.trace.recovery import recover

            if recover(trace, ended=ended) is not None:
                file.scan()
        return trace

    @classmethod
    def growing(cls, path: Path) -> Trace:
        """As `open`, of a file that this very process writes: without its tail.

        Raises:
            TraceError: as `open`.
        """
        file, header = _begun(path)
        return cls(path, header, file)

    @property
    def count(self) -> int:
        """Rows in all."""
        return self.file.count

    @property
    def damage(self) -> str | None:
        """What of the file cannot be read, in one line; damage inside a chunk shows once the chunk was asked for."""
        return self.file.line()

    @property
    def dropped(self) -> int:
        """Rows that were recorded and are not here: thinned out to bound the file, or lost to a full disk."""
        said = {DROPPED: "rows", "lost": "rows", "end": "dropped_rows"}
        rows = [note.body.get(key) for name, key in said.items() for note in self.notes(name)]
        return max([0, *(count for count in rows if type(count) is int)])

    @property
    def device(self) -> str:
        """What computed, e.g. "cuda:0": as noted once torch ran, for a recording may begin before; else as the header says."""
        noted = [note.body.get("device") for note in self.notes("device")]
        named = [name for name in noted if isinstance(name, str)]
        return named[-1] if named else self.header.device

    @property
    def accelerated(self) -> bool:
        """What computed has memory and streams of its own, which no simulation has."""
        return self.device.partition(":")[0] not in ("cpu", "virtual")

    @property
    def level(self) -> str:
        """How finely it was recorded: the header's level, or "ops" where operators were asked for beside it."""
        return "ops" if self.notes(WINDOW) else self.header.level

    def __len__(self) -> int:
        """Chunks in all."""
        return len(self.file.rows)

    def chunk(self, index: int) -> Rows:
        """The rows of one chunk; TraceError where it is damaged."""
        offset = self.file.rows[index]
        try:
            return self._decoded(index)
        except ValueError as error:
            raise TraceError(f"{self.path}: chunk {index} at byte {offset} is damaged: {error}") from None

    def sequence(self, index: int) -> int:
        """The number a chunk had when it was recorded; chunks of a file that was made smaller share some."""
        return self.file.sequences[index]

    def chunks(self) -> Iterator[Rows]:
        """All chunks in the order they were written; damaged ones are left out, and `damage` says so."""
        return self._from(0, len(self))

    def more(self) -> Iterator[Rows]:
        """The chunks that were added since the last call, the first time all; for files that still grow.

        A file that its writer made smaller meanwhile is opened anew, and continued where this reader was.

        Raises:
            TraceError: another run's file lies at the path now.
        """
        self._renew()
        first, self._given = self._given, len(self)
        if self._given:
            self._given_sequence = self.file.sequences[-1]
        return self._from(first, self._given)

    def notes(self, name: str | None = None) -> list[Note]:
        """The notes of that name, or all, in the order they were written; each is read once, and not to be changed."""
        return list(self._notes.named(name))

    def close(self) -> None:
        """Close the file; also done when the trace is let go."""
        self.file.close()

    def _from(self, first: int, end: int) -> Iterator[Rows]:
        file = self.file
        for index in range(first, end):
            try:
                rows = self._decoded(index, file)
            except ValueError as error:
                file.damaged(file.rows[index], str(error))
            else:
                yield rows

    def _decoded(self, index: int, file: FrameFile | None = None) -> Rows:
        file = file or self.file
        frame, payload = file.read(file.rows[index], file.sizes[index])
        return decoded(payload, frame.count, self.names)

    def _renew(self) -> None:
        try:
            found = self.path.stat()
        except (OSError, ValueError):
            found = None
        if found is None or (found.st_dev, found.st_ino) == self.file.identity:
            self.file.scan()
            return
        file, header = _begun(self.path)
        # One that began anew at another level holds other rows.
        if _of_run(header) != _of_run(self.header):
            raise TraceError(f"{self.path}: expected the run that was watched, found another; open it again")
        self.file.close()
        self.file = file
        self._notes = Notes(file)
        self._given = next((at for at, number in enumerate(file.sequences) if number > self._given_sequence), len(file.rows))


def _of_run(header: Header) -> tuple[object, ...]:
    return header.pid, header.mono_ns, header.host, header.level


def header_of(path: Path) -> Header:
    """What the trace at ``path`` says of its run; nothing else of it is read.

    Raises:
        TraceError: this is no trace file, or its header cannot be read.
    """
    file, header = _begun(path, scan=False)
    file.close()
    return header


def _begun(path: Path, *, scan: bool = True) -> tuple[FrameFile, Header]:
    file = FrameFile(path)
    try:
        start = file.bytes_at(START, 0)
        if start[: len(MAGIC)] != MAGIC or len(start) < START:
            raise TraceError(f"{path}: expected a trace of zprof, found something else; record one with zprof run")
        version = int.from_bytes(start[len(MAGIC) :], "little")
        if version != VERSION:
            raise TraceError(f"{path}: expected format version {VERSION}, found {version}; read it with the zprof of that run")
        frame, payload = file.read(START)
        if frame.kind != FrameKind.HEADER:
            raise ValueError("the first frame is something else")
        header = Header.unpacked(unpacked(payload), str(path))
        if scan:
            file.scan()
    except ValueError as error:
        file.close()
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: its header cannot be read: {error}; record the run again") from None
    return file, header
