"""How several files make one policy: the files it extends, read first, and the dialect each of them speaks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.documents import Document, Place, Spot, complain, member, plain, read
from offload.errors import PolicyError, ZhooksError
from offload.policy import deepspeed
from offload.policy.tables import POLICY
from offload.text import shown, shown_path

__all__ = ["EXTENDS", "handed", "load"]

#: The key that names the files a policy builds on; it is gone once they are read.
EXTENDS = "extends"
#: Editors write and read it; it says nothing about the policy.
_SCHEMA = "$schema"
#: Lists that grow from file to file, where other keys are replaced.
_GROWING = "rule"

MAX_DEPTH = 8
MAX_FILES = 64
MAX_TOTAL_NCHARS = 4 << 20


@dataclass(slots=True)
class _Chain:
    """What has been read so far, the documents in the order a reader meets them: extended files first."""

    own: frozenset[str]
    arguments: Mapping[str, deepspeed.Argument]
    documents: list[Document] = field(default_factory=list)
    files: int = 0
    nchars: int = 0

    def follow(self, document: Document, folder: Path, trail: tuple[str, ...]) -> None:
        """Add the documents that ``document`` extends, then itself; ``trail`` are the real paths from the first to here."""
        self.files += 1
        self.nchars += document.nchars
        for name in _extended(document):
            if len(trail) > MAX_DEPTH:
                raise _refusal(f"extends goes deeper than {MAX_DEPTH} files; flatten it", document)
            if self.files >= MAX_FILES or self.nchars > MAX_TOTAL_NCHARS:
                limit = f"{MAX_FILES} files or {MAX_TOTAL_NCHARS >> 20} MiB"
                raise _refusal(f"extends adds up to more than {limit}; a policy is a page of settings", document)
            path = folder / name
            try:
                base = read(path, POLICY)
            except PolicyError as error:
                raise _refusal(str(error), document) from None
            real = os.path.realpath(path)
            if real in trail:
                raise _refusal(f"{shown_path(path)} extends itself through this file; leave one of them out", document)
            self.follow(base, path.parent, (*trail, real))
        if deepspeed.speaks(document.values, self.own):
            translated, ignored = deepspeed.translate(document.values, at=document, arguments=self.arguments)
            # The places that were written are DeepSpeed's; what is wrong with a whole of several files leads to this line.
            spot = document.spot(("zero_optimization",))
            spots: dict[Place, Spot] = {(key,): spot for key in translated} if spot else {}
            self.documents.append(replace(document, values=translated, spots=spots, ignored=ignored))
        else:
            deepspeed.mixed(document, self.own)
            values = {key: value for key, value in document.values.items() if key not in (EXTENDS, _SCHEMA)}
            self.documents.append(replace(document, values=values))


def load(path: Path, own: frozenset[str], arguments: Mapping[str, deepspeed.Argument]) -> Document:
    """Read a file and those it extends; ``own`` are the names of a policy's own keys, ``arguments`` what a launcher was told.

    Raises:
        PolicyError: a file is missing, unreadable or malformed, speaks two dialects, or extends itself.
    """
    chain = _Chain(own | {EXTENDS}, arguments)
    chain.follow(read(path, POLICY), path.parent, (os.path.realpath(path),))
    return _merged(chain.documents)


def handed(values: Mapping[str, Any], own: frozenset[str], arguments: Mapping[str, deepspeed.Argument]) -> Document:
    """As `load`, for values handed over in the program; what they extend lies in the working directory."""
    chain = _Chain(own | {EXTENDS}, arguments)
    checked = plain(values)
    if not isinstance(checked, dict):
        raise PolicyError(f"policy must be a table of settings, found {checked!r}")
    chain.follow(Document(POLICY, "policy", checked), Path(), ())
    return _merged(chain.documents)


def _extended(document: Document) -> list[str]:
    value = document.values.get(EXTENDS)
    names = [value] if isinstance(value, str) else value
    if names is None and EXTENDS not in document.values:
        return []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name and name.isprintable() for name in names):
        raise _refusal(f"expected the path of a policy file or a list of them, found {shown(value)}", document)
    return list(names)


def _refusal(why: str, document: Document) -> ZhooksError:
    return complain([((EXTENDS,), why)], document)


def _merged(documents: list[Document]) -> Document:
    """One document: tables key by key, the later file's value; rules one after the other."""
    last = documents[-1]
    if len(documents) == 1:
        return last
    values: dict[str, Any] = {}
    spots: dict[Place, Spot] = {}
    ignored: list[str] = []
    for layer, document in enumerate(documents, 1 - len(documents)):
        before = values.get(_GROWING)
        rules = document.values.get(_GROWING)
        shift = len(before) if isinstance(before, (list, tuple)) and isinstance(rules, (list, tuple)) else 0
        for place, spot in document.spots.items():
            if shift and place[0] == _GROWING and len(place) > 1 and place[1].startswith("#"):
                place = (place[0], member(int(place[1][1:]) + shift), *place[2:])
            spots[place] = replace(spot, layer=layer)
        for key, value in document.values.items():
            held = values.get(key)
            if isinstance(held, Mapping) and isinstance(value, Mapping):
                values[key] = {**held, **value}
            elif key == _GROWING and isinstance(held, (list, tuple)) and isinstance(value, (list, tuple)):
                values[key] = [*held, *value]
            else:
                values[key] = value
        ignored += [f"{document.source}: {line}" for line in document.ignored]
    return Document(POLICY, last.source, values, spots, ignored=tuple(ignored))
