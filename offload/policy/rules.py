"""Owns [[rule]]: tiers and dtypes that hold for some parameters only, chosen by a glob over their names.

`offload.policy` asks it for the tiers and the dtypes of a parameter. It never sees a parameter, only its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from offload.documents import Name, Table, words
from offload.policy.tables import DTYPES, DTYPES_ELSEWHERE, TIERS, TIERS_ELSEWHERE, Dtype, TierName
from offload.tier import Tier, Tiers

__all__ = ["CELLS", "Dtypes", "Rule", "RuleCell", "RulePrecision", "Tiers", "dtypes_of", "ruled_keys", "tiers_of"]

CELLS = ("parameter", "gradient", "optimizer")
_PRECISION = "precision"


class RuleCell(Table):
    """What a rule says of one cell."""

    tier: TierName | None = words(
        None,
        expected=TIERS,
        meant=TIERS_ELSEWHERE,
        does="The tier of this cell for the parameters that match.",
        why="Unset leaves this to the table.",
    )


class RulePrecision(Table):
    """What a rule says of dtypes."""

    param: Dtype | None = words(
        None,
        expected=DTYPES,
        meant=DTYPES_ELSEWHERE,
        does="The dtype the parameters that match are gathered and computed in.",
        why="Unset leaves it to [precision] param.",
    )
    reduce: Dtype | None = words(
        None,
        expected=DTYPES,
        meant=DTYPES_ELSEWHERE,
        does="The dtype the gradients of the parameters that match are summed in.",
        why="Unset leaves it to [precision] reduce.",
    )


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The policy's words for one parameter: what it is computed in, and what its gradients are summed in; None is its own."""

    param: Dtype | None
    reduce: Dtype | None


class Rule(Table):
    """[[rule]]: other tiers and dtypes for the parameters whose name matches; the last that matches wins, key by key."""

    match: Name = words(
        ...,
        expected='a glob over parameter names, e.g. "*.embed*"',
        does="A glob over the names of `model.named_parameters()`; * matches dots too.",
    )
    parameter: RuleCell = Field(RuleCell(), description="The tensors the model computes with.")
    gradient: RuleCell = Field(RuleCell(), description="What backward leaves for the optimizer.")
    optimizer: RuleCell = Field(RuleCell(), description="The optimizer's states and the masters it updates.")

    precision: RulePrecision = Field(RulePrecision(), description="Dtypes of compute and of reduction.")

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Any) -> Any:
        """JSON has no dotted keys; "parameter.tier" written there means what it means in TOML."""
        if not isinstance(values, Mapping):
            return values
        nested: dict[Any, Any] = {}
        for key, value in values.items():
            cell, dot, name = key.partition(".") if isinstance(key, str) else (key, "", "")
            if dot and cell in (*CELLS, _PRECISION) and isinstance(values.get(cell, {}), Mapping):
                nested[cell] = {**(nested.get(cell) or values.get(cell) or {}), name: value}
            else:
                nested.setdefault(key, value)
        return nested

    @model_validator(mode="after")
    def _says_something(self) -> Rule:
        if not self.says():
            problem = ((), f"sets nothing; write {', '.join(list(ruled_keys())[:-1])} or {list(ruled_keys())[-1]}")
            raise PydanticCustomError("policy_rule", "sets nothing", {"problems": [problem]})
        return self

    def tiers(self) -> dict[str, TierName]:
        """The cells the rule speaks of, and where it puts them."""
        return {cell: tier for cell in CELLS if (tier := getattr(self, cell).tier) is not None}

    def says(self) -> dict[str, dict[str, str]]:
        """Everything the rule sets, table by table, as a file nests it."""
        cells: dict[str, dict[str, str]] = {cell: {"tier": tier} for cell, tier in self.tiers().items()}
        dtypes = {key: str(value) for key, value in self.precision if value is not None}
        return {**cells, _PRECISION: dtypes} if dtypes else cells

    def matches(self, *names: str) -> bool:
        """Whether the rule is about the parameter that has these names (a tied one has several); case counts."""
        return any(fnmatchcase(name, self.match) for name in names)


def tiers_of(names: Sequence[str], rules: Sequence[Rule], otherwise: Mapping[str, TierName]) -> Tiers:
    """The tiers of the parameter of these names: the last rule that matches and says so, else ``otherwise``, cell by cell."""
    chosen = dict(otherwise)
    for rule in rules:
        if rule.matches(*names):
            chosen.update(rule.tiers())
    return Tiers(**{cell: Tier(chosen[cell]) for cell in CELLS})


def dtypes_of(names: Sequence[str], rules: Sequence[Rule], otherwise: Dtypes) -> Dtypes:
    """The dtypes of the parameter of these names: the last rule that matches and says so, else ``otherwise``, key by key."""
    param, reduce = otherwise.param, otherwise.reduce
    for rule in rules:
        if rule.matches(*names):
            param, reduce = rule.precision.param or param, rule.precision.reduce or reduce
    return Dtypes(param, reduce)


def ruled_keys() -> Iterator[str]:
    """Every key a rule may set, as a file writes it."""
    yield from (f"{cell}.tier" for cell in CELLS)
    yield from (f"{_PRECISION}.{key}" for key in RulePrecision.model_fields)
