"""Owns what only several ranks show together: one clock for all, who is late to which collective, who is slow, who holds more.

`zprof report` and the pages that draw several ranks call it. It reads no rows: it takes of each rank a `Lane`, made while that
rank's trace was read, so that a thousand ranks fit in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.text import counted, plural
from zprof.analysis.clock_bounds import SYNCHRONISING, bounds
from zprof.rows import TraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zprof.analysis.analysis import Analysis
    from zprof.trace.header import Header
    from zprof.trace.reader import Trace

    Int64s = NDArray[np.int64]

__all__ = [
    "COLLECTIVES", "Clock", "Lane", "Lanes", "Member", "Skew", "Straggler", "clocks", "lane_of", "members_of", "paths_of",
    "skews", "stragglers", "traces_of",
]  # fmt: skip

#: The spans that all ranks begin together, or should.
COLLECTIVES = ("gather", "gather activation", "reduce", "collective")
#: A rank whose own work takes so much longer than the median rank's is a straggler.
SLOW = 1.05
#: The begins of collectives that are kept of all ranks together.
MOST_BEGINS = 1 << 25


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's trace, and what it says of its run; the file is not open."""

    path: Path
    header: Header


@dataclass(frozen=True, slots=True)
class Clock:
    """How a rank's monotonic clock reads on the first rank's.

    Attributes:
        offset_ns: to be added. by: "monotonic" (one boot of one host: exact), "wall" (as good as the hosts' clocks), or
            "collectives", where these prove the wall clocks to be wrong.
        drift_ns: how far the rank's two clocks moved apart during the recording; 0 where they cannot be compared.
        bounds_ns: (least, most) that ``offset_ns`` can be, as collectives prove; None where they prove nothing.
        wall_ns: what it would be by the wall clocks.
    """

    rank: int
    host: str
    offset_ns: int
    by: str
    drift_ns: int
    bounds_ns: tuple[int, int] | None = None
    wall_ns: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """What is kept of a rank to compare it with others.

    Attributes:
        begins: (what, key) -> when each of these collectives began, in order, on the rank's own clock.
        work_ns: the median over steps of the time not spent waiting; None where steps or waits were not seen.
        step_ns: the median step; None where none was seen.
        wait_ns: the median over steps of the time spent waiting, but for a loader; None as ``work_ns``.
        collectives: whether they were seen.
        peaks: tier -> bytes of what was recorded; None where nothing on it could be.
        ends: of those in ``begins`` that keep ranks together, when each ended; none where rows were dropped.
    """

    header: Header
    end_clock: tuple[int, int] | None
    begins: dict[tuple[str, str], Int64s]
    work_ns: int | None
    step_ns: int | None
    peaks: Mapping[str, int | None]
    collectives: bool = True
    wait_ns: int | None = None
    ends: Mapping[tuple[str, str], Int64s] = field(default_factory=dict)


class Lanes:
    """The lanes of a run's ranks, which are added one at a time and take a bounded amount of memory.

    Where the begins of collectives are too many, every second is let go, of all ranks the same ones: the n-th of a unit
    is the n-th on every rank.

    Attributes:
        every: of each unit's collectives the first is kept, and of those after it only each so-many-eth.
    """

    def __init__(self, most: int = MOST_BEGINS) -> None:
        self.all: list[Lane] = []
        self.every = 1
        self._most, self._count = most, 0
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}

    def add(self, lane: Lane) -> None:
        """Keep ``lane``."""
        # Thousands of ranks have the same units, and each its own copy of their names.
        begins, ends = (
            {self._pairs.setdefault(pair, pair): times for pair, times in of.items()} for of in (lane.begins, lane.ends)
        )
        self.all.append(_thinned(replace(lane, begins=begins, ends=ends), self.every))
        self._count += _times(self.all[-1])
        while self._count > max(self._most, sum(len(each.begins) + len(each.ends) for each in self.all)):
            self.every *= 2
            self.all = [_thinned(each, 2) for each in self.all]
            self._count = sum(map(_times, self.all))


def _times(lane: Lane) -> int:
    return sum(map(len, lane.begins.values())) + sum(map(len, lane.ends.values()))


def _thinned(lane: Lane, every: int) -> Lane:
    if every == 1:
        return lane
    # A view would keep all of it.
    begins, ends = ({pair: times[::every].copy() for pair, times in of.items()} for of in (lane.begins, lane.ends))
    return replace(lane, begins=begins, ends=ends)


