"""Owns how a running process looks in a terminal: who it is, what it does now, what it holds, and the stacks of its threads.

`zprof.commands.attach` prints it. It decides nothing, and says of what was not seen why.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from offload.text import as_duration, as_size, counted, one_line, shown_path
from zprof.living.attached import Attached
from zprof.living.memory import Memory, as_json
from zprof.living.places import of_script
from zprof.living.recorded import Activity, Doing
from zprof.living.stacks import OWN_THREADS, Thread
from zprof.rows import CATEGORIES, TIERS
from zprof.show.live.sources import Sources

__all__ = ["attach_json", "attach_text"]


def attach_text(found: Attached) -> str:
    """The report."""
    lines = [*_who(found), *_recording(found), "", *_memory(found.memory)]
    if found.doing is not None and found.doing.held:
        lines += ["", *_held(found.doing)]
    if found.stacks is not None:
        sources = Sources()
        for thread in found.stacks.threads:
            lines += ["", *_thread(found, thread, sources)]
    else:
        lines += ["", f"stacks: not seen: {found.problem}"]
    return "\n".join(lines)


def _who(found: Attached) -> list[str]:
    process = found.process
    said = [f"pid {process.pid}"]
    if process.inner != process.pid:
        said[0] += f" ({process.inner} in its container)"
    if found.place is not None:
        said.append(f"rank {found.place[0]} of {found.place[1]}")
    said += [process.state.value, f"running for {as_duration(found.running_s * 1e9)}"]
    lines = [f"{', '.join(said)}: {process.command}"]
    if process.tracer:
        lines.append(f"debugged by pid {process.tracer}")
    python = [child for child in found.children if child.alive]
    if python:
        named = ", ".join(f"{child.pid} ({one_line(child.name)})" for child in python[:6])
        lines.append(f"started {named}{f' and {len(python) - 6} more' if len(python) > 6 else ''}")
    return lines


def _recording(found: Attached) -> list[str]:
    doing = found.doing
    if doing is None or found.trace is None:
        return [f"not recorded by zprof{f': {found.unrecorded}' if found.unrecorded else ''}"]
    said = [f"{counted(doing.steps, 'step')} done"]
    if doing.in_step:
        said.append("in an optimizer's step")
    if doing.phase is not None:
        said.append(f"in {doing.phase}")
    if doing.unit is not None:
        said.append(f"in unit {one_line(doing.unit)}")
    lines = [f"recorded into {shown_path(found.trace)} at level {found.level}: {', '.join(said)}"]
    for wait in doing.waits:
        lines.append(f"waits in {one_line(wait.name)} for {as_duration(max(0, found.time_ns - wait.begin_ns))}")
    begun = [f"{one_line(each.name)} {as_duration(max(0, found.time_ns - each.begin_ns))} ago" for each in doing.under_way]
    if begun:
        lines.append(f"begun and not ended: {', '.join(begun[:6])}{', ...' if len(begun) > 6 else ''}")
    if doing.last_ns is not None and not doing.waits:
        lines.append(f"last recorded activity {as_duration(max(0, found.time_ns - doing.last_ns))} ago")
    return lines


def _memory(memory: Memory) -> list[str]:
    def size(nbytes: int | None) -> str:
        return "not seen" if nbytes is None else as_size(nbytes)

    share = f"its share {size(memory.proportional)} (PSS)"
    lines = [f"resident {size(memory.resident)}, {share}, the most so far {size(memory.most)}"]
    if memory.swapped:
        lines.append(f"in swap {as_size(memory.swapped)}")
    if memory.cgroup is not None:
        bound = f" of {as_size(memory.limit)}" if memory.limit is not None else ""
        lines.append(f"its container holds {as_size(memory.cgroup)}{bound}, without file cache")
    for gpu in memory.gpus:
        lines.append(f"{gpu.key} ({one_line(gpu.name)}) holds {size(gpu.nbytes)} for it, by NVML")
    if memory.nvml and not memory.gpus:
        lines.append(f"GPU memory: not seen: {one_line(memory.nvml)}")
    return lines


def _held(doing: Doing) -> list[str]:
    """Bytes by category and tier, of what is recorded."""
    tiers = [tier for tier in TIERS if any(place[1] == tier for place in doing.held)]
    lines = [f"{'held now':<14}" + "".join(f"{tier:>12}" for tier in tiers)]
    for category in CATEGORIES:
        row = [doing.held.get((category, tier)) for tier in tiers]
        if any(row):
            lines.append(f"{category:<14}" + "".join(f"{as_size(each) if each else '-':>12}" for each in row))
    for tier in tiers:
        if (unseen := doing.covered.tier(tier)) is not None:
            lines.append(f"not all of the {tier} is seen: no {', '.join(doing.covered.missing(tier))}: {unseen}")
    return lines


def _thread(found: Attached, thread: Thread, sources: Sources) -> list[str]:
    state = "" if thread.active is None else ", on a CPU" if thread.active else ", idle"
    lines = [f"thread {thread.name or 'without a name'} ({thread.number or '?'}{state})"]
    root = f"/proc/{found.process.pid}/root"
    if thread.name in OWN_THREADS:
        return [f"{lines[0]}: the recorder's own"]
    for frame in of_script(thread.frames):
        if frame.native:
            lines.append(f"  {frame.function} ({frame.file.rpartition('/')[2]})")
            continue
        text = sources.line(frame, root, found.process.began_s)
        lines.append(f"  {frame.file}:{frame.line} {frame.function}" + (f": {text}" if text else ""))
    return lines


def attach_json(found: Attached) -> dict[str, Any]:
    """The same as plain values."""
    process, doing = found.process, found.doing
    return {
        "pid": process.pid,
        "pid_in_container": process.inner,
        "command": list(process.words),
        "state": process.state.value,
        "running_s": found.running_s,
        "rank": found.place[0] if found.place is not None else None,
        "world": found.place[1] if found.place is not None else None,
        "memory": as_json(found.memory),
        "recording": None if doing is None or found.trace is None else {
            "trace": str(found.trace),
            "level": found.level,
            "steps": doing.steps,
            "in_step": doing.in_step,
            "pass": doing.phase,
            "unit": doing.unit,
            "waits": [_activity(each, found.time_ns) for each in doing.waits],
            "under_way": [_activity(each, found.time_ns) for each in doing.under_way],
            "held_nbytes": {tier: {name: nbytes for (name, on), nbytes in doing.held.items() if on == tier} for tier in TIERS},
            "unseen": doing.covered.lines(),
            "samples": doing.samples,
        },
        "not_recorded": found.unrecorded or None,
        "stacks": None if found.stacks is None else {
            "by": found.stacks.source,
            "threads": [
                {"name": thread.name, "tid": thread.number, "active": thread.active, "frames": list(map(asdict, thread.frames))}
                for thread in found.stacks.threads
            ],
        },
        "no_stacks": str(found.problem) if found.problem is not None else None,
        "children": [{"pid": child.pid, "command": list(child.words), "state": child.state.value} for child in found.children],
    }  # fmt: skip


def _activity(activity: Activity, now_ns: int) -> dict[str, Any]:
    return {"what": activity.what, "key": activity.key, "for_s": max(0, now_ns - activity.begin_ns) / 1e9}
