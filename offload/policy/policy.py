"""The policy: one file that says what is partitioned, in which precision, on which tier and when it is gathered."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from offload.documents import Document, Place, Table, explain, member, plain, sized, words
from offload.errors import PolicyError
from offload.policy import layers as policy_layers
from offload.policy.deepspeed import Argument, IgnoredKeys
from offload.policy.tables import (
    CELLS,
    POLICY,
    Activation,
    Budget,
    Comm,
    DeviceMemory,
    Disk,
    Dtypes,
    Gradient,
    Host,
    Optimizer,
    Partition,
    Placed,
    Precision,
    Resilience,
    Rule,
    Save,
    Schedule,
    Units,
)
from offload.text import Share, format_size, toml_value
from offload.tier import Tier, Tiers
from offload.user_warnings import warn_user

__all__ = ["Policy", "written"]

Placement = Literal["R", "P", "S"]

# The four rows that exist (ZeRO, arXiv:1910.02054, section 5), in the order of `CELLS`: what a file may write, and
# what it means: R replicated, S sharded, P a partial sum on every rank until the accumulation boundary.
_ROWS: dict[int, tuple[Partition, Partition, Partition]] = {
    0: ("replicate", "replicate", "replicate"),
    1: ("replicate", "replicate", "shard"),
    2: ("replicate", "shard", "shard"),
    3: ("shard", "shard", "shard"),
}
_PLACEMENTS: dict[int, tuple[Placement, Placement, Placement]] = {
    0: ("R", "R", "R"),
    1: ("R", "P", "S"),
    2: ("R", "S", "S"),
    3: ("S", "S", "S"),
}

_RULES = "a list of tables, each written [[rule]]"
Rules = Annotated[
    tuple[Rule, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class Policy(Table):
    """What to partition, in which precision, on which tier, and when.

    Make one with ``load`` (from a file) or ``of`` (from anything that ``attach`` takes), or write ``Policy(stage=2)``.  A stage
    and partitions that are both given must agree; partitions without a stage must match exactly one stage.

    Raises:
        PolicyError: has one line per problem.
    """

    stage: int = words(
        3,
        expected="0, 1, 2 or 3",
        does="What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.",
        why="3 takes the least memory, for at most 1.5 times the traffic.",
        ge=0,
        le=3,
    )
    parameter: Placed = Field(Placed(), description="The tensors the model computes with.")
    gradient: Gradient = Field(Gradient(), description="What backward leaves for the optimizer.")
    optimizer: Optimizer = Field(Optimizer(), description="The optimizer's states and the masters it updates.")
    activation: Activation = Field(Activation(), description="What autograd saves for backward.")
    precision: Precision = Field(Precision(), description="Dtypes of compute and of reduction.")
    units: Units = Field(Units(), description="Which modules are gathered together.")
    schedule: Schedule = Field(Schedule(), description="When units are gathered, released and reduced.")
    budget: Budget = Field(Budget(), description="Bytes a rank may use on each tier.")
    device: DeviceMemory = Field(DeviceMemory(), description="The memory of the device.")
    host: Host = Field(Host(), description="The memory of the host tier.")
    disk: Disk = Field(Disk(), description="The scratch file of the disk tier.")
    save: Save = Field(Save(), description="Saves in the background of training.")
    resilience: Resilience = Field(Resilience(), description="What is checked for, and what is kept to recover from a failure.")
    comm: Comm = Field(Comm(), description="How ranks communicate.")
    rule: Rules = words((), expected=_RULES, does="Other tiers and dtypes for parameters by name; the last wins.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            raise explain(error, Document(POLICY, "policy", values), Policy) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], arguments: Mapping[str, Argument] | None = None) -> Self:
        """Read a policy file (TOML or JSON, at most 1 MiB) with the files it extends, or a DeepSpeed configuration.

        Args:
            path: of the file.
            arguments: the launcher's arguments, by DeepSpeed's dotted keys, for values that the configuration leaves at "auto".
        Returns:
            The policy.
        Raises:
            PolicyError: missing, unreadable, malformed or contradictory; one line per problem, with file and line number.
        Warns:
            IgnoredKeys: a DeepSpeed configuration has keys that have no effect here.
        """
        try:
            file = Path(path)
        except TypeError:
            raise PolicyError(f"policy must be the path of a policy file, found {type(path).__name__[:50]}") from None
        return cls._build(policy_layers.load(file, frozenset(cls.model_fields), arguments or {}))

    @classmethod
    def of(
        cls,
        value: str | os.PathLike[str] | Mapping[str, Any] | Policy | None,
        arguments: Mapping[str, Argument] | None = None,
    ) -> Policy:
        """Return the policy that ``value`` describes: a path is loaded, a mapping checked, a policy returned unchanged.

        Args:
            value: a path, a mapping, a ``Policy``, or None for all defaults.
            arguments: as in ``load``.
        Returns:
            The policy.
        Raises:
            PolicyError: as in ``load``, or ``value`` is none of these.
        Warns:
            IgnoredKeys: as in ``load``.
        """
        if value is None:
            return cls()
        if isinstance(value, Policy):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls.load(value, arguments)
        if not isinstance(value, Mapping):
            raise PolicyError(f"policy must be a path, a mapping, a Policy or None, found {type(value).__name__}")
        strangers = [key for key in value if not isinstance(key, str)]
        if strangers:
            raise PolicyError(f"policy needs names for keys, found {type(strangers[0]).__name__[:50]}")
        return cls._build(policy_layers.handed(value, frozenset(cls.model_fields), arguments or {}))

    @classmethod
    def _build(cls, document: Document) -> Self:
        policy = cls.__new__(cls)
        try:
            # Past this class's own __init__, whose error would name neither file nor line.
            BaseModel.__init__(policy, **document.values)
        except ValidationError as error:
            raise explain(error, document, cls) from None
        if document.ignored:
            warn_user(IgnoredKeys(document.source, document.ignored))
        return policy

    @model_validator(mode="before")
    @classmethod
    def _stage_from_cells(cls, values: Any) -> Any:
        """Fill in the stage that the written cells spell; where they spell none or several, `_agree` says so."""
        if not isinstance(values, Mapping) or "stage" in values:
            return values
        written: dict[str, object] = {}
        for cell in CELLS:
            table = values.get(cell)
            said = table.get("partition") if isinstance(table, Mapping) else getattr(table, "partition", None)
            written |= {} if said is None else {cell: said}
        stages = _stages(written)
        return {**values, "stage": stages[0]} if written and len(stages) == 1 else values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse cells that contradict the stage, that spell none or several of the four rows, or that cannot be placed."""
        problems = _rows(self) or _misplaced(self) or _uncomputed(self) or _contradicted(self)
        if problems:
            raise PydanticCustomError("policy_cells", "cells contradict", {"problems": problems})
        return self

    def partition(self, cell: str) -> Partition:
        """The effective partition of "parameter", "gradient" or "optimizer"."""
        return _ROWS[self.stage][CELLS.index(cell)]

    def table(self) -> dict[str, Placement]:
        """The effective placement of each cell: "R" replicated, "S" sharded, "P" partial sums until the boundary."""
        return dict(zip(CELLS, _PLACEMENTS[self.stage], strict=True))

    def tiers(self, *names: str) -> Tiers:
        """The tiers of the parameter with these names: those of the last matching rule that sets them, else of the tables."""
        chosen = {cell: getattr(self, cell).tier for cell in CELLS}
        for rule in self.rule:
            if rule.matches(*names):
                chosen.update(rule.tiers())
        return Tiers(**{cell: Tier(tier) for cell, tier in chosen.items()})

    def dtypes(self, *names: str) -> Dtypes:
        """The dtypes in which the parameter with these names is computed and its gradients are reduced; None is its own dtype.

        They come from the last matching rule that sets them, else from [precision]; an unset ``reduce`` is fp32 if ``param`` is
        set.
        """
        param, reduce = self.precision.param, self.precision.reduce
        for rule in self.rule:
            if rule.matches(*names):
                param, reduce = rule.precision.param or param, rule.precision.reduce or reduce
        return Dtypes(param, reduce or ("fp32" if param else None))

    @property
    def tiered(self) -> bool:
        """Whether a table or a rule stores or updates anything elsewhere than plain PyTorch does."""
        cells = (self.parameter, self.gradient, self.optimizer, self.activation)
        ruled = (tier for rule in self.rule for tier in rule.tiers().values())
        moved = any(tier != "device" for tier in (*(cell.tier for cell in cells), *ruled))
        chosen = self.optimizer
        own = chosen.kernel != "torch" or chosen.compute != "device" or chosen.overlap or chosen.rounding != "nearest"
        return moved or own

    def values(self) -> dict[str, Any]:
        """Return every key that is set, defaults included, as plain values; ``of`` makes an equal policy of them."""
        tables = {
            name: {key: _plain(value) for key, value in table if value is not None}
            for name, table in self
            if isinstance(table, Table)
        }
        rules = [{"match": rule.match} | rule.says() for rule in self.rule]
        return {"stage": self.stage, **tables, "rule": rules}

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return a JSON schema of policy files, for editors."""
        schema: dict[str, Any] = _bare(cls.model_json_schema())
        path = {"type": "string", "minLength": 1}
        schema["properties"] |= {
            policy_layers.EXTENDS: {
                "anyOf": [path, {"type": "array", "items": path}],
                "description": "Policy files this one builds on, relative to it; what is written here wins.",
            },
            "$schema": {"type": "string", "description": "The schema an editor checks this file with."},
        }
        rule = schema["$defs"]["Rule"]["properties"]
        rule |= {f"{cell}.tier": schema["$defs"]["RuleCell"]["properties"]["tier"] for cell in CELLS}
        rule |= {f"precision.{key}": says for key, says in schema["$defs"]["RulePrecision"]["properties"].items()}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "zhooks policy"}

    def describe(self) -> str:
        """Return the effective table and every key, as a policy file that loads as an equal policy.

        Keys that differ from their defaults come first; the others follow, as comments.
        """
        table = self.table()
        lines = [f"# {'what':<10} partition  placed  tier"]
        for cell in CELLS:
            lines.append(f"# {cell:<10} {self.partition(cell):<9}  {table[cell]:<6}  {self._tier_in_words(cell)}")
        lines += ["# R replicated, S sharded, P a partial sum on every rank until the accumulation boundary", ""]
        lines.append(f"stage = {self.stage}")
        defaults = ["", "# All other keys have their defaults:"]
        for name, section in self:
            if isinstance(section, Table):
                chosen = section.model_dump(exclude_defaults=True).keys()
                changed = [self._line(name, key, value) for key, value in section if key in chosen]
                lines += ["", f"[{name}]", *changed] if changed else []
                others = [self._line(name, key, value) for key, value in section if key not in chosen]
                defaults += ["#", f"# [{name}]", *(f"# {line.removeprefix('# ')}" for line in others)] if others else []
        for rule in self.rule:
            lines += ["", "[[rule]]", f"match = {toml_value(rule.match)}"]
            says = rule.says().items()
            lines += [f"{table}.{key} = {toml_value(value)}" for table, keys in says for key, value in keys.items()]
        return "\n".join([*lines, *defaults])

    def _tier_in_words(self, cell: str) -> str:
        share = self.optimizer.device_share if cell == "optimizer" else 0
        return f"{getattr(self, cell).tier}{f', {share:g} of it on the device' if share else ''}"

    def _line(self, section: str, key: str, value: object) -> str:
        note = self._meaning(section, key, value)
        if value is None:
            return f"# {key} is unset: {note}"
        line = f"{key} = {written(type(getattr(self, section)), key, value)}"
        return f"{line}  # {note}" if note else line

    def _meaning(self, section: str, key: str, value: object) -> str:
        """What an unset or automatic value comes to in this policy."""
        if key == "partition" and value is None:
            return f"{self.partition(section)}, which follows from stage {self.stage}"
        if key == "reshard_after_forward" and value == "auto":
            return "the last unit, as no [budget] device is set" if self.budget.device is None else "as [budget] device allows"
        if (section, key) == ("precision", "reduce") and value is None:
            return "fp32, as param is set" if self.precision.param else "each gradient's own dtype"
        if isinstance(value, Share):
            return "of what is free when it is attached"
        extra = type(getattr(self, section)).model_fields[key].json_schema_extra
        return str(extra["unset"]) if value is None and isinstance(extra, dict) else ""


def written(table: type[BaseModel], key: str, value: object) -> str:
    """``value`` of a table's ``key`` as a policy file would have it."""
    if isinstance(value, Share):
        return toml_value(str(value))
    return toml_value(format_size(value) if isinstance(value, int) and sized(table.model_fields[key]) else value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Share) else list(value) if isinstance(value, tuple) else value


