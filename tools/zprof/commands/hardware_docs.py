"""Owns the tables of ``docs/reference/hardware.md``: every key of a hardware profile and its meaning, from the models.

Run ``python -m zprof.commands.hardware_docs docs/reference/hardware.md`` after a change of a key; a test compares the page. It
writes between the page's marks and never touches the prose around them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from offload.documents import tables_of
from offload.hardware import Hardware
from zprof.commands.key_tables import filled, row, writer

__all__ = ["main", "render", "tables"]


def tables() -> dict[str, type[BaseModel]]:
    """The names a mark may have, and the keys of each: "top" for those outside any table."""
    return {"top": Hardware, **tables_of(Hardware)}


def render(page: str) -> str:
    """``page`` with the table of each mark made anew."""
    return filled(page, "what it is", _rows)


def _rows(name: str) -> Iterator[str]:
    known = tables()
    for key, field in known[name].model_fields.items():
        if name != "top" or key not in known:
            yield row(key, field, _plain)


def _plain(default: object) -> str:
    return "unset" if default is None or default == "" else str(default)


main = writer(render)

if __name__ == "__main__":
    main()
