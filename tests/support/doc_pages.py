"""Owns which pages the documentation has, and what they say once the files they include are in them.

Tests of pages call it.  It never edits a page.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]

_INCLUDED = re.compile(r'^--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """A page as it is shown: with what ``--8<-- "file"`` and ``--8<-- "file:section"`` stand for."""
    return _INCLUDED.sub(lambda found: _included(found[1], found[2]), page.read_text(encoding="utf-8"))


def _included(path: str, section: str | None) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if section is not None:
        _, _, behind = text.partition(f"[start:{section}] -->\n")
        text, _, _ = behind.partition(f"<!-- --8<-- [end:{section}]")
        assert text, f"{path}: no section {section}"
    return text.rstrip("\n")
