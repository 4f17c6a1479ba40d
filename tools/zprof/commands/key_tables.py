"""Owns how tables of keys get into a page of the documentation: between its marks, a row a key, from pydantic's fields.

``policy_docs.py`` and ``hardware_docs.py`` say which keys; it never knows what a key means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

__all__ = ["filled", "row", "writer"]

_MARKED = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, meaning: str, rows: Callable[[str], Iterable[str]]) -> str:
    """``page`` with the table of each mark made anew; ``rows`` of a mark's name, under a last column called ``meaning``."""
    head = f"| key | default | values | {meaning} |\n|---|---|---|---|\n"
    return _MARKED.sub(lambda mark: f"{mark[1]}{head}{''.join(rows(mark[2]))}{mark[3]}", page)


def row(key: str, field: FieldInfo, written: Callable[[Any], str]) -> str:
    """One key's; ``written`` is the text of a default that there is."""
    extra: Any = field.json_schema_extra
    default = "none: write it" if field.default is PydanticUndefined else f"`{written(field.default)}`"
    cells = (f"`{key}`", default, extra["expected"], field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def writer(render: Callable[[str], str]) -> click.Command:
    """The command that makes a page's tables anew."""

    @click.command()
    @click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    def main(page: Path) -> None:
        """Regenerate the tables of PAGE, in place."""
        before = page.read_text(encoding="utf-8")
        after = render(before)
        page.write_text(after, encoding="utf-8")
        click.echo(f"{page}: {'unchanged' if after == before else 'written'}")

    return main
