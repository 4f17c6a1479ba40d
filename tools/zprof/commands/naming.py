"""Owns the names of traces where none is given: a new one for each run, and the newest run for the commands that read one.

`zprof run` asks it where to write; report, check, export, timeline, flamegraph and oom what to read.

Note: [How ranks agree without a word]
    A run is numbered one above the highest number that an earlier run has left, of any rank. Files of the same job do not
    count, though one rank may have made its own before another looks: they are younger than the launcher, the process that
    started the ranks. Launchers of several hosts start at different times: there, and in a folder that several hosts may
    share, the run is called as its job is, by what torchrun or Slurm say to all of its ranks; where they say nothing the name
    stays the plain one, and a file that is there already is refused.

Note: [Attempts of one job]
    Ranks that are started again write new files. torchrun's count of restarts is of one host, and does not rise where ranks
    of another have failed, or hosts have joined: a rank whose file is there, of the same job, takes the next number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from offload.text import one_line, plural
from zprof.clock import boot_ns, wall_ns
from zprof.problem import Misuse, Problem
from zprof.recording.processes import stat_of
from zprof.trace.families import member_name, newest

__all__ = ["RUN", "latest", "named_or_latest", "output_of"]

#: The first run's traces; {rank} becomes the rank.
RUN = "run.{rank}.zprof"
_OF_A_RUN = re.compile(r"run(?:-(\d{1,9}))?\.\d+(?:\.restart\d+)?\.zprof", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
#: What torchrun calls a job that nobody named.
_UNNAMED = ("", "none")
_MOST_NAME = 64
#: Traces of the newest run that are named when it was not.
_MOST_SAID = 8
_MOST_ATTEMPTS = 10_000
#: Where the ranks that were asked for stand while a command's arguments are read.
_RANKS = "zprof.ranks"

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class _Job:
    """What the launcher says: the job's own name, "" where it has none; when the launcher began; hosts; which start it is."""

    name: str
    began_s: float | None
    several_hosts: bool
    restarts: int

    @classmethod
    def here(cls, world: int) -> _Job:
        told = os.environ.get
        launched = world > 1 or "TORCHELASTIC_RUN_ID" in os.environ
        restarts = told("TORCHELASTIC_RESTART_COUNT", "0")
        nodes = told("SLURM_STEP_NUM_NODES") or told("SLURM_NNODES") or "1"
        local = told("LOCAL_WORLD_SIZE")
        return cls(
            _job_name() if launched or "SLURM_STEP_ID" in os.environ else "",
            _parent_began_s() if launched else float("inf"),
            world > 1 and (nodes != "1" if local is None else local != str(world)),
            int(restarts) if restarts.isdecimal() else 0,
        )

    def owns(self, path: Path, *, force: bool) -> bool:
        """Whether an earlier attempt of this job has written the file: under ``force`` only one of this very launcher."""
        if not force and self.name and path.name.startswith(f"{self.name}."):
            return True
        if "TORCHELASTIC_RUN_ID" not in os.environ or self.began_s is None:
            # Another launcher's process may be a shell, from which jobs are started one after the other.
            return False
        with suppress(OSError):
            return path.stat().st_mtime >= self.began_s
        return False


def _job_name() -> str:
    """What all ranks of a job know it by, as part of a file's name: "job7" of torchrun's --rdzv-id, else "slurm-4711-0"."""
    told = os.environ.get
    said = told("TORCHELASTIC_RUN_ID", "")
    if said in _UNNAMED:
        job, step = told("SLURM_JOB_ID", ""), told("SLURM_STEP_ID", "")
        said = f"slurm-{job}-{step}".rstrip("-") if job else ""
    if _UUID.fullmatch(said):
        # As torchrun --standalone makes them.
        said = f"job-{said[:8]}"
    return re.sub(r"[^A-Za-z0-9_-]", "_", said)[:_MOST_NAME]


def output_of(output: str | None, rank: int, world: int, force: bool) -> Path:
    """Where this rank writes: a file, a name with {rank} in it, or a folder, in which the run gets a name of its own.

    Raises:
        Problem: nothing can be written there, or something is there already.
    """
    job = _Job.here(world)
    if output is not None and _is_folder(output.replace("{rank}", str(rank))):
        folder = _folder(output.replace("{rank}", str(rank)))
        pattern = str(folder / (member_name(job.name, "{rank}") if job.name else _next_name(job, folder)))
    else:
        pattern = output or (RUN if force else _next_name(job))
    if world > 1 and "{rank}" not in pattern:
        raise Misuse(f"-o {output}: expected {{rank}} in the name, because each of {world} ranks writes its own file")
    path = _of_attempt(Path(pattern.replace("{rank}", str(rank))), job, force)
    _check_writable(path, force)
    return path


def _is_folder(output: str) -> bool:
    return output.endswith(os.sep) or os.path.isdir(output)


