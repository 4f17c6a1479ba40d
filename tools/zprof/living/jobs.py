"""Owns which processes of this machine, and which traces, are the ranks of one job.

`zprof hang` asks it. Ranks are known by the environment that launchers give them, by the process that started them, or by the
traces that they record into; it looks at nobody's memory and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offload.errors import ZhooksError
from zprof.living.processes import Process, children_of, everybody, found, recorded_by
from zprof.living.recorded import recording_of
from zprof.rows import TraceError
from zprof.trace.header import Header, here
from zprof.trace.reader import Trace

__all__ = ["Job", "Member", "jobs_here", "of_processes", "of_traces", "place_in_job"]

#: (rank, world) as launchers name them: torchrun and most, Slurm, Open MPI, MPICH.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
#: What names a job, as far as it is there.
_OF_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.launch",
)  # fmt: skip
_MOST_WORLD = 1 << 20
#: In the command line of a process that multiprocessing spawned.
_SPAWNED = "multiprocessing.spawn import spawn_main"


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, or a process that is taken for one.

    Attributes:
        rank: None where nobody says.
        process: as it was when it was found; None where there is none here (any more).
        trace: that it records into, or recorded.
        why: why it has no trace, where that is more than that nobody records.
    """

    rank: int | None
    process: Process | None
    trace: Path | None = None
    header: Header | None = None
    why: str = ""

    @property
    def label(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"pid {self.process.pid}" if self.process is not None else str(self.trace)

    @property
    def elsewhere(self) -> bool:
        """It is recorded on another machine, or was before this one started anew."""
        return self.header is not None and self.process is None and (self.header.host, self.header.boot) != here()


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that belong together.

    Attributes:
        name: for a reader: "127.0.0.1:29500".
        world: ranks in all; None where nobody says. local: of them on this machine.
    """

    name: str
    members: tuple[Member, ...]
    world: int | None = None
    local: int | None = None

    @property
    def unseen(self) -> int:
        """Ranks that run on other machines, and that no trace is here of."""
        return max(0, (self.world or 0) - len(self.members))


def place_in_job(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world) that a launcher gave a process; None without one."""
    for rank, world in _NAMES:
        mine, all_of = environment.get(rank, ""), environment.get(world, "")
        if mine.isdecimal() and all_of.isdecimal() and len(all_of) < 8 and int(mine) < int(all_of):
            return int(mine), int(all_of)
    return None


def jobs_here() -> list[Job]:
    """Every job that has a rank running on this machine, as far as their environments may be seen."""
    groups: dict[tuple[str, ...], dict[int, list[tuple[Process, Mapping[str, str]]]]] = {}
    for process in everybody():
        environment = process.environment() if process.alive else {}
        place = place_in_job(environment)
        if place is not None:
            key = tuple(environment.get(name, "") for name in _OF_JOB)
            groups.setdefault(key, {}).setdefault(place[0], []).append((process, environment))
    jobs = []
    for key, ranks in groups.items():
        chosen = {rank: one for rank, those in ranks.items() if (one := _chosen([process for process, _ in those])) is not None}
        if chosen:
            told = next(iter(ranks.values()))[0][1]
            jobs.append(_job(key, chosen, told))
    return sorted(jobs, key=lambda job: job.name)


def of_processes(pids: Sequence[int]) -> Job:
    """The job that those processes are of, or what they started is; processes of no job are taken as they are.

    Raises:
        ZhooksError: one is not there, or they are of several jobs.
    """
    processes = []
    for pid in pids:
        process = found(pid)
        if process is None:
            raise ZhooksError(f"pid {pid}: expected a running process, found none")
        processes.append(process)
    everywhere = jobs_here()
    jobs: list[Job] = []
    alone: list[Process] = []
    for process in processes:
        mine = [job for job in everywhere if _has(job, {process.pid, *_below(process.pid)})]
        if len(mine) > 1:
            several = f"found {len(mine)} below it; name one of their ranks"
            raise ZhooksError(f"pid {process.pid}: expected a process of one job, {several}")
        if mine:
            jobs += [job for job in mine if job not in jobs]
        else:
            alone += _spawned(recorded_by(process) or process) or [recorded_by(process) or process]
    if len(jobs) + bool(alone) > 1:
        raise ZhooksError("expected processes of one job, found several jobs; name those of one at a time")
    if jobs:
        return jobs[0]
    members = tuple(_member(process, None) for process in {process.pid: process for process in alone}.values())
    # Who records knows the rank.
    named = tuple(replace(one, rank=one.header.rank) if one.header is not None and len(members) > 1 else one for one in members)
    ranks = [one.rank for one in named]
    if None in ranks or len(set(ranks)) < len(ranks):
        named = members
    return Job(f"pid {', '.join(map(str, pids))}", named)


def of_traces(paths: Sequence[Path]) -> Job:
    """The job whose ranks recorded those traces.

    Raises:
        TraceError: one is no trace, or two are of one rank.
    """
    members: dict[int, Member] = {}
    world = 1
    for path in paths:
        header = Trace.open(path).header
        if header.rank in members:
            other = members[header.rank].trace
            both = f"rank {header.rank} in {other}, too"
            raise TraceError(f"{path}: expected traces of one run, found {both}; name those of one run")
        members[header.rank] = Member(header.rank, _recorder_of(header, path), path, header)
        world = max(world, header.world)
    on_this = sum(not member.elsewhere for member in members.values())
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return Job(name, tuple(members[rank] for rank in sorted(members)), world, on_this)


def _job(key: tuple[str, ...], chosen: Mapping[int, Process], told: Mapping[str, str]) -> Job:
    named = dict(zip(_OF_JOB, key, strict=True))
    name = f"{named['MASTER_ADDR']}:{named['MASTER_PORT']}" if named["MASTER_PORT"] else named["SLURM_JOB_ID"] or "unnamed"
    place = place_in_job(told)
    world = place[1] if place is not None else None
    local = told.get("LOCAL_WORLD_SIZE", "")
    here_in_all = int(local) if local.isdecimal() and len(local) < 8 else None
    members = {rank: _member(process, rank) for rank, process in sorted(chosen.items())}
    missing = _missing(world, here_in_all, told, members)
    ended = _ended_beside(chosen.values())
    for at, rank in enumerate(missing):
        # Launchers start ranks in their order. Which it was is known only where each that lacks is one of those.
        process = ended[at] if len(ended) == len(missing) else None
        members[rank] = _gone(rank, process, members.values())
    return Job(name, tuple(members[rank] for rank in sorted(members)), world, here_in_all)


def _missing(world: int | None, local: int | None, told: Mapping[str, str], members: Mapping[int, Member]) -> list[int]:
    """Ranks that must be on this machine, and are not."""
    if world is None or world > _MOST_WORLD:
        return []
    if local == world:
        return [rank for rank in range(world) if rank not in members]
    group = told.get("GROUP_RANK", "")
    if local is None or not group.isdecimal():
        return []
    # Launchers number the ranks of a machine in a row.
    first = int(group) * local
    return [rank for rank in range(first, min(first + local, world)) if rank not in members] if first <= min(members) else []


def _ended_beside(ranks: Iterable[Process]) -> list[Process]:
    """What the parents of ``ranks`` started, too, and have not asked how it ended; its environment is gone with it."""
    parents = {process.parent for process in ranks}
    ended = [child for parent in parents for child in children_of(parent) if not child.alive]
    return sorted(ended, key=lambda process: (process.began_s, process.pid))


def _gone(rank: int, process: Process | None, others: Iterable[Member]) -> Member:
    """A rank that does not run; its trace, where it lies beside another's under its own number."""
    for other in others:
        if other.trace is None or other.rank is None or f".{other.rank}." not in other.trace.name:
            continue
        path = other.trace.with_name(other.trace.name.replace(f".{other.rank}.", f".{rank}.", 1))
        with suppress(TraceError):
            header = Trace.open(path).header
            if header.rank == rank and (header.host, header.boot) == here():
                return Member(rank, process, path, header)
    return Member(rank, process)


def _member(process: Process, rank: int | None) -> Member:
    path, why = recording_of(process)
    header = None
    if path is not None:
        try:
            header = Trace.growing(path).header
        except TraceError:
            path = None
    return Member(rank, process, path, header, why)


def _recorder_of(header: Header, path: Path) -> Process | None:
    """The process that records now, on this machine."""
    if (header.host, header.boot) != here() or not header.boot:
        return None
    process = found(header.pid)
    if process is None or not process.alive:
        return process
    open_now, unseen = recording_of(process)
    if open_now is None:
        # Another process of that number by now, unless its files may not be seen.
        return process if unseen and not os.access(f"/proc/{process.pid}/fd", os.R_OK) else None
    with suppress(OSError):
        return process if os.path.samefile(open_now, path) else None
    return None


def _chosen(processes: Sequence[Process]) -> Process | None:
    """Of all that have one rank's environment the one that trains: nearest to the launcher, and Python.

    Under ``zprof run`` it is the child that is recorded. What it starts has the same environment.
    """
    parents = {process.pid: process.parent for process in processes}

    def depth(process: Process) -> int:
        steps, at = 0, process.parent
        while at in parents and steps < len(parents):
            steps, at = steps + 1, parents[at]
        return steps

    trains = [process for process in processes if not _launches(process)]
    ordered = sorted(trains, key=lambda process: (depth(process), process.began_s, process.pid))
    recorded = [process for process in ordered if process.is_recorded]
    if recorded:
        return recorded[0]
    # One that has ended has no interpreter any more; where it was the first, nothing else is this rank's.
    return next((process for process in ordered if not process.alive or process.is_python), None)


def _launches(process: Process) -> bool:
    """It starts ranks; where pods are numbered, it has a rank's environment itself."""
    words = process.words[:6]
    return any(Path(word).name in _LAUNCHERS for word in words[:2]) or any(word in _LAUNCHER_MODULES for word in words)


def _below(pid: int) -> set[int]:
    """All that it started, and what those started."""
    import psutil

    try:
        return {each.pid for each in psutil.Process(pid).children(recursive=True)}
    except (psutil.Error, OSError):
        return set()


def _has(job: Job, pids: set[int]) -> bool:
    return any(member.process is not None and member.process.pid in pids for member in job.members)


def _spawned(parent: Process) -> list[Process]:
    """The processes that torch.multiprocessing, or multiprocessing's spawn, started as ranks, and those that are recorded.

    Forks, and what a forkserver starts, are told from loader workers by that: they record into traces of their own.
    """
    begun = [child for child in children_of(parent.pid) if any(_SPAWNED in word for word in child.words)]
    known = {parent.pid, *(child.pid for child in begun)}
    others = (found(pid) for pid in sorted(_below(parent.pid) - known))
    return [*begun, *(each for each in others if each is not None and each.alive and recording_of(each)[0] is not None)]
