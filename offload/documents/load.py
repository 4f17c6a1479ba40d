"""A settings file as plain values that know their file and line."""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
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
        return next((self.spots[place[:end]] for end in range(len(place), 0, -1) if place[:end] in self.spots), None)

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
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        raise kind.error(f"{source}: expected a {kind.noun} in TOML or JSON, found {_yaml(text)}")
    if suffix == ".json" or text.lstrip().startswith(("{", "//", "/*")):
        text = _without_comments(text)
    as_json = suffix == ".json" or text.lstrip().startswith("{")
    bare = _TEXT.sub(_blanked, text)
    _check_shape(text, bare, source, kind, dotted=not as_json)
    try:
        values = _json_values(text, source, kind) if as_json else tomllib.loads(text)
        lines = _json_lines(text) if as_json else _toml_lines(text, bare)
    except json.JSONDecodeError as error:
        raise kind.error(f"{source}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except tomllib.TOMLDecodeError as error:
        # Python before 3.14 gives the position only inside the message.
        said = re.fullmatch(r"(.*?)\s*\(at (?:line (\d+), column (\d+)|end of document)\)", str(error), re.DOTALL)
        line = said[2] if said and said[2] else str(text.count("\n") + 1)
        hint = _quotes(text, int(said[2]), int(said[3])) if said and said[2] else ""
        raise kind.error(f"{source}:{line}: not valid TOML: {one_line(said[1] if said else str(error))}{hint}") from None
    except RecursionError:
        raise kind.error(f"{source}: nested too deeply; a {kind.noun} is tables of plain values") from None
    except kind.error:
        raise
    except ValueError as error:
        digits = "a number with too many digits for a size or a count" if "digits" in str(error) else one_line(str(error))[:200]
        raise kind.error(f"{source}: expected a {kind.noun}, found {digits}") from None
    return Document(kind, source, values, {place: Spot(0, line, source) for place, line in lines.items()}, len(text))


def _text(path: Path, kind: Kind) -> str:
    source = shown_path(path)
    try:
        raw = read_regular(path, MAX_FILE_NBYTES)
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        searched = ""
        if not path.is_absolute():
            # There may be no working directory any more.
            with suppress(OSError):
                searched = f" in {shown_path(path.absolute().parent)}"
        raise kind.error(f"{source}: no such {kind.noun} file{searched}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise kind.error(f"{source}:{line}: expected UTF-8 text, found byte 0x{raw[error.start]:02x}") from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise kind.error(f"{source}: expected a {kind.noun} file of at most 1 MiB, found {error.strerror}") from None
        raise kind.error(f"{source}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise kind.error(f"{shown(str(path))}: not a path") from None


# A text that is not closed goes to its end: each character is looked at once, whatever the file holds.
_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)|' + r"'''.*?(?:'{3,5}|\Z)|" + r'"(?:[^"\\\n]|\\.)*"?|' + r"'[^'\n]*'?|#[^\n]*",
    re.DOTALL,
)
_DOTTED = re.compile(rf"(?<![A-Za-z0-9_-])(?:[A-Za-z0-9_-]+[ \t]*\.[ \t]*){{{MAX_DOTTED}}}")


def _blanked(match: re.Match[str]) -> str:
    """As long as the string or comment that it stands for: a string may be one name of a dotted key."""
    return (" " if match[0].startswith("#") else "_") * len(match[0])


def _check_shape(text: str, bare: str, source: str, kind: Kind, *, dotted: bool) -> None:
    """Refuse what a parser would take time or depth without end for."""

    def refuse(at: int, found: str) -> ZhooksError:
        return kind.error(f"{source}:{text.count(chr(10), 0, at) + 1}: {found}")

    depth = 0
    for match in re.finditer(r"[\[{\]}]", bare):
        depth += 1 if match[0] in "[{" else -1
        if depth > MAX_NESTED:
            found = f"nested too deeply, more than {MAX_NESTED} brackets; a {kind.noun} is tables of plain values"
            raise refuse(match.start(), found)
    if dotted and (long := _DOTTED.search(bare)):
        found = f"expected a key of at most {MAX_DOTTED} dotted names, found more; a {kind.noun} is tables of values"
        raise refuse(long.start(), found)


def _quotes(text: str, line: int, column: int) -> str:
    """What to do about a bare word where a value is expected."""
    lines = text.splitlines()
    word = re.match(r"[A-Za-z_]+", lines[line - 1][column - 1 :]) if line <= len(lines) else None
    if word is None:
        return ""
    return f"; write {word[0].lower()}" if word[0].lower() in ("true", "false") else "; strings need quotes"


