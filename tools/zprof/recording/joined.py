"""Owns a recording that joins a process which has long begun, and leaves it while it goes on.

What `zprof attach --record` runs inside a process calls `join` and `leave`. It begins and ends where torch lets hooks come and
go, never raises into the program, and takes out what it put in.

Note: [Where storages may be followed from]
    A backward, and ``inference_mode``, restore torch's dispatch keys as they were when they began, so a mode that comes in one
    of them would be lost with them. Above level "events" a recording begins with the next forward outside of both.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zprof.recording.recorder import LEVELS, Recorder

__all__ = ["join", "leave"]

#: A recording whose time is over waits so long for a forward in which its mode can go; then it ends, and the mode stays, deaf.
_GRACE_S = 10.0


def join(path: str, *, level: str, seconds: float, force: bool) -> dict[str, Any]:
    """Begin recording into ``path`` for ``seconds``; what was done, as plain values.

    Raises:
        Exception: nothing was begun, and nothing of it is left.
    """
    assert level in LEVELS
    before = {name.partition(".")[0] for name in tuple(sys.modules)}
    joined = _Joined(Recorder(path, level=level, force=force), seconds)
    joined.start()
    _joined[str(joined.path)] = joined
    imported = sorted({name.partition(".")[0] for name in tuple(sys.modules)} - before)
    return {"path": str(joined.path), "level": level, "waits": not joined.recorder.open, "imported": imported}


def leave(path: str) -> dict[str, Any]:
    """End it now, or, above level "events", with the next forward; what is not there is not ended."""
    joined = _joined.get(path)
    if joined is None:
        return {"ended": False}
    joined.leave()
    return {"ended": True}


class _Joined:
    """A recording, and the hook and the timer that end it."""

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self.recorder = recorder
        self.path = Path(recorder.path).absolute()
        self._seconds = seconds
        self._until_s = math.inf
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._handle: Any = None
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """On the thread that is recorded."""
        if self.recorder.level == "events" or "torch" not in sys.modules:
            self._begin()
        else:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._handle = register_module_forward_pre_hook(self._forward_begins)
            self._after(self._seconds + _GRACE_S, self._close)

    def leave(self) -> None:
        """Its time is over."""
        self._until_s = 0.0
        if self._handle is None or (threading.get_ident() == self._thread and self._safe()):
            self._close()
        else:
            self._after(_GRACE_S, self._close)

    def _begin(self) -> None:
        self._until_s = time.monotonic() + self._seconds
        self.recorder.listen()
        self._after(self._seconds, self.leave)

    def _forward_begins(self, *_: Any) -> None:
        """What torch calls; nothing of it may reach the program."""
        with suppress(Exception):
            if threading.get_ident() != self._thread or os.getpid() != self._pid:
                return
            over = time.monotonic() >= self._until_s
            if (over or not self.recorder.open) and self._safe():
                if over:
                    self._close()
                else:
                    self._begin()

    def _safe(self) -> bool:
        from zprof.recording.hooks import unchanged_when_left

        return unchanged_when_left()

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        """In place of what was to come before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, do)
        self._timer.daemon, self._timer.name = True, "zprof-end"
        self._timer.start()

    def _close(self) -> None:
        _joined.pop(str(self.path), None)
        if self._timer is not None:
            self._timer.cancel()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self.recorder.close("the requested time is over")


_joined: dict[str, _Joined] = {}
