"""Owns ``zprof timeline``: one or several ranks' traces in, one page out.

`zprof.cli` loads it when it is called. It never draws: `pages.timeline` makes the data, `pages.page` the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from offload.text import as_duration
from zprof.commands.naming import named_or_latest

__all__ = ["timeline"]

#: In the order they run: each uses what those before it define.
SCRIPTS = tuple(f"timeline{part}.js" for part in ("", "_memory", "_lanes", "_rates", "_page"))


@click.command()
@named_or_latest("runs", click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page to write; by default RUN.timeline.html.")
@click.option("-f", "--force", is_flag=True, help="Overwrite the page if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON, for programs.")
def timeline(runs: tuple[Path, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Plot RUNs, one per rank, over time: memory by category, what ran, transfers, exposed waits. The default is the newest
    run in this folder.

    The page is one HTML file that needs no network: open it in a browser, send it, archive it.

    \b
    Example:  zprof timeline run.0.zprof run.1.zprof -o run.html
    """
    from zprof.analysis.ranks import traces_of
    from zprof.commands.output import check_output, write_output
    from zprof.show.pages.page import page, page_path, plotly_source
    from zprof.show.pages.timeline import peak_line
    from zprof.show.pages.timeline import timeline as drawn

    path = output or page_path(runs, "timeline")
    check_output(path, runs, force=force)
    plotly_source()
    traces = traces_of(runs)
    # Again, for a run may be a folder that holds them.
    check_output(path, [trace.path for trace in traces], force=force)
    title = f"zprof timeline: {path.name.removesuffix('.html').removesuffix('.timeline')}"
    data = drawn(traces) | {"title": title}
    body = page(title, data, scripts=SCRIPTS).encode()
    write_output(path, body)
    merged = data["merged"]
    if as_json:
        said = {"page": str(path), "bytes": len(body), "merged": merged, "summary": data["report"]["summary"]}
        click.echo(json.dumps(said, indent=2))
        return
    click.echo(f"{path}: {len(body) / 2**20:.1f} MiB, {peak_line(data)}")
    if merged["below_ns"]:
        click.echo(f"{merged['spans']:,} spans as {merged['kept']:,}: those below {as_duration(merged['below_ns'])} are merged")
    click.echo("Open it in a browser; for the same in the terminal: zprof report " + " ".join(map(str, runs)))
