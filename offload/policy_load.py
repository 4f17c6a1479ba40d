"""Owns the way from a policy file's text to plain values, and from a rejected value back to its file and line.

`offload.policy` calls it with its own schema. This room never knows what a key means and never builds a policy.
"""

from __future__ import annotations

import difflib
import json
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from offload.errors import PolicyError

__all__ = ["Document", "Place", "explain", "format_size", "parse_size", "read", "toml_value"]

#: A policy is a page of settings; a larger file is a mistake, and refused before it is read.
MAX_FILE_NBYTES = 1 << 20
#: Problems listed before the rest is only counted.
MAX_PROBLEMS = 20
#: Sizes stay within a signed 64-bit integer, as every allocator and file interface below does.
MAX_SIZE_NBYTES = (1 << 63) - 1

#: Where a value stands in the document: () is the document, ("units", "names") a key of a table.
Place = tuple[str, ...]

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_DECIMAL_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_UNITS = _DECIMAL_UNITS | _BINARY_UNITS


@dataclass(frozen=True, slots=True)
class Document:
    """A policy as plain values, with what is known of where they came from.

    Attributes:
        source: how errors name it; the path of a file, or "policy" for values handed over in the program.
        values: the top-level table.
        lines: 1-based line of every key that could be found.
    """

    source: str
    values: dict[str, Any]
    lines: dict[Place, int] = field(default_factory=dict)


def parse_size(value: object) -> int:
    """Bytes meant by an int or by text such as "20 GiB", "1.5 GB" or "4096"; a fraction of a byte is rounded down.

    Raises:
        PolicyError: neither, negative, or beyond 2**63 - 1 bytes.
    """
    nbytes: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        scale = _SIZE_UNITS.get(match[2].lower())
        nbytes = None if scale is None else int(Fraction(match[1]) * scale)
    if nbytes is None or not 0 <= nbytes <= MAX_SIZE_NBYTES:
        raise PolicyError(f'expected bytes or a size like "20 GiB" (units KB to TB, KiB to TiB), found {_shown(value)}')
    return nbytes


def format_size(nbytes: int) -> str:
    """Text that `parse_size` reads back to exactly ``nbytes``, in the largest binary unit that divides it."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def toml_value(value: object) -> str:
    """A bool, number, text or sequence of these as TOML writes it; texts must be printable."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(member) for member in value)}]"
    return json.dumps(value, ensure_ascii=False)


