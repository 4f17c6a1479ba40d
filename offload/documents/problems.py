"""Owns the way from a rejected value back to its file, its line and what to do.

`offload.policy` and `offload.hardware` raise what it makes. It never reads a file and never decides
what is wrong.
"""

from __future__ import annotations

import difflib
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from pydantic import BaseModel, ValidationError

from offload.documents.load import Document, Place, Spot, member
from offload.errors import ZhooksError
from offload.text import one_line, shown

__all__ = ["complain", "explain", "nearest", "tables_of"]

#: Problems listed before all others are only counted.
MAX_PROBLEMS = 10
#: Characters of one line, and of all of them: whoever reads more has stopped reading.
MAX_LINE_NCHARS = 600
MAX_NCHARS = 4000

_LAST = Spot(sys.maxsize, 0, "")
_MEMBER = re.compile(r"#\d+", re.ASCII)


def complain(problems: Sequence[tuple[Place, str]], document: Document) -> ZhooksError:
    """The error of one line a problem, each with the file and line of its place, in the order a reader meets them."""
    return _said([(place, partial(str, text)) for place, text in problems], document)


def _said(problems: Sequence[tuple[Place, Callable[[], str]]], document: Document) -> ZhooksError:
    """As `complain`, with texts that are made only for the lines that are shown."""
    order = document.order()

    def written(place: Place) -> tuple[Spot, int]:
        # Values handed over in the program have no spots, and those of one line share theirs.
        inside = next((place[:depth] for depth in range(len(place), 0, -1) if place[:depth] in order), None)
        return document.spot(place) or _LAST, len(order) if inside is None else order[inside]

    found = sorted(problems, key=lambda problem: written(problem[0]))
    # Both branches of a union complain about one value in the same words; a dict keeps one of them, and the order.
    lines: dict[str, None] = {}
    listed = 0
    for place, text in found[:MAX_PROBLEMS]:
        line = f"{_prefix(place, document)}{text()}"
        line = line if len(line) <= MAX_LINE_NCHARS else f"{line[: MAX_LINE_NCHARS - 3]}..."
        if sum(map(len, lines)) + len(line) > MAX_NCHARS:
            break
        lines[line] = None
        listed += 1
    if len(found) > listed:
        lines[f"{document.source}: and {len(found) - listed} more"] = None
    return document.kind.error("\n".join(lines))


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
            found.append((place, partial(_complaint, detail, place, schema)))
    return _said(found, document)


def nearest(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known key that is most like ``key``, if any is."""
    # Names are short; a long key is no misspelling, and comparing it would take time without end.
    near = difflib.get_close_matches(key[:64], list(known), n=1, cutoff=cutoff)
    return near[0] if near else None


@cache
def tables_of(schema: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """The tables of a schema, arrays of tables among them: the keys that they are under, and the model of each."""
    kinds = [
        (key, kind)
        for key, field in schema.model_fields.items()
        for kind in (field.annotation, *typing.get_args(field.annotation))
    ]
    return {key: kind for key, kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)}


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


def _complaint(detail: Mapping[str, Any], place: Place, schema: type[BaseModel]) -> str:
    if not place:
        return f"expected a table of settings with names for keys, found {shown(detail['input'])}"
    model: type[BaseModel] = schema
    for key in place[:-1]:
        model = tables_of(model).get(key, model)
    key = place[-1]
    if detail["type"] == "extra_forbidden":
        return f"unknown key; {_nearest(place, model, schema)}"
    if detail["type"] == "invalid_key":
        return f"expected names for keys, found {shown(detail['loc'][-1])}"
    if key in model.model_fields:
        extra = model.model_fields[key].json_schema_extra
        expected = extra.get("expected") if isinstance(extra, dict) else None
        if expected is None and key in tables_of(model):
            expected = "a table"
        if detail["type"] == "missing":
            return f"expected {expected}, found nothing; write it"
        meant = _meant(extra, model.model_fields[key].annotation, detail["input"])
        return f"expected {expected or detail['msg']}, found {shown(detail['input'])}{meant}"
    return f"expected a table, found {shown(detail['input'])}"


def _meant(extra: object, annotation: object, found: object) -> str:
    """The value that another library's word stands for, else the one that a misspelt word is most like."""
    if not isinstance(found, str):
        return ""
    elsewhere = extra.get("meant", {}) if isinstance(extra, dict) else {}
    meant = elsewhere.get(found.lower())
    # What has digits is no misspelling: fp64 is not fp16.
    if meant is None and found.isalpha():
        meant = nearest(found.lower(), _words(annotation))
    return f"; did you mean {shown(meant)}?" if meant is not None else ""


def _words(annotation: object) -> Iterator[str]:
    """The texts that a field takes one of."""
    for each in typing.get_args(annotation):
        if isinstance(each, str):
            yield each
        else:
            yield from _words(each)


def _nearest(place: Place, model: type[BaseModel], schema: type[BaseModel]) -> str:
    """Name the tables that have this key, else the closest key of the same table, else one that is much alike in another table,
    else all that are known."""
    key = place[-1]
    having = [name for name, table in tables_of(schema).items() if key in table.model_fields]
    if having:
        *some, last = (_label((name, key)) for name in having)
        return f"did you mean {', '.join(some)} or {last}?" if some else f"did you mean {last}?"
    near = nearest(key, model.model_fields)
    if near:
        return f"did you mean {_label((*place[:-1], near))}?" if len(place) == 1 else f"did you mean {near}?"
    for name, table in tables_of(schema).items():
        elsewhere = nearest(key, table.model_fields, 0.8)
        if elsewhere:
            return f"did you mean {_label((name, elsewhere))}?"
    return f"known keys here: {', '.join(model.model_fields)}"


def _label(place: Place) -> str:
    """A place as a reader of the file would name it: [units] names, or [[rule]] parameter.tier."""
    names = [key for key in place if not _MEMBER.fullmatch(key)]
    if len(place) == 1 or not names:
        return place[0] if place else ""
    table = f"[[{names[0]}]]" if len(names) < len(place) else f"[{names[0]}]"
    return " ".join([table, ".".join(names[1:])]).rstrip()


def _prefix(place: Place, document: Document) -> str:
    spot = document.spot(place)
    where = f"{spot.source}:{spot.line}" if spot else document.source
    if not place:
        return f"{where}: "
    # A line says which of several tables of an array is meant; without one, its number does.
    label = _label(place)
    if spot is None and len(place) > 1 and _MEMBER.fullmatch(place[1]):
        label = label.replace("]]", f"]] {int(place[1][1:]) + 1}", 1)
    label = one_line(label)
    return f"{where}: {label if len(label) <= 120 else f'{label[:117]}...'}: "
