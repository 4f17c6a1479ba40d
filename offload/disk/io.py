"""The seam to the system's file calls, and what is built on it: whole transfers between memory and a file.

``disk_tier.py`` moves blocks through here and ``scratch.py`` opens and grows its file; tests put a faulty ``Io`` under both.
It never knows extents or checksums, and never decides what an error means.

Note: [Aligned or bounced]
    Direct I/O wants memory, length and file offset on pages.  What starts on a page goes from where it lies, and only a
    ragged tail, less than a page, passes through a bounce buffer as the second element of the same vectored call.  What
    starts elsewhere passes through the bounce buffer whole.  There are never more buffers than threads, and the system
    commits only the pages of one that were used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offload.pages import ALIGN, aligned, round_up

__all__ = ["Bytes", "Io", "Mover", "SystemIo"]

#: 1-D bytes that somebody else owns.
Bytes = npt.NDArray[np.uint8]

#: So often a call may move less than a page before the file counts as ended; it happens at the end of a truncated file.
STALLS = 3


class Io(Protocol):
    """The calls a disk tier makes; all raise OSError, and any transfer may move less than it was asked to."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; a file that is created is its owner's alone (0600)."""

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Bytes read into ``buffers``; 0 at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        """Bytes written from ``buffers``."""

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Make the file hold the range, with space for it on the disk."""

    def truncate(self, fd: int, nbytes: int) -> None:
        """Shorten the file to ``nbytes``."""

    def free_nbytes(self, fd: int) -> tuple[int, int]:
        """What this process may still write on the file's file system, and the size of all of that."""


class SystemIo:
    """The system's own calls; Python repeats those that a signal interrupts."""

    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return os.preadv(fd, [buffer.data for buffer in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return os.pwritev(fd, [buffer.data for buffer in buffers], offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def free_nbytes(self, fd: int) -> tuple[int, int]:
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


class BufferedIo(SystemIo):
    """The system's calls on a file system that is said not to do direct I/O."""

    def open(self, path: Path, flags: int, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, dir_fd)


class Mover:
    """Moves whole ranges between memory and one open file; any number of threads at once.

    Args:
        direct: the descriptor wants pages: see Note [Aligned or bounced].
        bounce_nbytes: the longest range that will be asked for.
    """

    def __init__(self, io: Io, fd: int, *, direct: bool, bounce_nbytes: int) -> None:
        self._io, self._fd = io, fd
        self._align = ALIGN if direct else 1
        self._bounce_nbytes = round_up(bounce_nbytes)
        self._idle: list[Bytes] = []

    def write(self, memory: Bytes, offset: int) -> int:
        """Write ``memory`` at ``offset``, a multiple of ALIGN, and whole pages of it; bytes taken before it went no further."""
        whole, tail = self._split(memory)
        if not tail.size:
            return self._whole(self._io.pwritev, [whole], offset)
        bounce = self._take()
        try:
            padded = bounce[: round_up(tail.size)]
            np.copyto(padded[: tail.size], tail)
            padded[tail.size :] = 0
            return min(memory.size, self._whole(self._io.pwritev, [whole, padded], offset))
        finally:
            self._idle.append(bounce)

    def read(self, memory: Bytes, offset: int) -> int:
        """Fill ``memory`` from ``offset``, a multiple of ALIGN; fewer bytes than asked for where the file ends."""
        whole, tail = self._split(memory)
        if not tail.size:
            return self._whole(self._io.preadv, [whole], offset)
        bounce = self._take()
        try:
            padded = bounce[: round_up(tail.size)]
            moved = self._whole(self._io.preadv, [whole, padded], offset)
            np.copyto(tail, padded[: tail.size])
            return min(memory.size, moved)
        finally:
            self._idle.append(bounce)

    def _split(self, memory: Bytes) -> tuple[Bytes, Bytes]:
        """What may be moved from where it lies, and what must be bounced."""
        lies = memory.ctypes.data % self._align == 0
        here = memory.size // self._align * self._align if lies else 0
        return memory[:here], memory[here:]

    def _take(self) -> Bytes:
        try:
            return self._idle.pop()
        except IndexError:
            return aligned(self._bounce_nbytes).numpy()

    def _whole(self, call: Callable[[int, Sequence[Bytes], int], int], buffers: list[Bytes], offset: int) -> int:
        """Repeat ``call`` where it moved less than everything; the bytes moved when it moves no more."""
        total = sum(buffer.size for buffer in buffers)
        moved = stalls = 0
        while moved < total and stalls < STALLS:
            try:
                count = call(self._fd, _from(buffers, moved), offset + moved)
            except InterruptedError:
                continue
            if count == 0:
                break
            # Direct I/O cannot go on within a page: what was moved of it is moved again.
            step = count // self._align * self._align
            stalls = 0 if step else stalls + 1
            moved += step
        return moved


def _from(buffers: list[Bytes], skipped: int) -> list[Bytes]:
    """What is left of ``buffers`` after their first ``skipped`` bytes."""
    left = []
    for buffer in buffers:
        if skipped < buffer.size:
            left.append(buffer[skipped:])
        skipped = max(0, skipped - buffer.size)
    return left
