"""Owns the answer of a hang report: which ranks stand still, in what, and who is missing, from two looks at a job.

`zprof hang` prints it. It is pure: looks go in, and nothing is asked here.

Note: [What a hang is]
    A rank stands still where the same wait is open in its recording at both looks, or where neither its recording nor its stack
    has moved, in several samples between them, and it neither computes nor reads nor writes. A hang is seen where a rank waits
    for others and no rank that could end the wait moves, or where all stand still. A rank that computes at the same line for
    long is slow, as far as one can see. Who waits for a device may spin, and its processor time says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from offload.text import as_duration, as_size
from zprof.living.jobs import Job
from zprof.living.looks import Look
from zprof.living.places import Kind, shown
from zprof.living.processes import State

__all__ = ["Finding", "Group", "Motion", "Verdict", "busy_text", "judged", "named_ranks"]

#: More of a core, or more read and written in a second, is work; the recorder and polling loops take less.
_WORKS_SHARE, _WORKS_NBYTES = 0.5, 4 << 20


class Motion(Enum):
    """How a rank was between two looks."""

    GONE = "gone"
    #: In a wait for other ranks, or for the device, at both looks.
    WAITS = "waits"
    STILL = "stuck"
    #: At the same place, and busy there.
    WORKS = "works"
    MOVES = "moves"
    UNSEEN = "not seen"


class Finding(Enum):
    """What a job does."""

    MOVES = "moves"
    ENDED = "ended"
    #: Some wait for ranks that do not come.
    MISSING = "missing"
    #: All wait in the same exchange.
    TOGETHER = "together"
    #: They wait in several.
    DIFFERENT = "different"
    #: None is in an exchange, and none moves.
    STILL = "still"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that are alike: in the same wait, or at the same place.

    Attributes:
        wait: what they wait for, such as "reduce layers.7"; "" where they wait for nobody that is known.
        looks: one a rank, the latest.
        waited_ns: the longest of them; at_least: it is only known that it began before the first look.
    """

    motion: Motion
    wait: str
    looks: tuple[Look, ...]
    waited_ns: int | None
    at_least: bool = False

    @property
    def where(self) -> str:
        """The user's innermost line."""
        return _where(self.looks[0])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What two looks show.

    Attributes:
        hangs: exit code 3. text: the answer, in a sentence or two.
        groups: all ranks, those that wait first.
    """

    finding: Finding
    hangs: bool
    text: str
    groups: tuple[Group, ...]


def judged(
    job: Job, before: Sequence[Look], after: Sequence[Look], elapsed_s: float, moved: Collection[str] = ()
) -> Verdict:
    """What two looks at ``job``, which lie ``elapsed_s`` apart, show.

    Args:
        moved: labels of ranks whose stack was another one between the two.
    """
    known = {each.label: each for each in before}
    motions = [(look, _motion(known.get(look.label), look, elapsed_s, look.label in moved)) for look in after]
    groups = _grouped(motions, elapsed_s)
    by = {motion: [group for group in groups if group.motion is motion] for motion in Motion}
    gone = [look for group in by[Motion.GONE] for look in group.looks]
    if len(gone) == len(after):
        return _all_gone(gone, groups)
    finding, text = _found(job, by, len(after), elapsed_s)
    hangs = finding in (Finding.MISSING, Finding.TOGETHER, Finding.DIFFERENT, Finding.STILL)
    failed = [look for look in gone if not _ended_well(look)]
    if failed and finding is not Finding.MISSING:
        text += f"; {_gone(failed)}"
    return Verdict(finding, hangs, text, tuple(groups))


def named_ranks(looks: Sequence[Look], *, short: int = 12) -> str:
    """"rank 1", "ranks 0, 2 and 3", "ranks 0-6 and 8 of 3 hosts": who it is, for a sentence."""
    numbers = sorted(look.rank for look in looks if look.rank is not None)
    if len(numbers) < len(looks):
        return _listed([look.label for look in looks][:short])
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return f"ranks {_listed(words if len(words) <= short else [*words[:short], f'{len(words) - short} more'])}"


def _motion(before: Look | None, look: Look, elapsed_s: float, between: bool) -> Motion:
    if look.gone:
        return Motion.GONE
    if before is None or before.gone:
        return Motion.MOVES
    waits, waited = look.waits_for, before.waits_for
    if waits is not None:
        return Motion.WAITS if waits == waited else Motion.MOVES
    moved = _rows_moved(before, look)
    here, there = look.place, before.place
    if moved is None and (here is None or there is None):
        stopped = look.process is not None and look.process.state in (State.STOPPED, State.TRACED, State.UNINTERRUPTIBLE)
        return Motion.STILL if stopped else Motion.UNSEEN
    if moved or between:
        return Motion.MOVES
    if here is not None and there is not None and look.noted_ns is None and before.noted_ns is None:
        # The second look may have read C frames, which say what it waits for.
        alike = here.mark == there.mark if here.clear == there.clear else here.frames == there.frames
        if not alike:
            return Motion.MOVES
        if here.kind is Kind.DEVICE or (here.kind is Kind.COLLECTIVE and not _works(before, look, elapsed_s)):
            return Motion.WAITS
    return Motion.WORKS if _works(before, look, elapsed_s) else Motion.STILL


def _rows_moved(before: Look, look: Look) -> bool | None:
    if before.doing is None or look.doing is None:
        return None
    return before.doing.rows != look.doing.rows


def _works(before: Look, look: Look, elapsed_s: float) -> bool:
    used = (look.spent_s, before.spent_s, _WORKS_SHARE), (look.moved_nbytes, before.moved_nbytes, _WORKS_NBYTES)
    return any(now is not None and then is not None and now - then > bound * max(elapsed_s, 1e-3) for now, then, bound in used)


def _grouped(ranks: Sequence[tuple[Look, Motion]], elapsed_s: float) -> list[Group]:
    """Alike ranks together; those that wait first, then those that stand, and the larger group first."""
    found: dict[tuple[Motion, str, str, object], list[Look]] = {}
    for look, motion in ranks:
        frames = look.place.frames if look.place is not None else None
        found.setdefault((motion, _wait(look, motion), look.gone, frames), []).append(look)
    counts = _counts([look for look, motion in ranks if motion is Motion.WAITS])
    groups = []
    for (motion, wait, _, _), looks in found.items():
        if motion is Motion.WAITS and counts:
            for count in sorted({counts[look.label] for look in looks}):
                some = [look for look in looks if counts[look.label] == count]
                groups.append(_group(motion, f"{wait} (number {count:,})", some, elapsed_s))
        else:
            groups.append(_group(motion, wait, looks, elapsed_s))
    order = [Motion.WAITS, Motion.STILL, Motion.WORKS, Motion.GONE, Motion.MOVES, Motion.UNSEEN]
    return sorted(groups, key=lambda group: (order.index(group.motion), -len(group.looks), group.looks[0].rank or 0))


def _group(motion: Motion, wait: str, looks: Sequence[Look], elapsed_s: float) -> Group:
    times = [waited for look in looks if (waited := look.waited_ns()) is not None]
    if times or motion not in (Motion.WAITS, Motion.STILL):
        return Group(motion, wait, tuple(looks), max(times, default=None))
    return Group(motion, wait, tuple(looks), int(elapsed_s * 1e9), at_least=True)


def _counts(looks: Sequence[Look]) -> dict[str, int]:
    """Which number the exchange has that each waits in, of those of its name: where all know, and are not in the same."""
    counts: dict[str, int] = {}
    for look in looks:
        waits = look.waits_for
        begun = look.doing.begun if look.doing is not None else None
        if waits is None or begun is None or waits.key not in begun:
            return {}
        counts[look.label] = begun[waits.key]
    same_name = len({look.waits_for for look in looks}) and len({look.waits_for.name for look in looks if look.waits_for}) == 1
    return counts if same_name and len(set(counts.values())) > 1 else {}


def _wait(look: Look, motion: Motion) -> str:
    if motion is Motion.GONE:
        return look.waits_for.name if look.waits_for is not None and not _ended_well(look) else ""
    if look.waits_for is not None:
        return look.waits_for.name
    return look.place.name if look.place is not None else ""


def _found(job: Job, by: dict[Motion, list[Group]], count: int, elapsed_s: float) -> tuple[Finding, str]:
    still, works, moving = by[Motion.STILL], by[Motion.WORKS], by[Motion.MOVES]
    waiting = _by_wait(by[Motion.WAITS])
    missing = [look for group in by[Motion.GONE] for look in group.looks]
    if by[Motion.UNSEEN] and not waiting and not still and not works and not moving:
        return Finding.UNSEEN, f"{_ranks(by[Motion.UNSEEN])} cannot be seen: {by[Motion.UNSEEN][0].looks[0].unseen}"
    apart = as_duration(elapsed_s * 1e9)
    if not waiting:
        if moving:
            also = f"; {_there([*still, *works])}" if still or works else ""
            return Finding.MOVES, f"no hang seen: {_ranks(moving)} moved between two looks, {apart} apart{also}"
        if works:
            return Finding.MOVES, f"no hang seen: {_there(works)}" + (f"; {_there(still)}" if still else "")
        return Finding.STILL, f"{_there(still)}; no rank is in a collective"
    waits = "; ".join(map(_waits, waiting))
    if moving or works:
        who = _ranks([*moving, *works])
        verb = "moves" if sum(len(group.looks) for group in (*moving, *works)) == 1 else "move"
        return Finding.MOVES, f"no hang seen: {waits}, and {who} {verb}: {_places([*moving, *works])}"
    if missing or still or by[Motion.UNSEEN]:
        said = []
        if missing:
            said.append(_gone(missing))
        if still:
            alone = sum(len(group.looks) for group in still) == 1
            are, they = ("is", "it is") if alone else ("are", "they are")
            said.append(f"{_ranks(still)} {are} not there: {they} {_places(still)}")
        if by[Motion.UNSEEN]:
            said.append(f"{_ranks(by[Motion.UNSEEN])} cannot be seen: {by[Motion.UNSEEN][0].looks[0].unseen}")
        return Finding.MISSING, f"{waits}; {'; '.join(said)}"
    if len(waiting) > 1:
        calls = "; ".join(f"{_waits(group)}{_at(group)}" for group in waiting)
        return Finding.DIFFERENT, f"ranks are in different collectives: {calls}"
    if job.unseen:
        others = f"{job.unseen} of {job.world} ranks run on other machines"
        return Finding.MISSING, f"{waits}; {others}, and no trace of them was named"
    if len(waiting) == 1 and count == 1 and (job.world or 1) == 1:
        return Finding.STILL, f"{waits}{_at(waiting[0])}"
    return Finding.TOGETHER, f"{waits}: all are there; their shapes or groups differ, a connection was lost, or a device hangs"


def _by_wait(groups: Sequence[Group]) -> list[Group]:
    """Groups that wait for the same as one, wherever their code is."""
    waits: dict[str, list[Group]] = {}
    for group in groups:
        waits.setdefault(group.wait, []).append(group)
    joined = []
    for wait, some in waits.items():
        times = [group.waited_ns for group in some if group.waited_ns is not None]
        looks = tuple(look for group in some for look in group.looks)
        joined.append(Group(some[0].motion, wait, looks, max(times, default=None), all(group.at_least for group in some)))
    return joined


def _all_gone(gone: Sequence[Look], groups: Sequence[Group]) -> Verdict:
    failed = [look for look in gone if not _ended_well(look)]
    if not failed:
        text = f"no rank runs any more: {named_ranks(gone)} ended with exit code 0"
        return Verdict(Finding.ENDED, False, text, tuple(groups))
    waited = _by_wait([group for group in groups if group.wait])
    text = f"no rank runs any more: {_gone(failed)}"
    if waited:
        waits = "; ".join(f"{_names(group)} waited in {group.wait}{_since(group)}" for group in waited)
        others = [group for group in groups if not group.wait and not all(map(_ended_well, group.looks)) and group.where]
        text += f"; when they ended, {waits}" + "".join(f"; {_names(each)} was {_place_of(each)}" for each in others)
    noted = [look for look in failed if look.noted_ns is not None]
    if noted and not waited:
        stood = [group for group in groups if group.looks[0] in noted]
        text += "".join(f"; by its own note {_names(each)} was {_place_of(each)}" for each in stood)
    return Verdict(Finding.MISSING if waited or noted else Finding.ENDED, bool(waited or noted), text, tuple(groups))


def _ended_well(look: Look) -> bool:
    return look.gone.startswith("ended with exit code 0")


def _gone(looks: Sequence[Look]) -> str:
    by: dict[str, list[Look]] = {}
    for look in looks:
        by.setdefault(look.gone, []).append(look)
    return "; ".join(f"{named_ranks(some)} {'is' if len(some) == 1 else 'are'} gone ({why})" for why, some in by.items())


def _ranks(groups: Sequence[Group]) -> str:
    return named_ranks([look for group in groups for look in group.looks])


def _names(group: Group) -> str:
    return named_ranks(group.looks)


def _waits(group: Group) -> str:
    return f"{_names(group)} {_plural(group, 'wait')} in {group.wait}{_since(group)}"


def _plural(group: Group, verb: str) -> str:
    return f"{verb}s" if len(group.looks) == 1 else verb


def _since(group: Group) -> str:
    if group.waited_ns is None:
        return ""
    return f" for {'at least ' if group.at_least else ''}{as_duration(group.waited_ns)}"


def _at(group: Group) -> str:
    return f" ({group.where})" if group.where else ""


def _there(groups: Sequence[Group]) -> str:
    stuck = {Motion.STILL: " stuck", Motion.WORKS: ""}
    are = {True: "is", False: "are"}
    return "; ".join(
        f"{_names(group)} {are[len(group.looks) == 1]}{stuck[group.motion]} {_place_of(group)}" for group in groups
    )


def _places(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return _place_of(groups[0])
    return "; ".join(f"{_names(group)} {_place_of(group)}" for group in groups)


def _place_of(group: Group) -> str:
    """"in train.py:88 load_batch, stopped by a signal": where, and what else explains it."""
    look = group.looks[0]
    said = [f"in {group.where}" if group.where else f"at a place that is not seen ({look.unseen or 'it has no stack'})"]
    if look.place is not None and look.place.kind is Kind.LOADER:
        places = [worker.place for worker in look.workers if worker.place is not None and worker.place.frames]
        said.append("waiting for a loader" + (f" whose worker is in {shown(places[0].frames[0])}" if places else ""))
    if look.process is not None and look.process.state in (State.STOPPED, State.TRACED, State.UNINTERRUPTIBLE):
        said.append(look.process.state.value)
    if group.motion is Motion.WORKS:
        said.append("busy at the same line in both looks")
    return ", ".join(said)


def _where(look: Look) -> str:
    return shown(look.place.frames[0]) if look.place is not None and look.place.frames else ""


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def busy_text(before: Look, look: Look, elapsed_s: float) -> str:
    """"0.98 of a core, 12 MiB read from and written to disk": what it used between two looks; "" where that was not seen."""
    said = []
    if look.spent_s is not None and before.spent_s is not None:
        said.append(f"{(look.spent_s - before.spent_s) / max(elapsed_s, 1e-3):.2f} of a core")
    if look.moved_nbytes is not None and before.moved_nbytes is not None and look.moved_nbytes > before.moved_nbytes:
        said.append(f"{as_size(int(look.moved_nbytes - before.moved_nbytes))} read from and written to disk")
    return ", ".join(said)
