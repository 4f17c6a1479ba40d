"""Owns the measures: the named numbers a run is held to, what each means, and which way is worse.

``zprof diff``, ``zprof check`` and reports speak in them. It never decides what is too much. Every measure has an answer for
every recording: a number, or `Unseen` where the recording cannot say it, and never 0 in its stead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zprof.analysis.coverage import Unseen
from zprof.gpu.vendors import rows_of
from zprof.rows import CATEGORIES, TIERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from offload.hardware import Hardware
    from zprof.analysis.analysis import Analysis
    from zprof.analysis.children import Children
    from zprof.analysis.compute import Computed
    from zprof.analysis.operators import Operators

__all__ = ["MEASURES", "Measure", "Unit", "Value", "measures", "numbers"]

#: What a recording says of a measure.
Value = float | Unseen

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
# where it is the only one.
_TABLE: tuple[Measure, ...] = (
    Measure("rss.peak", "bytes", "more", "Most resident memory of the process that was sampled."),
    Measure("rss.growth", "bytes", "more", "The same, less what was resident when the recording began."),
    Measure("cgroup.peak", "bytes", "more", "Most memory of the process's cgroup that was sampled."),
    Measure("children.peak", "bytes", "more", "Most memory of processes under this one; what they share counts once (PSS)."),
    Measure("children.rss.peak", "bytes", "more", "The same in resident bytes: what they share counts for each."),
    Measure("children.count", "count", "more", "Most processes under this one at once."),
    Measure("tree.peak", "bytes", "more", "Most memory of the process and its children; shared memory counts once (PSS)."),
    Measure("tree.shared.peak", "bytes", "more", "Most shared memory in that, such as batches that loader workers pass on."),
    Measure("shm.peak", "bytes", "more", "Most bytes of all files in /dev/shm, of any process."),
    Measure("pinned.peak", "bytes", "more", "Most page-locked host memory that was sampled."),
    Measure("cuda.allocated.peak", "bytes", "more", "Most bytes the CUDA allocator had given out, at a sample."),
    Measure("cuda.reserved.peak", "bytes", "more", "Most bytes the CUDA allocator held, at a sample."),
    Measure("startup.ms", "ms", "more", "From the start of the process to the first step: imports, attach, the first batch."),
    Measure("step.count", "count", "", "Optimizer steps recorded."),
    Measure("step.first_ms", "ms", "more", "The first step, which fills pools and learns the order of use."),
    Measure("step.median_ms", "ms", "more", "The median step after the first."),
    Measure("step.p95_ms", "ms", "more", "95 of 100 steps after the first take at most this."),
    Measure("step.max_ms", "ms", "more", "The longest step after the first."),
    Measure("forward.ms_per_step", "ms", "more", "Time per step in forward."),
    Measure("backward.ms_per_step", "ms", "more", "Time per step in backward."),
    Measure("update.ms_per_step", "ms", "more", "Time per step in the optimizer."),
    Measure("outside.ms_per_step", "ms", "more", "Time per step in neither forward, backward nor the optimizer."),
    Measure("exposed.ms_per_step", "ms", "more", "Time per step that training threads waited, counted once."),
    Measure("exposed.percent", "%", "more", "The same as a share of the steps."),
    Measure("exposed.data.percent", "%", "more", "Time the training thread waited for data loaders, as a share of the steps."),
    Measure("energy.joules_per_step", "J", "more", "Energy of all sampled GPUs per step."),
    Measure("flops.per_step", "count", "more", "FLOPs done per step: those of counted steps, recomputed ones included."),
    Measure("flops.model_per_step", "count", "more", "The same of the model's forwards and backwards, each counted once."),
    Measure("tokens.per_second", "count", "less", "Tokens of the model's input, a second of the median step; of this rank."),
    Measure("samples.per_second", "count", "less", "Samples of the model's input, a second of the median step; of this rank."),
    Measure("mfu.percent", "%", "less", "The model's FLOPs at the device's peak, as a share of the median step."),
    Measure("hfu.percent", "%", "less", "The same of all FLOPs done."),
    Measure("ops.self_ms", "ms", "more", "Time per step of the busiest thread in torch's operators; --level ops."),
    Measure("ops.calls_per_step", "count", "more", "Operators called per step."),
    Measure("ops.between_percent", "%", "more", "Share of the step in which that thread was in no operator: Python, waits."),
    Measure("ops.sync_ms", "ms", "more", "Time per step in calls that wait for a device."),
    Measure("gpu.busy_ms", "ms", "", "Time per step in which a stream of the idlest GPU of this rank ran anything."),
    Measure("gpu.idle_percent", "%", "more", "Share of the step in which none did."),
    Measure("gpu.launch_bound_percent", "%", "more", "Share of the step: idle because the host had not launched anything yet."),
    Measure("energy.joules_per_token", "J", "more", "Energy of all sampled GPUs, a token of this rank."),
    Measure("growth.bytes_per_step", "bytes", "more", "Memory that kept growing, per step: leaks, or data kept on purpose."),
    Measure("oom.count", "count", "more", "Requests for memory whose failure ended the script."),
    Measure("rows.dropped", "count", "more", "Rows that were recorded but are not in the file: figures are less accurate."),
)
_NO_STEP = Unseen("no optimizer step was recorded")
_NO_START = Unseen("not recorded: recording began in a running program; zprof run records a program from its start")
_TOO_SHORT = Unseen("sampled over less than half of the steps")
#: Waits that zhooks names, and those for torch.distributed; a measure each.
_WAITS = (
    "data", "gather", "gather activation", "fetch", "reduce", "stash", "unstash", "update", "collective", "point to point"
)  # fmt: skip
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
        yield Measure(_exposed(wait), "ms", "more", f"Time per step spent only waiting for {wait}.")
    for verb, name in _MOVES.items():
        yield Measure(f"{name}.bytes_per_s", "bytes/s", "less", f'Bytes of "{verb}" over the time at least one was running.')
        yield Measure(f"{name}.bytes_per_step", "bytes", "more", f'Bytes of "{verb}" per step.')


#: Every measure there is, by name.
MEASURES: dict[str, Measure] = {measure.name: measure for measure in _all()}


def measures(
    analysis: Analysis, *, within: tuple[int, int] | None = None, hardware: Hardware | None = None
) -> dict[str, Value]:
    """All of `MEASURES` for a run, by name.

    Args:
        within: count peaks of tiers between these times; over the whole run where it is None.
        hardware: the profile of the device; None takes the shipped one of just that device, if there is one.
    """
    grown = analysis.grown
    found: dict[str, Value] = {
        "oom.count": float(len(analysis.failures)),
        "rows.dropped": float(analysis.trace.dropped),
        "growth.bytes_per_step": grown if isinstance(grown, Unseen) else float(sum(each.per_step for each in grown)),
        "energy.joules_per_step": _joules(analysis),
        "startup.ms": _started(analysis),
    }
    for part in (_held(analysis, within), _sampled(analysis), _stepped(analysis), _moved(analysis)):
        found |= part
    found |= _computed(analysis.computed, hardware, found["energy.joules_per_step"])
    found |= _operators(analysis.operators)
    assert found.keys() == MEASURES.keys(), f"not the measures there are: {sorted(found.keys() ^ MEASURES.keys())}"
    return {name: found[name] for name in MEASURES}


def numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Those of ``values`` that were seen."""
    return {name: value for name, value in values.items() if not isinstance(value, Unseen)}


