"""Owns the way from a settings file's text to plain values that know their file and line.

`offload.policy` calls it for each file of a policy, `offload.hardware` for a profile. It never knows what a key means and
never builds what the file describes.
"""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from offload.errors import ZhooksError
from offload.regular_files import read_regular
from offload.text import Share, one_line, shown, shown_path

__all__ = ["MAX_FILE_NBYTES", "Document", "Kind", "Place", "Spot", "member", "plain", "read"]

#: A document is a page of settings; a larger file is a mistake, and refused before it is read.
MAX_FILE_NBYTES = 1 << 20
#: The names of a dotted key, and brackets inside each other: checked before parsing, which would take time without end.
MAX_DOTTED = 16
MAX_NESTED = 32
#: Entries of one key's tables and lists, where they are handed over in the program.
MAX_ENTRIES = 1 << 14

#: Where a value stands in the document: () is the document, ("units", "names") a key of a table, ("rule", "#0", "match")
#: a key of the first table of an array.
Place = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a document is: "policy", and the class of the errors about it."""

    noun: str
    error: type[ZhooksError]


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """Where a key was written; spots sort as a reader meets them, the files a policy extends first.

    Attributes:
        layer: 0 is the file that was asked for, or the values handed over; those it extends are below 0.
        line: counted from 1.
        source: the file's name.
    """

    layer: int
    line: int
    source: str


@dataclass(frozen=True, slots=True)
class Document:
    """Settings as plain values, with what is known of where they came from.

    Attributes:
        kind: what they are.
        source: how errors name it; the path of a file, or the kind's noun for values handed over in the program.
        values: the top-level table.
        spots: where every key that could be found was written.
        nchars: how long the file was, those it extends included.
        ignored: what a DeepSpeed configuration asked for and does not get, one line each.
    """

    kind: Kind
    source: str
    values: dict[str, Any]
    spots: dict[Place, Spot] = field(default_factory=dict)
    nchars: int = 0
    ignored: tuple[str, ...] = ()

    def spot(self, place: Place) -> Spot | None:
        """Where ``place`` was written, or the nearest table around it that was found."""
        for depth in range(len(place), 0, -1):
            if place[:depth] in self.spots:
                return self.spots[place[:depth]]
        return None

    def order(self) -> dict[Place, int]:
        """A number for every place among the values, which are in the order they were written in."""
        numbers: dict[Place, int] = {}

        def number(place: Place, values: object) -> None:
            numbers.setdefault(place, len(numbers))
            if isinstance(values, Mapping):
                for key, value in values.items():
                    # JSON has dotted keys for those of tables.
                    number((*place, *str(key).split(".")), value)
            elif isinstance(values, (list, tuple)):
                for index, value in enumerate(values):
                    number((*place, member(index)), value)

        number((), self.values)
        return numbers


def member(index: int) -> str:
    """The name, in a `Place`, of the table at ``index`` of an array of tables; no key of a document begins so."""
    return f"#{index}"


def read(path: Path, kind: Kind) -> Document:
    """Read a TOML or JSON file; JSON is known by the suffix .json or an opening brace, which no TOML begins with.

    Raises:
        ZhooksError: of the kind's class; missing, unreadable, not a regular file, above 1 MiB, not UTF-8, or not well-formed.
    """
    source = shown_path(path)
    text = _text(path, kind)
    try:
        if path.suffix.lower() in (".yaml", ".yml"):
            raise kind.error(f"{source}: expected a {kind.noun} in TOML or JSON, found {_yaml(text)}")
        if path.suffix.lower() == ".json" or text.lstrip().startswith(("{", "//", "/*")):
            text = _without_comments(text)
        _check_shape(text, source, kind)
        if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
            return Document(kind, source, _json_values(text, source, kind), _spots(source, _json_lines(text)), len(text))
        return Document(kind, source, tomllib.loads(text), _spots(source, _toml_lines(text)), len(text))
    except kind.error:
        raise
    except json.JSONDecodeError as error:
        raise kind.error(f"{source}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except tomllib.TOMLDecodeError as error:
        # Python 3.11 gives the position only inside the message.
        said = re.fullmatch(r"(.*?)\s*\(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        line = said[2] if said and said[2] else str(text.count("\n") + 1)
        hint = _quotes(text, int(said[2]), int(said[3])) if said and said[2] else ""
        raise kind.error(f"{source}:{line}: not valid TOML: {one_line(said[1] if said else str(error))}{hint}") from None
    except RecursionError:
        raise kind.error(f"{source}: nested too deeply; a {kind.noun} is tables of plain values") from None
    except ValueError as error:
        digits = "a number with too many digits for a size or a count" if "digits" in str(error) else one_line(str(error))[:200]
        raise kind.error(f"{source}: expected a {kind.noun}, found {digits}") from None


_DOTTED = re.compile(rf"(?<![A-Za-z0-9_-])(?:[A-Za-z0-9_-]+[ \t]*\.[ \t]*){{{MAX_DOTTED}}}")


def _check_shape(text: str, source: str, kind: Kind) -> None:
    """Refuse what a parser would take time or depth without end for, in one pass over the text."""
    as_json = text.lstrip().startswith("{")
    bare: list[str] = []
    depth = position = 0
    line = 1
    for match in (_JSON_TOKEN if as_json else _TOML_VALUE).finditer(text):
        token = match[0]
        depth += (token in "[{") - (token in "]}")
        if depth > MAX_NESTED:
            line += text.count("\n", 0, match.start())
            raise kind.error(
                f"{source}:{line}: nested too deeply, more than {MAX_NESTED} brackets; a {kind.noun} is tables of plain values"
            )
        # A text may be one name of a dotted key; its own dots are none.
        bare += (text[position : match.start()], "_" if token[0] in "\"'" else token if token in "[]{}\n" else "")
        position = match.end()
    others = "".join((*bare, text[position:]))
    dotted = None if as_json else _DOTTED.search(others)
    if dotted:
        line += others.count("\n", 0, dotted.start())
        found = f"expected a key of at most {MAX_DOTTED} dotted names, found more"
        raise kind.error(f"{source}:{line}: {found}; a {kind.noun} is tables of values")


class _Foreign:
    """What stands for a value that no file can hold: it is equal to nothing, and says in few words what it was."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


