"""Owns how far a command that simulates has come, on stderr: one line that is rewritten on a terminal, elsewhere a few lines.

``zprof plan``, ``simulate`` and ``oom`` call it, as they run for seconds to minutes. It never writes to stdout, and leaves
nothing on a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from offload.text import one_line

__all__ = ["Progress", "progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a command says what it does.

    Attributes:
        now: takes what it does now, which is shown on a terminal only.
        done: takes what is finished, which is worth a line everywhere.
    """

    now: Callable[[str], None]
    done: Callable[[str], None]


@contextmanager
def progress(doing: str) -> Iterator[Progress]:
    """Say what the command is ``doing``, and on a terminal for how long, until the end of the block."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        click.echo(f"zprof: {one_line(doing)} ...", err=True)
        yield Progress(lambda text: None, lambda text: click.echo(one_line(text), err=True))
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # What is long must not push the others out of the line.
    spinner = SpinnerColumn(table_column=Column(min_width=1))
    elapsed = TimeElapsedColumn(table_column=Column(min_width=len("0:00:00"), no_wrap=True))
    line = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    with Bar(spinner, elapsed, line, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(one_line(doing), total=None)

        def show(text: str) -> None:
            # Drawn at once: what is said last would often be wiped before the next of ten drawings a second.
            bar.update(task, description=one_line(text), refresh=True)

        yield Progress(show, show)
