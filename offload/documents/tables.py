"""The tables of a settings file: strict models of their keys, and each rejected value said with its file and line."""

from __future__ import annotations

import difflib
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from offload.documents.load import Document, Place, Spot, member
from offload.errors import ZhooksError
from offload.text import format_size, one_line, parse_amount, parse_size, shown

__all__ = ["SIZE_SCHEMA", "Name", "Names", "Size", "Table", "complain", "explain", "nearest", "sized", "tables_of", "words"]

_SIZE_PATTERN = r"^\s*\d{1,20}(\.\d{1,20})?\s*([Bb]|[KkMmGgTt][Ii]?[Bb])?\s*$"
SIZE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_PATTERN, "examples": ["20 GiB"]}]
}
#: Problems listed before all others are only counted; characters of one line, and of all of them.
MAX_PROBLEMS, MAX_LINE_NCHARS, MAX_NCHARS = 10, 600, 4000

_LAST = Spot(sys.maxsize, 0, "")
_MEMBER = re.compile(r"#\d+", re.ASCII)


def words(
    default: Any,
    *,
    does: str,
    expected: str = "",
    why: str = "",
    unset: str = "",
    meant: Mapping[str, str] | None = None,
    **bounds: Any,
) -> Any:
    """A field with the words its error uses, what it does, and the reason for its default beside it.

    Args:
        expected: what it takes, where its type and bounds do not say so.
        unset: what it comes to where nothing is written.
        meant: other libraries' words for a value -> the value, to be proposed to whoever writes them.
    """
    extra: dict[str, Any] = {"expected": expected, "does": does, "why": why, "unset": unset, "meant": dict(meant or {})}
    return Field(default, description=f"{does} {why}".rstrip(), json_schema_extra=extra, **bounds)


def sized(field: FieldInfo) -> bool:
    """Whether a field's numbers are bytes, which a file may write with a unit."""
    return not {parse_size, parse_amount}.isdisjoint(_checks(field))


def _checks(field: FieldInfo) -> set[Callable[..., Any]]:
    """What a value is read by before its type is looked at."""
    inner = [each for kind in typing.get_args(field.annotation) for each in getattr(kind, "__metadata__", ())]
    return {each.func for each in (*field.metadata, *inner) if isinstance(each, BeforeValidator)}


def _name(value: str) -> str:
    if not 0 < len(value) <= 256 or not value.isprintable():
        raise ValueError("not a name")
    return value


Name = Annotated[str, AfterValidator(_name)]
# Files have lists; a frozen policy keeps tuples.
Names = Annotated[tuple[Name, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_SCHEMA)]


class Table(BaseModel):
    """One table of the file: frozen, and strict about its keys and their types."""

    # Strict: a policy that says "3" for 3 or 1 for true was not written by someone who read the schema.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for key, field in cls.model_fields.items():
            if isinstance(field.json_schema_extra, dict) and not field.json_schema_extra.get("expected"):
                field.json_schema_extra["expected"] = _expected(f"{cls.__name__}.{key}", field)


def _expected(key: str, field: FieldInfo) -> str:
    """What a field takes, in words, by its type and its bounds."""
    kinds = {field.annotation, *typing.get_args(field.annotation)} - {type(None)}
    bounds = {end: getattr(each, end) for each in field.metadata for end in _BOUNDS if hasattr(each, end)}
    checks = _checks(field)
    if parse_amount in checks:
        return 'bytes, a size like "20 GiB" or a share like "80%"'
    if parse_size in checks:
        said = [f"at least {format_size(bounds['ge'])}"] if bounds.get("ge") else []
        said += [f"a multiple of {format_size(bounds['multiple_of'])}"] if "multiple_of" in bounds else []
        return 'bytes or a size like "20 GiB"' + (f", {' and '.join(said)}" if said else "")
    if typing.get_origin(field.annotation) is tuple:
        return "a list of non-empty names"
    if choices := list(_choices(field.annotation)):
        *some, last = map(shown, choices)
        return f"{', '.join(some)} or {last}"
    low, high = bounds.get("ge"), bounds.get("le", bounds.get("lt"))
    assert kinds <= {int, float} and low is not None and high is not None, f"{key} does not say what it expects"
    if kinds == {float}:
        return f"a number from {low:g} to {high:g}"
    return f"an integer from {low} to {_power(high if 'le' in bounds else high - 1)}"


_BOUNDS = ("ge", "le", "lt", "multiple_of")


def _power(number: int) -> str:
    """Powers of two as a reader knows them."""
    for less, tail in ((0, ""), (1, " - 1")):
        if number > 1 << 16 and (number + less).bit_count() == 1:
            return f"2**{(number + less).bit_length() - 1}{tail}"
    return str(number)


def _choices(annotation: object) -> Iterator[str | bool]:
    """What a field takes one of."""
    if annotation is bool:
        yield from (True, False)
    elif typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    else:
        for each in typing.get_args(annotation):
            yield from _choices(each)


@cache
def tables_of(schema: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """The tables of a schema, arrays of tables among them: the keys that they are under, and the model of each."""
    kinds = [
        (key, kind)
        for key, field in schema.model_fields.items()
        for kind in (field.annotation, *typing.get_args(field.annotation))
    ]
    return {key: kind for key, kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)}


