"""Finds uses of memory that nothing orders: a read or write that may overtake the last conflicting one, memory freed too soon.

A `Listener` of a machine: tests and ``zhooks.simulate`` add it.  It follows what streams were told to wait for, never clocks:
a race that happens to come out right in time is one all the same.

Source: happens-before by vector clocks, as torch's CUDA sanitizer has it (``torch/cuda/_sanitizer.py``), here by bytes instead
of storages, and with the caching allocator's rule: memory goes back to the stream that took it, in that stream's order.

Note: [Order]
    Each stream counts what it is given, and knows of every other how far that had come at the latest moment it waited for.
    The host is a stream that all others wait for: what is issued comes after all the host did and waited for.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from offload.virtual.machine import Access, Happening, Moment, Stream
from offload.virtual.memory import ACCELERATOR

__all__ = ["Race", "Races", "Use"]

#: How far each stream has come, by number.
Clock = dict[int, int]
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of memory: what used it, on which stream, and where the host issued it."""

    what: str
    stream: str
    where: str
    writes: bool

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} it on stream {self.stream}{self.where}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of the same bytes that nothing orders, or memory given back before its last use.

    Attributes:
        kind: "write after read", "read after write", "write after write" or "freed in use".
        nbytes: how many bytes both use.
    """

    kind: str
    nbytes: int
    first: Use
    second: Use | None

    def __str__(self) -> str:
        if self.second is None:
            then = "the next use of its memory"
            return f"freed in use, {self.nbytes} B: {self.first}, and nothing orders that before {then}"
        return f"{self.kind}, {self.nbytes} B: {self.first}; {self.second}, and nothing makes the second wait for the first"


@dataclass(slots=True)
class _Noted:
    """The last uses of a run of bytes: the write, and reads since, by stream."""

    start: int
    stop: int
    write: tuple[int, int, Use] | None = None
    reads: dict[int, tuple[int, Use]] = field(default_factory=dict)

    def cut(self, at: int) -> _Noted:
        """What begins at ``at``; this ends there."""
        rest = _Noted(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest


class Races:
    """What was found so far; a race between the same two lines is found once.

    Attributes:
        found: in the order in which the host issued the second use.
        checked: uses that were looked at: a check that saw nothing proves nothing.
    """

    def __init__(self) -> None:
        self.found: list[Race] = []
        self.checked = 0
        self._known: set[tuple[str, str, str]] = set()
        self._clocks: dict[int, Clock] = {}
        self._noted: list[_Noted] = []
        self._starts: list[int] = []
        self._owner: dict[int, Stream] = {}
        self._kept: set[tuple[int, int]] = set()
        #: Uses of memory that was freed and may be taken again on a stream: bytes, the user's stream and count, the use.
        self._given_back: dict[int, list[tuple[int, int, int, Use]]] = {}

    # Order.

    def _clock(self, stream: Stream) -> Clock:
        return self._clocks.setdefault(stream.number, {})

    def recorded(self, moment: Moment, stream: Stream) -> None:
        moment.facts[self] = dict(self._clock(stream))

    def awaited(self, moment: Moment, stream: Stream) -> None:
        _join(self._clock(stream), moment.facts.get(self, {}))

    def happened(self, happening: Happening) -> None:
        stream = happening.stream
        clock, host = self._clock(stream), self._clock(stream.machine.host)
        _join(clock, host)
        clock[stream.number] = now = clock.get(stream.number, 0) + 1
        where = ""
        for access in happening.accesses:
            self.checked += 1
            where = where or _where()
            self._use(access, stream.number, now, clock, Use(happening.what, stream.name, where, access.writes))

    # Uses.

    def _use(self, access: Access, stream: int, now: int, clock: Clock, use: Use) -> None:
        for noted in self._over(access.start, access.stop):
            overlap = noted.stop - noted.start
            write = noted.write
            if write is not None and clock.get(write[0], 0) < write[1]:
                self._find("write after write" if access.writes else "read after write", overlap, write[2], use)
            if access.writes:
                for reader, (count, read) in noted.reads.items():
                    if clock.get(reader, 0) < count:
                        self._find("write after read", overlap, read, use)
                noted.write, noted.reads = (stream, now, use), {}
            else:
                noted.reads[stream] = (now, use)

    def _over(self, start: int, stop: int) -> list[_Noted]:
        """The runs from ``start`` to ``stop``, cut to these bounds; those that were not known are new."""
        out: list[_Noted] = []
        at = bisect_left(self._starts, start)
        if at and self._noted[at - 1].stop > start:
            self._insert(at, self._noted[at - 1].cut(start))
        while start < stop:
            nearest = self._noted[at] if at < len(self._noted) else None
            if nearest is None or nearest.start > start:
                end = stop if nearest is None else min(stop, nearest.start)
                self._insert(at, _Noted(start, end))
            elif nearest.stop > stop:
                self._insert(at + 1, nearest.cut(stop))
            out.append(self._noted[at])
            start, at = self._noted[at].stop, at + 1
        return out

    def _insert(self, at: int, noted: _Noted) -> None:
        self._noted.insert(at, noted)
        self._starts.insert(at, noted.start)

    # Memory.

    def kept(self, access: Access, stream: Stream) -> None:
        self._kept.add((stream.number, access.start))

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        self._owner[address] = stream
        if index != ACCELERATOR:
            return
        clock = dict(self._clock(stream))
        _join(clock, self._clock(stream.machine.host))
        for overlap, number, count, use in self._given_back.pop(stream.number, ()):
            if clock.get(number, 0) < count:
                self._find("freed in use", overlap, use, None)

    def freed(self, address: int, nbytes: int, index: int) -> None:
        """What is taken next on the stream that took it may be this memory: see ``allocated``.  The host's is gone at once.

        What the thread that frees it has waited for is over, whoever takes it next, and so is what the streams it is kept for
        have been given or wait for.
        """
        stream = self._owner.pop(address, None)
        if stream is None or not nbytes:
            return
        runs, known = self._over(address, address + nbytes), dict(self._clock(stream.machine.host))
        inside = {(number, start) for number, start in self._kept if address <= start < address + nbytes}
        self._kept -= inside
        for number, _ in inside:
            _join(known, self._clocks.get(number, {}))
        on_device = index == ACCELERATOR
        back = self._given_back.setdefault(stream.number, [])
        for noted in runs:
            uses = [noted.write] if noted.write is not None else []
            uses += [(user, count, use) for user, (count, use) in noted.reads.items()]
            for user, count, use in uses:
                if known.get(user, 0) >= count or (on_device and user == stream.number):
                    continue
                if on_device:
                    back.append((noted.stop - noted.start, user, count, use))
                else:
                    self._find("freed in use", noted.stop - noted.start, use, None)
        self._forget(runs)

    def _forget(self, runs: Iterable[_Noted]) -> None:
        for noted in runs:
            at = bisect_left(self._starts, noted.start)
            del self._starts[at], self._noted[at]

    def _find(self, kind: str, nbytes: int, first: Use, second: Use | None) -> None:
        key = (kind, first.where or first.what, "" if second is None else second.where or second.what)
        if key not in self._known:
            self._known.add(key)
            self.found.append(Race(kind, nbytes, first, second))


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


_SEAM = tuple(str(Path(__file__).parents[1] / name) for name in ("virtual", "device", "work.py"))


def _where() -> str:
    """The line that issued it, above torch and the seam to the device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _skipped(file: str) -> bool:
    return file.startswith(_SEAM) or "/torch/" in file


@cache
def _line(file: str, number: int) -> str:
    return f" at {Path(file).name}:{number}"
