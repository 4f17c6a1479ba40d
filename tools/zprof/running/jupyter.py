"""Owns zprof in notebooks: ``%load_ext zprof``, and ``%%zprof`` above a cell, which records it and shows what it held.

`zprof.load_ipython_extension` calls `load`. It imports IPython only where that is loaded already, and what the cell raises it
raises.

Note: [The cell's own error]
    IPython shows an error of the cell itself and gives it back in a result. The recording hears of it from there, and an
    error that shows nothing more is raised, so that a notebook which runs all its cells stops here.
"""

from __future__ import annotations

import html
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.text import as_size
from zprof.recording.recorder import LEVELS, Level, Recorder

if TYPE_CHECKING:
    from zprof.analysis.ledger import Ledger

__all__ = ["Recording", "load", "record_cell"]

_MOST_ROWS = 8


class Shown(Exception):
    """The cell failed, and its error has been shown."""

    def _render_traceback_(self) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class Recording:
    """What a recorded cell held: shown by the notebook, printed as text elsewhere.

    Attributes:
        path: the trace, for ``zprof report`` and the other commands.
        peaks: tier -> bytes, each at its own highest moment. held: (category, tier) -> bytes at the highest of them.
        explained: why it ran out of memory, in lines; empty where it did not.
    """

    path: Path
    peaks: dict[str, int]
    held: dict[tuple[str, str], int]
    explained: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> Recording:
        """Read a trace once.

        Raises:
            TraceError: it cannot be read.
        """
        from zprof.analysis.analysis import Analysis
        from zprof.oom.explanation import explain
        from zprof.trace.reader import Trace

        analysis = Analysis.of(Trace.open(path))
        ledger = analysis.ledger
        peaks = {tier: ledger.peak(tier).nbytes for tier in ledger.tiers}
        return cls(path, peaks, _held(ledger, peaks), tuple(explain(analysis)))

    @property
    def next(self) -> str:
        return f"zprof report {shlex.quote(str(self.path))}"

    def __repr__(self) -> str:
        peak = ", ".join(f"{tier} {as_size(nbytes)}" for tier, nbytes in self.peaks.items()) or "nothing was placed"
        of = [f"  {what} on {tier} {as_size(nbytes)}" for (what, tier), nbytes in self.held.items()]
        return "\n".join([f"zprof: peak {peak}", *of, *self.explained, f"trace {self.path}; next: {self.next}"])

    def _repr_html_(self) -> str:
        """A small table; every name is escaped, and it needs nothing from a network."""
        most = max(self.held.values(), default=0)
        rows = "".join(
            f"<tr><td>{html.escape(what)}</td><td>{html.escape(tier)}</td><td style='text-align:right'>{as_size(nbytes)}</td>"
            f"<td><div style='background:#4c78a8;height:.7em;width:{120 * nbytes // most}px'></div></td></tr>"
            for (what, tier), nbytes in self.held.items()
        )
        peak = ", ".join(f"{html.escape(tier)} {as_size(nbytes)}" for tier, nbytes in self.peaks.items())
        peak = peak or "nothing was placed"
        why = f"<pre>{html.escape(chr(10).join(self.explained))}</pre>" if self.explained else ""
        return f"<div><b>peak {peak}</b><table>{rows}</table>{why}<code>{html.escape(self.next)}</code></div>"


def _held(ledger: Ledger, peaks: dict[str, int]) -> dict[tuple[str, str], int]:
    """By category and tier, at the highest moment of the tier that held most; the largest first."""
    if not peaks:
        return {}
    moment = ledger.peak(max(peaks, key=lambda tier: peaks[tier]))
    found: dict[tuple[str, str], int] = {}
    for series, nbytes in zip(ledger.series, ledger.at(moment).tolist(), strict=True):
        if nbytes > 0:
            found[series.category, series.tier] = found.get((series.category, series.tier), 0) + nbytes
    return dict(sorted(found.items(), key=lambda pair: -pair[1])[:_MOST_ROWS])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-o", "--output", default="cell.zprof", show_default=True, metavar="FILE", help="The trace; overwritten.")
@click.option("--level", type=click.Choice(LEVELS), default="alloc", show_default=True, help="How much to record.")
@click.option("--ops-steps", metavar="STEPS", help="At --level ops, which: 10:13 for steps 10, 11 and 12, or all.")
def options(output: str, level: Level, ops_steps: str | None) -> tuple[str, Level, str | None]:
    """%%zprof [-o FILE] [--level LEVEL] [--ops-steps STEPS]: record this cell and show what it held."""
    return output, level, ops_steps


def load(shell: Any) -> None:
    """Give ``shell`` (IPython's) the magic ``%%zprof``."""

    def zprof(line: str, cell: str | None = None) -> Recording | None:
        """Record this cell and show what it held: ``%%zprof [-o FILE] [--level events|alloc|stack|ops]``.

        The trace, cell.zprof unless said, is written over; ``%%zprof --help`` lists the options.
        """
        if cell is None:
            click.echo("%zprof: expected a cell to record; write %%zprof above it", err=True)
            return None
        return record_cell(shell, line, cell)

    # Of lines too: IPython finds the help of `%zprof?` among those alone.
    shell.register_magic_function(zprof, magic_kind="line_cell", magic_name="zprof")


def record_cell(shell: Any, line: str, cell: str) -> Recording | None:
    """Run ``cell`` recorded as ``line`` says; what it held, None where ``line`` is not understood, which is then said.

    Raises:
        Shown: the cell raised. TraceError: the trace cannot be made or read.
    """
    try:
        parsed = options.main(args=shlex.split(line), prog_name="%%zprof", standalone_mode=False)
    except (click.ClickException, ValueError) as wrong:
        click.echo(f"%%zprof: {wrong.format_message() if isinstance(wrong, click.ClickException) else wrong}", err=True)
        return None
    if not isinstance(parsed, tuple):
        return None  # --help has been printed.
    output, level, ops_steps = parsed
    try:
        recorder = Recorder(output, level=level, force=True, ops_steps=ops_steps)
    except ValueError as wrong:
        click.echo(f"%%zprof: {wrong}", err=True)
        return None
    # A cell is run again and again: its trace is its last run's.
    recorder.listen()
    error: BaseException | None = None
    try:
        result = shell.run_cell(cell)
        error = result.error_before_exec or result.error_in_exec
    except BaseException as raised:
        error = raised
        raise
    finally:
        _end(recorder, error)
    recording = Recording.of(recorder.path)
    if error is None:
        return recording
    from IPython import display

    show: Any = display.display
    show(recording)
    raise Shown from error


def _end(recorder: Recorder, error: BaseException | None) -> None:
    from zprof.oom.facts import failure_of, write

    failure = failure_of(error)
    if failure is not None:
        write(recorder, failure)
    recorder.close(reason=type(error).__name__ if error is not None else "", exit=int(error is not None))
