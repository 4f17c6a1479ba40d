"""Owns ``zprof timeline``: the traces of any number of ranks in, one page out.

`zprof.cli` loads it when it is called. It never draws: `pages.timeline` makes the data, `pages.page` the file.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from offload.text import as_duration
from zprof.commands.naming import named_or_latest
from zprof.problem import Problem

__all__ = ["timeline"]

#: In the order they run: each uses what those before it define.
SCRIPTS = tuple(f"timeline{part}.js" for part in ("", "_memory", "_lanes", "_rates", "_ranks", "_page"))


@click.command()
@named_or_latest("runs", click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write; by default RUN.timeline.html.")
@click.option("-f", "--force", is_flag=True, help="Overwrite the page if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON, for programs.")
def timeline(runs: tuple[Path, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Plot RUNs, one per rank, over time: memory by category, what ran, transfers, exposed waits. The default is the newest
    run in this folder.

    Of more than 16 ranks the page shows the figures of all, outliers first, and plots a few: the farthest from the others,
    those with the most work and the most memory, and a typical one. --rank plots others.

    The page is one HTML file that needs no network: open it in a browser, send it, archive it.

    \b
    Example:  zprof timeline run.0.zprof run.1.zprof -o run.html
    """
    from zprof.analysis.outliers import MANY
    from zprof.analysis.ranks import members_of, traces_of
    from zprof.commands.output import check_output, write_output
    from zprof.show.pages.page import page, page_path, plotly_source
    from zprof.show.pages.timeline import peak_line, timeline_of_many
    from zprof.show.pages.timeline import timeline as drawn

    path = output or page_path(runs, "timeline")
    check_output(path, runs, force=force)
    plotly_source()
    unreadable: dict[Path, str] = {}
    paths = [*(member.path for member in members_of(runs, unreadable)), *unreadable]
    # Again, for a run may be a folder that holds them.
    check_output(path, paths, force=force)
    title = f"zprof timeline: {path.name.removesuffix('.html').removesuffix('.timeline')}"
    data = (timeline_of_many(paths) if len(paths) > MANY else drawn(traces_of(paths))) | {"title": title}
    named = data["ranks"]["files"] if data["ranks"] else shlex.join(map(str, runs))
    body = page(title, data, scripts=SCRIPTS).encode()
    write_output(path, body)
    merged = data["merged"]
    count = data["ranks"]["count"] if data["ranks"] else len(data["runs"])
    if as_json:
        drawn_ranks = [run["rank"] for run in data["runs"]]
        said = {"page": str(path), "bytes": len(body), "ranks": count, "drawn": drawn_ranks, "merged": merged}
        click.echo(json.dumps(said | {"summary": data["report"]["summary"]}, indent=2))
        _refuse_unreadable(data["report"]["unreadable"])
        return
    click.echo(f"{path}: {len(body) / 2**20:.1f} MiB, {peak_line(data)}")
    for rank, why in data["ranks"]["drawn"].items() if data["ranks"] else ():
        click.echo(f"of {count:,} ranks drawn: rank {rank}: {why}")
    if merged["below_ns"]:
        click.echo(f"{merged['spans']:,} spans as {merged['kept']:,}: those below {as_duration(merged['below_ns'])} are merged")
    click.echo(f"Open it in a browser; for the same in the terminal: zprof report {named}")
    _refuse_unreadable(data["report"]["unreadable"])


def _refuse_unreadable(unreadable: Sequence[Mapping[str, str]]) -> None:
    """The page is there; that ranks are missing in it is said as ``zprof report`` does."""
    if unreadable:
        from zprof.show.report.text import left_out

        for line in left_out(unreadable):
            click.echo(line, err=True)
        raise click.exceptions.Exit(Problem.exit_code)
