"""Owns how a hang report looks: ranks that are alike together, each with its lines of code, and the answer last.

`zprof.commands.hang` prints it. It decides nothing: `zprof.living.verdict` has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from offload.text import as_duration, counted, one_line
from zprof.living.jobs import Job
from zprof.living.looks import Look
from zprof.living.places import KEPT, Place, shown
from zprof.living.processes import State
from zprof.living.verdict import Finding, Group, Motion, Verdict, busy_text, named_ranks
from zprof.show.live.sources import Sources

__all__ = ["hang_json", "hang_text"]

_WIDTH = 120


def hang_text(job: Job, verdict: Verdict, before: Sequence[Look], elapsed_s: float) -> str:
    """The report, its answer as the last line."""
    known = {look.label: look for look in before}
    sources = Sources()
    lines = [_title(job, elapsed_s), ""]
    for group in verdict.groups:
        lines += [*_group(group, known, elapsed_s, sources), ""]
    word = "hang" if verdict.hangs else "answer"
    text = verdict.text.removeprefix("no hang seen: ")
    lines.append(f"{'no hang seen' if verdict.finding is Finding.MOVES else word}: {text}")
    return "\n".join(lines)


def _title(job: Job, elapsed_s: float) -> str:
    count = len(job.members)
    said = counted(count, "process" if job.world is None else "rank")
    if job.unseen:
        said += f" of {job.world}"
    return f"{one_line(job.name)}: {said}, looked at twice, {as_duration(elapsed_s * 1e9)} apart"


def _group(group: Group, known: Mapping[str, Look], elapsed_s: float, sources: Sources) -> list[str]:
    look = group.looks[0]
    pids = [str(each.process.pid) for each in group.looks if each.process is not None and each.rank is not None]
    who = named_ranks(group.looks) + (f" (pid {', '.join(pids[:8])}{', ...' if len(pids) > 8 else ''})" if pids else "")
    lines = [f"{who}: {_state(group)}"]
    if (doing := _doing(group)) is not None:
        lines.append(f"  {doing}")
    if look.noted_ns is not None:
        lines.append(f"  its own note of {as_duration(look.noted_ns)} {'before' if look.gone else 'ago'} says where it is:")
    if look.place is not None:
        lines += [f"  {line}" for line in _frames(look, look.place, sources)]
    elif look.unseen:
        lines.append(f"  no stack: {look.unseen}")
    for worker in look.workers[:4]:
        place = worker.place
        where = shown(place.frames[0]) if place is not None and place.frames else "a place that is not seen"
        lines.append(f"  its worker pid {worker.pid} is in {where}")
    before = known.get(look.label)
    if group.motion in (Motion.STILL, Motion.WORKS) and before is not None and (used := busy_text(before, look, elapsed_s)):
        lines.append(f"  used in between: {used}")
    return lines


def _state(group: Group) -> str:
    look = group.looks[0]
    if group.motion is Motion.GONE:
        waited = f", waited in {group.wait}{_for(group)}" if group.wait else ""
        return f"gone: {look.gone}{waited}"
    said: str = group.motion.value
    if group.motion is Motion.WAITS:
        said = f"waits in {group.wait}{_for(group)}" if len(group.looks) == 1 else f"wait in {group.wait}{_for(group)}"
    elif group.motion is Motion.STILL:
        said = "stuck, in no collective"
        if group.wait:
            said += f": waits for {group.wait}"
    if look.process is not None and look.process.state in (State.STOPPED, State.TRACED, State.UNINTERRUPTIBLE):
        said += f", {look.process.state.value}"
    return said


def _for(group: Group) -> str:
    if group.waited_ns is None:
        return ""
    return f" for {'at least ' if group.at_least else ''}{as_duration(group.waited_ns)}"


def _doing(group: Group) -> str | None:
    """Steps and unit, by their recordings."""
    found = [look.doing for look in group.looks if look.doing is not None]
    if not found:
        return None
    steps = sorted({doing.steps for doing in found})
    count = counted(steps[0], "step") if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    said = [f"{count} done"]
    units = sorted({doing.unit for doing in found if doing.unit})
    if len(units) == 1:
        said.append(f"in unit {one_line(units[0])}")
    phases = sorted({doing.phase for doing in found if doing.phase})
    if len(phases) == 1:
        said.append(f"in {phases[0]}")
    under_way = {each.name for doing in found for each in doing.under_way}
    others = sorted(one_line(name) for name in under_way if name != group.wait)
    if others and group.motion is not Motion.MOVES:
        said.append(f"begun and not ended: {', '.join(others[:4])}{', ...' if len(others) > 4 else ''}")
    return ", ".join(said)


def _frames(look: Look, place: Place, sources: Sources) -> list[str]:
    """The innermost lines of the user's, with their text."""
    lines = []
    root = f"/proc/{look.process.pid}/root" if look.process is not None else ""
    since = look.process.began_s if look.process is not None else None
    for frame in place.frames[:KEPT]:
        text = sources.line(frame, root, since) if since is not None else ""
        line = f"{shown(frame)}" + (f": {text}" if text else "")
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...")
    if len(place.frames) > KEPT:
        lines.append(f"... {len(place.frames) - KEPT} more lines of the script's: zprof attach shows all")
    if place.thread:
        lines.append(f"(on the thread {place.thread})")
    return lines


def hang_json(job: Job, verdict: Verdict, before: Sequence[Look], elapsed_s: float) -> dict[str, Any]:
    """The same as plain values."""
    known = {look.label: look for look in before}
    return {
        "job": job.name,
        "world": job.world,
        "seen": len(job.members),
        "elapsed_s": elapsed_s,
        "hang": verdict.hangs,
        "finding": verdict.finding.value,
        "text": verdict.text,
        "groups": [
            {
                "motion": group.motion.value,
                "ranks": [look.rank for look in group.looks],
                "waits_in": group.wait or None,
                "waited_s": None if group.waited_ns is None else group.waited_ns / 1e9,
                "waited_at_least": group.at_least,
                "where": group.where or None,
            }
            for group in verdict.groups
        ],
        "ranks": [_rank_json(look, group, known.get(look.label)) for group in verdict.groups for look in group.looks],
    }


def _rank_json(look: Look, group: Group, before: Look | None) -> dict[str, Any]:
    process, doing, place = look.process, look.doing, look.place
    waits = look.waits_for
    spent = None if before is None or look.spent_s is None or before.spent_s is None else look.spent_s - before.spent_s
    return {
        "rank": look.rank,
        "pid": process.pid if process is not None else None,
        "host": look.host or None,
        "state": process.state.value if process is not None and not look.gone else None,
        "gone": look.gone or None,
        "motion": group.motion.value,
        "trace": str(look.trace) if look.trace is not None else None,
        "steps": doing.steps if doing is not None else None,
        "unit": doing.unit if doing is not None else None,
        "waits": None if waits is None else {"what": waits.what, "key": waits.key, "for_s": (look.waited_ns() or 0) / 1e9},
        "under_way": [{"what": each.what, "key": each.key} for each in doing.under_way] if doing is not None else None,
        "place": None if place is None else {
            "kind": place.kind.value,
            "name": place.name or None,
            "frames": [asdict(frame) for frame in place.frames],
            "above": [asdict(frame) for frame in place.above],
        },
        "noted_s_ago": None if look.noted_ns is None else look.noted_ns / 1e9,
        "no_stack": look.unseen or None,
        "workers": [
            {"pid": worker.pid, "frames": None if worker.place is None else list(map(asdict, worker.place.frames))}
            for worker in look.workers
        ],
        "cpu_s": spent,
    }  # fmt: skip
