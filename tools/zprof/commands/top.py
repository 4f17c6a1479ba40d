"""Owns ``zprof top``: devices, host memory and recording runs, live or once.

`zprof.cli` hangs the command in. It never imports torch, and works without a GPU, without a terminal and without a run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from zprof.commands.options import seconds
from zprof.show.top.view import as_text, drawn, sheets
from zprof.show.top.watch import Look, Watch

__all__ = ["top"]

#: How long the only look of ``--once`` watches for rates, where there are any.
_GLANCE_S = 0.2


_seconds = seconds(0.05, 3600, "50ms to 3600s, such as 500ms or 2s")


@click.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...")
@click.option("-1", "--once", is_flag=True, help="Show the state once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object with --once, otherwise one per line.")
@click.option("--interval", default="1s", callback=_seconds, metavar="TIME", help="The time between updates; by default 1s.")
def top(runs: tuple[Path, ...], once: bool, as_json: bool, interval: float) -> None:
    """Watch GPUs, host memory and recording runs: bytes by tier, step time, bandwidths, and what each rank waits for.

    RUN is a trace, possibly still being written; the default is all runs being recorded in this folder. Ctrl-C ends it.

    \b
    Once, for a script:       zprof top -1 --json
    A run with two ranks:     zprof top run.0.zprof run.1.zprof
    """
    watch = Watch(runs)
    try:
        if once:
            _print(_one(watch), as_json, indent=2)
        elif as_json or not _draws():
            _stream(watch, as_json, interval)
        else:
            _live(watch, interval)
    except KeyboardInterrupt:
        # How it is meant to be ended; nothing was lost.
        return
    finally:
        watch.close()


def _one(watch: Watch) -> Look:
    look = watch.look()
    if not watch.has_rates:
        return look
    time.sleep(_GLANCE_S)
    return watch.look()


def _print(look: Look, as_json: bool, indent: int | None = None) -> None:
    if as_json:
        import json

        click.echo(json.dumps(look.as_json(), indent=indent))
    elif _draws():
        from rich.console import Console

        Console().print(drawn(sheets(look)))
    else:
        click.echo(as_text(sheets(look)))


def _stream(watch: Watch, as_json: bool, interval: float) -> None:
    """One look after the other, for pipes, logs and terminals that cannot move their cursor."""
    while True:
        _print(watch.look(), as_json)
        if not as_json:
            click.echo()
        time.sleep(interval)


def _live(watch: Watch, interval: float) -> None:
    from rich.live import Live

    with Live(drawn(sheets(watch.look())), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(drawn(sheets(watch.look())), refresh=True)


def _draws() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
