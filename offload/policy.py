"""Owns the policy: one file that says what is partitioned, in which precision, on which tier and when it is gathered.

`attach` resolves a policy once and hands its decisions on; `zprof policy` checks and shows one without a model. This
room never looks at a model, a device or a process group, and never guesses: what it cannot honour it refuses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from offload import policy_load
from offload.errors import PolicyError
from offload.policy_load import Document, format_size, parse_size

__all__ = [
    "Budget",
    "Comm",
    "Dtype",
    "Partition",
    "Placed",
    "Policy",
    "Precision",
    "Schedule",
    "Units",
    "format_size",
    "parse_size",
]

Partition = Literal["shard", "replicate"]
Tier = Literal["device"]
Dtype = Literal["fp32", "bf16", "fp16"]
Transport = Literal["auto", "stock", "p2p", "shm"]
Placement = Literal["R", "P", "S"]

_CELLS = ("parameter", "gradient", "optimizer")
# The four rows that exist (ZeRO, arXiv:1910.02054, section 5), in the order of `_CELLS`: what a file may write, and
# below what it means: R replicated, S sharded, P a partial sum on every rank until the accumulation boundary.
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


def _key(default: Any, *, expected: str, why: str, **bounds: Any) -> Any:
    """A field with the words its error uses and the reason for its default beside it."""
    return Field(default, description=why, json_schema_extra={"expected": expected}, **bounds)


def _tuple(value: object) -> object:
    """Files have lists; a frozen policy keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


def _name(value: str) -> str:
    if not 0 < len(value) <= 256 or not value.isprintable():
        raise ValueError("not a name")
    return value


Names = Annotated[tuple[Annotated[str, AfterValidator(_name)], ...], BeforeValidator(_tuple)]
Size = Annotated[int, BeforeValidator(parse_size)]

_NAMES = "a list of non-empty names"
_DTYPES = '"fp32", "bf16" or "fp16"'
_SIZES = 'bytes or a size like "20 GiB"'


class _Table(BaseModel):
    # Strict: a policy that says "3" for 3 or 1 for true was not written by someone who read the schema.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class Placed(_Table):
    """One row of the table of placements: [parameter], [gradient] or [optimizer]."""

    partition: Partition | None = _key(
        None,
        expected='"shard" or "replicate"',
        why="Unset follows from the stage, so that a file says the stage or the cells and seldom both.",
    )
    tier: Tier = _key("device", expected='"device", the only tier of this version', why="Where the compute is.")


class Precision(_Table):
    """[precision]: the dtypes of compute and of reduction; the shards keep the model's own (fp32) masters."""

    param: Dtype | None = _key(
        None,
        expected=_DTYPES,
        why="Unset leaves each parameter's own dtype: attach alone must not change a result.",
    )
    reduce: Dtype | None = _key(
        None,
        expected=_DTYPES,
        why="Unset is fp32 where param is set, else the gradient's own: long sums are where 16 bits lose most.",
    )
    output: Dtype | None = _key(
        None,
        expected=_DTYPES,
        why="Unset leaves the model's output as it computed it; losses are usually taken in fp32 by the loss itself.",
    )
    cast_inputs: bool = _key(
        True,
        expected="true or false",
        why="Floating-point inputs are cast to param, else the first layer would refuse them.",
    )


class Units(_Table):
    """[units]: which modules are gathered together."""

    classes: Names = _key((), expected=_NAMES, why="Module class names; none lets repeated blocks find themselves.")
    names: Names = _key((), expected=_NAMES, why="Globs over module names, e.g. layers.*; none as above.")
    min_numel: int = _key(
        65536,
        expected="an integer from 0 to 2**40",
        why="Smaller neighbours are coalesced, for below this latency outweighs transfer; 0 coalesces nothing.",
        ge=0,
        le=1 << 40,
    )
    max_numel: int = _key(
        1 << 26,
        expected="an integer from 1 to 2**40",
        why="A larger flat buffer is cut into segments; 2**26 of fp32 are 256 MiB, where size no longer helps.",
        ge=1,
        le=1 << 40,
    )


