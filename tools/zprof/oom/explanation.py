"""Owns what is said of a run that has ended: where its trace is; where memory ran out, who held it and what would have fitted.

``zprof run`` and ``zprof report`` print it. It reads one trace and changes nothing; figures that nobody recorded are not made
up, and the lines say when a figure is the error's own, rounded one.
"""

from __future__ import annotations

import json
import shlex
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.text import as_size
from zprof.analysis.coverage import coverage
from zprof.oom.changes import Plight
from zprof.oom.facts import Failure
from zprof.oom.fit import Remedy, remedies
from zprof.rows import BEFORE_STACK, CATEGORIES, TIERS, RowKind
from zprof.trace.frames import FrameKind, packed, sealed

if TYPE_CHECKING:
    from zprof.analysis.ledger import Ledger, Moment
    from zprof.running.child import Ending
    from zprof.trace.columns import Rows
    from zprof.trace.reader import Trace

__all__ = ["Explained", "explain", "explained", "last_lines"]

#: To read more rows than this takes seconds, which a run that ended well need not wait for.
_MOST_ROWS = 2_000_000
_MOST_KEYS, _MOST_REMEDIES = 5, 6
#: The spans a step consists of; within the last that began, the highest moment is the one that failed.
_PHASES = ("forward", "backward", "step")
#: A unit counts for what states cost a parameter if it is not among the smallest.
_NOT_SMALL = 8
#: What the model makes while it computes.
_MADE = ("activation", "temporary", "other")
_NOT_TRIED = "not tried: zprof oom RUN --job module:function --hardware FILE simulates each, and looks for others"


def last_lines(path: Path, ending: Ending, kill: tuple[str, int | None] | None, world: int) -> list[str]:
    """The last lines of ``zprof run``.

    Args:
        kill: whose want of memory the kernel ended a process for meanwhile, and the limit, if it did.
        world: how many ranks ran.
    Raises:
        TraceError: the trace cannot be read.
    """
    from zprof.trace.reader import Trace

    trace = Trace.open(path, ended=True)
    if not ending.failed and trace.count > _MOST_ROWS:
        return [f"trace {path} ({as_size(path.stat().st_size)})", *_next(trace, path, world)]
    ledger = _Reading(trace)
    killed = _kill(ending, kill, ledger) if ending.signal == 9 else None
    if killed is not None:
        _write_down(path, killed)
    lines = _explained(trace, ledger, killed) if ending.failed else []
    if ending.signal == 9 and killed is None:
        lines.append(f"killed by SIGKILL; no process was ended for want of memory meanwhile; {_rss(ending)}")
    elif ending.signal and killed is None:
        lines.append(f"ended by signal {ending.signal}")
    covered = coverage(trace, ledger.ledger.tiers)
    parts = {tier: " of what zhooks placed" if covered.tier(tier) else "" for tier in TIERS}
    peaks = [f"{tier} {as_size(nbytes)}{parts[tier]}" for tier, nbytes in ledger.peaks().items()]
    peaks += [f"rss {as_size(nbytes)}" for nbytes in [ledger.highest("rss")] if nbytes]
    lines.append(f"trace {path} ({as_size(path.stat().st_size)}); peak {', '.join(peaks) or 'unknown'}")
    return lines + _next(trace, path, world)


def _next(trace: Trace, path: Path, world: int) -> list[str]:
    """The command to go on with; of several ranks for all of their files, which the shell finds where nothing is quoted."""
    rank = f".{trace.header.rank}."
    if world > 1 and rank in path.name:
        return [f"next: zprof report {path.with_name(path.name.replace(rank, '.*.', 1))}"]
    return [f"next: zprof report {shlex.quote(str(path))}"]


def _write_down(path: Path, killed: Failure) -> None:
    """The process could not say why it ended: its trace says it from now on. A torn chunk before this is passed over."""
    with suppress(OSError), path.open("ab") as file:
        file.write(sealed(FrameKind.NOTE, packed(["oom", asdict(killed)])))