def _folder(output: str) -> Path:
    """The folder, made where its name ends as one and the one above is there: every rank makes it, the first one does."""
    folder = Path(output)
    try:
        folder.mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise Problem(f"-o {output}: expected a folder, or to create one: {error.strerror}; name another with -o") from None
    return folder


def _of_attempt(path: Path, job: _Job, force: bool) -> Path:
    """The same for ranks that were started again after a failure, whose trace is the one to look at."""
    name, restarts = path, job.restarts
    if restarts:
        path = name.with_name(f"{name.stem}.restart{restarts}{name.suffix}")
    while path.exists() and job.owns(path, force=force) and restarts < _MOST_ATTEMPTS:
        restarts += 1
        path = name.with_name(f"{name.stem}.restart{restarts}{name.suffix}")
    return path


def _check_writable(path: Path, force: bool) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise Problem(f"{path}: expected a folder to write into, found no {folder}; make it, or name another file with -o")
    if path.is_dir():
        raise Problem(f"{path}: expected the name of a file, found a folder; name a file with -o")
    if path.exists() and not force:
        raise Problem(f"{path}: exists already; overwrite it with -f, or name another file with -o")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise Problem(f"{path}: expected permission to write there, found none; name another file with -o")


def _next_name(job: _Job, folder: Path = Path()) -> str:
    """The name of the next run's traces in ``folder``, with {rank} in it; the same on every rank of a job."""
    if job.began_s is None or job.several_hosts:
        return member_name(job.name, "{rank}") if job.name else RUN
    highest = 0
    for path in folder.glob("run*.zprof"):
        found = _OF_A_RUN.fullmatch(path.name)
        # One that is gone meanwhile is no one's name.
        with suppress(OSError):
            if found and path.stat().st_mtime < job.began_s:
                highest = max(highest, int(found[1] or 1))
    return f"run-{highest + 1}.{{rank}}.zprof" if highest else RUN


def _parent_began_s() -> float | None:
    """When the process that started this one began, as `time.time` counts; None where the system does not say."""
    stat = stat_of(os.getppid())
    return None if stat is None else (wall_ns() - boot_ns() + stat.began_ns) / 1e9


def latest(folder: Path = Path()) -> list[Path]:
    """The traces of the run that was written to last in ``folder``, by rank.

    Raises:
        Misuse: there is none.
    """
    family = newest(folder, alone=True)
    if family is None:
        raise Misuse("RUN: expected a trace, found no *.zprof in this folder; record one with zprof run, or name a file")
    return list(family.paths)


def named_or_latest(
    name: str, kind: click.ParamType[Any] | None = None, *, several: bool = True
) -> Callable[[_Command], _Command]:
    """The argument RUN of a command that reads a run, and the option --rank that takes some ranks of it.

    RUN is what is named, or else the newest run here, which is said on stderr.

    Args:
        several: it may be the traces of several ranks, and --rank may be said again; else one of them must be chosen.
    """

    def choose(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        ranks: tuple[int, ...] = ctx.meta.get(_RANKS, ())
        if ctx.resilient_parsing:
            return value
        for folder in [Path(path) for path in (value if several else filter(None, [value])) if os.path.isdir(path)]:
            family = newest(folder)
            if family is not None and (said := family.line(folder)):
                click.echo(f"zprof: {one_line(said)}", err=True)
        if value and not ranks:
            return value
        paths = [str(path) for path in (value if several else [value])] if value else [str(path) for path in latest()]
        if ranks:
            from zprof.analysis.ranks import paths_of

            whose = f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))} of the newest run"
            paths = [str(path) for path in paths_of(ranks, paths)]
        elif not several and len(paths) > 1:
            found = f"found {len(paths)} of the newest run here"
            raise Misuse(f"RUN: expected the trace of one rank, {found}; choose one with --rank, such as --rank 0")
        else:
            whose = "the newest run"
        if not value:
            some = " ".join(paths[:_MOST_SAID]) + (f" and {len(paths) - _MOST_SAID} more" if len(paths) > _MOST_SAID else "")
            click.echo(f"zprof: {some}: {whose} in this folder", err=True)
        values = [param.type.convert(path, param, ctx) for path in paths]
        return tuple(values) if several else values[0]

    def decorate(command: _Command) -> _Command:
        # Eager, for what is chosen by rank depends on it.
        command = click.option(
            "--rank",
            type=click.IntRange(min=0),
            multiple=several,
            is_eager=True,
            expose_value=False,
            callback=_remember,
            help="Read only this rank of RUN" + ("; repeatable." if several else "."),
        )(command)
        return click.argument(
            name,
            nargs=-1 if several else 1,
            required=False,
            metavar="[RUN]..." if several else "[RUN]",
            type=kind,
            callback=choose,
        )(command)

    return decorate


def _remember(ctx: click.Context, param: click.Parameter, value: int | tuple[int, ...] | None) -> None:
    chosen = value if isinstance(value, tuple) else () if value is None else (value,)
    ctx.meta[_RANKS] = tuple(dict.fromkeys(chosen))
