"""Owns the table of a timeline: of each unit or module what was waited for it, what it held at the peaks, and its FLOPs.

`timeline` calls it. It takes figures from `zprof.analysis`, as the report does, joins them by module, and measures no span
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zprof.analysis.coverage import Unseen
from zprof.analysis.curves import NO_KEY, module_of

if TYPE_CHECKING:
    from zprof.analysis.analysis import Analysis
    from zprof.show.pages.lanes import Spans
    from zprof.show.pages.timeline import Names

__all__ = ["units_table"]

#: Rows in the page, the weightiest of all.
_MOST_UNITS = 5000
_NAME_CHARS = 200


def units_table(
    reads: Sequence[Analysis], lanes: Sequence[Sequence[Spans]], names: Names, tick_ns: int
) -> dict[str, Any]:
    """The rows as columns, of all ranks together: waits are a step's, the ranks' mean; bytes those of the rank with the most.

    Args:
        reads, lanes: of each rank what is known of it, and its lanes.
        names: what the lanes' keys mean.
    """
    waits = _waits(reads)
    held = _held(reads)
    flops = _flops(reads)
    longest = _longest(lanes, names)
    kinds = sorted({what for each in waits.values() for what in each.ms})
    tiers = [tier for tier in ("device", "host", "disk") if any(tier in each for each in held.values())]
    units = sorted(
        {*waits, *held, *flops},
        key=lambda unit: (-_sum(waits, unit), -sum(held.get(unit, {}).values()), -flops.get(unit, 0.0), unit),
    )
    shown = units[:_MOST_UNITS]
    # Of waits that count: not those of the first step alone.
    places = [longest.get(unit, (0, 0, 0)) if unit in waits else (0, 0, 0) for unit in shown]
    remedies = [waits[unit].remedy if unit in waits else "" for unit in shown]
    settings = sorted({*remedies})

    unseen = next((why for read in reads if (why := read.covered.waits() or read.steps.warm.unseen) is not None), None)
    return {
        "unseen": None if unseen is None else unseen.why,
        "name": [unit[:_NAME_CHARS] for unit in shown],
        "all": len(units),
        "waited": sum(_sum(waits, unit) > 0 for unit in units),
        "kinds": kinds,
        # Of each kind of wait, and of each tier, one figure a row.
        "ms": [[round(waits[unit].ms.get(what, 0.0), 6) if unit in waits else 0 for unit in shown] for what in kinds],
        "count": [waits[unit].count if unit in waits else 0 for unit in shown],
        "longest_ms": [length / 1e6 for length, _, _ in places],
        "at": [begin // tick_ns for _, begin, _ in places],
        "run": [run for _, _, run in places],
        "settings": settings,
        "remedy": [settings.index(remedy) for remedy in remedies],
        "tiers": tiers,
        "held": [[held.get(unit, {}).get(tier, 0) for unit in shown] for tier in tiers],
        "flops": [round(flops.get(unit, 0)) for unit in shown],
    }


class _Waits:
    """Of one module: milliseconds a step by what was waited for, waits, and the key of the policy to look at first."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.count = 0
        self.remedy, self._most = "", 0.0


def _sum(waits: dict[str, _Waits], unit: str) -> float:
    return sum(waits[unit].ms.values()) if unit in waits else 0.0


def _waits(reads: Sequence[Analysis]) -> dict[str, _Waits]:
    found: dict[str, _Waits] = {}
    for read in reads:
        if read.covered.waits() is not None:
            continue
        # Per step and rank, so that runs of different lengths and numbers of ranks read alike.
        over = max(1, len(read.stalls.per_step_ns)) * len(reads) * 1e6
        for stall in read.stalls.units:
            if not stall.exposed_ns:
                continue
            each = found.setdefault(_unit(stall.key), _Waits())
            ms = stall.exposed_ns / over
            each.ms[stall.what] = each.ms.get(stall.what, 0.0) + ms
            each.count += stall.count
            if each.ms[stall.what] > each._most:
                each._most, each.remedy = each.ms[stall.what], next(iter(stall.settings), "")
    return found


def _held(reads: Sequence[Analysis]) -> dict[str, dict[str, int]]:
    """Module -> tier -> bytes at the tier's peak, of the rank where they were most."""
    found: dict[str, dict[str, int]] = {}
    for read in reads:
        for tier in read.ledger.tiers:
            for unit, nbytes in read.ledger.table(read.ledger.peak(tier), "module", tier).items():
                each = found.setdefault(unit, {})
                each[tier] = max(each.get(tier, 0), nbytes)
    return found


def _flops(reads: Sequence[Analysis]) -> dict[str, float]:
    """Module -> FLOPs per step, the mean of the ranks where they were counted."""
    counted = [read.computed for read in reads if not isinstance(read.computed, Unseen)]
    found: dict[str, float] = {}
    for each in counted:
        for unit, sums in each.by_module().items():
            flops = sum(count for what, count in sums.items() if what != "nbytes") / len(counted)
            if flops:
                found[unit] = found.get(unit, 0.0) + flops
    return found


def _unit(key: str) -> str:
    # Each copy of an activation has a number of its own.
    return module_of(key.partition(" activation ")[0]) or NO_KEY


def _longest(ranks: Sequence[Sequence[Spans]], names: Names) -> dict[str, tuple[int, int, int]]:
    """Module -> (length, begin, rank's place) of its longest wait."""
    import numpy as np

    found: dict[str, tuple[int, int, int]] = {}
    for run, lanes in enumerate(ranks):
        for waits in (lane for lane in lanes if lane.lane.name == "exposed waits"):
            length = waits.end_ns - waits.begin_ns
            order = np.lexsort((length, waits.key))
            last = np.flatnonzero(np.diff(waits.key[order], append=-1))
            for index in order[last].tolist():
                unit = _unit(names[int(waits.key[index])])
                if unit not in found or found[unit][0] < length[index]:
                    found[unit] = (int(length[index]), int(waits.begin_ns[index]), run)
    return found
