"""Owns the tables of ``docs/hardware.md``: every key of a hardware profile and its meaning, from the models.

Run ``python -m zprof.hardware_docs docs/hardware.md`` after a change of a key; a test compares the page. It writes between the
page's marks and never touches the prose around them.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from offload.documents import Table
from offload.hardware import Hardware

__all__ = ["render", "tables"]

_MARKED = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| key | default | values | what it is |\n|---|---|---|---|\n"


def tables() -> dict[str, type[BaseModel]]:
    """The names a mark may have, and the keys of each: "top" for those outside any table."""
    found: dict[str, type[BaseModel]] = {"top": Hardware}
    for name, field in Hardware.model_fields.items():
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Table):
                found[name] = kind
    return found


def render(page: str) -> str:
    """``page`` with the table of each mark made anew."""
    return _MARKED.sub(lambda mark: f"{mark[1]}{_HEAD}{''.join(_rows(mark[2]))}{mark[3]}", page)


def _rows(name: str) -> Iterator[str]:
    known = tables()
    for key, field in known[name].model_fields.items():
        if name == "top" and key in known:
            continue
        extra: Any = field.json_schema_extra
        default = "none: write it" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"
        cells = (f"`{key}`", default, extra["expected"], field.description or "")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _plain(default: object) -> str:
    return "unset" if default is None or default == "" else str(default)


@click.command()
@click.argument("page", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(page: Path) -> None:
    """Make the tables of PAGE anew, in place."""
    before = page.read_text(encoding="utf-8")
    after = render(before)
    page.write_text(after, encoding="utf-8")
    click.echo(f"{page}: {'unchanged' if after == before else 'written'}")


if __name__ == "__main__":
    main()