class Schedule(_Table):
    """[schedule]: when units are gathered, released and reduced."""

    reshard_after_forward: bool | Literal["auto"] = _key(
        "auto",
        expected='true, false or "auto"',
        why="auto keeps the last units gathered that fit [budget] device; with no budget the very last one.",
    )
    prefetch: int = _key(
        1,
        expected="an integer from 0 to 16",
        why="Units gathered ahead of use; one hides the transfer behind the compute and costs one more unit's buffer.",
        ge=0,
        le=16,
    )
    max_reductions: int = _key(
        2,
        expected="an integer from 1 to 64",
        why="Reductions in flight; one runs while the next fills, more only pile up gradient buffers.",
        ge=1,
        le=64,
    )


class Budget(_Table):
    """[budget]: bytes of gathered parameters that may stay between forward and backward."""

    device: Size | None = _key(
        None,
        expected=_SIZES,
        why='Unset keeps the last unit alone; read by reshard_after_forward = "auto"; the least of all ranks counts.',
    )


class Comm(_Table):
    """[comm]: how ranks talk."""

    transport: Transport = _key(
        "auto",
        expected='"auto", "stock", "p2p" or "shm"',
        why="auto takes the fastest that the backend and the hosts allow; stock is the backend's own collectives.",
    )
    timeout_s: float = _key(
        300.0,
        expected="seconds, above 0 and at most 86400",
        why="Long enough for a slow first step, short enough that a missing rank is named within a coffee.",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    bucket: Size = _key(
        16 << 20,
        expected=f"{_SIZES}, at least 256 B",
        why="Shared memory of one rank that gathers and reductions pass through; constant, whatever the model.",
        ge=256,
    )


class Policy(_Table):
    """What to partition, in which precision, on which tier, and when.

    Build one with `load` (a file) or `of` (anything `attach` takes); ``Policy(stage=2)`` works too. A written stage and
    written cells must agree; cells without a stage must spell exactly one of the four rows.

    Raises:
        PolicyError: one line a problem.
    """

    stage: int = _key(
        3,
        expected="0, 1, 2 or 3",
        why="Everything sharded: the least memory, for at most half as much traffic again.",
        ge=0,
        le=3,
    )
    parameter: Placed = Field(Placed(), description="The tensors the model computes with.")
    gradient: Placed = Field(Placed(), description="What backward leaves for the optimizer.")
    optimizer: Placed = Field(Placed(), description="The optimizer's states and the masters it updates.")
    precision: Precision = Field(Precision(), description="Dtypes of compute and of reduction.")
    units: Units = Field(Units(), description="Which modules are gathered together.")
    schedule: Schedule = Field(Schedule(), description="When units are gathered, released and reduced.")
    budget: Budget = Field(Budget(), description="Bytes a rank may hold.")
    comm: Comm = Field(Comm(), description="How ranks talk.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise policy_load.explain(error, Document("policy", values), Policy) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML or JSON policy file of at most 1 MiB.

        Raises:
            PolicyError: missing, unreadable, malformed or contradictory; one line a problem, with the file and line.
        """
        return cls._build(policy_load.read(Path(path)))

    @classmethod
    def of(cls, value: str | os.PathLike[str] | Mapping[str, Any] | Policy | None) -> Policy:
        """The policy ``value`` means: a path is loaded, a mapping checked, a policy is itself, None is every default.

        Raises:
            PolicyError: as `load`, or ``value`` is none of these.
        """
        if value is None:
            return cls()
        if isinstance(value, Policy):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls.load(value)
        if not isinstance(value, Mapping):
            raise PolicyError(f"policy: expected a path, a mapping, a Policy or None, found {type(value).__name__}")
        strangers = [key for key in value if not isinstance(key, str)]
        if strangers:
            raise PolicyError(f"policy: expected names for keys, found {type(strangers[0]).__name__}")
        return cls._build(Document("policy", dict(value)))

    @classmethod
    def _build(cls, document: Document) -> Self:
        policy = cls.__new__(cls)
        try:
            # Past this class's own __init__, whose error would name neither file nor line.
            BaseModel.__init__(policy, **document.values)
        except ValidationError as error:
            raise policy_load.explain(error, document, cls) from None
        return policy

    @model_validator(mode="before")
    @classmethod
    def _stage_from_cells(cls, values: Any) -> Any:
        """Fill in the stage that the written cells spell; where they spell none or several, `_agree` says so."""
        if not isinstance(values, Mapping) or "stage" in values:
            return values
        written = {cell: _partition(values.get(cell)) for cell in _CELLS if _partition(values.get(cell)) is not None}
        stages = _stages(written)
        return {**values, "stage": stages[0]} if written and len(stages) == 1 else values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse cells that contradict the stage, or that spell none or several of the four rows."""
        written = {cell: part for cell in _CELLS if (part := getattr(self, cell).partition) is not None}
        if "stage" in self.model_fields_set:
            wanted = dict(zip(_CELLS, _ROWS[self.stage], strict=True))
            problems = [
                ((cell, "partition"), f'stage {self.stage} expects "{wanted[cell]}", found "{part}"; change either')
                for cell, part in written.items()
                if part != wanted[cell]
            ]
        elif written:
            rows = "; ".join(f"stage {stage} = {', '.join(row)}" for stage, row in _ROWS.items())
            stages = _stages(written)
            fit = f"stages {', '.join(map(str, stages))} fit, write stage too" if stages else "no stage fits"
            problems = [
                (
                    (next(iter(written)), "partition"),
                    f"the cells spell no single row ({fit}); {', '.join(_CELLS)} are: {rows}",
                )
            ]
        else:
            problems = []
        if problems:
            raise PydanticCustomError("policy_cells", "cells contradict", {"problems": problems})
        return self

    def partition(self, cell: str) -> Partition:
        """The effective partition of "parameter", "gradient" or "optimizer"."""
        return _ROWS[self.stage][_CELLS.index(cell)]

    def table(self) -> dict[str, Placement]:
        """The effective placement of each cell: "R" replicated, "S" sharded, "P" partial sums until the boundary."""
        return dict(zip(_CELLS, _PLACEMENTS[self.stage], strict=True))

    def describe(self) -> str:
        """The effective table and every key, as a policy file that loads back to an equal policy."""
        table = self.table()
        lines = [f"# {'what':<10} partition  placed  tier"]
        for cell in _CELLS:
            lines.append(f"# {cell:<10} {self.partition(cell):<9}  {table[cell]:<6}  {getattr(self, cell).tier}")
        lines += ["# R replicated, S sharded, P a partial sum on every rank until the accumulation boundary", ""]
        lines.append(f"stage = {self.stage}")
        for name, section in self:
            if isinstance(section, _Table):
                lines += ["", f"[{name}]", *(self._line(name, key, value) for key, value in section)]
        return "\n".join(lines)

    def _line(self, section: str, key: str, value: object) -> str:
        note = self._meaning(section, key, value)
        if value is None:
            return f"# {key} is unset: {note}"
        written = format_size(value) if (section, key) in _SIZED and isinstance(value, int) else value
        line = f"{key} = {policy_load.toml_value(written)}"
        return f"{line}  # {note}" if note else line

    def _meaning(self, section: str, key: str, value: object) -> str:
        """What an unset or automatic value comes to in this policy."""
        if key == "partition" and value is None:
            return f"{self.partition(section)}, which follows from stage {self.stage}"
        if key == "reshard_after_forward" and value == "auto":
            return "the last unit, as no [budget] device is set" if self.budget.device is None else "as [budget] device allows"
        if (section, key) == ("precision", "reduce") and value is None:
            return "fp32, as param is set" if self.precision.param else "each gradient's own dtype"
        unset = {
            ("precision", "param"): "each parameter's own dtype",
            ("precision", "output"): "as the model computed it",
            ("budget", "device"): "no bound",
        }
        return unset.get((section, key), "") if value is None else ""


_SIZED = {("budget", "device"), ("comm", "bucket")}


def _partition(section: object) -> object:
    return section.get("partition") if isinstance(section, Mapping) else getattr(section, "partition", None)


def _stages(written: Mapping[str, object]) -> list[int]:
    return [
        stage
        for stage, row in _ROWS.items()
        if all(written.get(cell) in (None, part) for cell, part in zip(_CELLS, row, strict=True))
    ]
