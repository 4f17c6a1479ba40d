"""Owns what is run inside another process on Python 3.14: it says every thread's frames, or begins and ends a recording.

`remote` hands its text over, so it stands alone: the standard library, and of zprof what the process can import itself. It
answers through one file and never raises into the program it runs in.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["begin", "end", "stacks"]

_MOST_FRAMES = 512


def stacks(reply: str) -> None:
    """Answer with the frames of all threads, the innermost first, without those of this call."""
    _answer(reply, _stacks)


def begin(reply: str, path: str, level: str, seconds: float, force: bool) -> None:
    """Answer once a recording into ``path`` has begun, which ends itself after ``seconds``."""

    def record() -> dict[str, Any]:
        from zprof.recording.joined import join

        return join(path, level=level, seconds=seconds, force=force)

    _answer(reply, record)


def end(reply: str, path: str) -> None:
    """Answer once the recording into ``path`` has ended."""

    def leave() -> dict[str, Any]:
        from zprof.recording.joined import leave as left

        return left(path)

    _answer(reply, leave)


def _stacks() -> dict[str, Any]:
    threads = {each.ident: each for each in threading.enumerate()}
    found = []
    for ident, top in sys._current_frames().items():
        frames: list[tuple[str, str, int]] = []
        frame: Any = top
        while frame is not None and len(frames) < _MOST_FRAMES:
            # Handed over as text, this module's calls are of no file.
            if frame.f_globals.get("__zprof__") is None:
                frames.append((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        known = threads.get(ident)
        name, number = (known.name, known.native_id) if known is not None else ("", 0)
        found.append({"name": name, "number": number or 0, "frames": frames})
    return {"threads": found}


def _answer(reply: str, what: Callable[[], dict[str, Any]]) -> None:
    """Write what comes of it, or why nothing does, to a file that is there only once it is whole."""
    try:
        said = what()
    except BaseException as error:
        said = {"problem": f"{type(error).__name__}: {error}"[:400]}
    try:
        said["pid"] = os.getpid()
        passing = f"{reply}.part"
        with open(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(said, file)
        os.rename(passing, reply)
    except OSError:
        pass  # Who asked has gone.
