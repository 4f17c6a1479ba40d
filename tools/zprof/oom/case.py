"""Owns what a trace says of the moment at which memory ran out: the failure, in which phase of a step, and who held what.

`zprof.oom.explanation` puts it into words, and what is in the `Plight` is what changes are tried on. It reads no rows: it takes
them from an analysis, and makes up no figure that nobody recorded.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.events import FAILED, VERB
from zprof.oom.changes import IN_USE, Pace, Plight
from zprof.oom.facts import LEAST_KEPT, Failure
from zprof.oom.whole_step import block_of, bytes_of, whole_step
from zprof.rows import BEFORE_STACK, QUEUED, TIERS

if TYPE_CHECKING:
    from zprof.analysis.analysis import Analysis
    from zprof.analysis.ledger import Moment
    from zprof.trace.reader import Trace

__all__ = ["Case", "case_of", "computes_on_gpu", "recorded"]

#: The spans a step consists of; within the last that began, or a call that raised, the highest moment is the one that failed.
_PHASES = ("forward", "backward", "step")
#: A unit counts for what states cost a parameter if it is not among the smallest.
_NOT_SMALL = 8
#: What the model makes while it computes.
_MADE = ("activation", "temporary", "other")


@dataclass(frozen=True, slots=True)
class Case:
    """A failure beside what a trace says of it.

    Attributes:
        held: (category, tier, key) -> bytes at that moment. phase: "forward", "backward" or "step", or a call of the
            attachment, such as "detach"; "" outside.
        to_come: bytes of states still to be made, which are counted in the plight.
        reckoned: no whole step was seen; the plight's is made up from what there was and from what was still to come.
    """

    failure: Failure
    held: Mapping[tuple[str, str, str], int]
    plight: Plight
    phase: str
    to_come: int
    reckoned: bool


def recorded(trace: Trace) -> Failure | None:
    """The last failure a trace has a note of; what is not of its kind in the note is left out."""
    notes = trace.notes("oom")
    if not notes:
        return None
    body = notes[-1].body
    types = {"str": str, "bool": bool}
    kinds = {field.name: types.get(str(field.type), int) for field in fields(Failure)}
    values = {name: body[name] for name, kind in kinds.items() if type(body.get(name)) is kind}
    if not {"kind", "tier", "message"} <= values.keys() or values["tier"] not in TIERS:
        return None
    return Failure(**values)


def computes_on_gpu(analysis: Analysis) -> bool:
    """Whether the device is a GPU, whatever the header says: a recording may begin before torch is there."""
    return analysis.trace.device != "cpu" or bool(analysis.ledger.samples("cuda allocated"))


class _Course:
    """When a run failed, and in which phase of a step.

    Attributes:
        phase: "forward", "backward" or "step", or a call of the attachment; "" outside.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._ledger = ledger = analysis.ledger
        self.phase, self._since_ns, ended_ns = _last_phase(analysis)
        # One that an error ends is over too, but nothing is made after it.
        if ended_ns is not None and (self.phase == "step" or (ledger.made_ns or 0) >= ended_ns):
            self.phase, self._since_ns = "", ended_ns
        failed_ns = analysis.failures.time_ns.tolist()
        self._failed_ns: int | None = failed_ns[-1] if failed_ns else None
        ends = analysis.table.by_host("step").end_ns
        ends = ends[ends <= failed_ns[0]] if failed_ns else ends
        self._stepped_ns = int(ends.max()) if len(ends) else None

    def held(self, tier: str) -> dict[tuple[str, str, str], int]:
        """What was held when the last phase held most of ``tier``; keys without their stacks."""
        end_ns = self._ledger.end_ns if self._failed_ns is None else self._failed_ns
        return self._at(self._ledger.peak_between(tier, min(self._since_ns, end_ns), end_ns))

    def step(self, pool: tuple[str, ...], states: bool) -> list[dict[tuple[str, str, str], int]]:
        """The fullest moments of what whole steps needed, in all and of each category; none where no step was whole.

        Args:
            states: the step that failed had only states left to make, so that it counts.
        """
        ledger = self._ledger
        end = self._failed_ns if states and self._failed_ns is not None else self._stepped_ns
        if end is None:
            return []
        held = [each for each in pool if each in ledger.tiers]
        moments = {
            ledger.peak_between(tier, ledger.begin_ns, end, category)
            for tier in held
            for category in (None, *{series.category for series in ledger.series if series.tier == tier})
        }
        return [self._at(moment) for moment in moments]

    def _at(self, moment: Moment) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for series, nbytes in zip(self._ledger.series, self._ledger.at(moment).tolist(), strict=True):
            if nbytes > 0:
                place = (series.category, series.tier, series.key.partition(BEFORE_STACK)[0])
                found[place] = found.get(place, 0) + nbytes
        return found


