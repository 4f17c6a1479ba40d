"""Owns the rewriting of a trace file that grew past its bound: which part is thinned out, and how the new file takes over.

The writer starts one `Rewriting` on a thread of its own and goes on recording meanwhile. At every moment the path names one
complete file: the new one is made beside it, under a name that nobody can have foreseen, and renamed over it. It removes and
replaces only the two files that it has open.
"""

from __future__ import annotations

import errno
import os
import secrets
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path

from offload.private_files import create
from offload.regular_files import open_regular
from zprof.trace.decimate import EFFORTS, Effort, smaller
from zprof.trace.framefile import START, FrameFile
from zprof.trace.frames import FrameKind, packed, sealed, unpacked
from zprof.trace.reader import DROPPED, Trace

__all__ = ["Rewriting"]

_BLOCK = 1 << 20


class Rewriting:
    """One rewriting of one file.

    Args:
        path: the file; others may append to it meanwhile.
        limit: bytes; the newest quarter of it stays as it is, what is before it is thinned out to a quarter at most.
        dropped: rows that were dropped from the file before.
    Attributes:
        fd: the new file, open for appending. nbytes: its size so far.
        dropped: rows dropped in all.
    """

    def __init__(self, path: Path, limit: int, dropped: int) -> None:
        self.fd = -1
        self.nbytes = 0
        self.dropped = dropped
        self._path = path
        self._limit = limit
        self._beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        self._from = open_regular(path)
        self._copied = 0

    def run(self) -> None:
        """Make the new file, but for what was appended since.

        Raises:
            OSError: the disk is full. TraceError: the file is not what was written.
        """
        trace = Trace.open(self._path)
        try:
            file = trace.file
            # The newest quarter stays as it is, and the chunk that the quarter begins in.
            newest = os.fstat(self._from).st_size - self._limit // 4
            chunks = bisect_left(file.rows, newest)
            chunks -= chunks == len(file.rows) > 0
            self._copied = file.rows[chunks] if file.rows else file.read(START)[0].end
            for effort in EFFORTS:
                self._begin(file)
                dropped = smaller(trace, chunks, effort, self._write) if chunks else 0
                if self.nbytes <= self._limit // 2:
                    break
            self.dropped += dropped
            self._write(sealed(FrameKind.NOTE, packed([DROPPED, {"rows": self.dropped, "spans": self._whole(trace, effort)}])))
        finally:
            trace.close()
        self.catch_up()
        os.fsync(self.fd)

    def _whole(self, trace: Trace, effort: Effort) -> list[str]:
        """The spans of which none was ever dropped from the file."""
        before = [note.body.get("spans") for note in trace.notes(DROPPED)]
        known = before[-1] if before and isinstance(before[-1], list) else effort.spans
        return [what for what in effort.spans if what in known]

    def _begin(self, file: FrameFile) -> None:
        """A new file with the header and the notes of the part that is thinned out."""
        if self.fd < 0:
            self.fd = create(self._beside, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self.fd, 0)
        self.nbytes = 0
        header, _ = file.read(START)
        self._write(file.bytes_at(header.end, 0))
        for offset in file.notes:
            if offset < self._copied:
                note, payload = file.read(offset)
                if unpacked(payload)[0] != DROPPED:
                    self._write(file.bytes_at(note.end - offset, offset))

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.fd, left) :]
        self.nbytes += len(data)

    def catch_up(self) -> None:
        """Copy what was appended to the old file since."""
        while block := os.pread(self._from, _BLOCK, self._copied):
            self._write(block)
            self._copied += len(block)

    def finish(self) -> int:
        """Put the new file in the old one's place, and hand over its descriptor; nobody may append to the old one now.

        Raises:
            OSError: the disk is full, or somebody else has replaced one of the two files.
        """
        self.catch_up()
        os.fsync(self.fd)
        for path, fd in ((self._path, self._from), (self._beside, self.fd)):
            if not _names(path, fd):
                raise OSError(errno.ESTALE, f"{path.name} was replaced or removed during the recording")
        os.rename(self._beside, self._path)
        with suppress(OSError):
            # So that the new name outlives a loss of power; some file systems have no such thing.
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        """Let go of both files, and of the new one where it did not take the old one's place."""
        os.close(self._from)
        if self.fd >= 0:
            with suppress(OSError):
                if _names(self._beside, self.fd):
                    self._beside.unlink()
            os.close(self.fd)


def _names(path: Path, fd: int) -> bool:
    """The path is that of the open file itself, and no link to it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False
