"""Owns the lines of code that make storages: the user's frames of the calling thread, as one short interned text.

``tracker`` asks at level "stack", once for every storage. It never keeps a frame, whose locals would keep tensors alive.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

__all__ = ["BEFORE_STACK", "Stacks"]

#: Parts a key: "blocks.0 <- model.py:31:forward <- train.py:12:main", innermost first.
BEFORE_STACK = " <- "

#: Frames looked at, and frames of the user's kept.
DEEPEST, KEPT = 96, 12
#: Different stacks of one recording; those met later are named by their innermost frame alone.
MOST_STACKS = 8192

_LIBRARIES = ("torch", "zprof", "zhooks", "offload", "runpy", "threading")


class Stacks:
    """Texts of the stacks met."""

    def __init__(self) -> None:
        self._labels: dict[CodeType, str | None] = {}
        self._known: dict[tuple[object, ...], str] = {}

    def here(self) -> str:
        """The user's frames above the caller, innermost first; empty where there are none."""
        frame: FrameType | None = sys._getframe(1)
        labels = self._labels
        codes: list[CodeType] = []
        lines: list[int] = []
        depth = 0
        while frame is not None and depth < DEEPEST and len(codes) < KEPT:
            code = frame.f_code
            if code not in labels:
                labels[code] = _label(code)
            if labels[code] is not None:
                codes.append(code)
                lines.append(frame.f_lineno)
            frame = frame.f_back
            depth += 1
        where = (*codes, *lines)
        text = self._known.get(where)
        if text is None:
            names = [(labels[code] or "").replace("*", str(line), 1) for code, line in zip(codes, lines, strict=True)]
            if len(self._known) >= MOST_STACKS:
                return names[0] if names else ""
            text = self._known[where] = BEFORE_STACK.join(names)
        return text


def _label(code: CodeType) -> str | None:
    """"file:*:function" of a user's code; None for code of a library or of the interpreter."""
    name = code.co_filename
    if name.startswith("<frozen") or name.startswith(_folders()):
        return None
    short = "/".join(Path(name).parts[-2:])
    return f"{short.replace('*', '?')}:*:{code.co_name}"


def _folders() -> tuple[str, ...]:
    """Where the libraries' code lies; asked once for every code object, since a library may be imported late."""
    found = []
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if path:
            found.append(str(Path(path).parent) + "/" if Path(path).name == "__init__.py" else path)
    return tuple(found)

