"""Owns the remedy for late gathers: which of them could have begun one unit earlier, and what that would have hidden.

Reports ask it with the spans of a run and its policy. It proposes a key of the policy only where the recording shows compute
that could have hidden the transfer and a wire that was not busy already; it never promises more than was waited for.

Note: [What one unit earlier means]
    At a use the runtime launches the gathers of the next ``prefetch`` units. One more launches each gather at the use before
    the one that launched it. In forward a use begins where the compute before it ends; in backward, where the gradients of
    the unit before it are complete. Where neither was recorded, the gather before stands for the use before: never too early.

Note: [When a gather really ended]
    The runtime notes an end when it needs the buffer. Where it had to wait, that is when the transfer ended; elsewhere the
    transfer ended sooner. So the bytes a second of the gathers waited for give each gather the time it needs, and gathers
    follow one another on one wire.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offload.text import as_duration
from zprof.analysis.bandwidth import really_waited, waited_rate
from zprof.analysis.intervals import Ints, union_ns
from zprof.analysis.spans import Instants, SpanTable
from zprof.analysis.steps import Steps

if TYPE_CHECKING:
    from zprof.trace.reader import Trace

__all__ = ["POINTS", "WHATS", "Advice", "Remedy", "advice", "policy_of", "setting"]

WHATS = ("gather", "wait gather", "compute", "forward", "backward")
POINTS = ("ready", "release")

_MOST_PREFETCH = 16
_MOST_GATHERS = 1 << 15
#: Of refining the bytes a second; more change little.
_ROUNDS = 8
#: Of the passes' time the wire is busy: beyond this nothing can begin earlier.
_SATURATED = 0.9
#: Below this share of a step a remedy is not worth a line.
_LEAST_SHARE = 0.001

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Remedy:
    """One gather that would be hidden by beginning one unit earlier; nanoseconds a step, at most."""

    unit: str
    hides_ns_per_step: float

    def line(self, prefetch: int | None) -> str:
        """As the report says it; ``prefetch`` is the policy's, None where the recording does not say."""
        setting = "one more than it is" if prefetch is None else str(prefetch + 1)
        return (
            f"gather {self.unit} one unit earlier ([schedule] prefetch = {setting}) "
            f"hides up to {as_duration(self.hides_ns_per_step)} per step"
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """What can be done about gathers that were waited for.

    Attributes:
        prefetch: of the recorded policy; None where it was not recorded.
        busy: share of forward and backward in which the wire moved gathers, as far as is known; None where it cannot.
        remedies: the units whose gathers would gain, the most first; ``hides_ns_per_step`` is of all together.
        lines: one sentence each, for a reader.
    """

    prefetch: int | None
    busy: float | None
    remedies: tuple[Remedy, ...]
    hides_ns_per_step: float
    lines: tuple[str, ...]


def policy_of(trace: Trace) -> Mapping[str, object]:
    """The last policy a run recorded, as tables; empty where it recorded none, or none that can be read."""
    notes = trace.notes("policy")
    text = notes[-1].body.get("text") if notes else None
    try:
        found = json.loads(text if isinstance(text, str) else "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def advice(table: SpanTable, points: Instants, steps: Steps, policy: Mapping[str, object]) -> Advice:
    """What the steps of ``steps`` show; ``table`` holds the spans of `WHATS`, ``points`` the instants of `POINTS`."""
    steps = _latest(table, steps)
    if len(steps.bounds):
        table = table.where(np.arange(np.searchsorted(table.begin_ns, steps.bounds[0, 0]), len(table)))
    prefetch = setting(policy, "schedule", "prefetch")
    prefetch = prefetch if isinstance(prefetch, int) else None
    gathers, waits, passes = (_inside(table.of(*whats), steps) for whats in (("gather",), ("wait gather",), _PASSES))
    gathers = _sized(gathers, points)
    need_ns = _needs(gathers, waits)
    if need_ns is None or not len(passes) or not steps.whole_ns:
        return Advice(prefetch, None, (), 0.0, ())
    pass_ns = union_ns(passes.begin_ns, passes.end_ns)
    in_pass = _pass_of(gathers.begin_ns, passes) >= 0
    busy = min(1.0, float(need_ns[in_pass].sum()) / pass_ns)
    exposed_ns = int(waits.duration_ns.sum())
    if exposed_ns < _LEAST_SHARE * steps.whole_ns:
        return Advice(prefetch, busy, (), 0.0, ())
    if busy >= _SATURATED:
        return Advice(prefetch, busy, (), 0.0, (_saturated(busy, policy),))
    if prefetch is not None and prefetch >= _MOST_PREFETCH:
        return Advice(prefetch, busy, (), 0.0, ())
    gains = _gains(gathers, waits, passes, _uses(table, points), need_ns)
    total = min(float(gains.sum()), float(exposed_ns)) / len(steps.bounds)
    remedies = _by_unit(gathers, gains, steps) if total >= _LEAST_SHARE * steps.whole_ns / len(steps.bounds) else ()
    total = total if remedies else 0.0
    return Advice(prefetch, busy, remedies, total, _lines(remedies, total, prefetch))


_PASSES = ("forward", "backward")


def _sized(gathers: SpanTable, points: Instants) -> SpanTable:
    """The gathers that take time, with the bytes that say how much.

    A gather from this rank's own tier sends nothing to other ranks; there the buffer that is filled counts, whose size the
    release says.
    """
    if not gathers.nbytes.any():
        released = points.of("release")
        sizes = np.zeros(len(gathers.strings), np.int64)
        np.maximum.at(sizes, released.key, released.nbytes)
        gathers = replace(gathers, nbytes=sizes[gathers.key])
    return gathers.where(gathers.nbytes > 0)


def _latest(table: SpanTable, steps: Steps) -> Steps:
    """The last steps that hold no more gathers than can be replayed quickly; at least one."""
    begun = np.searchsorted(table.of("gather").begin_ns, steps.bounds[:, 0])
    if not len(begun):
        return steps
    enough = int(np.searchsorted(begun, begun[-1] - _MOST_GATHERS))
    return Steps(steps.bounds[min(enough, len(begun) - 1) :], steps.source)


def setting(policy: Mapping[str, object], table: str, key: str) -> object:
    """What a recorded policy says of one key; None where it says nothing."""
    found = policy.get(table)
    return found.get(key) if isinstance(found, Mapping) else None


def _inside(table: SpanTable, steps: Steps) -> SpanTable:
    """The spans that began within the steps."""
    place = np.searchsorted(steps.bounds[:, 0], table.begin_ns, side="right") - 1
    inside = place >= 0
    inside[inside] = table.begin_ns[inside] < steps.bounds[place[inside], 1]
    return table.where(inside)


def _pass_of(time_ns: Ints, passes: SpanTable) -> Ints:
    """The pass that had begun last at each time; -1 where none had, or it was over."""
    place = np.searchsorted(passes.begin_ns, time_ns, side="right") - 1
    over = place >= 0
    over[over] = time_ns[over] > passes.end_ns[place[over]]
    return np.where(over, -1, place)


def _uses(table: SpanTable, points: Instants) -> Ints:
    """When uses began, sorted. Note: [What one unit earlier means]."""
    compute, backward = table.of("compute"), table.of("backward")
    ready = points.of("ready").time_ns
    if len(compute):
        # Sorted by begin: a span that ends after the next began holds another.
        inner = np.append(compute.end_ns[:-1] <= compute.begin_ns[1:], True)
        if len(ready) and len(backward):
            # What is computed again in backward ends between two uses and begins none.
            inner &= _pass_of(compute.end_ns, backward) < 0
        compute = compute.where(inner)
    return np.sort(np.concatenate((compute.end_ns, ready)))


def _needs(gathers: SpanTable, waits: SpanTable) -> Floats | None:
    """Nanoseconds of the wire each gather needs; None where none was waited for. Note: [When a gather really ended]."""
    rate = waited_rate(gathers, waits)
    if rate is None:
        return None
    origin = int(gathers.begin_ns[0])
    begin, end = (np.asarray(column - origin, np.float64) for column in (gathers.begin_ns, gathers.end_ns))
    nbytes = gathers.nbytes.astype(np.float64)
    chosen = really_waited(gathers, waits)
    waited = np.zeros(len(gathers), np.bool_)
    waited[chosen[chosen >= 0]] = True
    for _ in range(_ROUNDS):
        # A gather waited for may have queued behind others that nobody waited for, whose ends the rate itself shows.
        spent = np.cumsum(nbytes / (rate / 1e9))
        ended = np.minimum(np.maximum.accumulate(begin - np.concatenate(([0.0], spent[:-1]))) + spent, end)
        free = np.concatenate(([-np.inf], np.maximum.accumulate(ended)[:-1]))
        busy_ns = float(np.maximum(end - np.maximum(begin, free), 0.0)[waited].sum())
        if busy_ns <= 0:
            break
        rate = max(rate, float(nbytes[waited].sum()) * 1e9 / busy_ns)
    return nbytes * (1e9 / rate)


def _gains(gathers: SpanTable, waits: SpanTable, passes: SpanTable, uses: Ints, need_ns: Floats) -> Floats:
    """Nanoseconds of waiting each gather would have spared, had all been launched one use earlier.

    The run is replayed: what is waited less lets all that follows come sooner, launches and uses alike, and the wire then
    has less time between them. So a gather may also wait longer than it did, and its gain be negative.
    """
    origin = int(gathers.begin_ns[0])
    waited, needed = np.zeros(len(gathers)), (gathers.end_ns - origin).astype(np.float64)
    chosen = really_waited(gathers, waits)
    waits, chosen = waits.where(chosen >= 0), chosen[chosen >= 0]
    np.add.at(waited, chosen, waits.duration_ns.astype(np.float64))
    # The buffer was needed where the wait began; where there was none, where its end was noticed.
    np.minimum.at(needed, chosen, (waits.begin_ns - origin).astype(np.float64))
    begin = (gathers.begin_ns - origin).astype(np.float64)
    launches = _launches(begin, _pass_of(gathers.begin_ns, passes), passes, uses, origin)
    gains: list[float] = []
    resumed, sooner = [-np.inf], [0.0]  # from this time on, everything comes so much sooner
    wire = -np.inf
    for launch, need, use, wait in zip(launches.tolist(), need_ns.tolist(), needed.tolist(), waited.tolist(), strict=True):
        wire = max(wire, launch - sooner[bisect_right(resumed, launch) - 1]) + need
        gains.append(wait - max(0.0, wire - (use - sooner[-1])))
        resumed.append(max(resumed[-1], use + wait))
        sooner.append(sooner[-1] + gains[-1])
    return np.array(gains)


def _launches(begin: Floats, number: Ints, passes: SpanTable, uses: Ints, origin: int) -> Floats:
    """When each gather, launched at ``begin`` in pass ``number``, would be launched one use earlier."""
    pass_begin = np.where(number >= 0, passes.begin_ns[number] - origin, 0).astype(np.float64)
    # What launched it: the last use that had begun, if that was in this pass; the pass's first use launches what it can.
    used = np.concatenate(([-np.inf, -np.inf], (uses - origin).astype(np.float64)))
    last = np.searchsorted(used, begin, side="right") - 1
    launched_in_pass = used[last] > pass_begin
    one_earlier = np.maximum(used[np.maximum(last - 1, 0)], pass_begin)
    # Where a pass recorded no use, the gather before in the same pass.
    followed = np.concatenate(([False], (number[1:] == number[:-1]) & (number[1:] >= 0)))
    follows = followed & ~_with_use(passes, uses)[number]
    before = np.where(follows, np.concatenate(([0.0], begin[:-1])), begin)
    return np.where(number < 0, begin, np.where(launched_in_pass, one_earlier, before))


def _with_use(passes: SpanTable, uses: Ints) -> NDArray[np.bool_]:
    """Which passes hold a recorded use."""
    first = np.searchsorted(uses, passes.begin_ns, side="right")
    return np.searchsorted(uses, passes.end_ns, side="right") > first


def _by_unit(gathers: SpanTable, gains: Floats, steps: Steps) -> tuple[Remedy, ...]:
    sums = np.bincount(gathers.key, weights=gains)
    least = _LEAST_SHARE * steps.whole_ns
    units = [int(key) for key in np.argsort(-sums, kind="stable") if sums[key] >= least]
    return tuple(Remedy(gathers.strings[key], float(sums[key]) / len(steps.bounds)) for key in units)


def _lines(remedies: tuple[Remedy, ...], total: float, prefetch: int | None) -> tuple[str, ...]:
    said = [remedy.line(prefetch) for remedy in remedies[:3]]
    if len(remedies) > 1:
        said.append(f"all {len(remedies)} such units together: up to {as_duration(total)} per step, for one more unit's buffer")
    return tuple(said)


def _saturated(busy: float, policy: Mapping[str, object]) -> str:
    """Why more prefetch does not help, and which keys of the policy move fewer bytes or move them faster."""
    remedies = []
    if setting(policy, "precision", "param") in (None, "fp32"):
        remedies.append('[precision] param = "bf16" (half the bytes)')
    if setting(policy, "schedule", "reshard_after_forward") is not False:
        remedies.append("[schedule] reshard_after_forward = false, or a larger [budget] device (no gather in backward)")
    tier = setting(policy, "parameter", "tier")
    if tier in ("host", "disk"):
        remedies.append(f'[parameter] tier = "{"host" if tier == "disk" else "device"}" (a faster tier)')
    remedies.append("more samples per step (the same bytes for more compute)")
    return f"gathers fill {busy:.0%} of forward and backward, so more prefetch cannot help; {'; '.join(remedies)} can"