def _held(analysis: Analysis, within: tuple[int, int] | None) -> dict[str, Value]:
    ledger, covered = analysis.ledger, analysis.covered

    def most(tier: str, category: str | None = None) -> float:
        if within is None or tier not in ledger.tiers:
            return float(ledger.peak(tier, category).nbytes)
        return float(ledger.peak_between(tier, *within, category).nbytes)

    found: dict[str, Value] = {}
    for tier in TIERS:
        found[f"{tier}.peak"] = covered.tier(tier) or most(tier)
        for category in CATEGORIES:
            found[f"{tier}.{category}.peak"] = covered.place(category, tier) or most(tier, category)
    return found


def _sampled(analysis: Analysis) -> dict[str, Value]:
    found: dict[str, Value] = {}
    sampled = {"rss": "rss", "cgroup memory": "cgroup", "/dev/shm used": "shm", "pinned": "pinned"}
    sampled |= {"cuda allocated": "cuda.allocated", "cuda reserved": "cuda.reserved"}
    for what, name in sampled.items():
        highest = [int(value.max()) for _, value in analysis.ledger.samples(what).values() if len(value)]
        found[f"{name}.peak"] = float(max(highest)) if highest else Unseen(f"not sampled: nothing reported {what}")
    most, start = found["rss.peak"], analysis.header.rss_nbytes
    unseen = most if isinstance(most, Unseen) else Unseen("the header does not record what was resident at the start")
    found["rss.growth"] = most - start if not isinstance(most, Unseen) and start else unseen
    return found | _under(analysis.children)