def plain(value: Any) -> Any:
    """``value`` in exactly the types a file could give, and the settings' own; what is none of them is shown, never touched."""
    if isinstance(value, Mapping) and len(value) <= MAX_ENTRIES:
        # Each key by itself: one that goes on without end is the one that is refused.
        return {_key(key): _plain(member, 1, itertools.count()) for key, member in value.items()}
    return _plain(value, 0, itertools.count())


def _plain(value: Any, depth: int, entries: Iterator[int]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
    if isinstance(value, (Mapping, list, tuple)):
        if depth > MAX_NESTED:
            return _Foreign("a table or list nested too deeply")
        if next(entries) + len(value) > MAX_ENTRIES:
            return _Foreign(f"more than {MAX_ENTRIES} entries")
        if isinstance(value, Mapping):
            return {_key(key): _plain(member, depth + 1, entries) for key, member in value.items() if next(entries) >= 0}
        members = [_plain(member, depth + 1, entries) for member in value if next(entries) >= 0]
        return tuple(members) if isinstance(value, tuple) else members
    if isinstance(value, (BaseModel, Share, datetime.date, datetime.time)):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return _Foreign(one_line(f"a value of type {name[:50]}"))


def _key(key: object) -> Any:
    if key is None or isinstance(key, (str, int, float)):
        return plain(key)
    return _Foreign(f"a value of type {type(key).__name__[:50]}")


def _spots(source: str, lines: dict[Place, int]) -> dict[Place, Spot]:
    return {place: Spot(0, line, source) for place, line in lines.items()}


def _searched(path: Path) -> str:
    """Which folder a relative path was looked for in; nothing where the path says it, or where there is no folder any more."""
    try:
        return "" if path.is_absolute() else f" in {shown_path(path.absolute().parent)}"
    except OSError:
        return ""


def _quotes(text: str, line: int, column: int) -> str:
    """What to do about a bare word where a value is expected."""
    lines = text.splitlines()
    word = re.match(r"[A-Za-z_]+", lines[line - 1][column - 1 :]) if line <= len(lines) else None
    if word is None:
        return ""
    if word[0].lower() in ("true", "false"):
        return f"; write {word[0].lower()}"
    return "; strings need quotes"


def _text(path: Path, kind: Kind) -> str:
    try:
        raw = read_regular(path, MAX_FILE_NBYTES)
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise kind.error(f"{shown_path(path)}: no such {kind.noun} file{_searched(path)}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise kind.error(f"{shown_path(path)}:{line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}") from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):
            found = error.strerror
            raise kind.error(f"{shown_path(path)}: expected a {kind.noun} file of at most 1 MiB, found {found}") from None
        raise kind.error(f"{shown_path(path)}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise kind.error(f"{shown(str(path))}: not a path") from None


def _json_values(text: str, source: str, kind: Kind) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise kind.error(f"{source}: {one_line(key)[:120]}: written twice in one object; keep one of them")
            values[key] = value
        return values

    values = json.loads(text, object_pairs_hook=once)
    if not isinstance(values, dict):
        raise kind.error(f"{source}:1: expected a JSON object, found {shown(values)}")
    return values


_JSON_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_JSON_LAST_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"?|,(?=\s*[}\]])')


def _without_comments(text: str) -> str:
    """JSON where comments and a comma after the last member are allowed, as DeepSpeed reads its configurations: spaces stand
    for them, so that lines and columns stay what they are."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _JSON_LAST_COMMA.sub(blank, _JSON_COMMENT.sub(blank, text))


_ACCELERATE = re.compile(r"^(compute_environment|distributed_type|deepspeed_config|fsdp_config)[ \t]*:", re.MULTILINE)
_NAMED_JSON = re.compile(r"^[ \t]+deepspeed_config_file[ \t]*:[ \t]*(\S+)", re.MULTILINE)


def _yaml(text: str) -> str:
    """What a file in YAML is, and what to pass instead."""
    if not _ACCELERATE.search(text):
        return "YAML; write it in one of these"
    named = _NAMED_JSON.search(text)
    instead = "the stage and tiers that it asks for as TOML"
    if named:
        instead = f"{one_line(named[1])[:120]}, the DeepSpeed configuration that it names"
    return (
        f"Accelerate's own configuration, which says how processes are started; pass {instead} "
        "(docs/how-to/from-deepspeed.md)"
    )


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],:\n]', re.DOTALL)


def _json_lines(text: str) -> dict[Place, int]:
    """Line of every key in a document known to be well-formed, and of every object that is a member of an array."""
    lines: dict[Place, int] = {}
    line = 1
    # One entry a bracket: its own name, or none for the document itself, and how many members before this one, or none
    # for an object.
    opened: list[tuple[str | None, int | None]] = []
    last = key = None
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token[0] == '"':
            last = json.loads(token)
        elif token == ":" and last is not None:
            key = last
            lines.setdefault((*_names(opened), key), line)
        elif token in "{[":
            index = opened[-1][1] if opened else None
            opened.append((key if index is None else member(index), 0 if token == "[" else None))
            if index is not None:
                lines.setdefault(_names(opened), line)
            key = None
        elif token in "}]":
            opened.pop()
        elif token == ",":
            key = None
            name, index = opened[-1]
            opened[-1] = (name, None if index is None else index + 1)
    return lines


def _names(opened: list[tuple[str | None, int | None]]) -> Place:
    return tuple(name for name, _ in opened if name is not None)


_TOML_KEY = re.compile(r"""\s*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)\s*(\.?)""")
# A text that is not closed goes to its end: each character is looked at once, whatever the file holds.
_TOML_VALUE = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|'
    + r"""'''.*?(?:'{3,5}|\Z)|"""
    + r'"(?:[^"\\\n]|\\.)*"?|' + r"'[^'\n]*'?|#[^\n]*|[\[{]|[\]}]|\n",
    re.DOTALL,
)


def _toml_lines(text: str) -> dict[Place, int]:
    """Line of every table and key in a document known to be well-formed; an inline table's keys count as its own."""
    lines: dict[Place, int] = {}
    # How many tables each array of tables has so far.
    arrays: dict[Place, int] = {}
    table: Place = ()
    line, counted = 1, 0
    for start, statement in _toml_statements(text):
        line, counted = line + text.count("\n", counted, start), start
        if statement.startswith("[["):
            array = _in_arrays((), _toml_key(statement.lstrip("[")), arrays, open_last=False)
            arrays[array] = arrays.get(array, 0) + 1
            place = table = (*array, member(arrays[array] - 1))
        elif statement.startswith("["):
            place = table = _in_arrays((), _toml_key(statement.lstrip("[")), arrays)
        else:
            place = _in_arrays(table, _toml_key(statement), arrays)
        for depth in range(1, len(place) + 1):
            lines.setdefault(place[:depth], line)
    return lines


def _in_arrays(table: Place, key: Place, arrays: dict[Place, int], *, open_last: bool = True) -> Place:
    """The place of ``key`` in ``table``: the name of an array of tables stands for its latest table."""
    place = table
    for depth, name in enumerate(key, 1):
        place = (*place, name)
        if place in arrays and (open_last or depth < len(key)):
            place = (*place, member(arrays[place] - 1))
    return place


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
    names: list[str] = []
    position = 0
    while match := _TOML_KEY.match(text, position):
        names.append(match[1].strip("\"'"))
        position = match.end()
        if not match[2]:
            break
    return tuple(names)
