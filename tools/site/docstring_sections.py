"""Lets the API reference read docstrings whose sections follow each other without a blank line.

mkdocstrings loads it (mkdocs.yml). griffe reads `Returns:` and `Raises:` as sections only after a blank line, which docstrings
here do not have. It never changes a word.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Sections"]

_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Returns|Yields|Raises|Warns|Source):)")


class Sections(griffe.Extension):
    """A blank line before each section."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with every module, class, function and attribute that was read."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