@dataclass(frozen=True, slots=True)
class Skew:
    """Who is late to the collectives of one unit.

    Attributes:
        rank: the one that cost most. late_ns: on average when it is last, behind the median of the others.
        times: how often it was last, of ``count``.
        total_ns: what its being last cost the others in all.
    """

    what: str
    key: str
    rank: int
    late_ns: int
    times: int
    count: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose own work takes longer than the median rank's, both a step."""

    rank: int
    host: str
    work_ns: int
    median_ns: int


def members_of(runs: Sequence[str | Path], unreadable: dict[Path, str] | None = None) -> list[Member]:
    """The traces that files and folders name, by rank; of a folder those of the run that was written to last.

    Args:
        unreadable: takes those whose header cannot be read, and why; else the first of them is an error.
    Raises:
        TraceError: one is missing or no trace, a folder holds none, a rank is there twice, or they are of different runs.
    """
    from zprof.trace.reader import header_of

    found: dict[int, Member] = {}
    first: Member | None = None
    for path in dict.fromkeys(path for run in runs for path in _files(Path(run))):
        try:
            member = Member(path, header_of(path))
        except TraceError as error:
            if unreadable is None:
                raise
            unreadable[path] = str(error)
            continue
        first = first or member
        header = member.header
        if bool(header.simulated) != bool(first.header.simulated):
            kinds = ("a simulation", "a run") if header.simulated else ("a run", "a simulation")
            raise TraceError(
                f"{path}: of {kinds[0]}, {first.path} of {kinds[1]}; expected traces of one kind, compare the two kinds with "
                "`zprof diff`"
            )
        other = found.setdefault(header.rank, member)
        if other is not member:
            again = f"rank {header.rank} is in {other.path} already"
            raise TraceError(f"{path}: {again}; expected one trace per rank, name one of them")
        if header.world != first.header.world:
            raise TraceError(
                f"{path}: of a run with {counted(header.world, 'rank')}, {first.path} of one with {first.header.world}; "
                "report one run at a time, or compare them with `zprof diff`"
            )
    if first is None and unreadable:
        raise TraceError(next(iter(unreadable.values())))
    return [found[rank] for rank in sorted(found)]


def traces_of(runs: Sequence[str | Path]) -> list[Trace]:
    """The same, opened: for who needs few of them, or all at once.

    Raises:
        TraceError: as `members_of`.
    """
    from zprof.trace.reader import Trace

    return [Trace.open(member.path) for member in members_of(runs)]


def paths_of(ranks: Sequence[int], runs: Sequence[str | Path]) -> list[Path]:
    """The traces of these ranks among those that files and folders name, by rank.

    Files whose names say other ranks are not opened, unless headers say otherwise than names do.

    Raises:
        TraceError: as `members_of`, or none is of one of these ranks.
    """
    from zprof.trace.families import rank_of

    wanted = set(ranks)
    files = list(dict.fromkeys(path for run in runs for path in _files(Path(run))))
    likely = [path for path in files if rank_of(path) in wanted]
    found = _by_rank(likely) if likely else {}
    if set(found) != wanted:
        found = _by_rank(files)
    for rank in ranks:
        if rank not in found:
            here = sorted(found)
            others = f"{plural(len(here), 'rank')} {', '.join(map(str, here[:8]))}{', ...' if len(here) > 8 else ''}"
            raise TraceError(f"--rank {rank}: expected a trace of this rank in {runs[0]}, found {others}")
    return [found[rank] for rank in sorted(wanted)]


def _by_rank(files: Sequence[Path]) -> dict[int, Path]:
    return {member.header.rank: member.path for member in members_of(files)}


def _files(run: Path) -> Sequence[Path]:
    from zprof.trace.families import newest

    # A name that is too long for the system raises from Path.is_dir.
    if not os.path.isdir(run):
        return [run]
    family = newest(run)
    if family is None:
        raise TraceError(f"{run}: no *.zprof in this folder, expected the traces of a run; record with `zprof run -o`")
    return family.paths


