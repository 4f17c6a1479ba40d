"""Owns the frame: the envelope in which everything of a trace file lies, and what keeps a damaged one from doing harm.

The writer seals frames and the reader opens them. It never knows what a payload means, and never allocates what a file merely
claims to hold.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

__all__ = [
    "HEAD_NBYTES",
    "MAGIC",
    "MARK",
    "MOST_ROWS",
    "Frame",
    "FrameKind",
    "head_at",
    "most",
    "opened",
    "packed",
    "sealed",
    "unpacked",
]

#: The most rows of a chunk.
MOST_ROWS = 4096
#: A file begins with this and the version as two bytes.
MAGIC = b"\x89zprof"
#: Every frame begins with this: no UTF-8 text holds it, so a reader finds the next frame after damage.
MARK = b"\xf5zp\xfa"

_HEAD = struct.Struct("<4sBBHIIII")
HEAD_NBYTES = _HEAD.size
_ZIPPED = 1
#: A payload may grow so much when unzipped and no more: zlib alone would allow a thousandfold.
_MOST_RATIO = 64


class FrameKind(IntEnum):
    """What a payload is; a reader passes over kinds it does not know."""

    HEADER = 1
    ROWS = 2
    NOTE = 3


_MOST = {FrameKind.HEADER: 16 << 20, FrameKind.ROWS: 4 << 20}
_MOST_COUNT = 4096


def most(kind: int) -> int:
    """Bytes of the largest payload of a kind, unzipped."""
    return _MOST.get(kind, 16 << 20)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class Frame:
    """The head of a frame whose own check was right.

    ``sequence`` numbers the chunks of a run from 1 and never falls within a file; ``count`` is the rows of a chunk.
    """

    offset: int
    kind: int
    flags: int
    count: int
    sequence: int
    nbytes: int
    check: int

    @property
    def end(self) -> int:
        return self.offset + HEAD_NBYTES + self.nbytes


def sealed(kind: FrameKind, payload: bytes, *, sequence: int = 0, count: int = 0, zipped: bool = True) -> bytes:
    """A frame of ``payload``, zipped where asked and where that saves at least an eighth."""
    flags = 0
    if zipped and len(payload) > 256:
        smaller = zlib.compress(payload, 1)
        if len(smaller) < len(payload) - len(payload) // 8 and len(payload) <= len(smaller) * _MOST_RATIO:
            payload, flags = smaller, _ZIPPED
    start = _HEAD.pack(MARK, kind, flags, count, sequence, len(payload), zlib.crc32(payload), 0)[:-4]
    return b"".join((start, zlib.crc32(start).to_bytes(4, "little"), payload))


def head_at(block: bytes, at: int, offset: int) -> Frame | None:
    """The head at ``block[at:]``, which lies at ``offset`` of its file; None where there is none."""
    if at + HEAD_NBYTES > len(block):
        return None
    mark, kind, flags, count, sequence, nbytes, check, own = _HEAD.unpack_from(block, at)
    if mark != MARK or own != zlib.crc32(block[at : at + HEAD_NBYTES - 4]):
        return None
    if flags & ~_ZIPPED or nbytes > most(kind) or (kind == FrameKind.ROWS) != (0 < count <= _MOST_COUNT):
        return None
    return Frame(offset, kind, flags, count, sequence, nbytes, check)


def opened(frame: Frame, payload: bytes) -> bytes:
    """The payload as it was before `sealed`.

    Raises:
        ValueError: its check is wrong, or it unzips to more than its kind may hold.
    """
    if len(payload) != frame.nbytes or zlib.crc32(payload) != frame.check:
        raise ValueError("its check is wrong")
    if not frame.flags & _ZIPPED:
        return payload
    bound = min(most(frame.kind), frame.nbytes * _MOST_RATIO)
    machine = zlib.decompressobj()
    try:
        unzipped = machine.decompress(payload, bound)
    except zlib.error:
        raise ValueError("it cannot be decompressed") from None
    if not machine.eof or machine.unused_data:
        raise ValueError(f"it decompresses to more than {bound} bytes, or ends early")
    return unzipped


def packed(value: object) -> bytes:
    """``value`` as msgpack; text that is no Unicode (a file name of odd bytes) is written with backslashes."""
    written: bytes = msgpack.packb(value, unicode_errors="backslashreplace")
    return written


def unpacked(payload: bytes) -> Any:
    """The value ``payload`` holds: plain maps with text keys, lists, texts, bytes and numbers.

    Raises:
        ValueError: it is not msgpack, or would take far more memory than its own size.
    """
    # A quarter of the bytes may open a list or map at most: sixteen megabytes of empty maps would be a gigabyte.
    if len(payload) > 1 << 18 and len(payload) - len(payload.translate(None, _CONTAINERS)) > len(payload) // 4:
        raise ValueError("it holds too many lists and maps")
    try:
        # A list's declared length is allocated before its elements are seen. Walking over the payload first, which
        # allocates nothing, proves that all the elements declared are there.
        walker = msgpack.Unpacker(max_buffer_size=len(payload) + 1, read_size=1)
        walker.feed(payload)
        walker.skip()
        if walker.tell() != len(payload):
            raise ValueError("bytes are left over")
        return msgpack.unpackb(payload, strict_map_key=True, max_ext_len=0, use_list=True)
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not msgpack: {str(error)[:80] or type(error).__name__}") from None


_CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