def _last_phase(analysis: Analysis) -> tuple[str, int, int | None]:
    """The phase that began last, when it did, and when it ended: None where it had not; "" where no phase was seen."""
    # Memory is taken and given as the host queues work.
    closed = analysis.table.by_host(*_PHASES)
    left = analysis.table.open.by_host(*_PHASES) if analysis.table.open is not None else closed.where(np.zeros(0, np.intp))
    begun = [(table.begin_ns[-1], table) for table in (closed, left) if len(table)]
    call = _failed_call(analysis)
    if not begun:
        return call or ("", analysis.header.mono_ns, None)
    began_ns, table = max(begun, key=lambda pair: pair[0])
    if call is not None and call[1] >= began_ns:
        return call
    word = table.strings[table.what[-1]]
    ended_ns = None if table is left else int(closed.of(word).end_ns.max())
    return word.removeprefix(QUEUED), int(began_ns), ended_ns


def _failed_call(analysis: Analysis) -> tuple[str, int, int | None] | None:
    """The last call of an attachment that raised: its name, when it began, and when it raised."""
    raised = analysis.instants.of(FAILED)
    if not len(raised.time_ns):
        return None
    key, time_ns = int(raised.key[-1]), int(raised.time_ns[-1])
    calls = analysis.table.of(VERB)
    begun = calls.begin_ns[(calls.key == key) & (calls.begin_ns <= time_ns)]
    return (analysis.trace.strings[key], int(begun[-1]), time_ns) if len(begun) else None


def case_of(analysis: Analysis, failure: Failure) -> Case:
    """The failure of a run that was recorded."""
    shared, course = not computes_on_gpu(analysis), _Course(analysis)
    process = failure.kind in ("cpu", "memory", "kill")
    pool = ("device", "host") if shared and process else (failure.tier,)
    held = _charged(course.held(failure.tier), failure)
    policy = _policy(analysis.trace)
    # Refused by attach, or by apply: of the policy that was asked for nothing is known but what the error says.
    unstated = failure.kind == "budget" and (policy is None or course.phase == "apply")
    policy = {} if unstated else policy
    units = _units(analysis) or {key: nbytes for (what, _, key), nbytes in held.items() if what == "parameter"}
    # Of a script without zhooks a block is what is numbered, not each of the modules in it.
    known = _units(analysis)
    held = _by_unit(held, known)
    room = None
    if failure.short is not None and failure.nbytes is not None:
        room = sum(nbytes for place, nbytes in held.items() if place[1] in pool) + failure.nbytes - failure.short
    if failure.kind == "budget" and failure.tier == "device":
        # It counts by the plan, more than was held at any moment.
        room = failure.limit
    missing = {} if unstated and not failure.states else _states_to_come(held, failure, course.phase)
    making = bool(failure.states) or course.phase == "step" or failure.key.startswith("optimizer/")
    moments = [] if unstated else course.step(pool, making)
    step = [_by_unit(_charged(moment, failure), known) for moment in moments]
    # What was held then, and in the steps before it, is not what would have been held.
    to_come, then = sum(missing.values()), {} if unstated else _without_batches(held, course.phase)
    tier = failure.tier if failure.states else _states_tier(held)
    for unit, nbytes in missing.items():
        then["optimizer", tier, unit] = then.get(("optimizer", tier, unit), 0) + nbytes
    short = failure.short
    if short is not None and to_come:
        # The request that failed was for one of them.
        short += max(0, to_come - (failure.nbytes or 0))
    if _for_a_buffer(failure, course.phase):
        then = _with_buffers(then)
        short = max(short or 0, sum(nbytes for place, nbytes in then.items() if place[1] == "host") - (failure.limit or 0))
    step = [_with_states(moment, then) for moment in step] if not _larger(held, failure, step) else []
    reckoned = not step and policy is None and failure.step_gradients is not None
    if reckoned:
        step = whole_step(held, failure.tier, failure.nbytes or 0, failure.step_gradients or 0, failure.step_states or 0)
    blocks = len({block_of(key, set()) for key in bytes_of(held, "parameter") if any(map(str.isdecimal, key.split(".")))})
    free = _free(failure, policy, held, shared=shared)
    # What malloc keeps of a few bytes is nothing to speak of.
    idle = failure.idle if failure.idle is not None and (failure.kind == "cuda" or failure.idle >= LEAST_KEPT) else 0
    limits = (free, idle, shared, tuple(step), room, blocks, _pace(analysis))
    plight = Plight(then, pool, short, analysis.header.world, policy, units, *limits, budget=failure.kind == "budget")
    return Case(failure, held, plight, course.phase, to_come, reckoned)


