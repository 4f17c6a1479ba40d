"""Owns the tail of a recording: a mapped file beside the trace that holds the newest rows, also after a kill.

The recorder puts every row into a `Tail`, and `zprof.trace.recovery` reads it back with `rows_of`. It never waits, never grows
and never raises into the training loop; what it cannot hold is only not recovered.

Note: [What a kill leaves]
    Pages of a mapped file belong to the kernel, so they outlive the process without a write. Rows lie in a ring, each with
    its number and a check of all its fields; a row that was being written has the wrong check and is counted as torn. How
    many rows the trace has is written down after they are there, so a few of those in the ring may be in the trace, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import zlib
from contextlib import suppress
from itertools import count
from pathlib import Path

from zprof.rows import Row
from zprof.trace.header import Header

__all__ = ["NBYTES", "SLOTS", "Tail", "rows_of", "run_of", "tail_path"]

#: Rows of the ring, a power of two.
SLOTS = 1 << 15
_NAMES_NBYTES = 1 << 20
_MAGIC = b"\x89ztail\x01\x00"
#: Which run it is of (pid and start), and what this interpreter's hash of a known tuple is: the check of rows is one.
_RUN = struct.Struct("<8sQQq")
#: How many rows the trace has, with a check; two of them, written in turns, so that one is always whole.
_WRITTEN = struct.Struct("<Qq")
_WRITTEN_AT = 64
_NAMES_AT = 128
_NAME = struct.Struct("<II")
_ROWS_AT = _NAMES_AT + _NAMES_NBYTES
#: number, kind, what, key, thread, nbytes, time, ident, check; as the machine has them, which is twice as quick.
_ROW = struct.Struct("@9q")
_LAST_SLOT, _ROW_NBYTES = SLOTS - 1, _ROW.size
NBYTES = _ROWS_AT + SLOTS * _ROW_NBYTES
#: Threads that record at one time may append in another order than they took their numbers in; no more than this.
_SLACK = 1024
_MOST_NAME_NBYTES = 4096
_NO_NAME = 0xFFFFFFFF
_KNOWN = (3, 1 << 40, -7)

_left_open: list[mmap.mmap] = []


def tail_path(path: Path) -> Path:
    """Where the tail of the trace at ``path`` lies."""
    return path.with_name(f"{path.name}.tail")


class Tail:
    """The newest rows of a recording, in a mapped file of its own, mode 0600, beside the trace.

    Raises:
        OSError: it cannot be made, or the disk is full.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = tail_path(path)
        with suppress(FileNotFoundError):
            self.path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        try:
            # All of it now: a page that finds the disk full when it is written to would end the process.
            os.posix_fallocate(self._fd, 0, NBYTES)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._map = mmap.mmap(self._fd, NBYTES)
            self._made = os.fstat(self._fd)
        except (OSError, ValueError):
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise
        self._pack = _ROW.pack_into
        _RUN.pack_into(self._map, 0, _MAGIC, header.pid, header.mono_ns, hash(_KNOWN))
        self._numbers = count(1)
        self._names: dict[str, int] = {}
        self._naming = threading.RLock()
        self._adding = False
        self._names_end = 0
        self._turn = 0

    def put(self, kind: int, what: str, key: str, nbytes: int, time_ns: int, thread: int, ident: int) -> int:
        """Take one row, in any thread; its number."""
        names = self._names
        try:
            at_what, at_key = names[what], names[key]
        except (KeyError, TypeError):
            at_what, at_key = self._name(what), self._name(key)
        number = next(self._numbers)
        try:
            check = hash((number, kind, at_what, at_key, thread, nbytes, time_ns, ident))
            at = _ROWS_AT + (number & _LAST_SLOT) * _ROW_NBYTES
            self._pack(self._map, at, number, kind, at_what, at_key, thread, nbytes, time_ns, ident, check)
        except (struct.error, TypeError, ValueError):
            pass  # No row, which the writer says; or the tail is closed.
        return number

    def written(self, number: int) -> None:
        """The trace has the first ``number`` rows."""
        self._turn ^= 1
        with suppress(ValueError):  # closed
            _WRITTEN.pack_into(self._map, _WRITTEN_AT + self._turn * _WRITTEN.size, number, hash((number, _WRITTEN_AT)))

    def close(self) -> None:
        """Take it away: all is in the trace."""
        with suppress(OSError):
            if os.path.samestat(self._made, self.path.lstat()):
                self.path.unlink()
        self._let_go()

    def leave(self) -> None:
        """In a forked child: the file is its parent's, whose lock on it must not outlive the parent."""
        self._let_go()

    def _let_go(self) -> None:
        with suppress(OSError):
            if os.path.samestat(self._made, os.fstat(self._fd)):
                os.close(self._fd)
                self._map.close()
                return
        # The script closed all descriptors: under their numbers, the mapping's own too, may be files of its by now.
        _left_open.append(self._map)

    def _name(self, name: object) -> int:
        """The number of a name that is new; none where the table is full, or this thread is adding one already."""
        with self._naming:
            if not isinstance(name, str):
                return _NO_NAME
            if name in self._names:
                return self._names[name]
            if self._adding:
                return _NO_NAME
            self._adding = True
            try:
                text = name.encode("utf-8", "backslashreplace")
                end = self._names_end + _NAME.size + len(text)
                if len(text) > _MOST_NAME_NBYTES or end > _NAMES_NBYTES or len(self._names) >= _NAMES_NBYTES:
                    return _NO_NAME
                at = _NAMES_AT + self._names_end
                self._map[at + _NAME.size : at + _NAME.size + len(text)] = text
                _NAME.pack_into(self._map, at, len(text) + 1, zlib.crc32(text))
                self._names_end = end
                self._names[name] = len(self._names)
                return self._names[name]
            except ValueError:
                return _NO_NAME
            finally:
                self._adding = False


