"""Calls with a bound on the answer, of what has no time limit of its own: a store of torch, whose client reads without end.

``zhooks.comm`` and ``zprof run --gather`` ask stores through it.  It knows no stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from offload.events import now_ns

__all__ = ["BoundedCalls", "NoAnswer"]

T = TypeVar("T")


class NoAnswer(RuntimeError):
    """A call has not returned within its time; ``seconds`` are since it began."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"has not answered for {seconds:.1f} s")
        self.seconds = seconds


class BoundedCalls:
    """Calls of one client, one at a time: one that has not returned is waited for before the next."""

    def __init__(self) -> None:
        self._pending: _Call[Any] | None = None

    def make(self, call: Callable[[], T], within_s: float) -> T:
        """Return what ``call`` returns, or raise what it raises.

        Raises:
            NoAnswer: it, or the one before it, has not returned ``within_s`` after it began.
        """
        if self._pending is not None:
            self._wait(self._pending, within_s)
        made = _Call(call)
        self._pending = made
        self._wait(made, within_s)
        return made.result()

    def _wait(self, made: _Call[Any], within_s: float) -> None:
        if not made.over.wait(max(0.0, within_s - made.seconds())):
            raise NoAnswer(made.seconds())
        self._pending = None


class _Call(Generic[T]):
    """A call on a thread of its own, a daemon: what never ends does not keep the program from ending."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._began_ns, self.over = now_ns(), threading.Event()
        self._call, self._returned, self._error = call, list[T](), list[Exception]()
        threading.Thread(target=self._run, name="zhooks-store", daemon=True).start()

    def _run(self) -> None:
        try:
            self._returned.append(self._call())
        except Exception as error:
            self._error.append(error)
        self.over.set()

    def seconds(self) -> float:
        """Since it began."""
        return (now_ns() - self._began_ns) / 1e9

    def result(self) -> T:
        """What the call returned or raised, once it is over."""
        for error in self._error:
            raise error
        return self._returned[0]
