"""How many functions Python calls: what a program costs its host beside the operations it issues.

``zhooks.simulate`` counts those of a step and ``zprof bench`` those of programs that it times, both by this.

Note: [What is counted]
    Calls of Python's functions and of built-in ones, on every thread that issues operations.  What the virtual device calls to
    find out what an operation makes is not of the program, and left out with all that it calls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from offload.errors import SimulationError

__all__ = ["Calls", "active_profiler"]

_HERE = str(Path(__file__).parent)


def active_profiler() -> str | None:
    """What profiles Python's calls on this thread, by name; None where nothing does."""
    profiler = sys.getprofile()
    if profiler is not None:
        named = profiler if hasattr(profiler, "__qualname__") else type(profiler)
        return f"{named.__module__}.{named.__qualname__}"
    # cProfile from Python 3.12 on.
    monitoring = getattr(sys, "monitoring", None)
    tool: str | None = None if monitoring is None else monitoring.get_tool(monitoring.PROFILER_ID)
    return tool


class Calls:
    """Counts while it is on.

    Args:
        apart: folders and files whose functions are not of the program.
        called: told of each call, at once.
    """

    def __init__(self, apart: tuple[str, ...] = (), called: Callable[[], None] | None = None) -> None:
        self.count = 0
        self._called, self._apart, self._on = called, (_HERE, *apart), False
        self._known: dict[CodeType, bool] = {}
        #: By thread: the frame of the outermost function that is not of the program.
        self._inside: dict[int, FrameType] = {}

    @contextmanager
    def on(self) -> Iterator[Calls]:
        """Count inside.

        Raises:
            SimulationError: a profiler is on, which hears what would be counted here, and could not be put back.
        """
        if sys.getprofile() is not None:
            raise SimulationError(
                "Cannot count Python's calls. Expected no profiler on this thread, because they are counted in its place; "
                f"found {active_profiler()}. Run it without."
            )
        self._on = True
        self.follow()
        try:
            yield self
        finally:
            self._on = False
            sys.setprofile(None)
            self._inside.clear()

    def follow(self) -> None:
        """Count on this thread, too, from now on."""
        if self._on and sys.getprofile() is None:
            sys.setprofile(self._hear)

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._on:
            sys.setprofile(None)
            return
        thread = threading.get_ident()
        inside = self._inside.get(thread)
        if inside is not None:
            if event == "return" and frame is inside:
                del self._inside[thread]
            return
        if event == "call":
            apart = self._known.get(frame.f_code)
            if apart is None:
                apart = self._known[frame.f_code] = frame.f_code.co_filename.startswith(self._apart)
            if apart:
                self._inside[thread] = frame
                return
        elif event != "c_call":
            return
        self.count += 1
        if self._called is not None:
            self._called()