def _under(found: Children | Unseen) -> dict[str, Value]:
    """Of the processes under the recorded one: 0 where somebody looked and there were none."""
    names = ("children.peak", "children.rss.peak", "children.count", "tree.peak", "tree.shared.peak")
    if isinstance(found, Unseen):
        return dict.fromkeys(names, found)
    alone = Unseen("no process was seen under this one, whose own is rss.peak")
    unread = Unseen("not sampled: the kernel did not report what they share, or they ran too briefly")

    def said(value: int | None, without: Value) -> Value:
        return without if not found.most else unread if value is None else float(value)

    held = (said(found.pss_nbytes, 0.0), said(found.rss_nbytes, 0.0), float(found.most))
    return dict(zip(names, (*held, said(found.tree_nbytes, alone), said(found.shared_nbytes, alone)), strict=True))


def _stepped(analysis: Analysis) -> dict[str, Value]:
    import numpy as np

    steps, usual, covered = analysis.steps, analysis.usual, analysis.covered
    names = ("count", "first_ms", "median_ms", "p95_ms", "max_ms")
    unseen = covered.steps() or (None if steps.count else _NO_STEP)
    if unseen is not None:
        found: dict[str, Value] = {f"step.{name}": unseen for name in names}
    else:
        took = usual.duration_ns / 1e6
        late = np.percentile(took, 95, method="higher")
        figures = (steps.count, steps.duration_ns[0] / 1e6, np.median(took), late, took.max())
        whys = (None, steps.unseen, *[usual.unseen] * 3)
        found = {f"step.{name}": why or float(figure) for name, figure, why in zip(names, figures, whys, strict=True)}
    return found | _passes(analysis, unseen) | _waited(analysis, unseen)


def _started(analysis: Analysis) -> Value:
    """By the host, which issues the first step when it has come so far."""
    header, steps = analysis.header, analysis.steps
    if header.simulated:
        return Unseen("not simulated: a simulation begins with its first step")
    if not header.process_ns:
        return _NO_START
    unseen = analysis.covered.steps() or (None if steps.count else _NO_STEP)
    if unseen is not None or steps.unseen is not None:
        return unseen or Unseen("not recorded: when the first step began, because its forward was not seen")
    took_ns = int(steps.issued[0, 0]) - header.process_ns
    return took_ns / 1e6 if took_ns >= 0 else Unseen("not recorded: by the trace's header, the process began later")


