"""Owns [[rule]]: tiers that hold for some parameters only, chosen by a glob over their names.

`offload.policy` asks it for the tiers of a parameter. This room never sees a parameter, only its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from offload.policy_tables import TIERS, Name, Table, TierName, words
from offload.tier import Tier, Tiers

__all__ = ["CELLS", "Rule", "RuleCell", "Tiers", "tiers_of"]

CELLS = ("parameter", "gradient", "optimizer")


class RuleCell(Table):
    """What a rule says of one cell."""

    tier: TierName | None = words(
        None, expected=TIERS, does="The tier of this cell for the parameters that match.", why="Unset leaves the cell alone."
    )


class Rule(Table):
    """[[rule]]: other tiers for the parameters whose name matches; of several that match, the last wins, cell by cell."""

    match: Name = words(
        ...,
        expected='a glob over parameter names, e.g. "*.embed*"',
        does="A glob over the names of `model.named_parameters()`; * matches dots too.",
    )
    parameter: RuleCell = Field(RuleCell(), description="The tensors the model computes with.")
    gradient: RuleCell = Field(RuleCell(), description="What backward leaves for the optimizer.")
    optimizer: RuleCell = Field(RuleCell(), description="The optimizer's states and the masters it updates.")

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Any) -> Any:
        """JSON has no dotted keys; "parameter.tier" written there means what it means in TOML."""
        if not isinstance(values, Mapping):
            return values
        nested: dict[Any, Any] = {}
        for key, value in values.items():
            cell, dot, name = key.partition(".") if isinstance(key, str) else (key, "", "")
            if dot and cell in CELLS and isinstance(values.get(cell, {}), Mapping):
                nested[cell] = {**(nested.get(cell) or values.get(cell) or {}), name: value}
            else:
                nested.setdefault(key, value)
        return nested

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if not self.tiers():
            problem = ((), "sets nothing; write parameter.tier, gradient.tier or optimizer.tier")
            raise PydanticCustomError("policy_rule", "sets nothing", {"problems": [problem]})
        return self

    def tiers(self) -> dict[str, TierName]:
        """The cells the rule speaks of, and where it puts them."""
        return {cell: tier for cell in CELLS if (tier := getattr(self, cell).tier) is not None}

    def matches(self, name: str) -> bool:
        """Whether the rule is about the parameter ``name``; case counts."""
        return fnmatchcase(name, self.match)


def tiers_of(name: str, rules: Sequence[Rule], otherwise: Mapping[str, TierName]) -> Tiers:
    """The tiers of the parameter ``name``: the last rule that matches and says so, else ``otherwise``, cell by cell."""
    chosen = dict(otherwise)
    for rule in rules:
        if rule.matches(name):
            chosen.update(rule.tiers())
    return Tiers(**{cell: Tier(chosen[cell]) for cell in CELLS})
