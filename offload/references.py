"""Whether an object has a holder beside the sequence it is handed in, whatever this interpreter counts on the way.

``zhooks/unit/flat.py`` asks before it points a tensor elsewhere.  Python 3.14 borrows references where 3.11 counted them, so
the count of an object that nobody else holds is measured, by the very code that measures, and never assumed.  It starts without
torch, so that its tests can run it under every Python there is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["held_elsewhere"]


def _counts(things: Sequence[object]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_ALONE = _counts((object(),))[0]


def held_elsewhere(things: Sequence[object], known: int = 0) -> bool:
    """Some object in ``things``, a sequence that holds each once, is referred to from more than ``known`` places beside it."""
    return any(count > _ALONE + known for count in _counts(things))
