"""Owns the data of a timeline: several ranks on one clock, their lanes, memory and samples, and the summary above them.

``zprof timeline`` calls `timeline`, or for many ranks `timeline_of_many`. It never draws: what it returns is what
``timeline.js`` reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.text import as_size
from zprof.analysis.coverage import NOT_MEASURED
from zprof.show.pages.lanes import LANES, MOST_SPANS, Kept, Spans, keep
from zprof.show.pages.memory import Clock, device_samples, views
from zprof.show.pages.ranks import chosen, overview
from zprof.show.pages.units import units_table
from zprof.show.pages.windows import marked, windows_of
from zprof.show.report.findings import Body, report_of
from zprof.show.report.findings import report as report_files
from zprof.show.report.ranks import proven_lines
from zprof.show.report.summary import foremost
from zprof.show.report.text import doubts, not_recorded

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from zprof.analysis.analysis import Analysis
    from zprof.analysis.ranks import Clock as RankClock
    from zprof.trace.reader import Trace

    Ints = NDArray[np.int64]

__all__ = ["Names", "peak_line", "timeline", "timeline_of_many"]

#: A beginning shorter than this share of the run is shown with the rest; this much of the rest is shown before it.
_LEAST_BEGINNING = 0.05
_LEAD = 0.03
#: Points of a level curve in the page, over all ranks: some 200 KiB a tier.
_MOST_POINTS = 8000
_LEAST_POINTS = 400
#: Characters of all names in the page together, as they stand in its data.
_MOST_NAME_CHARS = 1_500_000
_NAME_CHARS = 200
_MOST_LINES = 60


class Names:
    """The names a page uses, numbered; what is long is cut so that names never make up most of a page."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []

    def number(self, name: str) -> int:
        """The number of ``name``, the same each time."""
        return self._numbers.setdefault(name, len(self._numbers))

    def __getitem__(self, number: int) -> str:
        if len(self._texts) != len(self._numbers):
            self._texts = list(self._numbers)
        return self._texts[number]

    def only(self, kept: Sequence[Kept]) -> tuple[list[Kept], list[str]]:
        """The same spans with names numbered anew, only those that are used."""
        import numpy as np

        used = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(part.key for part in kept)]))
        return (
            [replace(part, key=np.searchsorted(used, part.key)) for part in kept],
            _cut([self[number] for number in used.tolist()]),
        )


def timeline_of_many(paths: Sequence[Path]) -> dict[str, Any]:
    """As `timeline`, of more ranks than a page draws: the figures of all, read one trace at a time, and a few ranks drawn.

    Raises:
        TraceError: as `zprof.show.report.findings.report`.
    """
    from zprof.trace.reader import Trace

    report = report_files(paths)
    drawn = chosen(report)
    traces = [Trace.open(run["file"]) for run in report["runs"] if run["rank"] in drawn]
    return timeline(traces, report) | {"ranks": overview(report, drawn)}


