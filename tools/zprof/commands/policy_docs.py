"""Owns the tables of ``docs/reference/policy.md``: every key of the policy, its default and its meaning, from the models.

Run ``python -m zprof.commands.policy_docs docs/reference/policy.md`` after a change of a key; a test compares the page. It
writes between the page's marks and never touches the prose around them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offload.policy import CELLS, Policy, Rule, RuleCell, RulePrecision, Table, written
from zprof.commands.key_tables import filled, row, writer

__all__ = ["main", "render", "tables"]


def tables() -> list[str]:
    """The names a mark may have: "top" for the keys outside any table, then each table."""
    return ["top", *(name for name, value in Policy() if isinstance(value, Table)), "rule"]


def render(page: str) -> str:
    """``page`` with the table of each mark made anew."""
    return filled(page, "what it does, and why the default", _rows)


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
    own = key.rpartition(".")[2]
    return row(key, field, lambda default: "unset" if default is None else written(table, own, default))


main = writer(render)

if __name__ == "__main__":
    main()
