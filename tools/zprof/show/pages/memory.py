"""Owns what a timeline shows of memory: per tier the stacked categories, the peak and what held it, and what was measured.

`timeline` calls it once a rank. It takes levels from the ledger as they are and never adds up rows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.text import as_size
from zprof.gpu.vendors import VENDORS, rows_of
from zprof.rows import CATEGORIES, TIERS
from zprof.show.pages.page import packed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zprof.analysis.ledger import Ledger, Moment
    from zprof.trace.reader import Trace

    Ints = NDArray[np.int64]

__all__ = ["Clock", "device_samples", "held", "views"]

_MOST_HOLDERS = 14
#: Moments at which the remainder is taken apart; it changes slowly, and each costs a few milliseconds.
_EXPLAINED_AT = 40
#: Tier -> sampler counters that measure it from outside, and how the page calls them.
_MEASURES = {
    "device": {
        "cuda allocated": "allocator: allocated",
        "cuda reserved": "allocator: reserved",
        **{f"{vendor.prefix} memory used": f"{vendor.library}: used" for vendor in VENDORS},
    },
    "host": {"rss": "RSS growth", "pinned": "pinned"},
    "disk": {},
}
#: Quantity of a GPU -> its name in the page, unit, divisor, and whether it counts up so that its slope is what matters.
_SAMPLES = {
    "utilisation": ("utilisation", "%", 1, False),
    "power": ("power", "W", 1000, False),
    "pcie tx": ("PCIe sent", "B/s", 1, True),
    "pcie rx": ("PCIe received", "B/s", 1, True),
    "nvlink tx": ("NVLink sent", "B/s", 1, True),
    "nvlink rx": ("NVLink received", "B/s", 1, True),
}


@dataclass(frozen=True, slots=True)
class Clock:
    """From a trace's times to ticks of the page: what to add, the page's first nanosecond included, and how long a tick is."""

    shift_ns: int
    tick_ns: int

    def ticks(self, time_ns: Ints) -> dict[str, str]:
        import numpy as np

        return packed(np.clip((time_ns + self.shift_ns) // self.tick_ns, 0, 0xFFFFFFFF).astype(np.uint32))

    def tick(self, time_ns: int) -> int:
        return max(0, (time_ns + self.shift_ns) // self.tick_ns)


def views(trace: Trace, ledger: Ledger, clock: Clock, *, points: int) -> list[dict[str, Any]]:
    """What the page can show of this rank's memory, the one to begin with first; a tier that held nothing has none."""
    curves = {tier: found for tier in TIERS if (found := _curves(ledger, tier, points)) is not None}
    shown_views: list[dict[str, Any]] = []
    if trace.device == "cpu":
        # Device and host are one memory here, and the RSS measures them together.
        both = [curves[tier] for tier in ("device", "host") if tier in curves]
        measured = list(_measured(trace, ledger, clock, {"rss": "RSS growth"}))
        if len(both) == 2 or measured:
            view = _view("process", _added(both), ("device", "host"), ledger, clock)
            shown_views.append(view | {"lines": measured, "explained": _explained(ledger, clock)})
    for tier, each in curves.items():
        lines = [] if shown_views and trace.device == "cpu" else list(_measured(trace, ledger, clock, _MEASURES[tier]))
        shown_views.append(_view(tier, each, (tier,), ledger, clock) | {"lines": lines})
    # The first line of the first view is the one the ledger answers to: what it has over the ledger is the remainder.
    for view in shown_views:
        view["remainder"] = bool(view["lines"]) and view["name"] in ("process", "device")
    return shown_views


def held(ledger: Ledger, when: int | Moment, tiers: tuple[str, ...]) -> dict[str, Any]:
    """Who holds the bytes of ``tiers`` at a moment, the largest first, and what all others come to."""
    levels = ledger.at(when).tolist()
    rows = [
        (int(nbytes), series.category, series.tier, series.key)
        for series, nbytes in zip(ledger.series, levels, strict=True)
        if series.tier in tiers and nbytes > 0
    ]
    rows.sort(key=lambda row: (-row[0], row[1:]))
    others = rows[_MOST_HOLDERS:]
    return {
        "total": sum(row[0] for row in rows),
        "holders": [[nbytes, category, tier, key[:200]] for nbytes, category, tier, key in rows[:_MOST_HOLDERS]],
        "others": [len(others), sum(row[0] for row in others)],
    }