def timeline(traces: Sequence[Trace], report: Body | None = None) -> dict[str, Any]:
    """Everything the page shows of these traces, one a rank.

    Args:
        report: that of more ranks than these, which the page's summary is of; theirs unless given.
    """
    from zprof.analysis.analysis import Analysis
    from zprof.analysis.ranks import clocks as clocks_of
    from zprof.analysis.ranks import lane_of

    points = max(_LEAST_POINTS, _MOST_POINTS // len(traces))
    drawn_spans = {what for lane in LANES for what in lane.whats}
    reads = [Analysis.of(trace, spans=drawn_spans, points=points) for trace in traces]
    offsets = clocks_of([lane_of(read) for read in reads])
    edges = [_edges(read) for read in reads]
    start_ns = min(begin + clock.offset_ns for (begin, _), clock in zip(edges, offsets, strict=True))
    end_ns = max(end + clock.offset_ns for (_, end), clock in zip(edges, offsets, strict=True))
    duration_ns = max(1, end_ns - start_ns)
    clocks = [Clock(clock.offset_ns - start_ns, max(1, -(-duration_ns // 0xFFFFFFFF))) for clock in offsets]

    names = Names()
    lanes = [_lanes(read, clock, names) for read, clock in zip(reads, clocks, strict=True)]
    flat = [part for parts in lanes for part in parts]
    windows = windows_of(list(zip(reads, clocks, strict=True)))
    kept, merge_ns, whole = keep(flat, duration_ns, [(begin, end) for _, begin, end in windows], most=MOST_SPANS)
    kept, texts = names.only(kept)
    drawn = iter(kept)
    runs = [
        _about(read)
        | {"lanes": [next(drawn).packed(clock.tick_ns) for _ in parts]}
        | {"views": views(read.trace, read.ledger, clock, points=points), "samples": device_samples(read.ledger, clock)}
        for read, clock, parts in zip(reads, clocks, lanes, strict=True)
    ]
    return {
        "page": "timeline",
        "predicted": next((read.header.simulated for read in reads if read.header.simulated), ""),
        "tick_ns": clocks[0].tick_ns,
        "duration": duration_ns // clocks[0].tick_ns,
        "focus": _focus(reads, clocks, duration_ns),
        "names": texts,
        "runs": runs,
        "merged": {"spans": sum(map(len, flat)), "kept": sum(len(part.count) for part in kept), "below_ns": merge_ns},
        "whole": marked(windows[:whole] if merge_ns else [], clocks[0].tick_ns),
        "ranks": None,
        "report": _report(report_of(reads) if report is None else report),
        "units": units_table(reads, lanes, names, clocks[0].tick_ns),
        "notes": _notes(reads, offsets),
    }


def _report(report: Body) -> dict[str, Any]:
    """What the page takes from `zprof report` as it is, so that both say the same."""
    runs = report["runs"]
    first = foremost(runs)
    named = {run["rank"]: f"rank {run['rank']}: " if len(runs) > 1 else "" for run in runs}
    remedies = [f"{named[run['rank']]}{line}" for run in runs for line in run["remedies"]]
    return {
        "summary": report["summary"],
        "unreadable": report["unreadable"],
        "next": [each for each in report["next"] if not each["do"].startswith("zprof timeline")],
        "not_recorded": not_recorded(runs)[:_MOST_LINES],
        "doubts": list(doubts(report))[:_MOST_LINES],
        "remedies": remedies[:_MOST_LINES],
        "steps": first["steps"]["count"],
        "step_ms": first["measures"]["step.median_ms"],
    }


def _edges(read: Analysis) -> tuple[int, int]:
    """The first and the last nanosecond anything is known of."""
    ledger, table = read.ledger, read.table
    begins = [ledger.begin_ns, *([int(table.begin_ns.min())] if len(table) else [])]
    return min(begins), max([ledger.end_ns, *([int(table.end_ns.max())] if len(table) else [])])


def _focus(reads: Sequence[Analysis], clocks: Sequence[Clock], duration_ns: int) -> dict[str, Any] | None:
    """From where on the page shows the run at first, if what is before it (imports, setting up) would take much of the axis.

    That is a little before the first step, or where there is none, before the first span or allocation; a peak that came
    earlier is not left out.
    """
    ranks = [(read, clock.shift_ns) for read, clock in zip(reads, clocks, strict=True)]
    steps = [int(read.steps.bounds[0, 0]) + shift_ns for read, shift_ns in ranks if read.steps.count]
    firsts = steps or [time_ns + shift_ns for read, shift_ns in ranks for time_ns in _begun(read)]
    if not firsts:
        return None
    first = min(firsts)
    peaks = [
        peak.time_ns + shift_ns
        for read, shift_ns in ranks
        for peak in map(read.ledger.peak, read.ledger.tiers)
        if peak.nbytes
    ]
    shown = max(0, min(first, *peaks) - int(_LEAD * (duration_ns - first)) if peaks else first)
    if shown < _LEAST_BEGINNING * duration_ns:
        return None
    whole = all(read.steps.unseen is None for read in reads)
    what = ("first step" if whole else "first update") if steps else "first event"
    return {"begin": shown // clocks[0].tick_ns, "before_ns": first, "what": what}


def _begun(read: Analysis) -> list[int]:
    """When the first span began, and when the first bytes were held."""
    begins = [int(read.table.begin_ns.min())] if len(read.table) else []
    for tier in read.ledger.tiers:
        curves = read.ledger.curves(by="tier", tier=tier, points=_LEAST_POINTS)
        held = sum(curves.levels.values()) > 0
        begins += curves.time_ns[held][:1].tolist()
    return begins


def _notes(reads: Sequence[Analysis], clocks: Sequence[RankClock]) -> list[str]:
    """What a reader must know to read the page right."""
    notes = []
    walled = sum(clock.by == "wall" for clock in clocks)
    if walled:
        of = f"{walled} of {len(clocks)} ranks are from another host or boot"
        notes.append(f"{of}: aligned with the first by the wall clock.")
    notes += proven_lines(clocks)
    for read in reads:
        header = read.trace.header
        rank = f"rank {header.rank}"
        if header.simulated:
            notes.append(f"Predicted, not measured: {header.simulated}; this rank stands for all {header.world}.")
        if read.table.open is not None:
            count = len(read.table.open)
            ended = f"{count:,} spans had" if count > 1 else "1 span had"
            notes.append(f"{rank}: {ended} not ended when the recording did; drawn to its end.")
        if read.covered.queued("gather") is not None:
            notes.append(f"{rank}: passes, gathers and reductions are drawn where the host queued them: {NOT_MEASURED}.")
    return notes


def _lanes(read: Analysis, clock: Clock, names: Names) -> list[Spans]:
    """The lanes of one rank that hold anything."""
    import numpy as np

    strings = read.trace.strings
    parts = [read.table, *([read.table.open] if read.table.open is not None else [])]
    what_column, key, begin_ns, end_ns, nbytes = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("what", "key", "begin_ns", "end_ns", "nbytes")
    )
    used, inverse = np.unique(key, return_inverse=True)
    keys = np.array([names.number(strings[each]) for each in used.tolist()], dtype=np.int64)[inverse.reshape(-1)]
    numbers = {name: number for number, name in enumerate(strings)}
    found = []
    bounds = read.steps.bounds + clock.shift_ns
    if read.steps.count:
        first = "step 0" if read.steps.unseen is None else "step 0, its update"
        labels = np.array([names.number(f"step {index}" if index else first) for index in range(len(bounds))], dtype=np.int64)
        nothing = np.zeros(len(bounds), dtype=np.int64)
        found.append(Spans(LANES[0], nothing, labels, bounds[:, 0], bounds[:, 1], nothing))
    for lane in (each.of(strings) for each in LANES[1:]):
        place = np.full(len(strings) + 1, -1, dtype=np.int64)
        for index, name in enumerate(lane.whats):
            place[numbers.get(name, -1)] = index
        place[-1] = -1
        what = place[what_column]
        mine = np.flatnonzero(what >= 0)
        if any(read.covered.queued(name) for name in lane.whats):
            if lane.name == "exposed waits":
                continue
            # When the host queued them; without bytes, so that no rate is drawn of it.
            nbytes = np.where(what >= 0, 0, nbytes)
        if len(mine):
            times = (begin_ns[mine] + clock.shift_ns, end_ns[mine] + clock.shift_ns)
            found.append(Spans(lane, what[mine], keys[mine], *times, nbytes[mine].astype(np.int64)))
    return found


def _about(read: Analysis) -> dict[str, Any]:
    header = read.trace.header
    return {
        "rank": header.rank,
        "world": header.world,
        "file": read.trace.path.name,
        "host": header.host,
        "device": read.trace.device,
        "level": read.trace.level,
        "argv": " ".join(header.argv)[:400],
        "damage": read.trace.damage or "",
        "events": read.trace.count,
        "whole": not any(read.covered.tier(tier) for tier in read.ledger.tiers or ("device",)),
    }


def _cut(names: list[str]) -> list[str]:
    most = _NAME_CHARS
    while True:
        cut = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
        if most <= 8 or len(json.dumps(cut)) <= _MOST_NAME_CHARS:
            return cut
        most = most * 2 // 3


def peak_line(data: dict[str, Any]) -> str:
    """The largest peak of any rank, for the terminal: "3.2 GiB on device, rank 0"."""
    peaks = [(view["peak"]["total"], view["name"], run) for run in data["runs"] for view in run["views"][:1]]
    peaks = [peak for peak in peaks if peak[0]]
    if not peaks:
        return "no memory recorded"
    nbytes, name, run = max(peaks, key=lambda peak: peak[0])
    part = "" if run["whole"] else " of what was recorded"
    return f"peak {as_size(nbytes)}{part} ({'device and host' if name == 'process' else name}, rank {run['rank']})"
