"""Owns putting a function of ours around one of torch's, and taking it away again.

The watches of `recording` and `running` use it while a recording lasts. It never removes what somebody else has put over ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["put_around"]


def put_around(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace ``owner.name``, a class's or a module's own attribute, by ``around`` of it; what is returned puts it back.

    Raises:
        KeyError: ``owner`` itself has no such attribute.
    """
    original = vars(owner)[name]
    ours = around(original)
    setattr(owner, name, ours)

    def undo() -> None:
        # Somebody else's, put over ours meanwhile, stays.
        if vars(owner).get(name) is ours:
            setattr(owner, name, original)

    return undo
