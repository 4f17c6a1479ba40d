"""Owns that what hangs in torch hangs there once a process, however many recordings listen to it.

`collectives` and `loaders` have a watch each. It knows nothing of what is watched, and never calls a listener but to say that
nothing more is seen.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Heard", "Shared", "Watch"]


class Heard(Protocol):
    """A recording that listens.

    Attributes:
        wanted: whether it wants anything now. failed: called with why nothing more is seen.
    """

    @property
    def wanted(self) -> Callable[[], bool]: ...

    @property
    def failed(self) -> Callable[[str], None]: ...


ListenerT = TypeVar("ListenerT", bound=Heard)


class Watch(ABC, Generic[ListenerT]):
    """What hangs in torch, and who listens."""

    def __init__(self) -> None:
        self.listeners: tuple[ListenerT, ...] = ()
        self._undo = ExitStack()
        self._failed = False

    @abstractmethod
    def hang(self, undo: ExitStack) -> None:
        """Hang it in torch, and leave in ``undo`` what takes each piece away again."""

    def install(self) -> None:
        """Hang all of it, or nothing."""
        with ExitStack() as undo:
            self.hang(undo)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        """Leave torch as it was."""
        self._undo.close()

    def wanted(self) -> bool:
        """Somebody wants to know now."""
        return not self._failed and any(each.wanted() for each in self.listeners)

    def fail(self, error: Exception) -> None:
        """Nothing more is said: some waits would go unseen, count as a rank's own work, and nobody would know."""
        if not self._failed:
            self._failed = True
            for each in self.listeners:
                each.failed(f"{type(error).__name__}: {error}")


WatchT = TypeVar("WatchT", bound=Watch[Any])


class Shared(Generic[WatchT]):
    """The one watch of its kind, there while anybody listens."""

    def __init__(self, make: Callable[[], WatchT]) -> None:
        self._make = make
        self._changing = threading.RLock()
        self.watch: WatchT | None = None

    def join(self, listener: Heard) -> Callable[[], None]:
        """Have ``listener`` hear what is seen, until what is returned has been called.

        Raises:
            Exception: this torch lacks what it takes; nothing of it is left then.
        """
        with self._changing:
            if self.watch is None:
                watch = self._make()
                watch.install()
                self.watch = watch
            self.watch.listeners = (*self.watch.listeners, listener)

        def leave() -> None:
            with self._changing:
                watch = self.watch
                if watch is None:
                    return
                watch.listeners = tuple(each for each in watch.listeners if each is not listener)
                if not watch.listeners:
                    self.watch = None
                    watch.remove()

        return leave
