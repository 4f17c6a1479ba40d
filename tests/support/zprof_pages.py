"""Owns the way back from a page of ``zprof timeline`` or ``zprof flamegraph`` to what was packed into it.

Tests of pages read data from it. It runs no script: how a page looks is for `tests.support.browser`.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["column", "data_of", "unpacked"]


def unpacked(page: Path, element: str) -> bytes:
    """What an element of the page holds, e.g. "data" or "plotly"."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf'<script type="application/gzip" id="{element}">([A-Za-z0-9+/=]*)</script>', text)
    assert found, f"{page}: no packed {element}"
    return gzip.decompress(base64.b64decode(found[1], validate=True))


def column(packed: dict[str, str]) -> NDArray[Any]:
    """An array as the page's script reads it."""
    return np.frombuffer(base64.b64decode(packed["b"], validate=True), np.dtype(packed["t"]).newbyteorder("<"))


def data_of(page: Path) -> dict[str, Any]:
    """What the page draws."""
    loaded: dict[str, Any] = json.loads(unpacked(page, "data"))
    return loaded
