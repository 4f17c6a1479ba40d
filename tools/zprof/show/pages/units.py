"""Owns the table of the units compute waited for: exposed time by unit over all ranks, and where each one's longest wait is.

`timeline` calls it. It takes what was exposed from `zprof.analysis.stalls`, as the report does, and measures no span itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zprof.analysis.stalls import Stalls
    from zprof.show.pages.lanes import Spans
    from zprof.show.pages.timeline import Names

__all__ = ["exposed_units"]

_MOST_UNITS = 200
_NAME_CHARS = 200


def exposed_units(
    ranks: Sequence[Stalls], lanes: Sequence[Sequence[Spans]], names: Names, tick_ns: int
) -> dict[str, Any]:
    """The units with most exposed time a step, all ranks' mean.

    Args:
        ranks, lanes: of each rank its stalls, and its lanes.
        names: what the lanes' keys mean.
    """
    totals: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    remedies: dict[str, dict[str, tuple[str, ...]]] = {}
    for stalls in ranks:
        # Per step and rank, so that runs of different lengths and numbers of ranks read alike.
        over = max(1, len(stalls.per_step_ns)) * len(ranks) * 1e6
        for stall in stalls.units:
            each = totals.setdefault(stall.key, {})
            each[stall.what] = each.get(stall.what, 0.0) + stall.exposed_ns / over
            counts[stall.key] = counts.get(stall.key, 0) + stall.count
            remedies.setdefault(stall.key, {})[stall.what] = stall.settings
    longest = _longest(lanes, names)
    kinds = sorted({what for each in totals.values() for what in each})
    order = sorted((key for key in totals if sum(totals[key].values()) > 0), key=lambda key: (-sum(totals[key].values()), key))
    rows = []
    for key in order[:_MOST_UNITS]:
        each = totals[key]
        length_ns, begin_ns, run = longest.get(key, (0, 0, 0))
        rows.append(
            {
                "unit": key[:_NAME_CHARS],
                "ms": [each.get(what, 0.0) for what in kinds],
                "count": counts[key],
                "longest_ms": length_ns / 1e6,
                "at": begin_ns // tick_ns,
                "run": run,
                "remedy": next(iter(remedies[key][max(each, key=lambda what: each[what])]), ""),
            }
        )
    per_step = sum(stalls.ns_per_step for stalls in ranks) / len(ranks) / 1e6
    return {"kinds": kinds, "rows": rows, "all": len(order), "ms_per_step": per_step}


def _longest(ranks: Sequence[Sequence[Spans]], names: Names) -> dict[str, tuple[int, int, int]]:
    """Unit -> (length, begin, rank's place) of its longest wait."""
    import numpy as np

    found: dict[str, tuple[int, int, int]] = {}
    for run, lanes in enumerate(ranks):
        for waits in (lane for lane in lanes if lane.lane.name == "exposed waits"):
            length = waits.end_ns - waits.begin_ns
            order = np.lexsort((length, waits.key))
            last = np.flatnonzero(np.diff(waits.key[order], append=-1))
            for index in order[last].tolist():
                name = names[int(waits.key[index])]
                if name not in found or found[name][0] < length[index]:
                    found[name] = (int(length[index]), int(waits.begin_ns[index]), run)
    return found