def nearest(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known key that is most like ``key``, if any is."""
    # Names are short; a long key is no misspelling, and comparing it would take time without end.
    near = difflib.get_close_matches(key[:64], list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def complain(problems: Sequence[tuple[Place, str]], document: Document) -> ZhooksError:
    """The error of one line a problem, each with the file and line of its place, in the order a reader meets them."""
    return _complaint([(place, partial(str, text)) for place, text in problems], document)


def explain(error: ValidationError, document: Document, schema: type[BaseModel]) -> ZhooksError:
    """Turn pydantic's findings into what `complain` makes.

    A field says what it expects in ``json_schema_extra["expected"]``. A validator that speaks for several places raises
    a custom error whose context holds ``problems``, a list of (place, text), the places being below its own.
    """
    found: list[tuple[Place, Callable[[], str]]] = []
    for detail in error.errors(include_url=False):
        place = _place(detail["loc"], schema)
        spoken = detail.get("ctx", {}).get("problems")
        if spoken:
            found.extend(((*place, *below), partial(str, text)) for below, text in spoken)
        else:
            found.append((place, partial(_rejected, detail, place, schema)))
    return _complaint(found, document)


def _complaint(problems: Sequence[tuple[Place, Callable[[], str]]], document: Document) -> ZhooksError:
    """Texts are made only for the lines that are shown: of a thousand unknown keys each would be compared with all known."""
    order = document.order()

    def written(problem: tuple[Place, object]) -> tuple[Spot, int]:
        # Values handed over in the program have no spots, and those of one line share theirs.
        place = problem[0]
        inside = next((place[:depth] for depth in range(len(place), 0, -1) if place[:depth] in order), None)
        return document.spot(place) or _LAST, len(order) if inside is None else order[inside]

    found = sorted(problems, key=written)
    # Both branches of a union complain about one value in the same words; a dict keeps one of them, and the order.
    lines: dict[str, None] = {}
    listed = 0
    for place, text in found[:MAX_PROBLEMS]:
        line = _shortened(f"{_prefix(place, document)}{text()}", MAX_LINE_NCHARS)
        if sum(map(len, lines)) + len(line) > MAX_NCHARS:
            break
        lines[line] = None
        listed += 1
    if len(found) > listed:
        lines[f"{document.source}: and {len(found) - listed} more"] = None
    return document.kind.error("\n".join(lines))


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _prefix(place: Place, document: Document) -> str:
    spot = document.spot(place)
    where = f"{spot.source}:{spot.line}" if spot else document.source
    if not place:
        return f"{where}: "
    # A line says which of several tables of an array is meant; without one, its number does.
    label = _label(place)
    if spot is None and len(place) > 1 and _MEMBER.fullmatch(place[1]):
        label = label.replace("]]", f"]] {int(place[1][1:]) + 1}", 1)
    return f"{where}: {_shortened(one_line(label), 120)}: "


def _label(place: Place) -> str:
    """A place as a reader of the file would name it: [units] names, or [[rule]] parameter.tier."""
    names = [key for key in place if not _MEMBER.fullmatch(key)]
    if len(place) == 1 or not names:
        return place[0] if place else ""
    table = f"[[{names[0]}]]" if len(names) < len(place) else f"[{names[0]}]"
    return " ".join([table, ".".join(names[1:])]).rstrip()


def _place(location: tuple[int | str, ...], schema: type[BaseModel]) -> Place:
    """What of pydantic's location the file knows: no union branches, no positions in lists of plain values."""
    place: list[str] = []
    model: type[BaseModel] | None = schema
    for step in location:
        if model is None:
            break
        if isinstance(step, str):
            place.append(step)
            model = tables_of(model).get(step)
        else:
            place.append(member(step))
    return tuple(place)


def _rejected(detail: Mapping[str, Any], place: Place, schema: type[BaseModel]) -> str:
    """What is said against one value."""
    if not place:
        return f"expected a table of settings with names for keys, found {shown(detail['input'])}"
    model: type[BaseModel] = schema
    for key in place[:-1]:
        model = tables_of(model).get(key, model)
    key, kind, found = place[-1], detail["type"], shown(detail["input"])
    if kind == "extra_forbidden":
        return f"unknown key; {_known(place, model, schema)}"
    if kind == "invalid_key":
        return f"expected names for keys, found {shown(detail['loc'][-1])}"
    if key not in model.model_fields:
        return f"expected a table, found {found}"
    field = model.model_fields[key]
    extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    expected = extra.get("expected", "a table" if key in tables_of(model) else detail["msg"])
    if kind == "missing":
        return f"expected {expected}, found nothing; write it"
    meant: str | None = None
    if isinstance(detail["input"], str):
        word = detail["input"].lower()
        meant = extra.get("meant", {}).get(word)
        # What has digits is no misspelling: fp64 is not fp16.
        if meant is None and word.isalpha():
            meant = nearest(word, (each for each in _choices(field.annotation) if isinstance(each, str)))
    return f"expected {expected}, found {found}" + (f"; did you mean {shown(meant)}?" if meant is not None else "")


def _known(place: Place, model: type[BaseModel], schema: type[BaseModel]) -> str:
    """Name the tables that have this key, else the closest key of the same table, else one that is much alike in another table,
    else all that are known."""
    key, tables = place[-1], tables_of(schema)
    having = [_label((name, key)) for name, table in tables.items() if key in table.model_fields]
    if having:
        return f"did you mean {', '.join(having[:-1])}{' or ' if having[1:] else ''}{having[-1]}?"
    if near := nearest(key, model.model_fields):
        return f"did you mean {_label((*place[:-1], near)) if len(place) == 1 else near}?"
    for name, table in tables.items():
        if near := nearest(key, table.model_fields, 0.8):
            return f"did you mean {_label((name, near))}?"
    return f"known keys here: {', '.join(model.model_fields)}"