def read(path: Path) -> Document:
    """Read a TOML or JSON file; JSON is told by the suffix .json or an opening brace, which no TOML begins with.

    Raises:
        PolicyError: missing, unreadable, not a regular file, above 1 MiB, not UTF-8, or not well-formed.
    """
    source = str(path)
    text = _text(path)
    try:
        if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
            return Document(source, _json_values(text, source), _json_lines(text))
        return Document(source, tomllib.loads(text), _toml_lines(text))
    except PolicyError:
        raise
    except json.JSONDecodeError as error:
        raise PolicyError(f"{source}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except tomllib.TOMLDecodeError as error:
        # Python 3.11 gives the position only inside the message.
        said = re.fullmatch(r"(.*?)\s*\(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        line = said[2] if said and said[2] else str(text.count("\n") + 1)
        raise PolicyError(f"{source}:{line}: not valid TOML: {_one_line(said[1] if said else str(error))}") from None
    except RecursionError:
        raise PolicyError(f"{source}: nested too deeply; a policy is tables of plain values") from None
    except ValueError as error:
        raise PolicyError(f"{source}: {_one_line(str(error))}") from None


def explain(error: ValidationError, document: Document, schema: type[BaseModel]) -> PolicyError:
    """Turn pydantic's findings into a `PolicyError` of one line a problem, in the order of the file.

    A field says what it expects in ``json_schema_extra["expected"]``. A validator that speaks for several places raises
    a custom error whose context holds ``problems``, a list of (place, text).
    """
    found: list[tuple[Place, Mapping[str, Any] | str]] = []
    for detail in error.errors(include_url=False):
        spoken = detail.get("ctx", {}).get("problems")
        found.extend(spoken or [(_place(detail["loc"], schema), detail)])
    found.sort(key=lambda problem: _line(problem[0], document) or MAX_FILE_NBYTES)
    lines: dict[str, None] = {}
    for place, problem in found[:MAX_PROBLEMS]:
        text = problem if isinstance(problem, str) else _complaint(problem, place, schema)
        # Both branches of a union complain about one value in the same words.
        lines[f"{_prefix(place, document)}{text}"] = None
    if len(found) > MAX_PROBLEMS:
        lines[f"{document.source}: and {len(found) - MAX_PROBLEMS} more"] = None
    return PolicyError("\n".join(lines))


def _text(path: Path) -> str:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PolicyError(f"{path}: expected a policy file, found something that is not a regular file")
        if status.st_size <= MAX_FILE_NBYTES:
            with path.open("rb") as file:
                # One byte more than allowed, for a file that grew after it was measured.
                raw = file.read(MAX_FILE_NBYTES + 1)
        if status.st_size > MAX_FILE_NBYTES or len(raw) > MAX_FILE_NBYTES:
            raise PolicyError(f"{path}: expected a policy file of at most 1 MiB, found {status.st_size} bytes")
        return raw.decode("utf-8-sig")
    except PolicyError:
        raise
    except FileNotFoundError:
        raise PolicyError(f"{path}: no such policy file") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise PolicyError(f"{path}:{line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}") from None
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise PolicyError(f"{_shown(str(path))}: not a path") from None


def _json_values(text: str, source: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise PolicyError(f"{source}: {_one_line(key)}: written twice in one object; keep one of them")
            values[key] = value
        return values

    values = json.loads(text, object_pairs_hook=once)
    if not isinstance(values, dict):
        raise PolicyError(f"{source}:1: expected a JSON object, found {_shown(values)}")
    return values


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


def _json_lines(text: str) -> dict[Place, int]:
    """Line of every key in a document known to be well-formed: strings before a colon, under the keys that are open."""
    lines: dict[Place, int] = {}
    line = 1
    # One entry a bracket: the key it is the value of, which is none for the document itself and for members of arrays.
    opened: list[str | None] = []
    last = key = None
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token[0] == '"':
            last = json.loads(token)
        elif token == ":" and last is not None:
            key = last
            lines.setdefault((*(name for name in opened if name is not None), key), line)
        elif token in "{[":
            opened.append(key)
            key = None
        elif token in "}]":
            opened.pop()
        elif token == ",":
            key = None
    return lines


_TOML_KEY = re.compile(r"""\s*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)\s*(\.?)""")
_TOML_VALUE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'|#[^\n]*|[\[{]|[\]}]|\n",
    re.DOTALL,
)


def _toml_lines(text: str) -> dict[Place, int]:
    """Line of every table and key in a document known to be well-formed; an inline table's keys count as its own."""
    lines: dict[Place, int] = {}
    table: Place = ()
    line, counted = 1, 0
    for start, statement in _toml_statements(text):
        line, counted = line + text.count("\n", counted, start), start
        if statement.startswith("["):
            place = table = _toml_key(statement.lstrip("["))
        else:
            place = (*table, *_toml_key(statement))
        for depth in range(1, len(place) + 1):
            lines.setdefault(place[:depth], line)
    return lines


def _toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header or assignment with its offset; line ends inside strings, arrays and comments do not end one."""
    start = depth = 0
    for match in _TOML_VALUE.finditer(text + "\n"):
        token = match[0]
        if token in ("[", "{"):
            depth += 1
        elif token in ("]", "}"):
            depth -= 1
        elif token == "\n" and depth <= 0:
            statement = text[start : match.start()]
            bare = statement.lstrip()
            if bare and not bare.startswith("#"):
                yield start + len(statement) - len(bare), bare
            start, depth = match.end(), 0


def _toml_key(text: str) -> Place:
    parts: list[str] = []
    position = 0
    while match := _TOML_KEY.match(text, position):
        parts.append(match[1].strip("\"'"))
        position = match.end()
        if not match[2]:
            break
    return tuple(parts)


def _place(location: tuple[int | str, ...], schema: type[BaseModel]) -> Place:
    """The part of pydantic's location that the file knows: no union branches, no list positions."""
    place: list[str] = []
    model: type[BaseModel] | None = schema
    for part in location:
        if model is None or not isinstance(part, str):
            break
        place.append(part)
        model = _table(model, part)
    return tuple(place)


def _table(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    known = model.model_fields.get(key)
    kind = known.annotation if known is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _complaint(detail: Mapping[str, Any], place: Place, schema: type[BaseModel]) -> str:
    if not place:
        return f"expected a table of settings with names for keys, found {_shown(detail['input'])}"
    model: type[BaseModel] = schema
    for part in place[:-1]:
        model = _table(model, part) or model
    if detail["type"] == "extra_forbidden":
        return f"unknown key; {_nearest(place, model, schema)}"
    if _table(model, place[-1]) is not None:
        return f"expected a table, found {_shown(detail['input'])}"
    extra = model.model_fields[place[-1]].json_schema_extra
    expected = extra.get("expected") if isinstance(extra, dict) else None
    return f"expected {expected or detail['msg']}, found {_shown(detail['input'])}"


def _nearest(place: Place, model: type[BaseModel], schema: type[BaseModel]) -> str:
    """Name the closest key of the same table, else one that is much alike in another table, else all that are known."""
    key = place[-1]
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    if near:
        return f"did you mean {_label((*place[:-1], near[0]))}?" if len(place) == 1 else f"did you mean {near[0]}?"
    for name in schema.model_fields:
        table = _table(schema, name)
        elsewhere = difflib.get_close_matches(key, table.model_fields, n=1, cutoff=0.8) if table else []
        if elsewhere:
            return f"did you mean [{name}] {elsewhere[0]}?"
    return f"known here are {', '.join(model.model_fields)}"


def _label(place: Place) -> str:
    return f"[{place[0]}] {'.'.join(place[1:])}" if len(place) > 1 else place[0] if place else ""


def _line(place: Place, document: Document) -> int | None:
    """Line of the place, or of the nearest table around it that was found."""
    for depth in range(len(place), 0, -1):
        if place[:depth] in document.lines:
            return document.lines[place[:depth]]
    return None


def _prefix(place: Place, document: Document) -> str:
    line = _line(place, document)
    where = document.source if line is None else f"{document.source}:{line}"
    return f"{where}: {_one_line(_label(place))}: " if place else f"{where}: "


def _shown(value: object) -> str:
    """A value as the file would write it, short enough for a line."""
    if isinstance(value, (str, bool, int, float, list, dict)) or value is None:
        try:
            text = json.dumps(value, ensure_ascii=True, default=str)
        except (ValueError, TypeError, RecursionError):
            text = f"a {type(value).__name__} that cannot be shown"
    else:
        text = repr(value)
    text = _one_line(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
