"""Owns the words for a run that ran out of memory: what was asked for, who held what, and what would have let it fit.

`zprof report`, `zprof oom`, notebooks and the last lines of `zprof run` show them. It changes nothing; figures that nobody
recorded are not made up, and the lines say when a figure is the error's own, rounded one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.text import as_enough, as_size
from zprof.analysis.coverage import Unseen
from zprof.analysis.prefetch import setting
from zprof.analysis.remainder import peak_sample
from zprof.oom.case import Case, case_of, recorded
from zprof.oom.fit import Remedy, remedies
from zprof.recording.children import LOADERS
from zprof.rows import CATEGORIES, TIERS

if TYPE_CHECKING:
    from zprof.analysis.analysis import Analysis
    from zprof.oom.facts import Failure

__all__ = ["Explained", "explain", "explained", "under_it"]

_MOST_KEYS, _MOST_REMEDIES = 5, 6
#: Failures for want of memory that processes under this one draw on, too.
_OF_THE_HOST = ("kill", "cpu", "memory", "shm")
#: Of what all hold, the loader workers' share from which on a line speaks of them.
_GOOD_PART = 0.1
#: What an allocator of this process was refused by the kernel.
_OF_THE_PROCESS = ("cpu", "memory")
#: Of what counts against a limit, the share from which on what was freed since deserves a word.
_MUCH_FREED = 0.01
_MORE_SHM = (
    "give it more: docker run --shm-size=8g or --ipc=host, or mount -o remount,size=8G /dev/shm",
    "or keep less in flight: fewer loader workers (num_workers), a smaller prefetch_factor, smaller batches",
)
_NOT_TRIED = "not tried: zprof oom RUN --job module:function --hardware FILE simulates each, and looks for others"


def explain(analysis: Analysis, failure: Failure | None = None) -> list[str]:
    """Why the run ran out of memory, in lines; none where it did not, or nobody recorded it.

    Args:
        failure: what is known of it from elsewhere; the recorded one where it is None.
    """
    found = explained(analysis, failure)
    return [] if found is None else [*found.lines, *found.advice]


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a run ran out of memory.

    Attributes:
        lines: that say so, without what would have let it fit.
        advice: lines that say what would.
        remedies: what would, by recorded bytes.
        policy: that it ran under; None without zhooks, and where it failed before it had one.
        world: ranks.
    """

    failure: Failure
    lines: tuple[str, ...]
    advice: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    policy: Mapping[str, Any] | None
    world: int


def explained(analysis: Analysis, failure: Failure | None = None) -> Explained | None:
    """The same as values; None where it did not, or nobody recorded it."""
    failure = failure or recorded(analysis.trace)
    if failure is None:
        return None
    world = analysis.header.world
    if failure.kind == "shm":
        return Explained(failure, tuple(_shm_lines(analysis, failure)), (), (), None, world)
    case = case_of(analysis, failure)
    found = remedies(case.plight)
    advice = (*_fewer_workers(analysis, failure), *_proposals(case, found))
    return Explained(
        failure, tuple(_facts(analysis, case)), advice, tuple(found[:_MOST_REMEDIES]), case.plight.policy, world
    )


def _facts(analysis: Analysis, case: Case) -> list[str]:
    whole = not any(analysis.covered.tier(tier) for tier in analysis.ledger.tiers)
    held = (*_table(case.held, whole=whole), *_top(case.held, case.plight.pool))
    head = (_headline(case.failure, case.phase, case.plight.idle), *_limit_lines(case.failure))
    return [*head, *held, *_not_recorded(analysis, case), *under_it(analysis, case.failure)]


def _not_recorded(analysis: Analysis, case: Case) -> list[str]:
    """What reduces activations, which were not recorded, so that no change below can be about them."""
    passes = case.phase in ("forward", "backward") and case.failure.kind != "budget"
    if not passes or analysis.covered.place("activation", "device") is None:
        return []
    policy = case.plight.policy
    if policy is None:
        known = "torch.utils.checkpoint around each block or half the batch reduces"
    elif setting(policy, "activation", "checkpoint") == "unit":
        known = "half the batch reduces"
    else:
        known = '[activation] checkpoint = "unit" or half the batch reduces'
    return [f"activations were not recorded: {known} them; zprof run --level alloc shows by how much"]


def _headline(failure: Failure, phase: str, idle: int) -> str:
    about = "" if failure.exact else "about "
    asked = f"{about}{as_size(failure.nbytes)}" if failure.nbytes else "memory"
    where = failure.bound or f"{failure.tier} memory"
    key = f" for {_plain(failure.key)}" if failure.key else ""
    facts = []
    if failure.kind in _OF_THE_PROCESS and failure.limit is not None and failure.free is not None:
        used = as_size(failure.limit - failure.free)
        facts.append(f"{used} of {as_size(failure.limit)} in use, {as_size(failure.free)} left")
    else:
        if failure.limit is not None and failure.kind != "kill":
            facts.append(f"limit {as_size(failure.limit)}")
        if failure.free is not None:
            facts.append(f"{as_size(failure.free)} free")
    if failure.short is not None:
        facts.append(f"{as_size(failure.short)} short")
    if idle:
        whose = "reserved by the allocator" if failure.kind == "cuda" else "kept by malloc"
        facts.append(f"{as_size(idle)} {whose} and not in use")
    during = f", in {phase}" if phase else ""
    if failure.kind == "kill":
        return f"out of memory: {where}: {_plain(failure.message)}{during}"
    return f"out of memory: {where} refused {asked}{key}{during}{': ' if facts else ''}{', '.join(facts)}"


