"""The spans of what users ask of an attachment as a whole, so that observers know what memory is for that is taken meanwhile.

The mixins of ``Attachment`` mark their methods with it.  It never changes what a method does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from offload.events import Bus

__all__ = ["spanned"]

P = ParamSpec("P")
R = TypeVar("R")


class _Heard(Protocol):
    _bus: Bus


S = TypeVar("S", bound=_Heard)


def spanned(name: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Mark a method of an attachment: a call of it is a span of this name."""

    def marked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._bus.verb(name):
                return method(self, *args, **kwargs)

        return call

    return marked
