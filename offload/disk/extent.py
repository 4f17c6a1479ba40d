"""One extent of the scratch file: the requests under way on it, the moves of its blocks, the checksums of what it holds, and
what it holds kept for one who reads it later, while its block goes on in another extent.

``disk_tier.py`` runs the moves in threads.

Note: [Trusting the disk]
    The checksum of each CHECK bytes stays in memory, for the file lives no longer than its process.  It is computed from the
    source before a write and compared with what a read brought, so a lost, torn or misdirected write, a truncated file and
    a flipped bit are all found, at the latest when the bytes are wanted.  From the call of a write until all of it has
    ended well its chunks count as unwritten: bytes of a write that failed half way are never handed out.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torch import Tensor
from xxhash import xxh3_64_intdigest

from offload.disk.scratch import Bytes, Mover, trouble
from offload.errors import TierError
from offload.free_ranges import Space
from offload.pages import ALIGN, aligned, round_up
from offload.text import as_size
from offload.work import Ending, HostWork

__all__ = ["CHECK", "Extent", "ExtentFile", "Kept", "KeptRange", "ReadAhead", "Request", "Verb", "taken_by"]

#: A checksum covers so many bytes of an extent: whole chunks can be rewritten alone.
CHECK = 1 << 20

_CHANGED = "the file was changed or the device fails: the block is lost, load the last checkpoint"


class Verb(Enum):
    """What a request does, as its events and errors call it."""

    READ = "read"
    WRITE = "write"


class Request(Ending):
    """A transfer under way; dropping it neither stops the transfer nor frees the memory the transfer still uses."""

    def __init__(self, verb: Verb, key: str, offset: int, memory: Bytes) -> None:
        super().__init__()
        self.verb, self.key, self.offset, self.nbytes = verb, key, offset, memory.size
        self.memory: Bytes | None = memory
        self.error: TierError | None = None
        # Bytes whose blocks have not ended yet; the disk tier's lock guards it.
        self.left = self.nbytes
        self._pid = os.getpid()

    def wait(self) -> None:
        """Block until the memory may be used again.

        Raises:
            TierError: the transfer failed; names the block, the file and the place.
        """
        self.join()
        if self.error is not None:
            # A new one each time, or its traceback would keep the frames of all who ever waited.
            raise TierError(*self.error.args) from self.error.__cause__

    synchronize = wait

    def join(self) -> None:
        """Block until it is over, well or badly."""
        if not self.done() and os.getpid() != self._pid:
            raise TierError(
                f"disk tier cannot {self.verb.value} {self.key}. Expected process {self._pid}, which began it, found a fork "
                "of it; wait before forking"
            )
        super().join()

    def fail(self, error: BaseException) -> None:
        """The first thing that went wrong is what ``wait`` raises."""
        # Frames hold the memory of the transfer, which must not live as long as its error.
        for each in (error, error.__cause__):
            if each is not None:
                each.__traceback__ = None
        if self.error is None and isinstance(error, TierError):
            self.error = error
        elif self.error is None:
            self.error = TierError(f"disk tier cannot {self.verb.value} {self.key}: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Nothing uses the memory any more; what is to follow begins."""
        self.memory = None
        super().end()

    def excludes(self, other: Request) -> bool:
        """Whether the two must not be under way at once."""
        apart = self.offset + self.nbytes <= other.offset or other.offset + other.nbytes <= self.offset
        return not apart and Verb.WRITE in (self.verb, other.verb)