def _limit_lines(failure: Failure) -> list[str]:
    """What the limit of a process is, which the memory of the machine has nothing to do with."""
    if not failure.remedy:
        return []
    counts = "private memory that is mapped, used or not"
    if failure.bound == "RLIMIT_AS":
        resident = f" (at most {as_size(failure.resident)} was in memory)" if failure.resident else ""
        counts = f"address space, used or not{resident}"
    lines = [f"{failure.bound} limits this process, not the machine, and counts {counts}; {failure.remedy} before the start"]
    if failure.limit and (failure.given_back or 0) > _MUCH_FREED * failure.limit:
        lines.append(f"{as_size(failure.given_back or 0)} of what was in use has been freed since the error was raised")
    return lines


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


def under_it(analysis: Analysis, failure: Failure) -> list[str]:
    """What the processes under this one held, where they draw on the memory that ran out."""
    found = analysis.children
    if failure.kind not in _OF_THE_HOST or isinstance(found, Unseen) or not found.pss_nbytes:
        return []
    kinds = ", ".join(f"{kind.most} {kind.name}" for kind in found.kinds)
    line = f"child processes held at most {as_size(found.pss_nbytes)}, shared memory counted once ({kinds} at most)"
    if found.tree_nbytes is not None:
        line += f"; with the process at most {as_size(found.tree_nbytes)}"
    if found.shared_nbytes:
        line += f", {as_size(found.shared_nbytes)} of it in shared memory"
    lines = [f"{line}; the limit counts them, too" if failure.kind == "kill" else line]
    most = [f"{_plain(child.name)} (pid {child.pid}) {as_size(child.pss_nbytes)}" for child in found.who[:_MOST_KEYS]]
    return [*lines, f"most of that: {', '.join(most)}"] if most else lines


def _fewer_workers(analysis: Analysis, failure: Failure) -> list[str]:
    """What a loader's worker costs, where that is a good part of what ran out."""
    found = analysis.children
    workers = None if isinstance(found, Unseen) else found.kind(LOADERS)
    if failure.kind not in _OF_THE_HOST or workers is None or not workers.pss_nbytes or isinstance(found, Unseen):
        return []
    if workers.pss_nbytes < _GOOD_PART * (found.tree_nbytes or 0):
        return []
    each = as_size(workers.pss_nbytes // workers.most)
    return [f"each loader worker (num_workers; {workers.most} at most) takes about {each}"]


def _shm_lines(analysis: Analysis, failure: Failure) -> list[str]:
    """/dev/shm was full: the ledger and the policy have nothing to do with it."""
    lines = [_headline(failure, "", 0)]
    most = peak_sample(analysis.ledger, "/dev/shm used")
    if most is not None:
        lines.append(f"all files in /dev/shm took at most {as_size(most[1])} when it was sampled")
    return [*lines, *under_it(analysis, failure), *_MORE_SHM]


def _proposals(case: Case, found: list[Remedy]) -> list[str]:
    failure = case.failure
    if not found:
        said = "" if failure.kind == "kill" else f"; the error says: {_plain(failure.message)}"
        return [f"no change of the policy follows from what was recorded{said}"]
    lines = []
    if case.reckoned:
        coming = f"gradients of {as_size(failure.step_gradients or 0)} and states of {as_size(failure.step_states or 0)}"
        kept = "; freed memory that malloc keeps comes on top" if case.plight.shared else ""
        lines.append(f"no whole step was seen; it is estimated from similar blocks, and {coming} still to be made{kept}")
    if not any(remedy.verdict.good for remedy in found):
        lines.append("no change that was tried on these bytes, alone or combined, would have let it fit")
    if case.to_come:
        by = "as the error has them" if failure.states else "estimated from units that have theirs"
        # Under apply there may be some already, on another tier.
        which = "states" if case.phase == "apply" else "states still to be made"
        lines.append(f"{as_size(case.to_come)} of {which} are counted, {by}")
    for before, remedy in zip([None, *found], found[:_MOST_REMEDIES], strict=False):
        if before is None or before.verdict is not remedy.verdict:
            lines.append(remedy.verdict.value)
        lines.append(f"  {remedy}")
    return [*lines, *_or_more(case), _NOT_TRIED]


def _or_more(case: Case) -> list[str]:
    """The budget that would have held it: as the error says, or at least what is known to be lacking."""
    failure = case.failure
    if failure.kind != "budget" or not failure.bound.startswith("[budget]"):
        return []
    said = re.search(r"Raise it to ((?:at least )?\d[\d.]* (?:[KMGT]iB|B))", failure.message)
    if said:
        return [f"or raise {failure.bound} to {said[1]}"]
    if failure.limit is None or case.plight.short is None:
        return []
    return [f"or raise {failure.bound} to at least {as_enough(failure.limit + case.plight.short)}"]


def _plain(text: str) -> str:
    """Names and messages are data: nothing in them shall move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