def _toml_lines(text: str, bare: str) -> dict[Place, int]:
    """Line of every table and key of a well-formed document; of an inline table's keys its own."""
    lines: dict[Place, int] = {}
    # How many tables each array of tables has so far.
    arrays = Counter[Place]()
    table: Place = ()
    line, start, depth = 1, 0, 0
    for match in re.finditer(r"[\[{\]}\n]", bare + "\n"):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if match[0] != "\n" or depth:
            continue
        statement = text[start : match.end()]
        if not statement.strip():
            line, start = line + 1, match.end()
            continue
        header = statement.lstrip().startswith("[")
        append = statement.lstrip().startswith("[[")
        found: Any = tomllib.loads(statement)
        place: Place = () if header else table
        while isinstance(found, dict) and found:
            name, found = next(iter(found.items()))
            place = (*place, name)
            lines.setdefault(place, line)
            # The name of an array of tables stands for its latest table.
            if place in arrays and not (append and isinstance(found, list)):
                place = (*place, member(arrays[place] - 1))
        if append:
            arrays[place] += 1
            place = (*place, member(arrays[place] - 1))
            lines[place] = line
        table = place if header else table
        line, start = line + statement.count("\n"), match.end()
    return lines


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],:\n]', re.DOTALL)
_JSON_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_JSON_LAST_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"?|,(?=\s*[}\]])')


def _without_comments(text: str) -> str:
    """JSON where comments and a comma after the last member are allowed, as DeepSpeed reads its configurations: spaces stand
    for them, so that lines and columns stay what they are."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _JSON_LAST_COMMA.sub(blank, _JSON_COMMENT.sub(blank, text))


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


def _json_lines(text: str) -> dict[Place, int]:
    """Line of every key in a document known to be well-formed, and of every object that is a member of an array."""
    lines: dict[Place, int] = {}
    line = 1
    # Of each open bracket: the place of what it holds, and how many members came before, or None for an object.
    opened: list[tuple[Place, int | None]] = []
    last = key = ""
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token[0] == '"':
            last = json.loads(token)
        elif token == ":":
            key = last
            lines.setdefault((*opened[-1][0], key), line)
        elif token in "{[":
            above, index = opened[-1] if opened else ((), None)
            place = (*above, key if index is None else member(index)) if opened else ()
            if index is not None:
                lines.setdefault(place, line)
            opened.append((place, 0 if token == "[" else None))
        elif token in "}]":
            opened.pop()
        elif opened[-1][1] is not None:
            opened[-1] = opened[-1][0], opened[-1][1] + 1
    return lines


_ACCELERATE = re.compile(r"^(compute_environment|distributed_type|deepspeed_config|fsdp_config)[ \t]*:", re.MULTILINE)
_NAMED_JSON = re.compile(r"^[ \t]+deepspeed_config_file[ \t]*:[ \t]*(\S+)", re.MULTILINE)


def _yaml(text: str) -> str:
    """What a file in YAML is, and what to pass instead."""
    if not _ACCELERATE.search(text):
        return "YAML; write it in one of these"
    instead = "the stage and tiers that it asks for as TOML"
    if named := _NAMED_JSON.search(text):
        instead = f"{one_line(named[1])[:120]}, the DeepSpeed configuration that it names"
    return (
        f"Accelerate's own configuration, which says how processes are started; pass {instead} "
        "(docs/how-to/from-deepspeed.md)"
    )


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
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, (bool, BaseModel, Share, datetime.date, datetime.time)):
        return value
    if isinstance(value, (int, float)):
        return int.__pos__(value) if isinstance(value, int) else float.__pos__(value)
    if not isinstance(value, (Mapping, list, tuple)):
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return _Foreign(one_line(f"a value of type {name[:50]}"))
    if depth > MAX_NESTED:
        return _Foreign("a table or list nested too deeply")
    if next(entries) + len(value) > MAX_ENTRIES:
        return _Foreign(f"more than {MAX_ENTRIES} entries")
    if isinstance(value, Mapping):
        return {_key(key): _plain(member, depth + 1, entries) for key, member in value.items() if next(entries) >= 0}
    members = [_plain(member, depth + 1, entries) for member in value if next(entries) >= 0]
    return tuple(members) if isinstance(value, tuple) else members


def _key(key: object) -> Any:
    if key is None or isinstance(key, (str, int, float)):
        return plain(key)
    return _Foreign(f"a value of type {type(key).__name__[:50]}")
