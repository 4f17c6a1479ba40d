"""Owns what a recording says of its run now: the step, the unit, the spans that are open, and who holds how much.

`zprof attach` and `zprof hang` follow the traces of running processes by it, and ``zprof run --hang-after`` its own. It reads
the trace and the mapped ring beside it, asks the process nothing, and changes neither.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.text import one_line
from zprof.analysis.coverage import Coverage, coverage
from zprof.clock import now_ns, wall_ns
from zprof.rows import CATEGORIES, NO_PLACE, PLACES, TIERS, Row, RowKind, TraceError
from zprof.trace.columns import MOST_ROWS, Names, Rows, decoded, encoded
from zprof.trace.frames import MAGIC
from zprof.trace.header import Header, here
from zprof.trace.levels import Levels, Open
from zprof.trace.reader import Trace
from zprof.trace.recovery import RECOVERED, lacking, tail_rows
from zprof.trace.tail import SLOTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.living.processes import Process

__all__ = ["COLLECTIVE_WAITS", "HANG", "Activity", "Doing", "Following", "recording_of", "since_ns"]

#: The note that `zprof run --hang-after` leaves.
HANG = "hang"
#: Waits for other ranks; others are for a tier of this one.
COLLECTIVE_WAITS = ("wait gather", "wait reduce", "wait gather activation", "wait collective", "wait point to point")
#: From launch to usable: what ranks do together.
_TOGETHER = ("gather", "reduce", "gather activation", "collective", "point to point")
_OF_TORCH = ("collective", "point to point")
_UNITS = ("compute", "update")
#: A process that is recorded samples at least so often, and writes every second.
_SILENT_NS = 15_000_000_000
_MOST_OPEN_FILES = 65_536


@dataclass(frozen=True, slots=True)
class Activity:
    """A span that has begun and not ended; ``begin_ns`` is of the clock of the machine it runs on."""

    what: str
    key: str
    begin_ns: int
    thread: int

    @property
    def name(self) -> str:
        """"gather layers.3", or of torch.distributed's collectives "all_reduce"."""
        what = self.what.removeprefix("wait ")
        return one_line(self.key if what in _OF_TORCH else f"{what} {self.key}")


@dataclass(frozen=True, slots=True)
class Doing:
    """A run at the last row that is there.

    Attributes:
        rows: how many say what it does, samples not counted: more of them, and it has moved.
        last_ns: the time of the last of those; None where there is none. newest_ns: of any row.
        steps: that have ended; ``in_step`` where an optimizer's is open.
        unit: the innermost that computes or is updated; phase: "forward" or "backward".
        waits: what it stands still for, the outermost first. under_way: exchanges that were begun, the oldest first.
        begun: exchanges of torch.distributed so far, by name; None where rows were thinned out.
        held: (category, tier) -> bytes. samples: "rss" and the like -> the last value.
        end: exit code and reason that the run left; None while it runs, and of one that was killed.
        signal: that killed it, where ``zprof run`` saw it; 0 else.
        noted: what `zprof run --hang-after` noted last, and when; None without.
    """

    rows: int
    last_ns: int | None
    newest_ns: int
    steps: int
    in_step: bool
    unit: str | None
    phase: str | None
    waits: tuple[Activity, ...]
    under_way: tuple[Activity, ...]
    begun: dict[str, int] | None
    held: dict[tuple[str, str], int]
    samples: dict[str, int]
    covered: Coverage
    end: tuple[int, str] | None = None
    signal: int = 0
    noted: dict[str, Any] | None = None

    @property
    def waits_for(self) -> Activity | None:
        """The wait for other ranks that it stands in."""
        return next((each for each in self.waits if each.what in COLLECTIVE_WAITS), None)


