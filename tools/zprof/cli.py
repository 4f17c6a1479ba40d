"""Owns the ``zprof`` command line: its commands, what they share, and what happens to an error.

The console script calls `main`. It never imports torch or the runtime, and loads a command's module only when that command
is called, so that it answers at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from offload.errors import ZhooksError
from zprof.problem import problem_of

__all__ = ["main"]

#: Command -> (module, one line of help). The object has the command's name.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("zprof.commands.run", "Run a script or module and record it."),
    "top": ("zprof.commands.top", "Watch devices and recording runs live."),
    "attach": ("zprof.commands.attach", "Show a running process: its stacks, its memory, what it is doing."),
    "hang": ("zprof.commands.hang", "Show where every rank of a job is, and whether the job hangs."),
    "report": ("zprof.commands.report", "Show where memory and time of a run went."),
    "timeline": ("zprof.commands.timeline", "Plot a run over time, as one HTML page."),
    "flamegraph": ("zprof.commands.flamegraph", "Plot the memory at one moment by module, as one HTML page."),
    "frag": ("zprof.commands.frag", "Show how fragmented memory is, and whether an allocation would succeed."),
    "diff": ("zprof.commands.diff", "Compare two runs."),
    "check": ("zprof.commands.check", "Compare a run with limits, for CI."),
    "oom": ("zprof.commands.oom", "Explain why a run ran out of memory, and simulate changes that would fit."),
    "simulate": ("zprof.commands.simulate", "Predict a training step on hardware you don't have."),
    "bench": ("zprof.commands.bench", "Measure the bandwidth of this machine's memory, buses and disks."),
    "export": ("zprof.commands.export", "Write a run in another tool's format."),
    "doctor": ("zprof.commands.doctor", "Check what will work on this machine, what will not, and what to do."),
    "policy": ("zprof.commands.policy", "Check, show and convert policy files."),
    "plan": ("zprof.commands.plan", "Find the fastest policies for a job, by simulation."),
    "checkpoint": ("zprof.commands.checkpoint", "Show, verify and convert checkpoints."),
    "hardware": ("zprof.commands.hardware", "List, check and show hardware profiles."),
}


class _Lazy(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command; whoever reads what it prints may stop, as ``head`` does, and then it ends as ``cat`` would.

        A character that the output's encoding lacks is escaped, and output that cannot be written is a problem of one line.
        """
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*args, **options)
            finally:
                # Here, not when the interpreter ends, which would show a traceback of its own.
                if sys.stdout is not None:
                    sys.stdout.flush()
        except SystemExit as leaving:
            # rich makes an exit of a closed pipe.
            if isinstance(leaving.__context__, BrokenPipeError):
                _end_as_a_filter()
            raise
        except BrokenPipeError:
            _end_as_a_filter()
            raise
        except OSError as error:
            _end_unwritten(error)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """As click does, where it prints the help too."""
        try:
            return super().make_context(*args, **options)
        except BrokenPipeError:
            _end_as_a_filter()
            raise

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ZhooksError as error:
            raise problem_of(error) from error
        except BrokenPipeError:
            _end_as_a_filter()
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _end_unwritten(error: OSError) -> None:
    """End with one line; what is still buffered for standard output is dropped."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        where = "standard output" if error.filename is None else os.fsdecode(error.filename)
        click.echo(f"{where}: {error.strerror or error}", err=True)
    sys.exit(1)


def _end_as_a_filter() -> None:
    """End by the signal that plain programs get where nobody reads their pipe any longer."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zhooks", prog_name="zprof")
def main() -> None:
    """Profile training: where memory and time go, why a run ran out of memory, and what would fit.

    \b
    Start with:  zprof run train.py
    and then:    zprof report
    """
