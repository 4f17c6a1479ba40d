"""Owns the columns: how a chunk of rows becomes a payload of narrow integers and a table of names, and comes back.

The writer encodes and the reader decodes. A chunk stands alone, so that a lost one takes none of the others with it; nothing
here touches a file, and decoding never loops over rows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zprof.rows import NO_PLACE, Row, RowKind, place_of
from zprof.trace.frames import MOST_ROWS, packed, unpacked

__all__ = ["MOST_ROWS", "Names", "Rows", "bounded", "decoded", "encoded", "fits", "narrow", "packed_columns", "wide"]

#: Bounds of a row's numbers, so that no reader's sum or difference can overflow.
MOST_NBYTES = 1 << 56
MOST_TIME = 1 << 62
MOST_SMALL = 1 << 31
_MOST_NAME = 1000
#: The most different names a reader keeps.
_MOST_NAMES = 1 << 20
_COLUMNS = ("kind", "what", "key", "nbytes", "time_ns", "thread", "ident")
_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as columns, all of one length.

    Attributes:
        kind: uint8, a `RowKind`. what, key: int32, positions in the trace's ``strings``.
        nbytes, ident: int64. time_ns: int64, monotonic clock, absolute; not strictly sorted across threads. thread: int32.
        place: int8, of COUNTER, ALLOC and FREE rows that say what is held the number in `zprof.rows.PLACES`; else -1.
    """

    kind: NDArray[np.uint8]
    what: NDArray[np.int32]
    key: NDArray[np.int32]
    nbytes: _Int64s
    time_ns: _Int64s
    thread: NDArray[np.int32]
    ident: _Int64s
    place: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, which: slice | NDArray[np.intp]) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, column.name)[which] for column in fields(self)))


class Names:
    """Every name of a trace, once; grows while chunks are decoded, and a name keeps its position."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        #: Of each name the place that it is as a ``what``; at least as long as the names.
        self.places: NDArray[np.int8] = np.zeros(0, np.int8)
        self._position: dict[str, int] = {}

    def positions(self, table: list[str]) -> NDArray[np.int32]:
        """Where the names of a chunk's own table are; ValueError when there are too many."""
        known = self._position
        found = list(map(known.get, table))
        if None in found:
            first = len(self.strings)
            for name in table:
                if known.setdefault(name, len(known)) == len(self.strings):
                    self.strings.append(name)
            self._place(first)
            if len(known) > _MOST_NAMES:
                raise ValueError(f"the trace has more than {_MOST_NAMES} names")
            found = list(map(known.get, table))
        return np.array(found, np.int32)

    def _place(self, first: int) -> None:
        """Learn which of the names from number ``first`` on are places."""
        if len(self.places) < len(self.strings):
            # Twice what is needed: names come a few a chunk, and a copy each time would be quadratic.
            self.places = np.append(self.places[:first], np.zeros(2 * len(self.strings) - first, np.int8))
        self.places[first : len(self.strings)] = list(map(place_of, self.strings[first:]))


def fits(row: Row) -> bool:
    """Whether a row is one: known kind, texts, and numbers within bounds."""
    kind, what, key, nbytes, time_ns, thread, ident = row
    return (
        isinstance(what, str)
        and isinstance(key, str)
        and all(hasattr(number, "__index__") for number in (kind, nbytes, time_ns, thread, ident))
        and 0 <= kind < len(RowKind)
        and -MOST_NBYTES < nbytes < MOST_NBYTES
        and 0 <= time_ns < MOST_TIME
        and 0 <= thread < MOST_SMALL
        and 0 <= ident < MOST_TIME
    )


def encoded(rows: Sequence[Row]) -> bytes:
    """A chunk's payload, of 1 to `MOST_ROWS` rows.

    Raises:
        ValueError, TypeError, OverflowError: a row does not fit; `fits` says which.
    """
    kind, what, key, nbytes, time_ns, thread, ident = zip(*rows, strict=True)
    table = dict.fromkeys(what)
    table.update(dict.fromkeys(key))
    names = list(table)
    place = {name: index for index, name in enumerate(names)}.__getitem__
    numbers: dict[str, _Int64s] = {
        "kind": _integers(kind),
        "what": _integers(tuple(map(place, what))),
        "key": _integers(tuple(map(place, key))),
        "nbytes": _integers(nbytes),
        "time_ns": _integers(time_ns),
        "thread": _integers(thread),
        "ident": _integers(ident),
    }
    return packed_columns(numbers, names)