def device_samples(ledger: Ledger, clock: Clock) -> list[dict[str, Any]]:
    """What GPUs said over time: utilisation and power as they are, the counters of bytes as bytes a second."""
    import numpy as np

    found = []
    for quantity, (name, unit, divisor, counts) in _SAMPLES.items():
        samples = [pair for what in rows_of(quantity) for pair in ledger.samples(what).items()]
        for key, (time_ns, value) in sorted(samples, key=lambda pair: pair[0]):
            values = value.astype(np.float64) / divisor
            if counts:
                if len(values) < 2:
                    continue
                passed = np.maximum(np.diff(time_ns), 1) / 1e9
                # A counter that starts anew (its driver was loaded again) says nothing of the interval it does it in.
                values = np.maximum(np.diff(values), 0) / passed
                time_ns = time_ns[1:]
            if len(values):
                columns = {"time": clock.ticks(time_ns), "values": packed(values.astype(np.float32))}
                found.append({"name": name, "key": key, "unit": unit} | columns)
    return found


def _curves(ledger: Ledger, tier: str, points: int) -> tuple[Ints, dict[str, Ints]] | None:
    found = ledger.curves(by="category", tier=tier, points=points)
    levels = {name: found.levels[name] for name in CATEGORIES if name in found.levels and found.levels[name].any()}
    return (found.time_ns, levels) if levels else None


def _added(parts: list[tuple[Ints, dict[str, Ints]]]) -> tuple[Ints, dict[str, Ints]]:
    """The curves of several tiers as one, on all their times."""
    import numpy as np

    if not parts:
        return np.zeros(1, dtype=np.int64), {}
    grid = np.unique(np.concatenate([time_ns for time_ns, _ in parts]))
    levels: dict[str, Ints] = {}
    for time_ns, part in parts:
        at = np.searchsorted(time_ns, grid, side="right") - 1
        for name, level in part.items():
            values = np.where(at >= 0, level[np.maximum(at, 0)], 0)
            levels[name] = levels[name] + values if name in levels else values
    return grid, levels


def _view(
    name: str, curves: tuple[Ints, dict[str, Ints]], tiers: tuple[str, ...], ledger: Ledger, clock: Clock
) -> dict[str, Any]:
    import numpy as np

    time_ns, levels = curves
    if len(tiers) == 1:
        when: int | Moment = ledger.peak(tiers[0])
    else:
        total = sum(levels.values(), start=np.zeros(len(time_ns), dtype=np.int64))
        when = int(time_ns[int(np.argmax(total))])
    peak = held(ledger, when, tiers)
    return {
        "name": name,
        "time": clock.ticks(time_ns),
        "series": [{"name": category, "values": packed(level.astype(np.float32))} for category, level in levels.items()],
        "peak": peak | {"at": clock.tick(when if isinstance(when, int) else when.time_ns), "shown": as_size(peak["total"])},
    }


def _explained(ledger: Ledger, clock: Clock) -> dict[str, Any] | None:
    """Of what the process holds beyond the ledger, the part that the report has a line for, over time; None where none is.

    Before the first line there is, everything was being loaded: it counts as that line does.
    """
    import numpy as np

    sampled = [time_ns for time_ns, _ in ledger.samples("rss").values()]
    if not sampled or not len(sampled[0]):
        return None
    time_ns = sampled[0][np.unique(np.linspace(0, len(sampled[0]) - 1, _EXPLAINED_AT).astype(np.int64))]
    lines = [ledger.remainder(each) for each in time_ns.tolist()]
    known = np.array([sum(line.nbytes for line in each if not line.name.startswith("unexplained")) for each in lines])
    first = next((place for place, each in enumerate(lines) if len(each) > 1), None)
    if first is None:
        return None
    known[:first] = known[first]
    return {"time": clock.ticks(time_ns), "values": packed(np.maximum(known, 0).astype(np.float32))}


def _measured(trace: Trace, ledger: Ledger, clock: Clock, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    import numpy as np

    for what, name in names.items():
        for _, (time_ns, value) in sorted(ledger.samples(what).items()):
            grown = value - trace.header.rss_nbytes if what == "rss" else value
            yield {"name": name, "time": clock.ticks(time_ns), "values": packed(grown.astype(np.float32))}
