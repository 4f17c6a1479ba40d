"""Owns ``zprof run``: checks what it is asked, has a script recorded in a child, and says afterwards where to look.

`zprof.cli` hangs the command in. It ends as the script ended, never touches the script's output, and imports no torch.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from offload.regular_files import open_regular
from zprof.commands.naming import RUN, output_of
from zprof.commands.options import seconds
from zprof.problem import Misuse
from zprof.recording.chosen import AUTO
from zprof.recording.recorder import LEVELS, Children, Level, ranks
from zprof.recording.schedule import DEFAULT, Schedule
from zprof.recording.surroundings import local_rank
from zprof.running.child import Child, Ending, Kills, end_as
from zprof.running.launch import Order

if TYPE_CHECKING:
    from zprof.running.gathering import Meeting

__all__ = ["run"]

#: Launchers people put behind `zprof run`, and how each starts it instead; "..." is their own options.
_LAUNCHERS = {
    "torchrun": "torchrun {options} -m zprof run {script}",
    "accelerate": "accelerate launch {options} --module zprof run {script}",
    "deepspeed": "deepspeed {options} --module zprof run {script}",
    "mpirun": "mpirun {options} zprof run {script}",
    "mpiexec": "mpiexec {options} zprof run {script}",
    "srun": "srun {options} zprof run {script}",
    "python": "zprof run {script}",
}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_ADDRESS = re.compile(r"(?:(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]\s]+)):)?(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Seen:
    """Which file is at a path: another one, or one written since, differs."""

    inode: int
    changed_ns: int


_interval = seconds(0.001, 3600, "a time from 1ms to 3600s, such as 100ms or 1s", bare="")
_patience = seconds(0.1, 86400, "a time from 100ms to 24h, such as 90s or 10min", bare="")


def _steps(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else str(Schedule.of(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """9400, 0.0.0.0:9400 or [::]:9400: host and port."""
    if value is None:
        return None
    found = _ADDRESS.fullmatch(value)
    if not found or not 1 <= int(found["port"]) <= 65535:
        raise click.BadParameter(f"{value!r}: expected a port from 1 to 65535, such as 9400, or HOST:PORT such as 0.0.0.0:9400")
    return found["v6"] or found["host"] or "127.0.0.1", int(found["port"])


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Run a script or module and record it.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE|FOLDER",
    help=f"The trace to write; by default {RUN}, or run-2.{{rank}}.zprof, run-3.{{rank}}.zprof and so on if that exists. In a "
    "FOLDER, which hosts may share, traces are named after the torchrun or Slurm job.",
)
@click.option("-f", "--force", is_flag=True, help=f"Overwrite an existing trace; {RUN} without -o.")
@click.option(
    "--level",
    type=click.Choice((AUTO, *LEVELS)),
    default=AUTO,
    show_default=True,
    help="events: what zhooks places and does. alloc: also every torch storage. stack: also the lines that allocated them. "
    "ops: alloc, plus the operators and kernels of some steps. auto: events for a script that attaches zhooks before its first "
    "step, alloc for any other.",
)
@click.option(
    "--ops-steps",
    metavar="STEPS",
    callback=_steps,
    help=f"At --level ops, the steps: 10:13 for steps 10, 11 and 12, 3:6,100:103, or all; by default {DEFAULT}. Without an "
    "optimizer, forwards count. A window is at most 60 s long.",
)
@click.option("--ops-stack", is_flag=True, help="At --level ops: also the lines that called operators, which is slow.")
@click.option(
    "--nvml",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Sample GPUs through NVML, else AMD SMI or Level Zero.",
)
@click.option(
    "--interval", callback=_interval, default="100ms", show_default=True, metavar="TIME", help="Time between memory samples."
)
@click.option(
    "--children",
    type=click.Choice(["off", "memory", "record"]),
    default="memory",
    show_default=True,
    help="Processes that the script starts. memory: sample their memory from outside. record: forks and processes of "
    "multiprocessing that train, such as ranks of mp.spawn, also get a trace each: run.0.child-1.zprof and so on.",
)
@click.option("--live", is_flag=True, help="Show tiers, steps and bandwidths on the terminal while it runs.")
@click.option(
    "--hang-after",
    callback=_patience,
    metavar="TIME",
    help="If nothing has been recorded for this long, write the stacks of all threads to the trace and to stderr.",
)
@click.option(
    "--stacks-on",
    type=click.Choice(("USR1", "USR2")),
    help="Print the stacks of all threads to stderr on this signal, unless the script sets its own handler.",
)
@click.option(
    "--prometheus",
    callback=_address,
    metavar="[HOST:]PORT",
    help="While it runs, serve live figures for Prometheus at http://HOST:PORT/metrics; by default HOST is 127.0.0.1. Each "
    "rank of a host has its own port: PORT for the first, PORT+1 for the next.",
)
@click.option(
    "--prometheus-file",
    metavar="FILE",
    help="While it runs, write the same to FILE for a node exporter's --collector.textfile.directory. The name must end in "
    ".prom and, with several ranks, contain {rank}; the file is removed at the end.",
)
@click.option(
    "--gather",
    "gathers",
    is_flag=True,
    help="For hosts without a shared folder: at the end, send each rank's trace to the folder of rank 0 through torchrun's "
    "store. If a script failed, nothing is sent. Each trace also stays where it is.",
)
@click.option(
    "--gather-wait",
    callback=_patience,
    default="5min",
    show_default=True,
    metavar="TIME",
    help="How long ranks that have ended wait for others.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    output: str | None,
    force: bool,
    level: Level | Literal["auto"],
    ops_steps: str | None,
    ops_stack: bool,
    nvml: str,
    interval: float,
    children: Children | Literal["record"],
    live: bool,
    hang_after: float | None,
    stacks_on: str | None,
    prometheus: tuple[str, int] | None,
    prometheus_file: str | None,
    gathers: bool,
    gather_wait: float,
    module: bool,
    command: tuple[str, ...],
) -> None:
    """Run SCRIPT like python does, and record it into a trace. Arguments after SCRIPT are passed to it.

    \b
    zprof run train.py --epochs 3
    zprof run -o big.zprof --level alloc -m my_package.train
    zprof run --level ops --ops-steps 10:13 train.py
    zprof run --prometheus-file /var/lib/node_exporter/train.prom train.py
    torchrun --nnodes 2 ... -m zprof run --gather train.py
    torchrun --nproc_per_node 2 -m zprof run train.py

    Under torchrun or srun, {rank} in the name of the trace becomes the rank: one file per rank. Exit code and signals are
    those of the script. If it runs out of memory, zprof prints what held the memory and what would have fitted.
    """
    if level != "ops" and (ops_steps is not None or ops_stack):
        asked = "--ops-steps" if ops_steps is not None else "--ops-stack"
        raise Misuse(f"{asked}: expected --level ops, found --level {level}; operators are recorded at that level")
    _refuse_launchers(command, module)
    _check_script(command[0], module)
    rank, world = ranks()
    path = output_of(output, rank, world, force)
    together = _meeting(path, rank, world) if gathers else None
    number = f"SIG{stacks_on}" if stacks_on else ""
    order = Order(
        str(path),
        command[0],
        module,
        force,
        level,
        nvml,
        interval,
        children=children,
        watcher=os.getpid(),
        hang_after_s=hang_after or 0.0,
        stacks_on=number,
        ops_steps=ops_steps,
        ops_stack=ops_stack,
    )
    if force and children == "record":
        _remove_children(path)
    before, kills = _seen(path), Kills.read()
    show = live and rank == 0
    with _published(prometheus, prometheus_file, path, rank, world) as look:
        ending = _watch(order, command[1:], path, look) if show else _wait(Child(order.arguments(command[1:])), look)
    try:
        if together is not None:
            _gather(together, path, ending, gather_wait)
        if _seen(path) not in (None, before) and (rank == 0 or ending.failed):
            _print_last_lines(path, ending, Kills.read().since(kills) if ending.failed else None, world)
    except KeyboardInterrupt:
        pass  # Whoever does not want to hear more still gets the script's own ending.
    raise click.exceptions.Exit(end_as(ending))


def _wait(child: Child, look: Callable[[], None]) -> Ending:
    while True:
        ending = child.wait(1.0)
        if ending is not None:
            return ending
        look()


def _watch(order: Order, command: Sequence[str], path: Path, look: Callable[[], None]) -> Ending:
    if not sys.stderr.isatty():
        click.echo("zprof: --live: expected a terminal on stderr, found none; recording without it", err=True)
        return _wait(Child(order.arguments(command)), look)
    from zprof.running.live import watch

    return watch(order.arguments(command), path, look)


@contextmanager
def _published(
    address: tuple[str, int] | None, file: str | None, path: Path, rank: int, world: int
) -> Iterator[Callable[[], None]]:
    """Live figures for Prometheus, as far as they were asked for; what is given is called while the script runs.

    Raises:
        Problem: they cannot be had; the script has not been started.
    """
    looks: list[Callable[[], None]] = []
    if file is not None and world > 1 and "{rank}" not in file:
        why = f"expected {{rank}} in the name, because each of {world} ranks writes its own file"
        raise Misuse(f"--prometheus-file {file}: {why}")
    with ExitStack() as stack:
        if address is not None or file is not None:
            from zprof.show.live.published import served, written

            host = socket.gethostname()
            if file is not None:
                looks.append(stack.enter_context(written(Path(file.replace("{rank}", str(rank))), path, rank, host)))
            if address is not None:
                stack.enter_context(served(address[0], address[1] + local_rank(), path, rank, host))

        def look() -> None:
            for each in looks:
                each()

        yield look


def _meeting(path: Path, rank: int, world: int) -> Meeting | None:
    from zprof.running.gathering import meeting, name_of_rank

    if world > 1 and name_of_rank(path, rank, 0) is None:
        found = f"--gather: expected traces called <run>.<rank>.zprof, found {path.name}"
        raise Misuse(f"{found}; name them so with -o, such as -o {path.parent / 'run.{rank}.zprof'}")
    return meeting(rank, world)


def _gather(at: Meeting, path: Path, ending: Ending, patience_s: float) -> None:
    from zprof.running.gathering import gather

    if ending.failed:
        # Its launcher is about to end the others, which must not wait for this one.
        lines = [f"traces are not gathered, because the script failed; that of rank {at.rank} is {path.absolute()}"]
    else:
        try:
            lines = gather(at, path, patience_s)
        except Exception as error:
            lines = [f"traces are not gathered: {type(error).__name__}: {error}; that of rank {at.rank} is {path.absolute()}"]
    for line in lines:
        click.echo(f"zprof: {line}", err=True)


def _print_last_lines(path: Path, ending: Ending, kill: tuple[str, int | None] | None, world: int) -> None:
    """The last lines, on stderr: the output of the script stays its own."""
    from zprof.running.last_lines import last_lines

    try:
        lines = last_lines(path, ending, kill, world)
    except Exception as error:
        # The script's own ending matters more than a trace that cannot be read.
        lines = [f"trace: {path} ({type(error).__name__}: {error})"]
    for line in lines:
        click.echo(f"zprof: {line}" if line else "zprof:", err=True)


# What is asked.


def _refuse_launchers(command: Sequence[str], module: bool) -> None:
    """A launcher starts processes of its own, which would not be recorded: say the order that works."""
    name = _LAUNCHER_MODULES.get(command[0]) if module else Path(command[0]).name
    if name is not None and not module and re.fullmatch(r"python[\d.]*", name):
        name = "python"
    if name not in _LAUNCHERS or (not module and command[0] == name and Path(name).is_file()):
        return
    words = [word for word in command[1:] if not (name == "accelerate" and word == "launch")]
    at = next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
    options = " ".join(words[:at]) if at is not None else "..."
    script = " ".join(words[at:]) if at is not None else "train.py"
    starts = "expected a script, because zprof starts python itself"
    why = starts if name == "python" else "starts ranks, and zprof must run in each of them"
    line = re.sub(" +", " ", _LAUNCHERS[name].format(options=options, script=script))
    raise Misuse(f"{command[0]}: {why}: {line}")


def _check_script(script: str, module: bool) -> None:
    if module:
        name = script.partition(".")[0]
        places = [os.getcwd(), *sys.path]
        known = name in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(name, places) is not None
        if not known:
            raise Misuse(f"-m {script}: expected a module, found none named {name} here or installed")
        return
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise Misuse(f"{script}: expected a script, or a folder with a __main__.py, found a folder without one")
    if not path.exists():
        named = importlib.machinery.PathFinder.find_spec(script, [os.getcwd(), *sys.path]) if script.isidentifier() else None
        raise Misuse(f"{script}: expected a script, found no such file{'; a module needs -m' if named else ''}")
    if not os.access(path, os.R_OK):
        raise Misuse(f"{script}: expected a script that can be read, found no permission; change its mode")
    if not path.is_dir():
        try:
            os.close(open_regular(path))
        except OSError as error:
            raise Misuse(f"{script}: expected a script, found {error.strerror}; write it into a file") from None


def _remove_children(path: Path) -> None:
    """Those that were recorded beside the trace that is about to be written over; others' files stay."""
    from zprof.rows import TraceError
    from zprof.trace.children import recorded_children
    from zprof.trace.reader import Trace

    if not path.exists():
        return
    try:
        old = Trace.open(path)
    except TraceError:
        return
    for child in recorded_children(old):
        with suppress(OSError):
            child.path.unlink()
    old.close()


def _seen(path: Path) -> _Seen | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Seen(found.st_ino, found.st_mtime_ns)
