"""The spans of what users ask of an attachment as a whole, so that observers know what memory is for that is taken meanwhile.

The mixins of ``Attachment`` mark their methods with it.  It never changes what a method does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["spanned"]

F = TypeVar("F", bound=Callable[..., Any])


def spanned(name: str) -> Callable[[F], F]:
    """Mark a method of an attachment: a call of it is a span of this name."""

    def marked(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._bus.verb(name):
                return method(self, *args, **kwargs)

        return cast(F, call)

    return marked