def _passes(analysis: Analysis, unseen: Unseen | None) -> dict[str, Value]:
    usual, covered = analysis.usual, analysis.covered
    found: dict[str, Value] = {}
    passes = {"forward": ("forward",), "backward": ("backward",), "update": ("step", "update")}
    for name, whats in passes.items():
        table = analysis.table.of(*whats)
        # Steps of any optimizer are recorded, whoever made it; on a GPU the host only queues them.
        by_steps = covered.steps() if name == "update" and covered.queued("update") is None else covered.spans(name)
        # A step that is only its update has all of that.
        part = usual.unseen if name != "update" else None
        why = unseen or part or by_steps or (None if len(table) else Unseen(f"no {name} was recorded"))
        found[f"{name}.ms_per_step"] = why or _shared_ns(table.begin_ns, table.end_ns, usual.bounds) / 1e6 / usual.count
    why = next((each for each in found.values() if isinstance(each, Unseen)), None)
    if why is None:
        inside = analysis.table.of("forward", "backward", "step", "update")
        outside = usual.whole_ns - _shared_ns(inside.begin_ns, inside.end_ns, usual.bounds)
        found["outside.ms_per_step"] = outside / 1e6 / usual.count
    else:
        found["outside.ms_per_step"] = why
    return found


def _waited(analysis: Analysis, unseen: Unseen | None) -> dict[str, Value]:
    steps, usual, stalls, covered = analysis.steps, analysis.usual, analysis.stalls, analysis.covered
    # Without steps the whole recording counts as one, for the share of it.
    share = covered.waits() or usual.unseen or (None if len(steps.bounds) else _NO_STEP)
    found: dict[str, Value] = {"exposed.percent": share or 100 * stalls.share}
    why = unseen or usual.unseen or covered.waits()
    found["exposed.ms_per_step"] = why or stalls.ns_per_step / 1e6
    by_what = stalls.by_what()
    others = unseen or usual.unseen or covered.spans("wait")
    data = unseen or usual.unseen or covered.data()
    for wait in _WAITS:
        why = data if wait == "data" else others
        found[_exposed(wait)] = why or by_what.get(wait, 0) / 1e6 / usual.count
    whole = usual.whole_ns
    found["exposed.data.percent"] = data or (100 * by_what.get("data", 0) / whole if whole else _NO_STEP)
    return found


def _shared_ns(begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64], bounds: NDArray[np.int64]) -> int:
    """Nanoseconds within ``bounds`` in which at least one span runs."""
    from zprof.analysis.intervals import overlaps, portions

    return int(overlaps(*portions(begin_ns, end_ns), bounds)[2].sum())


def _moved(analysis: Analysis) -> dict[str, Value]:
    found: dict[str, Value] = {}
    steps, warm, covered = analysis.steps, analysis.steps.warm, analysis.covered
    rates = {rate.verb: rate for rate in analysis.rates}
    for verb, name in _MOVES.items():
        rate = rates.get(verb)
        nothing = None if rate is not None else Unseen(f"no {verb} was recorded")
        found[f"{name}.bytes_per_s"] = covered.spans(verb) or nothing or (rate.bytes_per_s if rate is not None else _NO_STEP)
        # How many bytes were moved is known also where it is not known how long that took.
        why = covered.amounts(verb) or nothing or covered.steps() or warm.unseen or (None if steps.count else _NO_STEP)
        if why is None:
            table = analysis.table.of(verb)
            inside = (table.begin_ns >= warm.bounds[0, 0]) & (table.begin_ns < warm.bounds[-1, 1])
            found[f"{name}.bytes_per_step"] = float(table.nbytes[inside].sum()) / warm.count
        else:
            found[f"{name}.bytes_per_step"] = why
    return found