def _bare(schema: Any) -> Any:
    """A schema without the words that only errors and pages use."""
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key not in ("expected", "does", "why", "meant", "unset")}
    return [_bare(value) for value in schema] if isinstance(schema, list) else schema


# What contradicts what: places, and what is said of each.

Problems = list[tuple[Place, str]]


def _stages(written: Mapping[str, object]) -> list[int]:
    """Those whose row has these partitions."""
    fit = {stage: dict(zip(CELLS, row, strict=True)) for stage, row in _ROWS.items()}
    return [stage for stage, row in fit.items() if all(row[cell] == partition for cell, partition in written.items())]


def _rows(policy: Policy) -> Problems:
    written = {cell: partition for cell in CELLS if (partition := getattr(policy, cell).partition) is not None}
    if "stage" in policy.model_fields_set:
        return [
            ((cell, "partition"), f'stage {policy.stage} expects "{wanted}", found "{written[cell]}"; change either')
            for cell, wanted in zip(CELLS, _ROWS[policy.stage], strict=True)
            if written.get(cell, wanted) != wanted
        ]
    if not written:
        return []
    rows = "; ".join(f"stage {stage} = {', '.join(row)}" for stage, row in _ROWS.items())
    stages = _stages(written)
    fit = f"stages {', '.join(map(str, stages))} fit, write stage too" if stages else "no stage fits"
    spelt = f"the cells match no single stage ({fit}); {', '.join(CELLS)} are: {rows}"
    return [((next(iter(written)), "partition"), spelt)]


