"""Owns ``zprof export``: the formats there are, where a file may be written, and what its reader learns.

`zprof.cli` hangs it in; each format is a module of its own, loaded when it is asked for. It never reads a trace itself, and
never writes over anything but a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zprof.commands.check import printable
from zprof.commands.naming import named_or_latest
from zprof.problem import Misuse
from zprof.rows import TraceError

if TYPE_CHECKING:
    from zprof.trace.reader import Trace

__all__ = ["FORMATS", "export"]

#: Format -> (its module, the suffix of a file that is not named). Those of `_TOGETHER` hold all ranks at once.
FORMATS = {
    "perfetto": ("zprof.show.exports.perfetto", ".perfetto.json"),
    "speedscope": ("zprof.show.exports.speedscope", ".speedscope.json"),
    "torch-snapshot": ("zprof.show.exports.snapshot", ".pickle"),
    "csv": ("zprof.show.exports.csv", ".csv"),
    "prometheus": ("zprof.show.exports.prometheus", ".prom"),
    "tensorboard": ("zprof.show.exports.tensorboard", ".tensorboard"),
}
_TOGETHER = ("perfetto", "speedscope", "torch-snapshot")


@click.command()
@named_or_latest("runs", click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(list(FORMATS)), required=True, help="The format to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file (tensorboard: the folder) to write; by default next to RUN, with its name.",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing file, or a folder of an earlier export.")
def export(runs: tuple[Path, ...], kind: str, output: Path | None, force: bool) -> None:
    """Write RUN in another tool's format. Nothing is sent anywhere.

    RUN is a trace, or a folder of traces; several are the ranks of one run. The default is the newest run in this folder.
    perfetto and speedscope take 16 ranks at most, chosen with --rank; csv, prometheus and tensorboard any number.

    \b
    perfetto        Bytes by tier and category, samples, and spans: nested spans
                    on their thread's track, transfers on separate tracks; all
                    ranks on one clock. At most 40 MB: the shortest spans of each
                    kind are left out, and it says how many. For level ops also
                    operators and kernels by thread and stream, with arrows from
                    each launch, in up to 48 MB more. Open it at
                    https://ui.perfetto.dev or in chrome://tracing.
    speedscope      Bytes at each tier's peak by module, time by verb and unit,
                    and each thread in order. https://www.speedscope.app
    torch-snapshot  The allocations of one rank; needs --level alloc, or a run on
                    a GPU. https://pytorch.org/memory_viz
    csv             Every row as recorded, for anything else: nanoseconds of each
                    rank's monotonic clock, bytes, unchanged names. Spreadsheets
                    treat a name that begins with = as a formula: import the
                    columns what and key as text.
    prometheus      The measures of `zprof check` as gauges, in bytes, seconds and
                    ratios, for a node exporter's textfile folder.
    tensorboard     Bytes, step times and samples as scalars of 32 bits, one run
                    per rank; the step is the millisecond of the recording.

    \b
    Examples:
      zprof export run.0.zprof run.1.zprof --format perfetto -o run.json
      zprof export runs/ --format speedscope --rank 3 --rank 517
      zprof export run.zprof --format torch-snapshot -o run.pickle
      zprof export run.zprof --format csv && duckdb -c "from 'run.csv' limit 9"
      zprof export run.zprof --format prometheus -o /var/lib/node/run.prom
      zprof export run.zprof --format tensorboard -o logs
    """
    from zprof.analysis.ranks import members_of

    module, suffix = FORMATS[kind]
    members = members_of(runs)
    paths = [member.path for member in members]
    _check_count(kind, len(members))
    path = output or paths[0].with_suffix(suffix)
    if path.exists() and any(path.samefile(each) for each in paths):
        raise click.BadParameter(f"{printable(str(path))}: is the run itself; name another file", param_hint="-o")
    try:
        _writable(path, folder=kind == "tensorboard", force=force)
        said, lost = import_module(module).write(_opened(paths, together=kind in _TOGETHER), path)
    except OSError as error:
        reason = error.strerror or error
        raise TraceError(f"{printable(str(path))}: cannot be written: {reason}; name another with -o") from None
    for line in lost:
        click.echo(printable(line), err=True)
    predicted = "predicted; " if members[0].header.simulated else ""
    click.echo(f"{printable(str(path))}: {predicted}{printable(said)}")


def _check_count(kind: str, count: int) -> None:
    """Refuse more ranks than the format, or one that holds all of them at once, can have."""
    from zprof.analysis.outliers import MANY

    if kind == "torch-snapshot" and count > 1:
        raise click.UsageError(f"torch-snapshot: expected one rank, found {count}; choose one with --rank")
    if kind in _TOGETHER and count > MANY:
        whose = "choose some with --rank, repeated for each; zprof report shows which stand out"
        raise Misuse(f"--format {kind}: expected {MANY} ranks at most, found {count:,}; {whose}")


def _opened(paths: Sequence[Path], *, together: bool) -> Iterable[Trace]:
    from zprof.show.exports.exported import one_by_one
    from zprof.trace.reader import Trace

    return [Trace.open(path) for path in paths] if together else one_by_one(paths)


def _writable(path: Path, *, folder: bool, force: bool) -> None:
    """Refuse, before a large trace is read, what writing would refuse in the end or should not replace."""
    shown = printable(str(path))
    if not path.parent.is_dir():
        folder_shown = printable(str(path.parent))
        raise TraceError(f"{shown}: expected a folder {folder_shown}, found none; make it, or name another with -o")
    if not path.exists():
        return
    if not force and (path.is_file() or folder):
        raise TraceError(f"{shown}: exists already, expected a new name; name another with -o, or overwrite it with -f")
    if folder and not path.is_dir():
        raise TraceError(f"{shown}: expected a folder, found something else; name another with -o")
    if not folder and not path.is_file():
        found = "a folder" if path.is_dir() else "a device or a pipe"
        raise TraceError(f"{shown}: expected a file, found {found}; name another with -o")
