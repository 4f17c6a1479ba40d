"""Owns an open trace file as a row of frames: where each lies, which are whole, and what is damage.

`zprof.trace.reader` makes traces of it. It never knows what a payload means, and never allocates for what a file merely claims.
"""

from __future__ import annotations

import os
import weakref
from array import array
from pathlib import Path

from offload.regular_files import open_regular
from zprof.rows import TraceError
from zprof.trace.frames import HEAD_NBYTES, MAGIC, MARK, Frame, FrameKind, head_at, opened

__all__ = ["START", "FrameFile"]

#: Where the first frame lies: behind the magic and the version.
START = len(MAGIC) + 2
_BLOCK = 1 << 20
_GLANCE = 1 << 12
_MOST_DAMAGES = 1000


class FrameFile:
    """An open trace file and where its frames lie: twelve bytes a chunk, whatever the file claims."""

    def __init__(self, path: Path) -> None:
        self.fd = _opened(path)
        self.close = weakref.finalize(self, os.close, self.fd)
        found = os.fstat(self.fd)
        self.identity = (found.st_dev, found.st_ino)
        self.rows: array[int] = array("q")
        self.sizes: array[int] = array("I")
        self.sequences: array[int] = array("I")
        self.notes: array[int] = array("q")
        self.count = 0
        self.damages: dict[int, str] = {}
        self.tail = ""
        self._next = START
        # Bytes read twice in search of frames; bounded, or a forged file could ask for hours of it.
        self._again = 0
        self._block, self._block_at = b"", 0

    def scan(self) -> None:
        """Find the frames that were added since the last scan."""
        size = os.fstat(self.fd).st_size
        self.tail, self._block = "", b""
        before: Frame | None = None
        while self._next < size:
            frame = self._glance(self._next)
            if frame and frame.end <= size:
                self._enter(frame)
                before, self._next = frame, frame.end
                continue
            # Bytes lost from within a frame leave the next ones before the end that its head says.
            if before and self._again < 4 * size and not self.right(before):
                self._again += before.nbytes
                at = self._search(before.offset + HEAD_NBYTES, size)
            else:
                at = self._search(self._next + 1, size)
            before = None
            if at is None:
                self.tail = f"ends inside a chunk at byte {size}: the run was killed, or is still writing"
                return
            self.damaged(self._next, "no frame begins there")
            self._next = at

    @property
    def end(self) -> int:
        """Where the last frame that was found ends."""
        return self._next

    def read(self, offset: int, nbytes: int | None = None) -> tuple[Frame, bytes]:
        """The frame at ``offset`` and its payload; ValueError where it is not right."""
        if nbytes is None:
            frame = head_at(self.bytes_at(HEAD_NBYTES, offset), 0, offset)
            if frame is None:
                raise ValueError("no frame begins there")
            nbytes = frame.nbytes
        whole = self.bytes_at(HEAD_NBYTES + nbytes, offset)
        frame = head_at(whole, 0, offset)
        if frame is None:
            raise ValueError("no frame begins there")
        return frame, opened(frame, whole[HEAD_NBYTES:])

    def right(self, frame: Frame) -> bool:
        """Whether the payload is what was written."""
        try:
            self.read(frame.offset, frame.nbytes)
        except ValueError:
            return False
        return True

    def damaged(self, offset: int, why: str) -> None:
        """Remember damage, for the line that reports it."""
        if len(self.damages) < _MOST_DAMAGES:
            self.damages.setdefault(offset, why)

    def _enter(self, frame: Frame) -> None:
        if frame.kind == FrameKind.ROWS:
            self.rows.append(frame.offset)
            self.sizes.append(frame.nbytes)
            self.sequences.append(frame.sequence)
            self.count += frame.count
        elif frame.kind == FrameKind.NOTE:
            self.notes.append(frame.offset)

    def _glance(self, offset: int) -> Frame | None:
        at = offset - self._block_at
        if at < 0 or at + HEAD_NBYTES > len(self._block):
            # Chunks are many pages apart, notes and samples are not: one look serves all small frames of a page.
            self._block, self._block_at, at = self.bytes_at(_GLANCE, offset), offset, 0
        return head_at(self._block, at, offset)

    def _search(self, start: int, size: int) -> int | None:
        while start < size:
            block = self.bytes_at(_BLOCK, start)
            at = block.find(MARK)
            while at >= 0:
                whole = at + HEAD_NBYTES <= len(block)
                frame = head_at(block if whole else self.bytes_at(HEAD_NBYTES, start + at), at if whole else 0, start + at)
                if frame and frame.end <= size:
                    return frame.offset
                at = block.find(MARK, at + 1)
            start += max(len(block) - len(MARK) + 1, 1)
        return None

    def bytes_at(self, nbytes: int, offset: int) -> bytes:
        """Up to ``nbytes`` bytes as they lie there."""
        try:
            return os.pread(self.fd, nbytes, offset)
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None

    def line(self) -> str | None:
        """What cannot be read, in one line."""
        said = []
        if self.damages:
            offset, why = next(iter(self.damages.items()))
            others = f", and in {len(self.damages) - 1} more places" if len(self.damages) > 1 else ""
            said.append(f"damaged at byte {offset} ({why}){others}: everything else was read")
        if self.tail:
            said.append(self.tail)
        return "; ".join(said) or None


def _opened(path: Path) -> int:
    try:
        return open_regular(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "check the path" if os.path.lexists(path) else f"record one with zprof run -o {path}"
        raise TraceError(f"{path}: cannot be read: {reason}; {advice}") from None