@dataclass(slots=True)
class _Fold:
    """What rows come to; copied before rows are taken that will come again."""

    strings: Sequence[str]
    levels: Levels
    held: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    samples: dict[str, int] = field(default_factory=dict)
    open: Open = field(default_factory=Open)
    #: Number of a span's row -> (what, key, time, thread), of those that are open.
    begun: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    launched: Counter[tuple[int, int]] = field(default_factory=Counter)
    next: int = 0
    rows: int = 0
    steps: int = 0
    last_ns: int = -1
    newest_ns: int = 0

    def copied(self) -> _Fold:
        return copy.deepcopy(self, {id(self.strings): self.strings})

    def take(self, rows: Rows) -> None:
        if not len(rows):
            return
        changes = self.levels.take(rows)
        self.held = np.append(self.held, np.zeros(len(self.levels) - len(self.held), np.int64))
        np.add.at(self.held, changes.series, changes.change)
        self.newest_ns = max(self.newest_ns, int(rows.time_ns.max()))
        sampled = (rows.kind == RowKind.COUNTER) & (rows.place == NO_PLACE)
        for at in np.flatnonzero(sampled)[-64:].tolist():
            name = f"{self.strings[int(rows.what[at])]} {self.strings[int(rows.key[at])]}".strip()
            self.samples[name] = int(rows.nbytes[at])
        doing = np.flatnonzero(~sampled)
        if len(doing):
            self.rows += len(doing)
            self.last_ns = max(self.last_ns, int(rows.time_ns[doing].max()))
        self._take_spans(rows)

    def _take_spans(self, rows: Rows) -> None:
        at = np.flatnonzero(rows.kind <= RowKind.END)
        what, key, begins = rows.what[at].astype(np.int64), rows.key[at].astype(np.int64), rows.kind[at] == RowKind.BEGIN
        number = np.arange(self.next, self.next + len(at))
        first, self.next = self.next, self.next + len(at)
        self.open.match(what << 32 | key, number, begins)
        still = self.open.row
        kept = {one: self.begun[one] for one in still[still < first].tolist()}
        for one in still[still >= first].tolist():
            place = int(at[one - first])
            fields = (rows.what, rows.key, rows.time_ns, rows.thread)
            kept[one] = tuple(int(column[place]) for column in fields)  # type: ignore[assignment]
        self.begun = kept
        names, counts = np.unique(what[~begins], return_counts=True)
        for name, count in zip(names.tolist(), counts.tolist(), strict=True):
            self.steps += count if self.strings[name] == "step" else 0
        pairs, counts = np.unique(np.stack((what[begins], key[begins])), axis=1, return_counts=True)
        for pair, count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
            if self.strings[pair[0]] in _OF_TORCH:
                self.launched[pair[0], pair[1]] += count


