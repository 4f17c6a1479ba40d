"""Owns the ``zprof`` command line: its commands, what they share, and what happens to an error.

The console script calls `main`. It never imports torch or the runtime, and loads a command's module only when that command
is called, so that it answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

from offload.errors import ZhooksError
from zprof.problem import problem_of

__all__ = ["main"]

#: Command -> (module, one line of help). The object has the command's name.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("zprof.run_cli", "Run a script or module and record it."),
    "top": ("zprof.top_cli", "Watch devices and recording runs live."),
    "report": ("zprof.report_cli", "Say where the bytes and milliseconds of a run went."),
    "timeline": ("zprof.timeline_cli", "Draw a run over time, as one page."),
    "flamegraph": ("zprof.flamegraph_cli", "Draw the bytes of a moment by module, as one page."),
    "frag": ("zprof.frag_cli", "Say how fragmented memory is, and whether an allocation would succeed."),
    "diff": ("zprof.diff_cli", "Compare two runs."),
    "check": ("zprof.check_cli", "Hold a run against limits, for CI."),
    "oom": ("zprof.oom_cli", "Say why a run ran out of memory, and try what would fit, by simulation."),
    "simulate": ("zprof.simulate_cli", "Predict a training step on hardware that is not there."),
    "bench": ("zprof.bench_cli", "Measure what this machine's memory, buses and disks can do."),
    "export": ("zprof.export_cli", "Write a run in another tool's format."),
    "doctor": ("zprof.doctor_cli", "Say what will work on this machine, what will not, and what to do."),
    "policy": ("zprof.policy_cli", "Check, show and convert policy files."),
    "plan": ("zprof.plan_cli", "Find the quickest policies for a job on hardware, by simulation."),
    "checkpoint": ("zprof.checkpoint_cli", "Show, verify and convert a checkpoint's folder."),
    "hardware": ("zprof.hardware_cli", "List hardware profiles, and check and show one."),
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

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ZhooksError as error:
            raise problem_of(error) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zhooks", prog_name="zprof")
def main() -> None:
    """Look into training: where its bytes and milliseconds go, why it ran out of memory, and what would fit.

    \b
    Start with:  zprof run -o run.zprof train.py
    and then:    zprof report run.zprof
    """