def _misplaced(policy: Policy) -> Problems:
    """Parameters that are replicated for the optimizer's sake (stages 1 and 2) have no tier to come from."""
    if policy.stage not in (1, 2):
        return []
    tiers: dict[Place, str | None] = {("parameter", "tier"): policy.parameter.tier}
    tiers |= {("rule", member(n), "parameter", "tier"): rule.parameter.tier for n, rule in enumerate(policy.rule)}
    why = 'replicated parameters are on the device at every use; use stage 3 (or 0) to place them, or tier "device"'
    return [
        (place, f'found "{tier}" at stage {policy.stage}: {why}')
        for place, tier in tiers.items()
        if tier not in (None, "device")
    ]


def _uncomputed(policy: Policy) -> Problems:
    """What an update on the host works on must be stored off the device, by a table or by a rule."""
    ruled = {cell for rule in policy.rule for cell, tier in rule.tiers().items() if tier != "device"}
    narrow = {policy.precision.param, *(rule.precision.param for rule in policy.rule)} != {None}
    left = [cell for cell in CELLS if getattr(policy, cell).tier == "device" and cell not in ruled]
    left = [cell for cell in left if cell != "parameter" or not narrow]
    if policy.optimizer.compute == "device" or not left:
        return []
    # Replicated parameters stay; those of 16 bit may anywhere, for their masters go with the states.
    moves = [cell for cell in left if cell != "parameter" or policy.stage not in (1, 2)]
    fixes = [f'tier = "host" or "disk" for {_listed(moves)}'] if moves else []
    if "parameter" in left:
        fixes.append('param = "bf16" in [precision]')
    fix = (" (or, for [parameter], " if "parameter" in moves else " and ").join(fixes) + ")" * ("parameter" in moves)
    why = (
        f'found "host" and {_listed(left)} on the device: an update on the host needs masters, gradient and states off the '
        f'device; write {fix}, or compute = "device"'
    )
    return [(("optimizer", "compute"), why)]


