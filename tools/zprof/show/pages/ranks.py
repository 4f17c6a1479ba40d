"""Owns what a timeline shows of more ranks than it can draw: which few are drawn, and the figures of all.

`timeline` calls it with a report of all ranks. It reads no trace, and finds nothing out that the report has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offload.text import as_duration, as_size
from zprof.rows import TIERS
from zprof.show.pages.page import packed
from zprof.show.report.next_commands import named
from zprof.show.report.ranks import stands_out
from zprof.show.report.summary import foremost

__all__ = ["chosen", "overview"]

#: Of those that stand out, so many are drawn.
_MOST_ODD = 3
_HOST_CHARS = 100


def chosen(report: Mapping[str, Any]) -> dict[int, str]:
    """The ranks that are drawn, seven at most, and why: those that stand out most, the extremes, and one as most are."""
    found: dict[int, str] = {}
    for rank, why in _asked(report):
        found[rank] = f"{found[rank]}; {why}" if rank in found else why
    return found


def _asked(report: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    ranks = report["ranks"]
    first = foremost(report["runs"])
    if first["oom"] is not None:
        yield first["rank"], "ran out of memory"
    for odd in ranks["outliers"][:_MOST_ODD]:
        yield odd["rank"], stands_out(odd["odd"])
    for name, why in (("work_ms", "most own work"), ("step_ms", "longest step")):
        values = _known(ranks[name])
        if values:
            rank = max(values, key=values.__getitem__)
            yield rank, f"{why}, {as_duration(values[rank] * 1e6)}"
            break
    for tier, held in ranks["peak_bytes"].items():
        values = _known(held)
        if values:
            rank = max(values, key=values.__getitem__)
            yield rank, f"highest {tier} peak, {as_size(values[rank])}"
            break
    # Scores are in no figure at all where none was seen.
    rank = min((int(rank) for rank in ranks["scores"]), key=lambda rank: (ranks["scores"][str(rank)], rank))
    yield rank, "nearest to the median"


def _known(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(rank): value for rank, value in values.items() if value is not None}


def overview(report: Mapping[str, Any], drawn: Mapping[int, str]) -> dict[str, Any]:
    """What the page shows of all ranks, as columns in the order of ranks; NaN is what was not seen."""
    import numpy as np

    ranks, runs = report["ranks"], report["runs"]
    numbers = [run["rank"] for run in runs]
    hosts = {host: number for number, host in enumerate(dict.fromkeys(run["host"] for run in runs))}
    place = {rank: at for at, rank in enumerate(numbers)}
    figures = []
    for name, unit, values in _figures(ranks):
        apart = ranks["deviations"][name]
        columns = ([of.get(str(rank)) for rank in numbers] for of in (values, apart))
        exact, scores = (np.array([np.nan if each is None else each for each in column], np.float64) for column in columns)
        figures.append({"name": name, "unit": unit, "values": packed(exact), "apart": packed(scores.astype(np.float32))})
    return {
        "count": len(runs),
        "world": ranks["world"],
        "rank": packed(np.array(numbers, np.uint32)),
        "host": packed(np.array([hosts[run["host"]] for run in runs], np.uint32)),
        "hosts": [host[:_HOST_CHARS] for host in hosts],
        "farthest": packed(np.array([place[int(rank)] for rank in ranks["scores"]], np.uint32)),
        "figures": figures,
        "odd": {str(each["rank"]): stands_out(each["odd"]) for each in ranks["outliers"]},
        "drawn": {str(rank): why for rank, why in drawn.items()},
        "files": named(report),
    }


def _figures(ranks: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(name, unit, values) of what ranks are compared in, as `zprof.analysis.outliers` calls them."""
    known = [("step", "ms", ranks["step_ms"]), ("own work", "ms", ranks["work_ms"]), ("waiting", "ms", ranks["wait_ms"])]
    known += [(f"{tier} peak", "bytes", ranks["peak_bytes"][tier]) for tier in TIERS if tier in ranks["peak_bytes"]]
    for name, unit, values in known:
        if name in ranks["deviations"]:
            yield name, unit, values