def packed_columns(numbers: dict[str, _Int64s], names: list[str]) -> bytes:
    """The payload of columns whose ``what`` and ``key`` are positions in ``names``; ValueError where one is out of bounds."""
    for name, (low, high) in _BOUNDS.items():
        column = numbers[name]
        if int(column.min()) < low or int(column.max()) >= high:
            raise ValueError(f"{name} out of bounds")
    time_ns = numbers["time_ns"]
    start = int(time_ns[0])
    steps = np.diff(time_ns, prepend=time_ns[0])
    columns = [narrow(steps if name == "time_ns" else numbers[name]) for name in _COLUMNS]
    return packed([[bounded(name) for name in names], start, *columns])


def decoded(payload: bytes, count: int, names: Names) -> Rows:
    """The rows of a payload, their names entered in ``names``.

    Raises:
        ValueError: the payload is not what `encoded` makes.
    """
    whole = unpacked(payload)
    if not (isinstance(whole, list) and len(whole) == 2 + len(_COLUMNS) and 0 < count <= MOST_ROWS):
        raise ValueError("it is not a chunk of rows")
    table, start = whole[0], whole[1]
    if not (isinstance(table, list) and all(type(name) is str for name in table) and len(table) <= 2 * MOST_ROWS):
        raise ValueError("its table of names is invalid")
    if not (type(start) is int and 0 <= start < MOST_TIME):
        raise ValueError("its time is out of bounds")
    numbers = {
        name: wide(column, count, name, *(_BOUNDS[name] if name != "time_ns" else (-MOST_TIME, MOST_TIME)))
        for name, column in zip(_COLUMNS, whole[2:], strict=True)
    }
    time_ns = np.cumsum(numbers["time_ns"])
    time_ns += start
    if int(time_ns.min()) < 0 or int(time_ns.max()) >= MOST_TIME:
        raise ValueError("its times are out of bounds")
    if max(int(numbers["what"].max()), int(numbers["key"].max())) >= len(table):
        raise ValueError("a name is not in its table")
    position = names.positions(table)
    kind = numbers["kind"].astype(np.uint8)
    place = names.places[position][numbers["what"]]
    # A span or a point may have any name.
    place[(kind < RowKind.COUNTER) | (kind == RowKind.SPAN)] = NO_PLACE
    return Rows(
        kind,
        position[numbers["what"]],
        position[numbers["key"]],
        numbers["nbytes"],
        time_ns,
        numbers["thread"].astype(np.int32),
        numbers["ident"],
        place,
    )


#: Of the columns as they are written; the bounds of times are those of the steps between them.
_BOUNDS = {
    "kind": (0, len(RowKind)),
    "what": (0, 2 * MOST_ROWS),
    "key": (0, 2 * MOST_ROWS),
    "nbytes": (1 - MOST_NBYTES, MOST_NBYTES),
    "time_ns": (0, MOST_TIME),
    "thread": (0, MOST_SMALL),
    "ident": (0, MOST_TIME),
}


def _integers(column: Sequence[int]) -> _Int64s:
    # Unlike numpy this refuses fractions, and it is as fast.
    return np.frombuffer(array("q", column), np.int64)


def narrow(column: _Int64s) -> list[object]:
    """[base, bytes]: each value is base plus an unsigned number of the narrowest width; none at all where all are equal."""
    low = int(column.min())
    span = int(column.max()) - low
    width = 0 if span == 0 else 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8
    if not width:
        return [low, b""]
    return [low, (column - low).astype(f"<u{width}").tobytes()]


def wide(column: Any, count: int, name: str, low: int, high: int) -> _Int64s:
    """The ``count`` values of what `narrow` made, each from ``low`` to below ``high``.

    Raises:
        ValueError: it is no column, or not of such values.
    """
    if not (isinstance(column, list) and len(column) == 2 and type(column[0]) is int and type(column[1]) is bytes):
        raise ValueError(f"its column {name} is invalid")
    base, raw = column
    width, odd = divmod(len(raw), count)
    if odd or width not in (0, 1, 2, 4, 8) or not low <= base < high:
        raise ValueError(f"its column {name} is out of bounds")
    if not width:
        return np.full(count, base, np.int64)
    # Wraps where a mutated file says so, and is found out of bounds then.
    values: _Int64s = np.frombuffer(raw, f"<u{width}").astype(np.int64)
    if width == 8 and int(values.min()) < 0:
        raise ValueError(f"its column {name} is out of bounds")
    values += base
    if base + (1 << 8 * width) > high and (int(values.max()) >= high or int(values.min()) < low):
        raise ValueError(f"its column {name} is out of bounds")
    return values


def bounded(name: str) -> str:
    """An over-long name is shortened; a check of the whole keeps it distinct from others with the same beginning."""
    if len(name) <= _MOST_NAME:
        return name
    return f"{name[: _MOST_NAME - 9]}~{zlib.crc32(name.encode('utf-8', 'backslashreplace')):08x}"

