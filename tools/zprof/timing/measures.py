"""Owns the measures: the named numbers a run is held to, what each means, and which way is worse.

``zprof diff``, ``zprof check`` and reports speak in them. It never decides what is too much, and leaves out what a recording
cannot say, instead of putting 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zprof.rows import CATEGORIES, TIERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zprof.ledger.ledger import Ledger
    from zprof.timing.analysis import Times
    from zprof.trace.reader import Trace

__all__ = ["MEASURES", "Measure", "Unit", "measures"]

Unit = Literal["bytes", "ms", "bytes/s", "%", "J", "count"]
Worse = Literal["more", "less", ""]


@dataclass(frozen=True, slots=True)
class Measure:
    """One named number: its unit, what it says, and whether more or less of it is worse ("" for neither)."""

    name: str
    unit: Unit
    worse: Worse
    meaning: str


# "A step" below is an average over the steps after the first, which fills pools and learns the order of use; over the first
# where it is the only one. What no span or sample of a recording tells is not among its measures.
_TABLE: tuple[Measure, ...] = (
    Measure("rss.peak", "bytes", "more", "Most resident memory of the process that was sampled."),
    Measure("rss.growth", "bytes", "more", "The same, less what was resident when the recording began."),
    Measure("cgroup.peak", "bytes", "more", "Most memory of the process's cgroup that was sampled."),
    Measure("pinned.peak", "bytes", "more", "Most page-locked host memory that was sampled."),
    Measure("cuda.allocated.peak", "bytes", "more", "Most bytes the CUDA allocator had given out, at a sample."),
    Measure("cuda.reserved.peak", "bytes", "more", "Most bytes the CUDA allocator held, at a sample."),
    Measure("step.count", "count", "", "Optimizer steps recorded."),
    Measure("step.first_ms", "ms", "more", "The first step, which fills pools and learns the order of use."),
    Measure("step.median_ms", "ms", "more", "The median step after the first."),
    Measure("step.p95_ms", "ms", "more", "95 of 100 steps after the first take at most this."),
    Measure("step.max_ms", "ms", "more", "The longest step after the first."),
    Measure("forward.ms_per_step", "ms", "more", "Time in forward, a step."),
    Measure("backward.ms_per_step", "ms", "more", "Time in backward, a step."),
    Measure("update.ms_per_step", "ms", "more", "Time in the optimizer, a step."),
    Measure("outside.ms_per_step", "ms", "more", "Time in neither forward, backward nor the optimizer, a step: loading data."),
    Measure("exposed.ms_per_step", "ms", "more", "Time the training threads stood waiting, a step, counted once."),
    Measure("exposed.percent", "%", "more", "The same as a share of the steps."),
    Measure("energy.joules_per_step", "J", "more", "Energy of all sampled GPUs, a step."),
    Measure("oom.count", "count", "more", "Requests for memory that failed."),
    Measure("rows.dropped", "count", "more", "Rows that were recorded and are not in the file: figures are then less sure."),
)
#: Waits that the runtime names; a measure each.
_WAITS = ("gather", "gather activation", "fetch", "reduce", "stash", "unstash", "update")
#: Spans that move bytes -> the first word of their measures.
_MOVES = {
    "gather": "gather",
    "gather activation": "gather_activation",
    "reduce": "reduce",
    "copy h2d": "h2d",
    "copy d2h": "d2h",
    "copy h2h": "h2h",
    "stash": "stash",
    "unstash": "unstash",
    "disk read": "disk_read",
    "disk write": "disk_write",
}


def _exposed(wait: str) -> str:
    return f"exposed.{wait.replace(' ', '_')}.ms_per_step"


def _all() -> Iterator[Measure]:
    for tier in TIERS:
        yield Measure(f"{tier}.peak", "bytes", "more", f"Most bytes the ledger had on the {tier} tier at once.")
        for category in CATEGORIES:
            yield Measure(f"{tier}.{category}.peak", "bytes", "more", f"Most {category} bytes on the {tier} tier at once.")
    yield from _TABLE
    for wait in _WAITS:
        yield Measure(_exposed(wait), "ms", "more", f"Time that only waiting for {wait} took, a step.")
    for verb, name in _MOVES.items():
        yield Measure(f"{name}.bytes_per_s", "bytes/s", "less", f'Bytes of "{verb}" over the time at least one was under way.')
        yield Measure(f"{name}.bytes_per_step", "bytes", "more", f'Bytes of "{verb}", a step.')


#: Every measure there is, by name.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _all()}


def measures(trace: Trace, ledger: Ledger, times: Times | None = None) -> dict[str, float]:
    """The measures of a run, by names of `MEASURES`; ``times`` where they are there already, else in another pass."""
    from zprof.timing import analysis

    times = times or analysis.times(trace)
    found = {"oom.count": float(times.oom), "rows.dropped": float(trace.dropped)}
    found |= _held(trace, ledger)
    found |= _stepped(times)
    found |= _moved(times)
    energy = _joules(ledger, times)
    if energy is not None:
        found["energy.joules_per_step"] = energy
    assert found.keys() <= MEASURES.keys(), f"undocumented: {sorted(found.keys() - MEASURES.keys())}"
    return {name: found[name] for name in MEASURES if name in found}


def _held(trace: Trace, ledger: Ledger) -> dict[str, float]:
    found: dict[str, float] = {}
    for tier in TIERS:
        found[f"{tier}.peak"] = float(ledger.peak(tier).nbytes)
        for category in CATEGORIES:
            found[f"{tier}.{category}.peak"] = float(ledger.peak(tier, category).nbytes)
    sampled = {"rss": "rss", "cgroup memory": "cgroup", "pinned": "pinned"}
    sampled |= {"cuda allocated": "cuda.allocated", "cuda reserved": "cuda.reserved"}
    for what, name in sampled.items():
        highest = [int(value.max()) for _, value in ledger.samples(what).values() if len(value)]
        if highest:
            found[f"{name}.peak"] = float(max(highest))
    if "rss.peak" in found:
        found["rss.growth"] = found["rss.peak"] - trace.header.rss_nbytes
    return found


def _stepped(times: Times) -> dict[str, float]:
    import numpy as np

    steps, warm, stalls = times.steps, times.steps.warm, times.stalls
    if not len(steps.bounds):
        return {}
    found = {"exposed.percent": 100 * stalls.share}
    if not steps.count:
        return found
    took = warm.duration_ns / 1e6
    found |= {
        "step.count": float(steps.count),
        "step.first_ms": float(steps.duration_ns[0]) / 1e6,
        "step.median_ms": float(np.median(took)),
        "step.p95_ms": float(np.percentile(took, 95, method="higher")),
        "step.max_ms": float(took.max()),
        "exposed.ms_per_step": stalls.ns_per_step / 1e6,
    }
    by_what = stalls.by_what()
    for wait in _WAITS:
        if wait in by_what or f"wait {wait}" in times.table.strings:
            found[_exposed(wait)] = by_what.get(wait, 0) / 1e6 / warm.count
    passes = {"forward": ("forward",), "backward": ("backward",), "update": ("step", "update")}
    for name, whats in passes.items():
        if len(table := times.table.of(*whats)):
            found[f"{name}.ms_per_step"] = _shared_ns(table.begin_ns, table.end_ns, warm.bounds) / 1e6 / warm.count
    if "forward.ms_per_step" in found:
        inside = times.table.of("forward", "backward", "step", "update")
        outside = warm.whole_ns - _shared_ns(inside.begin_ns, inside.end_ns, warm.bounds)
        found["outside.ms_per_step"] = outside / 1e6 / warm.count
    return found


def _shared_ns(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], bounds: NDArray[np.int64]) -> int:
    """Nanoseconds within ``bounds`` in which at least one span runs."""
    from zprof.timing.intervals import overlaps, portions

    return int(overlaps(*portions(begin_ns, end_ns), bounds)[2].sum())


def _moved(times: Times) -> dict[str, float]:
    found: dict[str, float] = {}
    warm = times.steps.warm
    for rate in times.rates:
        name = _MOVES[rate.verb]
        found[f"{name}.bytes_per_s"] = rate.bytes_per_s
        if times.steps.count:
            table = times.table.of(rate.verb)
            inside = (table.begin_ns >= warm.bounds[0, 0]) & (table.begin_ns < warm.bounds[-1, 1])
            found[f"{name}.bytes_per_step"] = float(table.nbytes[inside].sum()) / warm.count
    return found


def _joules(ledger: Ledger, times: Times) -> float | None:
    """Energy a step: what the counters of all GPUs rose by between the first step counted and the last."""
    import numpy as np

    warm = times.steps.warm
    counters = [pair for pair in ledger.samples("nvml energy").values() if len(pair[0]) > 1]
    if not times.steps.count or not counters:
        return None
    begin, end = int(warm.bounds[0, 0]), int(warm.bounds[-1, 1])
    # A counter that was not read over most of the steps would say too little, and nobody could tell.
    if any(time_ns[-1] - time_ns[0] < (end - begin) / 2 for time_ns, _ in counters):
        return None
    spent = 0.0
    for time_ns, value in counters:
        first, last = max(begin, int(time_ns[0])), min(end, int(time_ns[-1]))
        if last <= first:
            return None
        rise = np.interp(last, time_ns, value) - np.interp(first, time_ns, value)
        spent += float(rise) / 1e3 / (last - first) * (end - begin)
    return spent / warm.count
