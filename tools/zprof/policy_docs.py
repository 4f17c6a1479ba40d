"""Owns the tables of ``docs/policy.md``: every key of the policy, its default and its meaning, from the models.

Run ``python -m zprof.policy_docs docs/policy.md`` after a change of a key; a test compares the page. It writes between
the page's marks and never touches the prose around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offload.policy import CELLS, Policy, Rule, RuleCell, RulePrecision, Table, written

__all__ = ["render", "tables"]

_MARKED = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| key | default | values | what it does, and why the default |\n|---|---|---|---|\n"


def tables() -> list[str]:
    """The names a mark may have: "top" for the keys outside any table, then each table."""
    return ["top", *(name for name, value in Policy() if isinstance(value, Table)), "rule"]


def render(page: str) -> str:
    """``page`` with the table of each mark made anew."""
    return _MARKED.sub(lambda mark: f"{mark[1]}{_HEAD}{''.join(_rows(mark[2]))}{mark[3]}", page)


def _rows(name: str) -> Iterator[str]:
    if name == "top":
        yield _row("stage", Policy, Policy.model_fields["stage"])
        meant = "Policy files this one builds on; below."
        yield f"| `extends` | `unset` | a path or a list of paths | {meant} |\n"
    elif name == "rule":
        yield _row("match", Rule, Rule.model_fields["match"])
        for cell in CELLS:
            yield _row(f"{cell}.tier", RuleCell, RuleCell.model_fields["tier"])
        for key, field in RulePrecision.model_fields.items():
            yield _row(f"precision.{key}", RulePrecision, field)
    else:
        kind = type(getattr(Policy(), name))
        for key, field in kind.model_fields.items():
            yield _row(key, kind, field)


def _row(key: str, table: type[BaseModel], field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    own = key.rpartition(".")[2]
    if field.default is PydanticUndefined:
        default = "none: write it"
    else:
        default = f"`{'unset' if field.default is None else written(table, own, field.default)}`"
    cells = (f"`{key}`", default, extra["expected"], field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


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
