"""Owns the levels that several sources state: one row says what all of them hold of a quantity together.

The recorder gives it every counter. Two attachments of one process may name units alike; the level of such a series is their
sum. It keeps no source alive, and what one still held when it died is held no longer.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

__all__ = ["Sources"]


class Sources:
    """Levels by quantity and source; any thread may call.

    Args:
        write: takes (what, key, level, time_ns); called in the order in which levels were stated.
    """

    def __init__(self, write: Callable[[str, str, int, int], None]) -> None:
        self._write = write
        self._levels: dict[tuple[str, str], dict[int, int]] = {}
        self._known: dict[int, weakref.ref[object]] = {}
        # Sources die anywhere, also inside `state`: the callback only leaves word.
        self._dead: deque[int] = deque()
        self._stating = threading.RLock()

    def state(self, source: object, what: str, key: str, nbytes: int, time_ns: int) -> None:
        """``source`` holds ``nbytes`` of (``what``, ``key``) now."""
        number = id(source)
        with self._stating:
            if self._dead:
                self.bury(time_ns)
            if number not in self._known:
                self._known[number] = weakref.ref(source, lambda _: self._dead.append(number))
            levels = self._levels.get((what, key))
            if levels is None:
                levels = self._levels[what, key] = {}
            levels[number] = nbytes
            self._write(what, key, nbytes if len(levels) == 1 else sum(levels.values()), time_ns)

    def bury(self, time_ns: int) -> None:
        """Take away what sources that have died since held last; later, where somebody is stating a level just now."""
        # Never waits: who states may wait for the thread that calls this.
        if not self._dead or not self._stating.acquire(blocking=False):
            return
        try:
            while self._dead:
                number = self._dead.popleft()
                self._known.pop(number, None)
                for (what, key), levels in self._levels.items():
                    if levels.pop(number, 0):
                        self._write(what, key, sum(levels.values()), time_ns)
        finally:
            self._stating.release()
