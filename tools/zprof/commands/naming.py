"""Owns the names of traces where none is given: a new one for each run, and the newest run for the commands that read one.

`zprof run` asks it where to write; report, check, export, timeline, flamegraph and oom what to read.

Note: [How ranks agree without a word]
    A run is numbered one above the highest number that an earlier run has left, of any rank. Files of the same job do not
    count, though one rank may have made its own before another looks: they are younger than the launcher, the process that
    started the ranks. Launchers of several hosts start at different times, so there the name stays the plain one, and a file
    that is there already is refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from zprof.problem import Misuse
from zprof.trace.children import without_children

__all__ = ["RUN", "named_or_latest", "next_name"]

#: The first run's traces; {rank} becomes the rank.
RUN = "run.{rank}.zprof"
_OF_A_RUN = re.compile(r"run(?:-(\d{1,9}))?\.\d+(?:\.restart\d+)?\.zprof", re.ASCII)
_OF_A_RANK = re.compile(r"(.+)\.(\d+)((?:\.restart\d+)?\.zprof)", re.ASCII)
#: Where the rank that was asked for stands while a command's arguments are read.
_RANK = "zprof.rank"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def next_name(world: int, folder: Path = Path()) -> str:
    """The name of the next run's traces in ``folder``, with {rank} in it; the same on every rank of a job."""
    launched = world > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    began_s = _parent_began_s() if launched else float("inf")
    if began_s is None or os.environ.get("LOCAL_WORLD_SIZE", str(world)) != str(world):
        return RUN
    highest = 0
    for path in folder.glob("run*.zprof"):
        found = _OF_A_RUN.fullmatch(path.name)
        # One that is gone meanwhile is no one's name.
        with suppress(OSError):
            if found and path.stat().st_mtime < began_s:
                highest = max(highest, int(found[1] or 1))
    return f"run-{highest + 1}.{{rank}}.zprof" if highest else RUN


def _parent_began_s() -> float | None:
    """When the process that started this one began, as `time.time` counts; None where the system does not say."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        since_boot_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        # Field 22 of proc(5), of which two stand before the bracket.
        return time.time() - since_boot_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def latest(folder: Path = Path()) -> list[Path]:
    """The traces of the run that was written to last in ``folder``, by rank.

    Raises:
        Misuse: there is none.
    """
    times: dict[Path, int] = {}
    for path in without_children(folder.glob("*.zprof")):
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    if not times:
        raise Misuse("RUN: expected a trace, found no *.zprof in this folder; record one with zprof run, or name a file")
    newest = max(times, key=lambda path: (times[path], path.name))
    found = _OF_A_RANK.fullmatch(newest.name)
    if not found:
        return [newest]
    ranks = {}
    for path in times:
        of = _OF_A_RANK.fullmatch(path.name)
        if of and (of[1], of[3]) == (found[1], found[3]):
            ranks[int(of[2])] = path
    return [ranks[rank] for rank in sorted(ranks)]


def named_or_latest(
    name: str, kind: click.ParamType[Any] | None = None, *, several: bool = True
) -> Callable[[_Command], _Command]:
    """The argument RUN of a command that reads a run, and the option --rank that takes one rank of it.

    RUN is what is named, or else the newest run here, which is said on stderr.

    Args:
        several: it may be the traces of several ranks; else one of them must be chosen.
    """

    def choose(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        rank: int | None = ctx.meta.get(_RANK)
        if ctx.resilient_parsing or (value and rank is None):
            return value
        paths = [str(path) for path in (value if several else [value])] if value else [str(path) for path in latest()]
        if rank is not None:
            from zprof.analysis.ranks import path_of

            whose = f"rank {rank} of the newest run"
            paths = [str(path_of(rank, paths))]
        elif not several and len(paths) > 1:
            found = f"found {len(paths)} of the newest run here"
            raise Misuse(f"RUN: expected the trace of one rank, {found}; choose one with --rank, such as --rank 0")
        else:
            whose = "the newest run"
        if not value:
            click.echo(f"zprof: {' '.join(paths)}: {whose} in this folder", err=True)
        values = [param.type.convert(path, param, ctx) for path in paths]
        return tuple(values) if several else values[0]

    def decorate(command: _Command) -> _Command:
        # Eager, for what is chosen by rank depends on it.
        command = click.option(
            "--rank",
            type=click.IntRange(min=0),
            is_eager=True,
            expose_value=False,
            callback=_remember,
            help="Read only this rank of RUN.",
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


def _remember(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    ctx.meta[_RANK] = value