def _without_batches(held: Mapping[tuple[str, str, str], int], phase: str) -> dict[tuple[str, str, str], int]:
    """What a call of the attachment made does not grow with the batch."""
    found: dict[tuple[str, str, str], int] = {}
    for (what, tier, key), nbytes in held.items():
        place = ("other" if what == "temporary" and key == f"({phase})" else what, tier, key)
        found[place] = found.get(place, 0) + nbytes
    return found


def _free(
    failure: Failure, policy: Mapping[str, Any] | None, held: Mapping[tuple[str, str, str], int], *, shared: bool
) -> dict[str, int | None]:
    """What other tiers could still take: by the machine, where it has been asked, and by their own budgets."""
    free: dict[str, int | None] = {}
    if not shared and failure.host_free is not None:
        free["host"] = failure.host_free
    budgets = (policy or {}).get("budget")
    for tier in ("host", "disk"):
        limit = budgets.get(tier) if isinstance(budgets, Mapping) else None
        if isinstance(limit, int) and failure.kind == "budget":
            free[tier] = max(0, limit - sum(nbytes for place, nbytes in held.items() if place[1] == tier))
    return free


def _for_a_buffer(failure: Failure, phase: str) -> bool:
    """A step could not bring to the host what the disk has."""
    return failure.kind == "budget" and failure.tier == "host" and failure.key.startswith("staging of ") and phase == "step"