class Following:
    """A trace that may still grow, and its ring of newest rows.

    Raises:
        TraceError: ``path`` is no trace.
    """

    def __init__(self, path: Path, *, growing: bool = False) -> None:
        self.trace = Trace.growing(path) if growing else Trace.open(path)
        strings = self.trace.strings
        self._fold = _Fold(strings, Levels(strings), newest_ns=self.trace.header.mono_ns)
        self._recent: deque[Rows] = deque()
        self._machine = here()

    @property
    def header(self) -> Header:
        return self.trace.header

    @property
    def is_here(self) -> bool:
        """It is recorded, or was, on this machine since its start."""
        header = self.trace.header
        return (header.host, header.boot) == self._machine and bool(header.boot)

    @property
    def silent(self) -> bool:
        """Nobody has written to it for long, who would have."""
        try:
            return wall_ns() - self.trace.path.stat().st_mtime_ns > _SILENT_NS
        except OSError:
            return True

    def look(self) -> Doing:
        """Read what was added, and say where the run is.

        Raises:
            TraceError: another run's file lies at the path now.
        """
        # First: what is written meanwhile is in both then, and in neither the other way round.
        newest = tail_rows(self.trace) if self.is_here else []
        for rows in self.trace.more():
            self._fold.take(rows)
            self._recent.append(rows)
            while sum(map(len, self._recent)) - len(self._recent[0]) > 2 * SLOTS:
                self._recent.popleft()
        fold = self._fold
        new = lacking(newest, self._recent, self.trace.strings)
        if new:
            fold = fold.copied()
            for rows in self._as_chunks(new):
                fold.take(rows)
        return self._doing(fold)

    def close(self) -> None:
        """Let the file go."""
        self.trace.close()

    def _as_chunks(self, rows: list[Row]) -> Iterator[Rows]:
        for at in range(0, len(rows), MOST_ROWS):
            some = rows[at : at + MOST_ROWS]
            names: Names = self.trace.names
            yield decoded(encoded(some), len(some), names)

    def _doing(self, fold: _Fold) -> Doing:
        strings = self.trace.strings
        spans = sorted((Activity(strings[what], strings[key], at, thread) for what, key, at, thread in fold.begun.values()),
                       key=lambda each: each.begin_ns)  # fmt: skip
        units = [each.key for each in spans if each.what in _UNITS]
        passes = [each.what for each in spans if each.what in ("forward", "backward")]
        held: dict[tuple[str, str], int] = {}
        for place, nbytes in zip(fold.levels.place.tolist(), fold.held.tolist(), strict=True):
            if nbytes > 0:
                held[PLACES[place]] = held.get(PLACES[place], 0) + nbytes
        used = {tier for _, tier in held}
        return Doing(
            rows=fold.rows,
            last_ns=fold.last_ns if fold.last_ns >= 0 else None,
            newest_ns=fold.newest_ns,
            steps=fold.steps,
            in_step=any(each.what == "step" for each in spans),
            unit=units[-1] if units else None,
            phase=passes[-1] if passes else None,
            waits=tuple(each for each in spans if each.what.startswith("wait ")),
            under_way=tuple(each for each in spans if each.what in _TOGETHER),
            begun=None if self.trace.dropped else {strings[key]: count for (_, key), count in fold.launched.items()},
            held={place: held[place] for place in sorted(held, key=_by_category)},
            samples=dict(fold.samples),
            covered=coverage(self.trace, tuple(tier for tier in TIERS if tier in used)),
            end=self._end(),
            signal=self._signal(),
            noted=self._noted(),
        )

    def _end(self) -> tuple[int, str] | None:
        for note in self.trace.notes("end")[-1:]:
            code, reason = note.body.get("exit"), note.body.get("reason")
            return code if type(code) is int else 0, one_line(str(reason or "")[:200])
        return None

    def _signal(self) -> int:
        found = [note.body.get("signal") for note in self.trace.notes("killed") + self.trace.notes(RECOVERED)]
        return next((number for number in found if type(number) is int and 0 < number < 128), 0)

    def _noted(self) -> dict[str, Any] | None:
        notes = self.trace.notes(HANG)
        return dict(notes[-1].body) if notes else None


def _by_category(place: tuple[str, str]) -> tuple[int, int]:
    return CATEGORIES.index(place[0]), TIERS.index(place[1])


def since_ns(begin_ns: int) -> int:
    """How long ago that was, of a clock of this machine."""
    return max(0, now_ns() - begin_ns)


def recording_of(process: Process) -> tuple[Path | None, str]:
    """The trace that a process of this machine records into, and why none was found: "" where it is simply not recorded.

    By the files that it has open to append to: their first bytes, and the process that the header names.
    """
    folder = Path(f"/proc/{process.pid}/fd")
    try:
        names = os.listdir(folder)[:_MOST_OPEN_FILES]
    except PermissionError:
        return None, "its open files cannot be read"
    except OSError:
        return None, "it has ended"
    found: list[tuple[int, Path]] = []
    other = ""
    for name in names:
        with suppress(OSError, ValueError, TraceError):
            if not _appends(process.pid, name) or not _is_trace(folder / name):
                continue
            path = _path_of(folder / name)
            header = Trace.growing(path).header
            if header.boot != here()[1] or header.pid not in (process.pid, process.inner):
                into = one_line(path.name)
                other = f"it is a child of pid {header.pid}, which records into {into}, and is not recorded itself"
                continue
            found.append((header.mono_ns, path))
    return (max(found)[1], "") if found else (None, other)


def _appends(pid: int, name: str) -> bool:
    text = Path(f"/proc/{pid}/fdinfo/{name}").read_text(encoding="ascii", errors="replace")
    flags = next((int(line.split()[1], 8) for line in text.splitlines() if line.startswith("flags:")), 0)
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)


def _is_trace(link: Path) -> bool:
    from offload.regular_files import open_regular

    fd = open_regular(link)
    try:
        return os.pread(fd, len(MAGIC), 0) == MAGIC
    finally:
        os.close(fd)


def _path_of(link: Path) -> Path:
    """Where the file lies; the link itself where another mount, or another file by now, is at its name."""
    named = Path(os.readlink(link))
    with suppress(OSError):
        if os.path.samestat(named.lstat(), link.stat()):
            return named
    return link
