"""Owns the notes of an open trace file: each is read once, and the large ones again when their body is asked for.

`zprof.trace.reader` answers with them. It never keeps a snapshot of an allocator in memory, and never more than a bound of what
a forged file can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zprof.trace.framefile import FrameFile
from zprof.trace.frames import unpacked

__all__ = ["Note", "Notes"]

#: Payloads above it are large: of those the name alone is kept. Payloads kept in all, and notes of which anything is.
_LARGE = 1 << 14
_MOST_NBYTES = 1 << 22
_MOST_NOTES = 1 << 16


class Note(NamedTuple):
    """A named map that a run left beside its rows."""

    name: str
    body: dict[str, Any]


class Notes:
    """The notes of ``file``, which may grow; one that cannot be read is damage of it, and is left out."""

    def __init__(self, file: FrameFile) -> None:
        self._file = file
        #: By offset the note, the name of a large one, or None where it cannot be read.
        self._known: dict[int, Note | str | None] = {}
        self._kept_nbytes = 0

    def named(self, name: str | None) -> Iterator[Note]:
        """Those of that name, or all, in the order they were written."""
        for offset in self._file.notes:
            known = self._known.get(offset, "")
            # No note is called "": it is one that is not known yet, or large.
            if isinstance(known, str) and known in ("", name or known):
                known = self._read(offset)
            if isinstance(known, Note) and name in (None, known.name):
                yield known

    def _read(self, offset: int) -> Note | None:
        nbytes = 0
        try:
            _, payload = self._file.read(offset)
            nbytes = len(payload)
            pair = unpacked(payload)
            if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is str and type(pair[1]) is dict):
                raise ValueError("it is not a note")
            note = Note(pair[0], pair[1])
        except ValueError as error:
            self._file.damaged(offset, str(error))
            note = None
        if len(self._known) < _MOST_NOTES:
            small = nbytes <= _LARGE and self._kept_nbytes + nbytes <= _MOST_NBYTES
            self._kept_nbytes += nbytes if small else 0
            self._known[offset] = note if small or note is None else note.name
        return note
