"""Owns ``zprof flamegraph``: one trace in, one page of its bytes by module out.

`zprof.cli` loads it when it is called. It never draws: `pages.tree` makes the data, `pages.page` the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click

from zprof.commands.naming import named_or_latest
from zprof.commands.options import at_step

__all__ = ["flamegraph"]


@click.command()
@named_or_latest("run", click.Path(path_type=Path), several=False)
@click.option(
    "--at",
    "step",
    default="peak",
    show_default=True,
    metavar="peak|step:N",
    callback=at_step,
    help="The moment: each tier's peak in the run, or in step N, counted from 0.",
)
@click.option(
    "--by",
    type=click.Choice(["module", "line"]),
    default="module",
    show_default=True,
    help="A tree of modules, or of the calls that allocated the bytes (recorded at --level stack).",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write; by default RUN.flamegraph.html.")
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing page.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON, for programs.")
def flamegraph(
    run: Path, step: int | None, by: Literal["module", "line"], output: Path | None, force: bool, as_json: bool
) -> None:
    """Plot the memory RUN held at one moment, per tier, as a tree of modules or of calls. The default is the newest run in
    this folder.

    The page is one HTML file that needs no network: open it in a browser, send it, archive it.

    \b
    Example:  zprof flamegraph run.zprof --at step:3
    """
    from zprof.commands.output import check_output, write_output
    from zprof.show.pages.page import page, page_path, plotly_source
    from zprof.show.pages.tree import flamegraph as drawn
    from zprof.trace.reader import Trace

    path = output or page_path([run], "flamegraph")
    check_output(path, [run], force=force)
    plotly_source()
    title = f"zprof flamegraph: {path.name.removesuffix('.html').removesuffix('.flamegraph')}"
    data = drawn(Trace.open(run), step, by) | {"title": title}
    body = page(title, data, scripts=("flamegraph.js",)).encode()
    write_output(path, body)
    tiers = {tier["tier"]: tier["total"] for tier in data["tiers"]}
    if as_json:
        summary = {"page": str(path), "bytes": len(body), "at": data["at"], "tiers": tiers, "not_recorded": data["missing"]}
        click.echo(json.dumps(summary, indent=2))
        return
    held = ", ".join(f"{tier['shown']} on {tier['tier']}" for tier in data["tiers"]) or "no memory recorded"
    click.echo(f"{path}: {len(body) / 2**20:.1f} MiB; {data['at']}: {held}")
    for line in data["missing"]:
        click.echo(f"not recorded on {line}")
    click.echo(f"Open it in a browser; for the same over time: zprof timeline {run}")
