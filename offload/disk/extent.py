"""One extent of the scratch file: the requests under way on it, the moves of its blocks, and the checksums of what it holds.

``disk_tier.py`` keeps an ``ExtentState`` for every extent and runs its moves in threads.  It never hands out bytes other than
those last written, never decides where an extent lies, and never waits.

Note: [Trusting the disk]
    The checksum of each CHECK bytes stays in memory, for the file lives no longer than its process.  It is computed from the
    source before a write and compared with what a read brought, so a lost, torn or misdirected write, a truncated file and
    a flipped bit are all found, at the latest when the bytes are wanted.  From the call of a write until all of it has
    ended well its chunks count as unwritten: bytes of a write that failed half way are never handed out.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from xxhash import xxh3_64_intdigest

from offload.disk.io import Bytes, Mover
from offload.disk.scratch import trouble
from offload.errors import TierError
from offload.text import as_size
from offload.work import Ending

__all__ = ["CHECK", "Extent", "ExtentState", "Request", "Verb"]

#: A checksum covers so many bytes of an extent: whole chunks can be rewritten alone.
CHECK = 1 << 20

_CHANGED = "the file was changed or the device fails: the block is lost, load the last checkpoint"


class Verb(Enum):
    """What a request does, as its events and errors call it."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the file; it is known by identity, so one that was freed is not mistaken for its successor.

    Attributes:
        offset: in the file, a multiple of ALIGN.
        nbytes: exact; what it takes of the file is whole pages.
    """

    offset: int
    nbytes: int


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


class ExtentState:
    """An allocated extent and what it holds; moves of different chunks may run at once.

    Attributes:
        flying: the requests under way.
        kept: readers for whom it stays as it is.  The disk tier's lock guards both.
    """

    __slots__ = ("_path", "_sums", "_written", "extent", "flying", "kept", "key")

    def __init__(self, extent: Extent, key: str, path: Path) -> None:
        chunks = -(-extent.nbytes // CHECK)
        self.extent, self.key = extent, key
        self.flying: list[Request] = []
        self.kept: list[Ending] = []
        self._path = path
        self._sums = array("Q", bytes(8 * chunks))
        self._written = bytearray(chunks)

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
        subject = f"disk tier cannot {request.verb.value} {request.key} ({as_size(self.extent.nbytes)})"
        try:
            if request.verb is Verb.WRITE:
                self._write(mover, memory, at, subject)
            else:
                self._read(mover, memory, at, subject)
        except OSError as error:
            where = self.extent.offset + at
            raise TierError(f"{subject}: byte {where} of {self._path}: {trouble(error)}") from error

    def _write(self, mover: Mover, memory: Bytes, at: int, subject: str) -> None:
        # Before the write: bytes that somebody changes meanwhile must not count as those that were meant.
        sums = array("Q", (xxh3_64_intdigest(chunk.data) for chunk in _checked(memory)))
        where = self.extent.offset + at
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
        first, where = at // CHECK, self.extent.offset + at
        hollow = self._written.find(0, first, first + -(-memory.size // CHECK))
        if hollow >= 0:
            raise TierError(
                f"{subject}: byte {self.extent.offset + hollow * CHECK} of {self._path} was never written, or its write "
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


def _checked(memory: Bytes) -> list[Bytes]:
    return [memory[start : start + CHECK] for start in range(0, memory.size, CHECK)]

