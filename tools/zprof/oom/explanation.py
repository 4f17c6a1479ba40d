"""Owns the words for a run that ran out of memory: what was asked for, who held what, and what would have let it fit.

`zprof report`, `zprof oom`, notebooks and the last lines of `zprof run` show them. It changes nothing; figures that nobody
recorded are not made up, and the lines say when a figure is the error's own, rounded one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.text import as_size
from zprof.oom.case import Case, case_of, recorded
from zprof.oom.fit import Remedy, remedies
from zprof.rows import CATEGORIES, TIERS

if TYPE_CHECKING:
    from zprof.analysis.analysis import Analysis
    from zprof.oom.facts import Failure

__all__ = ["Explained", "explain", "explained"]

_MOST_KEYS, _MOST_REMEDIES = 5, 6
_NOT_TRIED = "not tried: zprof oom RUN --job module:function --hardware FILE simulates each, and looks for others"


def explain(analysis: Analysis, failure: Failure | None = None) -> list[str]:
    """Why the run ran out of memory, in lines; none where it did not, or nobody recorded it.

    Args:
        failure: what is known of it from elsewhere; the recorded one where it is None.
    """
    failure = failure or recorded(analysis.trace)
    if failure is None:
        return []
    case = case_of(analysis, failure)
    return _facts(analysis, case) + _proposals(case)


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


def explained(analysis: Analysis) -> Explained | None:
    """The same as values; None where it did not, or nobody recorded it."""
    failure = recorded(analysis.trace)
    if failure is None:
        return None
    case = case_of(analysis, failure)
    found = tuple(remedies(case.plight)[:_MOST_REMEDIES])
    return Explained(failure, tuple(_facts(analysis, case)), found, case.plight.policy, analysis.header.world)


def _facts(analysis: Analysis, case: Case) -> list[str]:
    whole = not any(analysis.covered.tier(tier) for tier in analysis.ledger.tiers)
    return [_headline(case), *_table(case.held, whole=whole), *_top(case.held, case.plight.pool)]


def _headline(case: Case) -> str:
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
    if case.plight.idle:
        whose = "reserved by the allocator" if failure.kind == "cuda" else "kept by malloc"
        facts.append(f"{as_size(case.plight.idle)} {whose} and not in use")
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


def _proposals(case: Case) -> list[str]:
    found, failure = remedies(case.plight), case.failure
    if not found:
        said = "" if failure.kind == "kill" else f"; the error says: {_plain(failure.message)}"
        return [f"no change of the policy follows from what was recorded{said}"]
    lines = []
    if case.reckoned:
        coming = f"gradients of {as_size(failure.step_gradients or 0)} and states of {as_size(failure.step_states or 0)}"
        kept = "; what malloc keeps of what is freed comes on top" if case.plight.shared else ""
        lines.append(f"no whole step was seen; it is reckoned from blocks alike, and {coming} still to be made{kept}")
    if not any(remedy.verdict.good for remedy in found):
        lines.append("nothing that was tried on these bytes, alone or together, would have let it fit")
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
