"""Owns ``zprof attach``: what a running process does now, what it holds, and a recording of it from now on.

`zprof.cli` hangs the command in. It stops the process for no longer than its stacks take to read, and says what it changed in
it where it was asked to record.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offload.errors import CapabilityError
from offload.text import shown_path
from zprof.commands import options
from zprof.problem import Misuse, Problem, problem_of

if TYPE_CHECKING:
    from zprof.living.processes import Process

__all__ = ["attach"]

_LEVELS = ("events", "alloc", "stack")
#: After its time a recording may have to wait for a forward in which it can end.
_GRACE_S = 15.0
_LOOK_S = 0.1


_duration = options.seconds(0.5, 3600, "500ms to 1h, such as 30s or 2min")


@click.command()
@click.argument("pid", type=click.IntRange(min=1))
@click.option("--native", is_flag=True, help="Read C frames too; takes seconds, and needs py-spy.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--record", "seconds", callback=_duration, metavar="TIME", help="Record it for this long, such as 30s.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="The file of --record; by default named after PID."
)
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--level", type=click.Choice(_LEVELS), help="For --record on Python 3.14; by default events.")
def attach(
    pid: int, native: bool, as_json: bool, seconds: float | None, output: Path | None, force: bool, level: str | None
) -> None:
    """Show the running process PID: the stacks of its threads and its memory. If zprof records it, also its step and unit,
    what it waits for, and bytes by category.

    py-spy reads the stacks from outside (pip install 'zhooks[attach]'); without it, on Python 3.14, the process prints them
    itself. Nothing in the process is changed, except with --record:

    \b
    zprof attach PID --record 30s
        With the same Python 3.14 or newer in both processes, a zprof.Recorder
        runs inside PID for 30 s. Its hooks are then removed; modules that it
        imported stay. Before 3.14, py-spy samples the Python stacks for 30 s
        into a file for speedscope.app: no bytes, no steps, and nothing in the
        process is changed.

    Exit code 1 if the process is gone or is not Python, 4 if it cannot be inspected.
    """
    from zprof.living.processes import found, recorded_by

    process = found(pid)
    if process is None:
        raise Problem(f"pid {pid}: expected a running process, found none")
    if not process.alive:
        raise Problem(f"pid {pid}: expected a running process, found one that is gone ({process.ending})")
    if (script := recorded_by(process)) is not None:
        click.echo(f"zprof: pid {pid} is zprof run; the script it records is pid {script.pid}", err=True)
        process = script
    if seconds is not None:
        if as_json or native:
            raise Misuse("--record: expected neither --json nor --native with it; look first, then record")
        _record(process, seconds, output, level, force)
        return
    if output is not None or level is not None or force:
        raise Misuse("-o, -f and --level: expected --record with them, found none; add it, or leave them out")
    _show(process, native, as_json)


def _show(process: Process, native: bool, as_json: bool) -> None:
    from zprof.living.attached import seen
    from zprof.show.live.attach import attach_json, attach_text

    found = seen(process, native=native)
    click.echo(json.dumps(attach_json(found), indent=2) if as_json else attach_text(found))
    if found.problem is not None:
        # Said where the stacks would be, and here for who reads only errors.
        raise problem_of(found.problem)


def _record(process: Process, seconds: float, output: Path | None, level: str | None, force: bool) -> None:
    from zprof.living.recorded import recording_of
    from zprof.living.remote import why_not

    trace, _ = recording_of(process)
    if trace is not None:
        raise Problem(f"pid {process.pid}: is already being recorded, into {shown_path(trace)}; zprof report can read it now")
    if not process.is_python:
        raise Problem(f"pid {process.pid}: expected a Python process, found {process.command}")
    lacks = why_not(process)
    if not lacks:
        _record_inside(process, seconds, output, level or "events", force)
    elif level is not None:
        raise problem_of(CapabilityError(f"--level {level}: expected a process that can begin to record itself: {lacks}"))
    else:
        _sample(process, seconds, output, force, lacks)


def _record_inside(process: Process, seconds: float, output: Path | None, level: str, force: bool) -> None:
    from zprof.commands.output import check_output
    from zprof.living.remote import begin_recording, end_recording

    path = (output or Path(f"attach-{process.pid}.0.zprof")).absolute()
    check_output(path, (), force=force)
    said = begin_recording(process, path, level=level, seconds=seconds, force=force)
    path = Path(said["path"])
    changed = [f"a recorder at level {said['level']}"]
    if said["imported"]:
        changed.append(f"imported modules ({', '.join(map(str, said['imported'][:12]))})")
    click.echo(f"zprof: in pid {process.pid}: {', '.join(changed)}", err=True)
    if said["waits"]:
        click.echo("zprof: recording begins at the next forward of a module outside of backward and inference_mode", err=True)
    try:
        ended = _wait_for_end(process, path, seconds + _GRACE_S)
    except KeyboardInterrupt:
        end_recording(process, path)
        ended = _wait_for_end(process, path, _GRACE_S)
    if not path.exists():
        raise Problem(f"pid {process.pid}: nothing was recorded: no forward of a module began within {seconds:.3g} s")
    left = "its hooks were removed; imported modules stay"
    state = left if ended else "the process ended first, or its trace has no end yet"
    click.echo(f"zprof: {shown_path(path)} ({state})", err=True)
    click.echo(f"zprof: next: zprof report {shown_path(path)}", err=True)


def _wait_for_end(process: Process, path: Path, longest_s: float) -> bool:
    """Whether the recording has written its end, before ``longest_s`` or the process was over."""
    from zprof.living.processes import found
    from zprof.rows import TraceError
    from zprof.trace.reader import Trace

    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        with suppress(TraceError):
            if path.exists() and Trace.growing(path).notes("end"):
                return True
        now = found(process.pid)
        if now is None or not now.alive or now.began_s != process.began_s:
            return False
        time.sleep(_LOOK_S)
    return False


def _sample(process: Process, seconds: float, output: Path | None, force: bool, lacks: str) -> None:
    from zprof.commands.output import check_output, write_output
    from zprof.living.stacks import sampled

    path = output or Path(f"attach-{process.pid}.speedscope.json")
    check_output(path, (), force=force)
    instead = "py-spy samples its Python stacks instead, without bytes and steps, and changes nothing in it"
    click.echo(f"zprof: {lacks}; {instead}", err=True)
    body = sampled(process, seconds)
    write_output(path, body)
    click.echo(f"zprof: {shown_path(path)}; open it with speedscope.app", err=True)
