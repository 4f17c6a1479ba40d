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

from offload.text import as_duration, as_size, plural
from zprof.analysis.outliers import MANY
from zprof.analysis.ranks import Clock

__all__ = ["proven_lines", "ranks_lines", "ranks_table", "stands_out"]

_MOST_SKEWS = 8
#: Stragglers and clocks that have a line each.
_MOST_LINES = 8
#: A wall clock that moved more than this during a run is worth a line: skews are of this size.
MOST_DRIFT_NS = 1_000_000


def ranks_table(report: Mapping[str, Any], top: int | None = None) -> list[Any]:
    """Each rank's peaks and pace: of many those that stand out, the farthest from the median first, and what others are like.

    Args:
        top: so many ranks, also those that do not stand out.
    """
    ranks, runs = report["ranks"], report["runs"]
    odd = {str(each["rank"]): stands_out(each["odd"]) for each in ranks["outliers"]}
    if len(runs) > (top or MANY):
        hosts = {str(run["rank"]): run["host"] for run in runs}
        most = MANY if top is None else top
        shown = {rank: hosts[rank] for rank in [rank for rank in ranks["scores"] if top or rank in odd][:most]}
    else:
        shown = {str(run["rank"]): run["host"] for run in runs}
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    tiers = list(ranks["peak_bytes"])
    headings = ["rank", "host", *(f"{tier} peak" for tier in tiers), "step", "own work", "waiting"]
    for heading in [*headings, "stands out in"] if odd else headings:
        drawing.add_column(heading, justify="left" if heading in ("host", "stands out in") else "right")
    columns: list[tuple[Mapping[str, Any], Callable[[Any], str]]] = [
        *((ranks["peak_bytes"][tier], as_size) for tier in tiers),
        *((ranks[name], _took) for name in ("step_ms", "work_ms", "wait_ms")),
    ]
    for rank, host in shown.items():
        apart = [odd.get(rank, "")] if odd else []
        drawing.add_row(rank, Text(_printable(host)), *(_or_dash(of[rank], draw) for of, draw in columns), *apart)
    rest = [str(run["rank"]) for run in runs if str(run["rank"]) not in shown]
    lines: list[Any] = [drawing]
    if rest:
        drawing.add_section()
        for label, fold in (("median", _median), ("lowest", min), ("highest", max)):
            cells = (_folded([of[rank] for rank in rest], fold, draw) for of, draw in columns)
            drawing.add_row(f"{len(rest):,}", f"others, {label}", *cells)
        lines.append(Text(f"{len(rest):,} ranks nearer the median: --top {len(runs)}"))
    if not odd and len(runs) > MANY:
        lines.append(Text("no rank stands out"))
    return lines


def stands_out(odds: Sequence[Mapping[str, Any]]) -> str:
    """In which figures, and by how much: "own work +46%, waiting -86%"."""
    said = []
    for odd in odds:
        value, middle = (odd[f"{name}_bytes"] if f"{name}_bytes" in odd else odd[f"{name}_ms"] for name in ("value", "median"))
        said.append(f"{odd['figure']} {value / middle - 1:+.0%}" if middle else f"{odd['figure']}, of which others have none")
    return ", ".join(said)


def _folded(values: Sequence[Any], fold: Callable[[Sequence[Any]], Any], drawn: Callable[[Any], str]) -> str:
    known = [value for value in values if value is not None]
    return drawn(fold(known)) if known else "-"


def _median(values: Sequence[Any]) -> Any:
    return type(values[0])(median(values))


def _took(ms: float) -> str:
    return as_duration(ms * 1e6)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


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
        lines.append(Text('which rank is slow, and who waits for whom, was not seen: see "not recorded" below'))
    stragglers = ranks["stragglers"] or ()
    for slow in stragglers[:_MOST_LINES]:
        more = slow["work_ns"] / slow["median_ns"] - 1
        works = f"works {as_duration(slow['work_ns'])} per step, {more:.0%} more than the median rank"
        lines.append(Text(f"straggler: rank {slow['rank']} {works}"))
    if len(stragglers) > _MOST_LINES:
        lines.append(Text(f"and {len(stragglers) - _MOST_LINES:,} more whose own work is slower than the median rank's"))
    if ranks["skew"]:
        lines.append(_skew(ranks, top or _MOST_SKEWS))
        if ranks["skew_every"] > 1:
            lines.append(Text(f"late ranks: from 1 in {ranks['skew_every']} collectives of each unit, to fit in memory"))
    elsewhere = [str(clock["rank"]) for clock in ranks["clocks"] if clock["by"] == "wall"]
    if elsewhere:
        who = f"{plural(len(elsewhere), 'rank')} {_listed(elsewhere)}"
        lines.append(Text(f"{who}: aligned with the first by wall clock, so skews may be clock error"))
    lines += map(Text, proven_lines([Clock(**clock) for clock in ranks["clocks"]]))
    moved = [clock for clock in ranks["clocks"] if clock["by"] == "wall" and abs(clock["drift_ns"]) > MOST_DRIFT_NS]
    for clock in sorted(moved, key=lambda clock: -abs(clock["drift_ns"]))[:_MOST_LINES]:
        by = f"{as_duration(clock['drift_ns'])} against its monotonic one"
        lines.append(Text(f"rank {clock['rank']}: its wall clock moved {by} meanwhile: skews are off by as much"))
    if len(moved) > _MOST_LINES:
        lines.append(Text(f"and the wall clocks of {len(moved) - _MOST_LINES:,} more ranks moved by less"))
    if simulated:
        lines.append(Text(f"simulated: this rank stands for all {ranks['world']}"))
    elif ranks["missing"]:
        lines.append(Text(f"not in this report, of {ranks['world']} ranks: {_listed(ranks['missing'])}"))
    return lines


def proven_lines(clocks: Sequence[Clock]) -> list[str]:
    """Of hosts whose wall clocks collectives prove to be wrong: by how much, and how well the offset is known."""
    of_host: dict[tuple[int, int], list[Clock]] = {}
    for clock in clocks:
        if clock.by == "collectives" and clock.bounds_ns is not None:
            least, most = clock.bounds_ns
            of_host.setdefault((least, most), []).append(clock)
    lines = []
    for (least, most), mine in list(of_host.items())[:_MOST_LINES]:
        off = mine[0].wall_ns - mine[0].offset_ns
        wrong = f"its wall clock is {as_duration(abs(off))} {'behind' if off < 0 else 'ahead of'} the first rank's"
        within = f"corrected by collectives, to within {as_duration((most - least + 1) // 2)}"
        lines.append(f"{plural(len(mine), 'rank')} {_listed([clock.rank for clock in mine])}: {wrong}; {within}")
    if len(of_host) > _MOST_LINES:
        lines.append(f"and {len(of_host) - _MOST_LINES:,} more hosts whose wall clocks are wrong, corrected by collectives")
    return lines


def _listed(ranks: Sequence[object]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _skew(ranks: Mapping[str, Any], most: int) -> Table:
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("late to", "unit", "rank", "by", "times", "cost"):
        drawing.add_column(heading, justify="left" if heading in ("late to", "unit") else "right")
    for skew in ranks["skew"][:most]:
        unit = Text(_printable(skew["key"]))
        often = f"{skew['times']} of {skew['count']}"
        late, cost = as_duration(skew["late_ns"]), as_duration(skew["total_ns"])
        drawing.add_row(skew["what"], unit, str(skew["rank"]), late, often, cost)
    return drawing
