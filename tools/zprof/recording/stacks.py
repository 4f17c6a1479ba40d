"""Owns the lines of code that make storages: the user's frames of the calling thread, as one short interned text.

``tracker`` asks at level "stack", once for every storage. It never keeps a frame, whose locals would keep tensors alive.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

from zprof.rows import BEFORE_STACK

__all__ = ["Stacks", "hide"]

#: Frames looked at, and frames of the user's kept.
DEEPEST, KEPT = 96, 12
#: Different stacks of one recording; those met later are named by their innermost frame alone.
MOST_STACKS = 8192

_LIBRARIES = ("torch", "zprof", "zhooks", "offload")
#: Where the interpreter's own modules lie, and what of it is not theirs: installed packages may be the user's model.
_STANDARD = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")


#: How torch.profiler writes a frame.
_ENTRY = re.compile(r"(?P<file>[^()]*)\((?P<line>\d+)\): (?P<function>.*)")

#: Code that is nobody's in particular by its file's name, and ours.
_HIDDEN: list[CodeType] = []


def hide(code: CodeType) -> None:
    """Leave the frames of ``code`` out of stacks that are taken from now on."""
    _HIDDEN.append(code)


class Stacks:
    """Texts of the stacks met."""

    def __init__(self) -> None:
        #: By number, for codes are compared without their file's name, and slowly; each is kept, so that it keeps its number.
        self._labels: dict[int, tuple[str | None, CodeType]] = {id(code): (None, code) for code in _HIDDEN}
        self._files: dict[str, str] = {}
        self._known: dict[tuple[int, ...], str] = {}
        #: File as torch.profiler names it -> as lines do; "" for a library's.
        self._whole: dict[str, str] = {}

    def here(self) -> str:
        """The user's frames above the caller, innermost first; empty where there are none."""
        frame: FrameType | None = sys._getframe(1)
        labels = self._labels
        codes: list[int] = []
        lines: list[int] = []
        depth = 0
        while frame is not None and depth < DEEPEST and len(codes) < KEPT:
            code = id(frame.f_code)
            known = labels.get(code)
            if known is None:
                known = labels[code] = self._label(frame.f_code), frame.f_code
            if known[0] is not None:
                codes.append(code)
                lines.append(frame.f_lineno)
            frame = frame.f_back
            depth += 1
        where = (*codes, *lines)
        text = self._known.get(where)
        if text is None:
            names = [(labels[code][0] or "").replace("*", str(line), 1) for code, line in zip(codes, lines, strict=True)]
            if len(self._known) >= MOST_STACKS:
                return names[0] if names else ""
            text = self._known[where] = BEFORE_STACK.join(names)
        return text

    def user_line(self, entries: Sequence[str]) -> str:
        """The innermost of the user's lines in a stack of torch.profiler's, "file(line): function"; "" where there is none."""
        for entry in entries:
            found = _ENTRY.fullmatch(entry)
            if found is None:
                continue
            file = found["file"]
            known = self._whole.get(file)
            if known is None:
                whole = _on_path(file)
                known = self._whole[file] = "" if _is_hidden(whole) else self._short(whole)
            if known:
                return f"{known}:{found['line']}:{found['function']}"
        return ""

    def _label(self, code: CodeType) -> str | None:
        """"file:*:function" of a user's code; None for code of a library or of the interpreter."""
        name = code.co_filename
        if _is_hidden(name):
            return None
        return f"{self._short(name)}:*:{code.co_qualname}"

    def _short(self, name: str) -> str:
        """The file's last two names, or as many as no other file met so far ends in."""
        parts = Path(name).parts
        for length in range(min(2, len(parts)), len(parts) + 1):
            short = "/".join(parts[-length:]).replace("*", "?").replace(BEFORE_STACK, "?")
            if self._files.setdefault(short, name) == name:
                break
        return short


def _on_path(file: str) -> str:
    """The whole name of a file that torch.profiler names from a folder of ``sys.path`` on."""
    if not file.startswith(("/", "<")):
        for folder in sys.path:
            whole = Path(folder or ".", file)
            if whole.is_file():
                return str(whole.absolute())
    return file


def _is_hidden(name: str) -> bool:
    """A file is a library's, or the interpreter's own."""
    if name.startswith("<frozen") or name.startswith(_folders()):
        return True
    return name.startswith(_STANDARD) and not any(part in name for part in _INSTALLED)


def _folders() -> tuple[str, ...]:
    """Where the libraries' code lies; asked once for every code object, since a library may be imported late."""
    found = []
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if path:
            found.append(str(Path(path).parent) + "/" if Path(path).name == "__init__.py" else path)
    return tuple(found)