def run_of(block: bytes) -> tuple[int, int] | None:
    """(pid, start) of the run a tail is of; None where it is no tail, or of a Python whose checks differ."""
    magic, pid, mono_ns, known = _RUN.unpack_from(block, 0)
    return (pid, mono_ns) if magic == _MAGIC and known == hash(_KNOWN) else None


def rows_of(block: bytes) -> tuple[list[Row], int]:
    """The rows that the trace may lack, in the order they were recorded; and how many were torn, or overwritten since."""
    from zprof.trace.columns import fits

    written = 0
    for turn in range(2):
        number, check = _WRITTEN.unpack_from(block, _WRITTEN_AT + turn * _WRITTEN.size)
        if check == hash((number, _WRITTEN_AT)):
            written = max(written, number)
    names = _names(block)
    found: dict[int, Row] = {}
    odd = 0
    for slot, fields in enumerate(_ROW.iter_unpack(block[_ROWS_AT:])):
        *row, check = fields
        number, kind, what, key, thread, nbytes, time_ns, ident = row
        if not any(fields):
            continue
        if check != hash(tuple(row)) or number & _LAST_SLOT != slot:
            odd += 1
        elif number > written - _SLACK:
            made = Row(kind, names.get(what, ""), names.get(key, ""), nbytes, time_ns, thread, ident)
            if what in names and key in names and fits(made):
                found[number] = made
            else:
                odd += 1
    # A row that lacks between others may be one of those that are wrong: each is counted once.
    lacking = max(found, default=written) - written - sum(number > written for number in found)
    return [found[number] for number in sorted(found)], max(odd, lacking)


def _names(block: bytes) -> dict[int, str]:
    """Names by number, up to the first that is not whole."""
    found: dict[int, str] = {}
    at = _NAMES_AT
    while at + _NAME.size <= _ROWS_AT:
        length, check = _NAME.unpack_from(block, at)
        text = block[at + _NAME.size : at + _NAME.size + length - 1]
        if not 0 < length <= _MOST_NAME_NBYTES + 1 or at + _NAME.size + length - 1 > _ROWS_AT or zlib.crc32(text) != check:
            break
        found[len(found)] = text.decode("utf-8", "replace")
        at += _NAME.size + length - 1
    return found