def _with_buffers(held: Mapping[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    """The host as a step needs it: buffers for all that the disk has of the unit in use."""
    units: dict[str, int] = {}
    for (_, tier, key), nbytes in held.items():
        if tier == "disk":
            units[key] = units.get(key, 0) + nbytes
    found = {place: nbytes for place, nbytes in held.items() if place[:2] != ("communication", "host")}
    found["communication", "host", IN_USE] = max(units.values(), default=0)
    return found


def _pace(analysis: Analysis) -> Pace:
    """As the run's own transfers were, or the machine's trials, those of a usual one else."""
    usual, steps = Pace(), analysis.steps.warm
    reached = {rate.verb: rate.reached_bytes_per_s for rate in analysis.rates if analysis.covered.spans(rate.verb) is None}
    bench = {rate.verb: rate.bench.bytes_per_s for rate in analysis.rates if rate.bench is not None}

    def rate(verb: str, otherwise: float) -> float:
        return bench.get(verb) or reached.get(verb) or otherwise

    forward_ns = analysis.table.of("forward").duration_ns
    if len(forward_ns):
        lasted: float | None = float(np.median(forward_ns))
    else:
        # A backward takes about as long as two.
        lasted = float(np.median(steps.duration_ns)) / 3 if steps.count and steps.unseen is None else None
    host, disk = rate("copy d2h", usual.host), rate("disk write", usual.disk)
    return Pace(rate("gather", usual.gather), host, disk, lasted)


def _units(analysis: Analysis) -> dict[str, int]:
    """Unit -> its bytes, gathered whole, as was said last."""
    said = analysis.instants.of("unit")
    return {analysis.trace.strings[key]: nbytes for key, nbytes in zip(said.key.tolist(), said.nbytes.tolist(), strict=True)}


def _charged(held: dict[tuple[str, str, str], int], failure: Failure) -> dict[tuple[str, str, str], int]:
    """What counts against the bound: [budget] device is of what the runtime places, not of what the model makes besides."""
    if failure.kind != "budget" or failure.tier != "device":
        return held
    return {place: nbytes for place, nbytes in held.items() if place[0] not in _MADE}


def _with_states(
    moment: Mapping[tuple[str, str, str], int], then: Mapping[tuple[str, str, str], int]
) -> dict[tuple[str, str, str], int]:
    """A moment of a step once all states are there, which the first step makes at its end."""
    states = {place: max(nbytes, moment.get(place, 0)) for place, nbytes in then.items() if place[0] == "optimizer"}
    return {**moment, **states}


def _larger(
    held: Mapping[tuple[str, str, str], int], failure: Failure, step: list[dict[tuple[str, str, str], int]]
) -> bool:
    """What failed had more to compute with than any step before, so that those say too little of it."""
    made = [sum(nbytes for place, nbytes in each.items() if place[0] in _MADE) for each in (held, *step)]
    return len(made) > 1 and failure.kind != "budget" and made[0] > max(made[1:])


def _policy(trace: Trace) -> Mapping[str, Any] | None:
    """The last policy an attachment stated; None without zhooks."""
    notes = trace.notes("policy")
    text = notes[-1].body.get("text") if notes else None
    if not isinstance(text, str):
        return None
    from offload.policy import Policy

    try:
        found = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Policy.of(found)
    except (ValueError, RecursionError, TypeError):
        return None
    return found


def _by_unit(held: Mapping[tuple[str, str, str], int], units: Iterable[str]) -> dict[tuple[str, str, str], int]:
    """Activations by unit, or by the outermost numbered block, where they were recorded by module."""
    known = set(units)
    found: dict[tuple[str, str, str], int] = {}
    for (what, tier, key), nbytes in held.items():
        place = (what, tier, block_of(key, known) if what == "activation" else key)
        found[place] = found.get(place, 0) + nbytes
    return found


def _states_to_come(held: Mapping[tuple[str, str, str], int], failure: Failure, phase: str) -> dict[str, int]:
    """Unit -> bytes of states it lacks: those that the error speaks of, or beside the unit that has most a parameter; the step
    would have made them too."""
    if failure.states:
        sizes = bytes_of(held, "parameter") or {"": 1}
        whole = sum(sizes.values())
        return {key: failure.states * nbytes // whole for key, nbytes in sizes.items() if nbytes}
    if phase != "step" and not failure.key.startswith("optimizer/"):
        return {}
    parameters, states = bytes_of(held, "parameter"), bytes_of(held, "optimizer")
    floor = max(parameters.values(), default=0) // _NOT_SMALL
    made = [states[key] / nbytes for key, nbytes in parameters.items() if nbytes >= floor and states.get(key)]
    most = max(made, default=0.0)
    lacks = {key: int(most * nbytes) - states.get(key, 0) for key, nbytes in parameters.items() if nbytes >= floor}
    return {key: nbytes for key, nbytes in lacks.items() if nbytes > 0}


def _states_tier(held: Mapping[tuple[str, str, str], int]) -> str:
    tiers = [(nbytes, tier) for (what, tier, _), nbytes in held.items() if what == "optimizer"]
    return max(tiers)[1] if tiers else "device"