def _listed(cells: Sequence[str]) -> str:
    *some, last = (f"[{cell}]" for cell in cells)
    return f"{', '.join(some)} and {last}" if some else last


def _contradicted(policy: Policy) -> Problems:
    """Keys that mean nothing, or nothing good, with another one as it is."""
    optimizer, activation, precision = policy.optimizer, policy.activation, policy.precision
    found: Problems = []
    if optimizer.device_share and optimizer.tier == "device":
        why = (
            f'found {optimizer.device_share:g} and tier = "device", where all of it is: it divides what [optimizer] tier '
            'places elsewhere; write tier = "host" or "disk" too, or leave it out'
        )
        found.append((("optimizer", "device_share"), why))
    if activation.partition != "none" and activation.checkpoint != "unit":
        why = f'found "{activation.partition}" and checkpoint = "{activation.checkpoint}": only inputs of units are partitioned'
        found.append((("activation", "partition"), f'{why}; write checkpoint = "unit" too'))
    if precision.cast_inputs == "unit" and precision.param is None:
        why = 'found "unit" and no param: inputs are cast to it; write param = "bf16" too (a bf16 model loses nothing by it)'
        found.append((("precision", "cast_inputs"), why))
    if optimizer.overlap and precision.loss_scale is not None:
        why = "expected false with [precision] loss_scale, found true: whether to step is known only after backward"
        found.append((("optimizer", "overlap"), why))
    elif optimizer.overlap and policy.resilience.nonfinite == "name":
        why = 'expected false with [resilience] nonfinite = "name", found true: gradients are checked only after backward'
        found.append((("optimizer", "overlap"), why))
    if precision.loss_scale is not None and precision.output == "fp16":
        why = 'expected "fp32" or nothing with loss_scale, found "fp16": gradients would vanish before they are scaled'
        found.append((("precision", "output"), why))
    if precision.loss_scale == "dynamic" and precision.min_scale > precision.initial_scale:
        why = f"expected at most initial_scale, {precision.initial_scale:g}, found {precision.min_scale:g}"
        found.append((("precision", "min_scale"), why))
    return found