class Extent:
    """A range of the file and what it holds; known by identity, so one that was freed is not mistaken for its successor.

    Moves of different chunks may run at once.

    Attributes:
        offset: in the file, a multiple of ALIGN.
        nbytes: exact; what it takes of the file is whole pages.
        flying: the requests under way.
        kept: readers for whom it stays as it is.
        outgrown: freed, but kept for a reader.  The disk tier's lock guards these three.
    """

    __slots__ = ("_path", "_sums", "_written", "flying", "kept", "key", "nbytes", "offset", "outgrown")

    def __init__(self, offset: int, nbytes: int, key: str, path: Path) -> None:
        self.offset, self.nbytes, self.key, self._path = offset, nbytes, key, path
        self.flying: list[Request] = []
        self.kept: list[Ending] = []
        self.outgrown = False
        chunks = -(-nbytes // CHECK)
        self._sums = array("Q", bytes(8 * chunks))
        self._written = bytearray(chunks)

    def __repr__(self) -> str:
        return f"Extent({self.offset}, {self.nbytes}, {self.key!r})"

    def forget(self, request: Request) -> None:
        """The chunks of a write hold nothing that may be read."""
        first, last = request.offset // CHECK, -(-(request.offset + request.nbytes) // CHECK)
        self._written[first:last] = bytes(last - first)

    def move(self, request: Request, mover: Mover, start: int, stop: int) -> None:
        """Transfer bytes ``start`` to ``stop`` of the request: whole chunks, or up to its end.

        Raises:
            TierError: they could not be transferred, or are not those that were written.
        """
        assert request.memory is not None
        memory = request.memory[start:stop]
        at = request.offset + start
        subject = f"disk tier cannot {request.verb.value} {request.key} ({as_size(self.nbytes)})"
        try:
            if request.verb is Verb.WRITE:
                self._write(mover, memory, at, subject)
            else:
                self._read(mover, memory, at, subject)
        except OSError as error:
            where = self.offset + at
            raise TierError(f"{subject}: byte {where} of {self._path}: {trouble(error)}") from error

    def _write(self, mover: Mover, memory: Bytes, at: int, subject: str) -> None:
        # Before the write: bytes that somebody changes meanwhile must not count as those that were meant.
        sums = array("Q", (xxh3_64_intdigest(chunk.data) for chunk in _checked(memory)))
        where = self.offset + at
        moved = mover.write(memory, where)
        if moved < memory.size:
            raise TierError(
                f"{subject}. Expected {memory.size} bytes to be written at byte {where} of {self._path}, found {moved}; "
                "choose another [disk] path"
            )
        first = at // CHECK
        self._sums[first : first + len(sums)] = sums
        self._written[first : first + len(sums)] = b"\1" * len(sums)

    def _read(self, mover: Mover, memory: Bytes, at: int, subject: str) -> None:
        first, where = at // CHECK, self.offset + at
        hollow = self._written.find(0, first, first + -(-memory.size // CHECK))
        if hollow >= 0:
            raise TierError(
                f"{subject}: byte {self.offset + hollow * CHECK} of {self._path} was never written, or its write "
                "failed or has not finished; write the block again"
            )
        moved = mover.read(memory, where)
        if moved < memory.size:
            raise TierError(
                f"{subject}. Expected {memory.size} bytes at byte {where} of {self._path}, found {moved} before the end; "
                f"{_CHANGED}"
            )
        for index, chunk in enumerate(_checked(memory)):
            found, expected = xxh3_64_intdigest(chunk.data), self._sums[first + index]
            if found != expected:
                begin = where + index * CHECK
                raise TierError(
                    f"{subject}. Expected checksum {expected:016x} of bytes {begin} to {begin + chunk.size} of {self._path}, "
                    f"found {found:016x}; {_CHANGED}"
                )


class ExtentFile:
    """Where extents lie in a file, and how much of it they take.

    Attributes:
        limit: bytes it may hold; None is all that the disk has.
        used: bytes that extents take now, in whole pages; ``high_water`` is the most it ever was.
        rounded: bytes of those beyond what was asked for, because extents end on pages of their own.
    """

    def __init__(self, path: Path, limit: int | None, start: int) -> None:
        self.path, self.limit = path, limit
        self.used = self.high_water = self.rounded = 0
        self._space = Space(start)

    @property
    def reserved(self) -> int:
        """Bytes the file has reserved, used or not."""
        return self._space.end - ALIGN

    def _take(self, nbytes: int, key: str) -> Extent | None:
        """A range that is free; None where none is large enough."""
        taken = taken_by(nbytes)
        start = self._space.take(taken)
        if start is None:
            return None
        self.used += taken
        self.rounded += taken - nbytes
        self.high_water = max(self.high_water, self.used)
        return Extent(start, nbytes, key, self.path)

    def _give(self, extent: Extent) -> None:
        taken = taken_by(extent.nbytes)
        self._space.give(extent.offset, taken)
        self.used -= taken
        self.rounded -= taken - extent.nbytes


def taken_by(nbytes: int) -> int:
    """What an extent takes of the file; even an empty one has a place of its own."""
    return max(ALIGN, round_up(nbytes))


def _checked(memory: Bytes) -> list[Bytes]:
    return [memory[start : start + CHECK] for start in range(0, memory.size, CHECK)]


# --- kept for a reader --------------------------------------------------------------------------------------------------

#: Read at once, and how many of those are in memory: one is used while the others are read, so that neither waits.
_WINDOW, _WINDOWS = 8 * CHECK, 3


class Kept(Ending):
    """An extent's bytes as they are now; over once it is closed.

    Args:
        read: starts filling memory from an offset, as ``Disk.read``.
        release: the extent is needed no longer.
    """

    def __init__(self, extent: Extent, read: Callable[[Tensor, int], HostWork], release: Callable[[Kept], None]) -> None:
        super().__init__()
        self.extent, self.read, self._release = extent, read, release

    def close(self) -> None:
        """Idempotent; not while it is read."""
        if not self.done():
            self._release(self)
            self.end()


@dataclass(frozen=True, slots=True)
class KeptRange:
    """Bytes ``start`` to ``stop`` of what an extent held."""

    kept: Kept
    start: int
    stop: int

    def windows(self) -> Iterator[KeptRange]:
        """What is read at once, in order, so that it has all of this."""
        for first in range(self.start - self.start % _WINDOW, self.stop, _WINDOW):
            yield KeptRange(self.kept, first, min(first + _WINDOW, self.kept.extent.nbytes))

    def __len__(self) -> int:
        return self.stop - self.start


class ReadAhead:
    """Kept ranges that are read once and in order, on any one thread: the next are under way while one is used.

    Args:
        ranges: all of them; none is closed before it was read.
    """

    def __init__(self, ranges: Sequence[KeptRange]) -> None:
        planned: deque[KeptRange] = deque()
        for window in (window for each in ranges for window in each.windows()):
            # Ranges that lie side by side share one.
            if not planned or planned[-1] != window:
                planned.append(window)
        self._ranges, self._planned = deque(ranges), planned
        self._nbytes = max(map(len, planned), default=0)
        self._begun: deque[tuple[KeptRange, Tensor, HostWork]] = deque()
        self._open: tuple[KeptRange, Tensor] | None = None
        self._idle: list[Tensor] = []

    def chunks(self, place: KeptRange) -> Iterator[Tensor]:
        """The bytes of ``place``, the next of the ranges, in order, uint8; a chunk is valid until the next is asked for.

        Raises:
            TierError: they cannot be read, or are not what was written.
        """
        planned = self._ranges.popleft()
        assert place == planned, f"expected {planned} to be asked for, found {place}"
        for window in place.windows():
            memory = self._opened(window)
            yield memory[max(place.start - window.start, 0) : min(place.stop, window.stop) - window.start]
        if not self._ranges:
            self.close()

    def _opened(self, window: KeptRange) -> Tensor:
        if self._open is None or self._open[0] != window:
            if self._open is not None:
                self._idle.append(self._open[1])
                self._open = None
            self._begin()
            found, memory, work = self._begun[0]
            assert found == window, f"expected {window} to be read, found {found}"
            # Nothing of it counts until all of it is there.
            work.synchronize()
            self._begun.popleft()
            self._open = window, memory
        return self._open[1]

    def _begin(self) -> None:
        """Read as far ahead as there is memory for."""
        while self._planned and len(self._begun) < _WINDOWS:
            window = self._planned[0]
            memory = self._idle.pop() if self._idle else aligned(self._nbytes)
            work = window.kept.read(memory[: len(window)], window.start)
            self._begun.append((window, memory, work))
            self._planned.popleft()

    def close(self) -> None:
        """Nothing is read any more when this returns, and its memory is free; idempotent."""
        self._planned.clear()
        for _, _, work in self._begun:
            with suppress(TierError):
                work.synchronize()
        self._begun.clear()
        self._idle.clear()
        self._open = None
