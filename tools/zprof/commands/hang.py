"""Owns ``zprof hang``: looks twice at the ranks of a job, and says whether they stand still, in what, and who is missing.

`zprof.cli` hangs the command in. It changes nothing in any process, and ends with 3 where a hang is seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offload.text import counted, one_line
from zprof.commands.options import seconds
from zprof.problem import BudgetProblem, CapabilityProblem, Misuse, Problem

if TYPE_CHECKING:
    from zprof.living.jobs import Job
    from zprof.living.looks import Look, Looking
    from zprof.living.verdict import Verdict

__all__ = ["hang"]

#: Between two looks; traces of other machines are written every second, and seen later still.
_APART_S, _APART_ELSEWHERE_S = 2.0, 5.0
_SAMPLES = 6
_MOST_LISTED = 12


_seconds = seconds(0.1, 3600, "100ms to 3600s, such as 2s or 1min")


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option(
    "-p", "--pid", "pids", multiple=True, type=click.IntRange(min=1), help="A rank, or its launcher; repeatable."
)
@click.option("--interval", callback=_seconds, metavar="TIME", help="Time between the two looks; 2s, or 5s with other hosts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def hang(runs: tuple[Path, ...], pids: tuple[int, ...], interval: float | None, as_json: bool) -> None:
    """Show where every rank of a job is, and whether the job hangs: what ranks wait in, for how long, and which is missing.

    RUN is a trace, or a folder with the traces of one run, which several machines may share. Without RUN and --pid it looks
    at the job that runs on this machine, or else at the newest run in this folder. py-spy reads the stacks
    (pip install 'zhooks[attach]'); ranks need not be recorded.

    Exit code 3 if there is a hang, 0 if ranks make progress, 1 if no job runs, 4 if permissions hide everything.

    \b
    A torchrun job:           zprof hang
    One of several jobs:      zprof hang --pid 4711
    A shared folder:          zprof hang runs/
    """
    from zprof.living.looks import Looking

    if runs and pids:
        raise Misuse("RUN: expected traces or --pid, found both")
    looking = Looking(_job(runs, pids))
    try:
        verdict, before, elapsed_s = _look_twice(looking, interval)
        _print(looking.job, verdict, before, elapsed_s, as_json)
    finally:
        looking.close()
    raise click.exceptions.Exit(_code(verdict))


def _job(runs: Sequence[Path], pids: Sequence[int]) -> Job:
    from zprof.living.jobs import jobs_here, of_processes, of_traces

    if pids:
        return of_processes(pids)
    if runs:
        return of_traces(_traces(runs))
    jobs = jobs_here()
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        raise Misuse(f"--pid: expected one of the {len(jobs)} jobs that run here, found none named: {_choices(jobs)}")
    from zprof.commands.naming import latest

    try:
        paths = latest()
    except Misuse:
        raise Misuse(
            "RUN: expected a job, found no process here with a rank (RANK and WORLD_SIZE) and no *.zprof in this folder; name "
            "a trace, or a process with --pid"
        ) from None
    click.echo(f"zprof: {' '.join(map(str, paths))}: the newest run in this folder, because no job runs here", err=True)
    return of_traces(paths)


def _traces(runs: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for run in runs:
        if run.is_dir():
            from zprof.commands.naming import latest

            found += latest(run)
        else:
            found.append(run)
    return found


def _choices(jobs: Sequence[Job]) -> str:
    said = []
    for job in jobs[:_MOST_LISTED]:
        processes = [member.process for member in job.members if member.process is not None]
        if processes:
            what = f"{one_line(job.name)}, {counted(len(processes), 'rank')}: {processes[0].command}"
            said.append(f"--pid {processes[0].pid} ({what})")
    return "; ".join(said)


def _look_twice(looking: Looking, interval: float | None) -> tuple[Verdict, list[Look], float]:
    from zprof.living.verdict import judged

    apart_s = interval or (_APART_ELSEWHERE_S if looking.has_elsewhere else _APART_S)
    began_s = time.monotonic()
    before = looking.look()
    moved: set[str] = set()
    for sample in range(1, _SAMPLES + 1):
        # Whatever a sample takes: the second look is never sooner than asked.
        time.sleep(max(0.0, began_s + apart_s * sample / _SAMPLES - time.monotonic()))
        if sample < _SAMPLES:
            moved |= looking.moved([look for look in before if look.label not in moved])
    elapsed_s = time.monotonic() - began_s
    after = looking.look(before)
    return judged(looking.job, before, after, elapsed_s, moved), before, elapsed_s


def _print(job: Job, verdict: Verdict, before: Sequence[Look], elapsed_s: float, as_json: bool) -> None:
    from zprof.show.live.hang import hang_json, hang_text

    if as_json:
        click.echo(json.dumps(hang_json(job, verdict, before, elapsed_s), indent=2))
    else:
        click.echo(hang_text(job, verdict, before, elapsed_s))


def _code(verdict: Verdict) -> int:
    from zprof.living.verdict import Finding

    if verdict.hangs:
        return BudgetProblem.exit_code
    if verdict.finding is Finding.UNSEEN:
        denied = any(look.denied for group in verdict.groups for look in group.looks)
        return CapabilityProblem.exit_code if denied else Problem.exit_code
    return Problem.exit_code if verdict.finding is Finding.ENDED and "gone (" in verdict.text else 0
