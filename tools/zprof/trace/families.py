"""Owns the names of a run's traces, and which of the traces in a folder are one run's.

``zprof run`` makes names by it, and whoever reads a folder asks which traces belong together. It reads headers only, and
removes nothing.

Note: [One run of several]
    A trace is named <run>.<rank>.zprof, and <run>.<rank>.restart<N>.zprof where its ranks were started again. N is no number of
    the job's: torchrun counts restarts on each host by itself, and a host whose ranks were well has counted fewer. The traces
    of one attempt are known by when they began: the first of a rank that has begun already begins the next attempt, for
    launchers end all ranks before they start them anew. Clocks of hosts may differ by less than that takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offload.text import counted
from zprof.rows import TraceError
from zprof.trace.children import without_children

if TYPE_CHECKING:
    from zprof.trace.header import Header

__all__ = ["Family", "family_of", "member_name", "newest", "rank_of"]

_MEMBER = re.compile(r"(.+)\.(\d{1,7})(?:\.restart(\d{1,9}))?\.zprof", re.ASCII)


@dataclass(frozen=True, slots=True)
class Family:
    """The traces of one run, of the attempt that began last.

    Attributes:
        name: what the names of its files begin with; "" for files whose names say nothing.
        paths: by the rank in their names. attempts: how often its ranks were started, as far as traces show.
        others: traces in the same folder that are of other runs, or of earlier attempts.
    """

    name: str
    paths: tuple[Path, ...]
    attempts: int = 1
    others: int = 0

    def line(self, where: Path) -> str | None:
        """What a reader of the folder must know; None where all of it is this run's."""
        if not self.others:
            return None
        which = f" of run {self.name}" if self.name else ""
        attempt = f", started {self.attempts} times" if self.attempts > 1 else ""
        count = f"{counted(len(self.paths), 'trace')}{which}{attempt}"
        return f"{where}: {count}, the newest here; {self.others:,} other{' is' if self.others == 1 else 's are'} left out"


def member_name(run: str, rank: int | str, restart: int = 0) -> str:
    """What one rank's trace is called."""
    return f"{run}.{rank}.restart{restart}.zprof" if restart else f"{run}.{rank}.zprof"


def family_of(path: Path) -> str:
    """The run that a trace's name says; "" for a name that says none."""
    found = _MEMBER.fullmatch(path.name)
    return found[1] if found else ""


def rank_of(path: Path) -> int | None:
    """The rank that a trace's name says; None for a name that says none. Its header is what counts."""
    found = _MEMBER.fullmatch(path.name)
    return int(found[2]) if found else None


def newest(folder: Path, *, alone: bool = False) -> Family | None:
    """The run in ``folder`` that was written to last; None where there is no trace.

    Args:
        alone: a trace whose name says no run is one by itself; else all of those are one.
    """
    times: dict[Path, int] = {}
    for path in without_children(folder.glob("*.zprof")):
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    if not times:
        return None
    last = max(times, key=lambda path: (times[path], path.name))
    name = family_of(last)
    if not name and alone:
        return Family("", (last,), 1, len(times) - 1)
    members = sorted(path for path in times if family_of(path) == name)
    attempts = _attempts(members, times) if name else [members]
    return Family(name, tuple(attempts[-1]), len(attempts), len(times) - len(attempts[-1]))


def _attempts(paths: Sequence[Path], changed_ns: dict[Path, int]) -> list[list[Path]]:
    """The traces of one run by attempt, each by rank. Note: [One run of several]."""
    ranks = {path: int(found[2]) for path in paths if (found := _MEMBER.fullmatch(path.name))}
    attempts: list[dict[int, Path]] = [{}]
    several = len(set(ranks.values())) < len(ranks)
    began = {path: _began_ns(path, changed_ns[path]) for path in paths} if several else {}
    for path in sorted(paths, key=lambda path: (began.get(path, 0), ranks[path])):
        if ranks[path] in attempts[-1]:
            attempts.append({})
        attempts[-1][ranks[path]] = path
    return [[attempt[rank] for rank in sorted(attempt)] for attempt in attempts]


def _began_ns(path: Path, changed_ns: int) -> int:
    from zprof.trace.reader import header_of

    try:
        header: Header = header_of(path)
    except TraceError:
        # What cannot be read was written to at that time, at least.
        return changed_ns
    return header.wall_ns or changed_ns
