"""Owns how the bytes of a snapshot file become plain lists, maps, texts and numbers: pickle, JSON or msgpack.

`snapshot` calls `decoded` and then checks what it got. It never runs what a file says: a pickle is walked opcode by opcode
before anything is built, and only opcodes that make plain values pass.

Note: [Bounded memory]
    A decoder may need much more memory than its input: a pickle can name a slot of its memo in the billions, and one byte
    can make a container of 64. So files are at most `MOST_NBYTES`, memo slots at most `_MOST_SLOTS`, and bytes that could
    make containers at most one in `_SPARSE` (a snapshot has one in forty or less).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from typing import Any

from offload.regular_files import read_regular
from zprof.rows import TraceError

__all__ = ["MOST_NBYTES", "decoded", "read_bytes"]

#: Larger files are refused; torch's own dumps reach this only with stacks of millions of events.
MOST_NBYTES = 1 << 30
_MOST_SLOTS = 1 << 22
_SPARSE = 16
_SLACK = 1 << 16

# Opcodes of one fixed length that make None, booleans, whole numbers, floats and containers, or use the memo. Possessive, and
# in runs, so that matching neither goes back nor grows. A tuple is a pair of small numbers and nothing else: tuples in tuples
# as the key of a map would be hashed by recursion in C, which nothing bounds.
_NUMBER = rb"(?:\x95........)?(?:K.|M..|J....)"
_FIXED = re.compile(
    rb"(?s:" + _NUMBER + _NUMBER + rb"\x86|\(" + _NUMBER + _NUMBER + rb"t"
    rb"|[\x88\x89N\]}\(use\)a\x94]"
    rb"|[Kqh\x80].|M..|J....|G........|j....|\x95........"
    rb"){1,4096}+"
)
# The same for texts and long numbers: opcode -> bytes of length that follow.
_SIZED = {0x8C: 1, ord("X"): 4, 0x8D: 8, 0x8A: 1}
_LONG_BINPUT, _STOP = ord("r"), ord(".")
_LONGEST_TEXT = 1 << 20


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The whole of a regular file.

    Raises:
        TraceError: it cannot be read, or is too large.
    """
    try:
        return read_regular(path, MOST_NBYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: expected a readable file, found: {reason}; check the path") from None


def decoded(data: bytes, subject: str) -> Any:
    """Plain values of a snapshot's bytes, whichever of the three forms they have.

    Raises:
        TraceError: neither of them, more than a snapshot says, or damaged; one line that starts with ``subject``.
    """
    if not data:
        raise TraceError(f"{subject}: expected a snapshot, found an empty file; write it again")
    if data[0] == 0x80:
        return _unpickled(data, subject)
    if data.lstrip(b" \t\r\n")[:1] in (b"{", b"["):
        return _from_json(data, subject)
    return _from_msgpack(data, subject)


def _refused(subject: str, expected: str, found: str) -> TraceError:
    remedy = "write it again with torch.cuda.memory._dump_snapshot"
    return TraceError(f"{subject}: expected {expected}, found {found}; {remedy}")


# --- pickle -------------------------------------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """An unpickler that makes nothing but the language's own containers and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("a class or function")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a persistent object")


def _unpickled(data: bytes, subject: str) -> Any:
    _sparse(data, data.count(b"}") + data.count(b"]") + data.count(b")"), subject)
    end = _walked(data, subject)
    try:
        return _Plain(io.BytesIO(data[:end])).load()
    # A damaged pickle makes the unpickler raise almost anything; whatever it is, nothing has run.
    except Exception as error:
        raise _refused(subject, "a whole pickle", _short(error)) from None


def _walked(data: bytes, subject: str) -> int:
    """Where a pickle of plain values ends; raises at the first opcode that could do anything else."""
    at, view = 0, memoryview(data)
    while True:
        match = _FIXED.match(data, at)
        if match:
            at = match.end()
            continue
        if at >= len(data):
            raise _refused(subject, "a whole pickle", f"its end at byte {at}")
        opcode = data[at]
        if opcode == _STOP:
            return at + 1
        if opcode in _SIZED:
            width = _SIZED[opcode]
            nbytes = int.from_bytes(view[at + 1 : at + 1 + width], "little")
            if nbytes > _LONGEST_TEXT:
                raise _refused(subject, f"texts of at most {_LONGEST_TEXT} bytes", f"{nbytes} at byte {at}")
            at += 1 + width + nbytes
        elif opcode == _LONG_BINPUT:
            slot = int.from_bytes(view[at + 1 : at + 5], "little")
            # A pickler numbers slots as it goes, and each costs it two bytes.
            if slot > min(at, _MOST_SLOTS):
                raise _refused(subject, "memo slots in order", f"slot {slot} at byte {at}")
            at += 5
        else:
            raise _refused(subject, "a pickle of lists, maps, texts and numbers", f"opcode {bytes([opcode])!r} at byte {at}")


def _sparse(data: bytes, containers: int, subject: str) -> None:
    if containers > len(data) // _SPARSE + _SLACK:
        raise _refused(subject, "a snapshot", f"{containers} containers in {len(data)} bytes")


def _short(error: BaseException) -> str:
    """A decoder's complaint as part of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(sign if sign.isprintable() else "?" for sign in text[:120])


# --- JSON and msgpack -----------------------------------------------------------------------------------------------------


def _from_json(data: bytes, subject: str) -> Any:
    _sparse(data, data.count(b"{") + data.count(b"["), subject)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _refused(subject, "JSON", _short(error)) from None


def _from_msgpack(data: bytes, subject: str) -> Any:
    # Imported late: only this form needs it.
    import msgpack

    budget = len(data) // _SPARSE + _SLACK
    count = 0

    def counted(made: Any) -> Any:
        nonlocal count
        count += 1
        if count > budget:
            raise ValueError(f"{count} containers in {len(data)} bytes")
        return made

    def refuse(code: int, body: bytes) -> Any:
        raise ValueError(f"extension type {code}")

    try:
        return msgpack.unpackb(
            data, strict_map_key=False, object_hook=counted, list_hook=counted, ext_hook=refuse, max_ext_len=0
        )
    # msgpack's errors have no common base; what it refuses is not a snapshot.
    except Exception as error:
        raise _refused(subject, "a pickle, JSON or msgpack snapshot", _short(error)) from None
