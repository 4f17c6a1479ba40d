"""Writes the reference of the command line into its page, from click, so that it cannot go stale.

mkdocs calls it as a hook (mkdocs.yml) for every page, and the page of the commands has the mark that it replaces. It runs no
command.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click

from zprof.cli import main

__all__ = ["on_page_markdown"]

_MARK = "<!-- the commands of zprof -->"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """A page's text, the mark in it replaced by every command."""
    return markdown.replace(_MARK, "\n".join(_command(main, "zprof", None, 2)))


def _command(command: click.Command, path: str, parent: click.Context | None, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path.split()[-1], parent=parent, **_settings(command, parent))
    yield f"{'#' * level} {path}\n"
    yield from _paragraphs(command.help or "")
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [f"| `{names}` | {_cell(said)} |" for names, said in filter(None, records) if said]
    yield "\n".join(["| option | what it does |", "|---|---|", *rows, ""])
    yield from _paragraphs(command.epilog or "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, f"{path} {name}", context, min(level + 1, 4) if parent is not None else level)


def _settings(command: click.Command, parent: click.Context | None) -> dict[str, Any]:
    return dict(command.context_settings) if parent is None else {}


def _paragraphs(text: str) -> Iterator[str]:
    """Help as Markdown: what click must not wrap is shown as it stands."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{inspect.cleandoc(paragraph[2:])}\n```\n"
        elif paragraph:
            yield f"{_prose(paragraph)}\n"


def _prose(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_").replace("[", r"\[")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")
