"""Owns what is seen of one running process: its stacks, its memory, and what its recording says, each with why it is missing.

`zprof attach` shows it. It asks every source once, and none of them keeps another from being asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ZhooksError
from zprof.clock import now_ns, wall_ns
from zprof.living.jobs import place_in_job
from zprof.living.memory import Memory, memory_of
from zprof.living.processes import Process, children_of, refusal, stuck_in_kernel
from zprof.living.recorded import Doing, Following, recording_of
from zprof.living.stacks import Stacks, stacks_of
from zprof.rows import TraceError

__all__ = ["Attached", "seen"]


@dataclass(frozen=True, slots=True)
class Attached:
    """A process at one time.

    Attributes:
        place: (rank, world) by its environment, or None.
        time_ns: on the clock of its recording. running_s: since it began.
        problem: why there are no stacks; None where there are.
        trace, doing: what it records into, and what that says; None where it is not recorded, ``unrecorded`` says more.
        children: that it started, the oldest first.
    """

    process: Process
    place: tuple[int, int] | None
    time_ns: int
    running_s: float
    stacks: Stacks | None
    problem: ZhooksError | None
    memory: Memory
    trace: Path | None
    level: str
    doing: Doing | None
    unrecorded: str
    children: Sequence[Process]


def seen(process: Process, *, native: bool = False) -> Attached:
    """Everything, now."""
    stacks, problem = None, None
    try:
        stacks = _stacks(process, native)
    except ZhooksError as error:
        problem = error
    trace, why = recording_of(process)
    doing, level = None, ""
    if trace is not None:
        try:
            following = Following(trace, growing=True)
            level, doing = following.header.level, following.look()
            following.close()
        except TraceError as error:
            why = str(error)
    return Attached(
        process=process,
        place=place_in_job(process.environment()),
        time_ns=now_ns(),
        running_s=max(0.0, wall_ns() / 1e9 - process.began_s),
        stacks=stacks,
        problem=problem,
        memory=memory_of(process),
        trace=trace,
        level=level,
        doing=doing,
        unrecorded=why,
        children=children_of(process.pid),
    )


def _stacks(process: Process, native: bool) -> Stacks:
    if stuck := stuck_in_kernel(process):
        raise ZhooksError(f"pid {process.pid}: no stack can be read while it is {stuck}")
    if not process.is_python:
        below = [child for child in children_of(process.pid) if child.alive and child.is_python]
        if not below and not process.visible:
            raise refusal(process)
        named = ", ".join(f"{child.pid} ({child.command})" for child in below[:4])
        what = f"pid {process.pid}: expected a Python process, found {process.command}"
        raise ZhooksError(what + (f"; it started {named}" if named else ""))
    return stacks_of(process, native=native)