def lane_of(analysis: Analysis) -> Lane:
    """What to keep of a rank."""
    import numpy as np

    from zprof.trace.levels import starts_of

    stalls, covered = analysis.stalls, analysis.covered
    begins: dict[tuple[str, str], Int64s] = {}
    ends: dict[tuple[str, str], Int64s] = {}
    for what in COLLECTIVES:
        mine = analysis.table.of(what)
        order = np.lexsort((mine.begin_ns, mine.key))
        keys = mine.key[order]
        starts = starts_of(keys)
        columns = (np.split(column[order], starts[1:]) for column in (mine.begin_ns, mine.end_ns))
        for key, begun, ended in zip(keys[starts].tolist(), *columns, strict=False):
            pair = what, mine.strings[key]
            begins[pair] = begun
            if pair in SYNCHRONISING and not covered.dropped:
                ends[pair] = ended
    # A rank that waits for its loader is late for the others, as one that computes for longer.
    work = stalls.steps.duration_ns - stalls.per_step_ns + stalls.data_ns
    counted = bool(stalls.steps.count) and covered.steps() is None and stalls.steps.unseen is None
    waits_seen = counted and covered.spans("wait") is None
    return Lane(
        header=analysis.header,
        end_clock=analysis.end_clock,
        begins=begins,
        work_ns=int(np.median(work)) if waits_seen else None,
        step_ns=int(np.median(stalls.steps.duration_ns)) if counted else None,
        peaks=analysis.peaks,
        collectives=covered.sees_collectives(),
        wait_ns=int(np.median(stalls.per_step_ns - stalls.data_ns)) if waits_seen else None,
        ends=ends,
    )


def clocks(lanes: Sequence[Lane]) -> list[Clock]:
    """Each rank's clock on that of the first: the same one within a boot of a host, through the wall clocks between hosts,
    unless collectives prove these to be wrong."""
    found = []
    first = lanes[0].header
    # Not the host's name: containers of one boot have names of their own. A rank that does not say its boot is alone.
    hosts = [lane.header.boot or (lane.header.rank,) for lane in lanes]
    proven = bounds(lanes, hosts)
    for lane, host in zip(lanes, hosts, strict=True):
        header, end = lane.header, lane.end_clock
        apart = (header.wall_ns - header.mono_ns) - (first.wall_ns - first.mono_ns)
        drift = 0 if end is None else (end[1] - end[0]) - (header.wall_ns - header.mono_ns)
        between = proven.get(host)
        offset, by = apart, "wall"
        if host == hosts[0]:
            offset, by = 0, "monotonic"
        elif between is not None and not between[0] <= apart <= between[1]:
            offset, by = sum(between) // 2, "collectives"
        found.append(Clock(header.rank, header.host, offset, by, drift, between, apart))
    return found


def skews(lanes: Sequence[Lane], most: int | None = None) -> list[Skew]:
    """Who is late to what, the costliest first; nothing for fewer than two ranks.

    The n-th gather of a unit on one rank is the n-th on every other; where counts differ the surplus is left out.
    """
    import numpy as np

    if len(lanes) < 2:
        return []
    offsets = [clock.offset_ns for clock in clocks(lanes)]
    found = []
    for what, key in dict.fromkeys(pair for lane in lanes for pair in lane.begins):
        here = [(lane, offset) for lane, offset in zip(lanes, offsets, strict=True) if (what, key) in lane.begins]
        count = min(len(lane.begins[what, key]) for lane, _ in here)
        if len(here) < 2:
            continue
        times = np.stack([lane.begins[what, key][:count] + offset for lane, offset in here])
        last = np.argmax(times, axis=0)
        ordered = np.sort(times, axis=0)
        late = ordered[-1] - np.median(ordered[:-1], axis=0).astype(np.int64)
        cost = np.zeros(len(here), np.int64)
        np.add.at(cost, last, late)
        worst = int(np.argmax(cost))
        total = int(cost[worst])
        times_last = int(((last == worst) & (late > 0)).sum())
        if total > 0:
            found.append(Skew(what, key, here[worst][0].header.rank, total // times_last, times_last, count, total))
    return sorted(found, key=lambda skew: (-skew.total_ns, skew.what, skew.key))[:most]


def stragglers(lanes: Sequence[Lane]) -> list[Straggler]:
    """The ranks whose own work takes more than `SLOW` times the median rank's, the slowest first."""
    from statistics import median_low

    timed = [(lane.work_ns, lane.header) for lane in lanes if lane.work_ns]
    if len(timed) < 2:
        return []
    # The lower of the middle two: with two ranks, the slow one is measured against the other.
    middle = median_low(work_ns for work_ns, _ in timed)
    slow = [Straggler(header.rank, header.host, work_ns, middle) for work_ns, header in timed if work_ns > SLOW * middle]
    return sorted(slow, key=lambda straggler: -straggler.work_ns)
