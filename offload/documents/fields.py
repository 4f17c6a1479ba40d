"""Owns what the keys of a settings file are made of: fields with their words, strict tables, names and sizes.

`offload.policy` and `offload.hardware` build their tables of it. It never knows a key and never reads a file.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo

from offload.text import parse_amount, parse_size

__all__ = ["SIZE_SCHEMA", "Name", "Names", "Size", "Table", "sized", "words"]

_SIZE_PATTERN = r"^\s*\d{1,20}(\.\d{1,20})?\s*([Bb]|[KkMmGgTt][Ii]?[Bb])?\s*$"
SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_PATTERN, "examples": ["20 GiB"]}]
}


def words(
    default: Any, *, expected: str, does: str, why: str = "", meant: Mapping[str, str] | None = None, **bounds: Any
) -> Any:
    """A field with the words its error uses, what it does, and the reason for its default beside it.

    Args:
        meant: other libraries' words for a value -> the value, to be proposed to whoever writes them.
    """
    extra: dict[str, Any] = {"expected": expected, "does": does, "why": why, "meant": dict(meant or {})}
    return Field(default, description=f"{does} {why}".rstrip(), json_schema_extra=extra, **bounds)


def sized(field: FieldInfo) -> bool:
    """Whether a field's numbers are bytes, which a file may write with a unit."""
    inner = [each for kind in typing.get_args(field.annotation) for each in getattr(kind, "__metadata__", ())]
    checks = [each.func for each in (*field.metadata, *inner) if isinstance(each, BeforeValidator)]
    return parse_size in checks or parse_amount in checks


def _tuple(value: object) -> object:
    """Files have lists; a frozen policy keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


def _name(value: str) -> str:
    if not 0 < len(value) <= 256 or not value.isprintable():
        raise ValueError("not a name")
    return value


Name = Annotated[str, AfterValidator(_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_tuple)]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_SCHEMA)]


class Table(BaseModel):
    """One table of the file: frozen, and strict about its keys and their types."""

    # Strict: a policy that says "3" for 3 or 1 for true was not written by someone who read the schema.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