def _computed(did: Computed | Unseen, hardware: Hardware | None, joules: Value) -> dict[str, Value]:
    from offload.errors import HardwareError
    from zprof.analysis.compute import hardware_of

    names = ("flops.per_step", "flops.model_per_step", "tokens.per_second", "samples.per_second", "mfu.percent", "hfu.percent")
    if isinstance(did, Unseen):
        return dict.fromkeys((*names, "energy.joules_per_token"), did)
    tokens, samples = did.tokens, did.samples
    no_tokens = Unseen("the model's input is not a matrix of integers, batch by sequence")
    shares: list[Value]
    on = hardware_of(did) if hardware is None else hardware
    if isinstance(on, Unseen):
        shares = [on, on]
    else:
        try:
            reached = did.on(on)
            shares = [100 * reached.mfu, 100 * reached.hfu]
        except HardwareError as error:
            shares = [Unseen(str(error))] * 2
    figures: list[Value] = [
        did.flops,
        did.model_flops,
        no_tokens if tokens is None else tokens / did.step_s,
        Unseen("no model was called with a tensor") if samples is None else samples / did.step_s,
        *shares,
    ]
    each: Value = joules if isinstance(joules, Unseen) else no_tokens
    if tokens and not isinstance(joules, Unseen):
        each = joules / tokens
    return dict(zip(names, figures, strict=True)) | {"energy.joules_per_token": each}


def _operators(ran: Operators | Unseen) -> dict[str, Value]:
    names = ("self_ms", "calls_per_step", "between_percent", "sync_ms")
    of_gpu = ("busy_ms", "idle_percent", "launch_bound_percent")
    if isinstance(ran, Unseen):
        return {**{f"ops.{name}": ran for name in names}, **{f"gpu.{name}": ran for name in of_gpu}}
    in_operators, step_ns = ran.in_operators_ns(), ran.step_ns
    counted = Unseen("the recorded operators do not cover a whole step") if not ran.shown.counted else None
    if ran.shown.left_out:
        counted = Unseen(f"{ran.shown.left_out:,} operators of the steps are not in the trace")
    no_gpu = counted or Unseen("not recorded: the run used no GPU when its operators were recorded")
    syncs: Value = sum(took for *_, took in ran.syncs()) / 1e6 if ran.shown.devices else no_gpu
    values = (in_operators / 1e6, sum(row.calls for row in ran.by("op")), 100 * (1 - in_operators / step_ns), syncs)
    found: dict[str, Value] = {f"ops.{name}": counted or value for name, value in zip(names, values, strict=True)}
    idlest = max(ran.idle(), key=lambda idle: idle.idle_ns, default=None)
    if idlest is None or counted is not None:
        return found | {f"gpu.{name}": no_gpu for name in of_gpu}
    shares = (100 * idlest.share, 100 * idlest.reasons["launch"] / step_ns)
    figures = ((step_ns - idlest.idle_ns) / 1e6, *shares)
    return found | {f"gpu.{name}": value for name, value in zip(of_gpu, figures, strict=True)}


def _joules(analysis: Analysis) -> Value:
    """Energy a step: what the counters of all GPUs rose by between the first step counted and the last."""
    import numpy as np

    warm = analysis.steps.warm
    samples = (pair for what in rows_of("energy") for pair in analysis.ledger.samples(what).values())
    counters = [pair for pair in samples if len(pair[0]) > 1]
    if not counters:
        return Unseen("not sampled: no GPU reported its energy")
    unseen = analysis.covered.steps() or warm.unseen or (None if analysis.steps.count else _NO_STEP)
    if unseen is not None:
        return unseen
    begin, end = int(warm.bounds[0, 0]), int(warm.bounds[-1, 1])
    # A counter that was not read over most of the steps would say too little, and nobody would know.
    if any(time_ns[-1] - time_ns[0] < (end - begin) / 2 for time_ns, _ in counters):
        return _TOO_SHORT
    spent = 0.0
    for time_ns, value in counters:
        first, last = max(begin, int(time_ns[0])), min(end, int(time_ns[-1]))
        if last <= first:
            return _TOO_SHORT
        rise = np.interp(last, time_ns, value) - np.interp(first, time_ns, value)
        spent += float(rise) / 1e3 / (last - first) * (end - begin)
    return spent / warm.count
