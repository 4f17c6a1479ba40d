"""Owns the part of the report's text that is about several ranks: how they differ, who is late, and who is slow.

`zprof.show.report.text` calls it. It finds out nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from offload.text import as_duration, as_size

__all__ = ["ranks_lines", "ranks_table"]

_MOST_RANKS = 16
_MOST_SKEWS = 8
#: A wall clock that moved more than this during a run is worth a line: skews are of this size.
MOST_DRIFT_NS = 1_000_000


def ranks_table(report: Mapping[str, Any], top: int | None = None) -> Table:
    """Each rank's peaks and pace; of more than ``top`` ranks those that differ most from the others, by rank."""
    ranks, runs = report["ranks"], report["runs"]
    most = top or _MOST_RANKS
    if len(runs) > most:
        apart = _apart(ranks)
        runs = sorted(sorted(runs, key=lambda run: -apart.get(str(run["rank"]), 0.0))[:most], key=lambda run: run["rank"])
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    tiers = list(ranks["peak_bytes"])
    for heading in ("rank", "host", *(f"{tier} peak" for tier in tiers), "step", "own work"):
        drawing.add_column(heading, justify="left" if heading == "host" else "right")
    for run in runs:
        rank = str(run["rank"])
        peaks = (_or_dash(ranks["peak_bytes"][tier][rank], as_size) for tier in tiers)
        host = "".join(letter if letter.isprintable() else "?" for letter in run["host"])
        times = (_or_dash(ranks[name][rank], lambda ms: as_duration(ms * 1e6)) for name in ("step_ms", "work_ms"))
        drawing.add_row(rank, Text(host), *peaks, *times)
    if len(runs) < len(report["runs"]):
        drawing.add_row("", f"{len(report['runs']) - len(runs)} ranks nearer the median: --top {len(report['runs'])}")
    return drawing


def _apart(ranks: Mapping[str, Any]) -> dict[str, float]:
    """Each rank's largest distance from the median, of any figure of the table, as a share of that median."""
    apart: dict[str, float] = {}
    for figures in (*ranks["peak_bytes"].values(), ranks["step_ms"], ranks["work_ms"]):
        known = {rank: value for rank, value in figures.items() if value is not None}
        middle = median(known.values()) if known else 0
        for rank, value in known.items():
            share = abs(value - middle) / middle if middle else float(bool(value))
            apart[rank] = max(apart.get(rank, 0.0), share)
    return apart


def _or_dash(value: Any, drawn: Callable[[Any], str]) -> str:
    return "-" if value is None else drawn(value)


def ranks_lines(ranks: Mapping[str, Any], top: int | None = None, *, simulated: bool = False) -> list[Any]:
    """What follows from it, in sentences and a table of who is late; a simulated rank stands for all."""
    lines: list[Any] = []
    for tier, found in ranks["peak_bytes"].items():
        peaks = {rank: nbytes for rank, nbytes in found.items() if nbytes is not None}
        low, high = min(peaks, key=peaks.__getitem__), max(peaks, key=peaks.__getitem__)
        if peaks[high] > peaks[low]:
            lines.append(Text(f"{tier}: rank {high} peaks {as_size(peaks[high] - peaks[low])} above rank {low}"))
    if ranks["stragglers"] is None:
        lines.append(Text("who is slow, and who waits for whom, was not seen: see below what is not recorded"))
    for slow in ranks["stragglers"] or ():
        more = slow["work_ns"] / slow["median_ns"] - 1
        works = f"works {as_duration(slow['work_ns'])} a step, {more:.0%} more than the median rank"
        lines.append(Text(f"straggler: rank {slow['rank']} {works}"))
    if ranks["skew"]:
        lines.append(_skew(ranks, top or _MOST_SKEWS))
    elsewhere = [str(clock["rank"]) for clock in ranks["clocks"] if clock["by"] == "wall"]
    if elsewhere:
        lines.append(Text(f"rank(s) {_listed(elsewhere)}: put beside the first by wall clock, so skews may be clock error"))
    for clock in ranks["clocks"]:
        if clock["by"] == "wall" and abs(clock["drift_ns"]) > MOST_DRIFT_NS:
            moved = f"{as_duration(clock['drift_ns'])} against its monotonic one"
            lines.append(Text(f"rank {clock['rank']}: its wall clock moved {moved} meanwhile: skews are off by as much"))
    if simulated:
        lines.append(Text(f"simulated: this rank stands for all {ranks['world']}"))
    elif ranks["missing"]:
        lines.append(Text(f"not in this report, of {ranks['world']} ranks: {_listed(ranks['missing'])}"))
    return lines


def _listed(ranks: Sequence[object]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _skew(ranks: Mapping[str, Any], most: int) -> Table:
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("late to", "unit", "rank", "by", "times", "cost"):
        drawing.add_column(heading, justify="left" if heading in ("late to", "unit") else "right")
    for skew in ranks["skew"][:most]:
        unit = Text("".join(letter if letter.isprintable() else "?" for letter in skew["key"]))
        often = f"{skew['times']} of {skew['count']}"
        late, cost = as_duration(skew["late_ns"]), as_duration(skew["total_ns"])
        drawing.add_row(skew["what"], unit, str(skew["rank"]), late, often, cost)
    return drawing
