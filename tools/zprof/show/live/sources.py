"""Owns the text of a line of code, as the file has it now: shown beside a frame, where the program can have been read from it.

The reports of running processes call it. It reads regular files up to a bound, through the process's root, and runs nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress

from offload.regular_files import read_regular
from offload.text import one_line
from zprof.living.stacks import Frame

__all__ = ["Sources"]

_MOST_NBYTES = 4 << 20
#: When a process began is known from when the machine did, which Linux gives in whole seconds.
_SLACK_S = 1.5
_MOST_TEXT = 80


class Sources:
    """Files read so far."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def line(self, frame: Frame, root: str, began_s: float) -> str:
        """The line's text; empty where there is none, or the file was changed since the process began."""
        if frame.native or frame.line < 1 or not os.path.isabs(frame.file):
            return ""
        path = f"{root}{frame.file}"
        if path not in self._lines:
            self._lines[path] = self._read(path, began_s)
        lines = self._lines[path]
        return one_line(lines[frame.line - 1])[:_MOST_TEXT] if frame.line <= len(lines) else ""

    def _read(self, path: str, began_s: float) -> list[str]:
        with suppress(OSError, ValueError):
            if os.stat(path).st_mtime <= began_s + _SLACK_S:
                return read_regular(path, _MOST_NBYTES).decode("utf-8", "replace").splitlines()
        return []