def explain(trace: Trace) -> list[str]:
    """Why the run ran out of memory, in lines; none where it did not, or nobody recorded it."""
    return _explained(trace, _Reading(trace), None)


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a run ran out of memory.

    Attributes:
        lines: that say so, without what would have let it fit.
        remedies: what would, by recorded bytes.
        policy: that it ran under; None without zhooks, and where it failed before it had one.
        world: ranks.
    """

    failure: Failure
    lines: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    policy: Mapping[str, Any] | None
    world: int


def explained(trace: Trace) -> Explained | None:
    """The same as values; None where it did not, or nobody recorded it."""
    failure = _recorded(trace)
    if failure is None:
        return None
    reading = _Reading(trace)
    case = _case(trace, reading, failure)
    found = tuple(remedies(case.plight)[:_MOST_REMEDIES])
    return Explained(failure, tuple(_facts(trace, reading, case)), found, case.plight.policy, trace.header.world)


class _Reading:
    """One pass over a trace: its ledger, the units it names, and when and in which phase of a step it failed."""

    def __init__(self, trace: Trace) -> None:
        from zprof.analysis.ledger import Ledger

        self.trace = trace
        self.units: dict[str, int] = {}
        self._failed_ns: int | None = None
        self._began, self._began_ns = "", trace.header.mono_ns
        self._ended_ns: int | None = None
        self._made_ns = 0
        self._stepped_ns: int | None = None
        self.ledger: Ledger = Ledger.of(trace, also=self._see)

    def _see(self, rows: Rows) -> None:
        """Points, and where phases begin and end: few rows of many."""
        names = self.trace.strings
        numbers = {names.index(word): word for word in (*_PHASES, "unit", "oom") if word in names}
        wanted = np.isin(rows.what, list(numbers)) & (rows.kind != RowKind.COUNTER)
        for at in wanted.nonzero()[0].tolist():
            word, kind, when = numbers[int(rows.what[at])], int(rows.kind[at]), int(rows.time_ns[at])
            if word == "unit":
                self.units[names[int(rows.key[at])]] = int(rows.nbytes[at])
            elif word == "oom":
                self._failed_ns = when
            elif kind == RowKind.BEGIN:
                self._began, self._began_ns, self._ended_ns = word, when, None
            elif kind == RowKind.END and word == self._began:
                self._ended_ns = when
                self._stepped_ns = when if word == "step" and self._failed_ns is None else self._stepped_ns
        made = rows.time_ns[rows.kind == RowKind.ALLOC]
        if len(made):
            self._made_ns = max(self._made_ns, int(made.max()))

    @property
    def phase(self) -> tuple[str, int]:
        """(phase, since when) of the failure. One that an error ends is over too, but nothing is made after it."""
        if self._ended_ns is None or (self._began != "step" and self._made_ns < self._ended_ns):
            return self._began, self._began_ns
        return "", self._ended_ns

    def peaks(self) -> dict[str, int]:
        return {tier: nbytes for tier in TIERS if (nbytes := self.ledger.peak(tier).nbytes)}

    def highest(self, what: str) -> int | None:
        """The most of a sampled quantity."""
        values = [int(value.max()) for _, value in self.ledger.samples(what).values() if len(value)]
        return max(values) if values else None

    def held(self, tier: str) -> tuple[dict[tuple[str, str, str], int], int]:
        """What was held when the last phase held most of ``tier``, and when that was; keys without their stacks."""
        ledger = self.ledger
        end = self._failed_ns if self._failed_ns is not None else ledger.end_ns
        moment = ledger.peak_between(tier, min(self.phase[1], end), end)
        return self._at(moment), moment.time_ns

    def step(self, pool: tuple[str, ...], states: bool) -> list[dict[tuple[str, str, str], int]]:
        """The fullest moments of what whole steps needed, in all and of each category; none where no step was whole.

        Args:
            states: the step that failed had only states left to make, so that it counts.
        """
        ledger = self.ledger
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
        for series, nbytes in zip(self.ledger.series, self.ledger.at(moment).tolist(), strict=True):
            if nbytes > 0:
                place = (series.category, series.tier, series.key.partition(BEFORE_STACK)[0])
                found[place] = found.get(place, 0) + nbytes
        return found


@dataclass(frozen=True, slots=True)
class _Case:
    """A failure beside what a trace says of it."""

    failure: Failure
    held: Mapping[tuple[str, str, str], int]
    plight: Plight
    phase: str
    to_come: int


def _explained(trace: Trace, reading: _Reading, killed: Failure | None) -> list[str]:
    failure = killed or _recorded(trace)
    if failure is None:
        return []
    case = _case(trace, reading, failure)
    return _facts(trace, reading, case) + _proposals(case)


def _facts(trace: Trace, reading: _Reading, case: _Case) -> list[str]:
    covered = coverage(trace, reading.ledger.tiers)
    whole = not any(covered.tier(tier) for tier in reading.ledger.tiers)
    return [_headline(case), *_table(case.held, whole=whole), *_top(case.held, case.plight.pool)]


def _recorded(trace: Trace) -> Failure | None:
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


def _kill(ending: Ending, kill: tuple[str, int | None] | None, reading: _Reading) -> Failure | None:
    """The kernel ended the process for want of memory; it does not say what was asked for."""
    if kill is None:
        return None
    whose, limit = kill
    bound = f"{whose} (limit {as_size(limit)})" if limit is not None else whose
    tier = "host" if _on_gpu(reading) else "device"
    return Failure("kill", tier, f"the kernel ended the process for want of memory: {_rss(ending)}", limit=limit, bound=bound)


def _rss(ending: Ending) -> str:
    return f"it had at most {as_size(ending.most_nbytes)} resident"


def _on_gpu(reading: _Reading) -> bool:
    return reading.trace.device != "cpu" or bool(reading.ledger.samples("cuda allocated"))


def _case(trace: Trace, reading: _Reading, failure: Failure) -> _Case:
    shared = not _on_gpu(reading)
    process = failure.kind in ("cpu", "memory", "kill")
    pool = ("device", "host") if shared and process else (failure.tier,)
    held, _ = reading.held(failure.tier)
    held = _charged(held, failure)
    policy = _policy(trace)
    units = reading.units or {key: nbytes for (what, _, key), nbytes in held.items() if what == "parameter"}
    held = _by_unit(held, units)
    room = None
    if failure.short is not None and failure.nbytes is not None:
        room = sum(nbytes for place, nbytes in held.items() if place[1] in pool) + failure.nbytes - failure.short
    missing = _states_to_come(held, failure, reading.phase[0])
    making = bool(failure.states) or reading.phase[0] == "step" or failure.key.startswith("optimizer/")
    step = [_by_unit(_charged(moment, failure), units) for moment in reading.step(pool, making)]
    to_come, then, tier = sum(missing.values()), dict(held), _states_tier(held)
    for unit, nbytes in missing.items():
        then["optimizer", tier, unit] = then.get(("optimizer", tier, unit), 0) + nbytes
    short = failure.short
    if short is not None and to_come:
        # The request that failed was for one of them.
        short += max(0, to_come - (failure.nbytes or 0))
    step = [_with_states(moment, then) for moment in step] if not _larger(held, failure, step) else []
    blocks = len({_block(key, set()) for key in _of(held, "parameter") if any(map(str.isdecimal, key.split(".")))})
    free = {"host": failure.host_free} if not shared and failure.host_free is not None else None
    limits = (free, failure.idle or 0, shared, tuple(step), room, blocks)
    plight = Plight(then, pool, short, trace.header.world, policy, units, *limits)
    return _Case(failure, held, plight, reading.phase[0], to_come)


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
        place = (what, tier, _block(key, known) if what == "activation" else key)
        found[place] = found.get(place, 0) + nbytes
    return found


def _block(path: str, units: set[str]) -> str:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in units:
            return ".".join(parts[:count])
    numbered = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return path if numbered is None else ".".join(parts[: numbered + 1])


def _states_to_come(held: Mapping[tuple[str, str, str], int], failure: Failure, phase: str) -> dict[str, int]:
    """Unit -> bytes of states it lacks: those that the error speaks of, or beside the unit that has most a parameter; the step
    would have made them too."""
    if failure.states:
        sizes = _of(held, "parameter")
        whole = sum(sizes.values())
        return {key: failure.states * nbytes // whole for key, nbytes in sizes.items() if nbytes}
    if phase != "step" and not failure.key.startswith("optimizer/"):
        return {}
    parameters, states = _of(held, "parameter"), _of(held, "optimizer")
    floor = max(parameters.values(), default=0) // _NOT_SMALL
    made = [states[key] / nbytes for key, nbytes in parameters.items() if nbytes >= floor and states.get(key)]
    most = max(made, default=0.0)
    lacks = {key: int(most * nbytes) - states.get(key, 0) for key, nbytes in parameters.items() if nbytes >= floor}
    return {key: nbytes for key, nbytes in lacks.items() if nbytes > 0}


def _states_tier(held: Mapping[tuple[str, str, str], int]) -> str:
    tiers = [(nbytes, tier) for (what, tier, _), nbytes in held.items() if what == "optimizer"]
    return max(tiers)[1] if tiers else "device"


def _of(held: Mapping[tuple[str, str, str], int], category: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for (what, _, key), nbytes in held.items():
        if what == category:
            found[key] = found.get(key, 0) + nbytes
    return found


# Lines.


def _headline(case: _Case) -> str:
    failure = case.failure
    about = "" if failure.exact else "about "
    asked = f"{about}{as_size(failure.nbytes)}" if failure.nbytes else "memory"
    where = failure.bound or f"{failure.tier} memory"
    key = f" for {_plain(failure.key)}" if failure.key else ""
    facts = []
    if failure.limit is not None and failure.kind != "kill":
        facts.append(f"limit {as_size(failure.limit)}")
    if failure.free is not None:
        facts.append(f"{as_size(failure.free)} free")
    if failure.short is not None:
        facts.append(f"{as_size(failure.short)} short")
    if failure.idle:
        facts.append(f"{as_size(failure.idle)} reserved by the allocator and not in use")
    during = f", in {case.phase}" if case.phase else ""
    if failure.kind == "kill":
        return f"out of memory: {where}: {failure.message}{during}"
    return f"out of memory: {where} refused {asked}{key}{during}{': ' if facts else ''}{', '.join(facts)}"


def _table(held: Mapping[tuple[str, str, str], int], *, whole: bool) -> list[str]:
    tiers = [tier for tier in TIERS if any(place[1] == tier for place in held)]
    if not tiers:
        return ["held at that moment: nothing that was recorded; --level alloc records every storage"]
    lines = [f"{'held at that moment':<22}{''.join(f'{tier:>12}' for tier in tiers)}"]
    for category in CATEGORIES:
        row = [sum(nbytes for (what, at, _), nbytes in held.items() if (what, at) == (category, tier)) for tier in tiers]
        if any(row):
            lines.append(f"  {category:<20}{_columns(row)}")
    totals = [sum(nbytes for (_, at, _), nbytes in held.items() if at == tier) for tier in tiers]
    # Below level "alloc" there may be more than was recorded.
    lines.append(f"  {'in all' if whole else 'recorded':<20}{_columns(totals)}")
    return lines


def _columns(row: Iterable[int]) -> str:
    return "".join(f"{as_size(nbytes) if nbytes else '-':>12}" for nbytes in row)


def _top(held: Mapping[tuple[str, str, str], int], pool: tuple[str, ...]) -> list[str]:
    places = sorted(((nbytes, place) for place, nbytes in held.items() if place[1] in pool), reverse=True)[:_MOST_KEYS]
    most = [f"{what} of {_plain(key) or '(unnamed)'} {as_size(nbytes)}" for nbytes, (what, _, key) in places]
    return [f"most of it: {', '.join(most)}"] if most else []


def _proposals(case: _Case) -> list[str]:
    found = remedies(case.plight)
    if not found:
        said = "" if case.failure.kind == "kill" else f"; the error says: {_plain(case.failure.message)}"
        return [f"no change of the policy follows from what was recorded{said}"]
    lines = []
    if case.to_come:
        lines.append(f"states still to be made are counted in: {as_size(case.to_come)}, as the units that have theirs hold")
    for before, remedy in zip([None, *found], found[:_MOST_REMEDIES], strict=False):
        if before is None or before.verdict is not remedy.verdict:
            lines.append(remedy.verdict.value)
        lines.append(f"  {remedy}")
    return [*lines, _NOT_TRIED]


def _plain(text: str) -> str:
    """Names and messages are data: nothing in them shall move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
