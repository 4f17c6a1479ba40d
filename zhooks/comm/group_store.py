"""The process group's store, with a bound on every answer; nothing else asks a store of torch.

``rendezvous.py`` and ``lost_rank.py`` speak through it, and ``choose_transport.py`` has torch make its groups through it.

Note: [Silent stores]
    A TCPStore's client sends a request and reads the answer, and no timeout of torch's holds for ``check``, ``add`` and
    ``set``: over a connection whose cable was pulled it reads until the system gives the connection up, after about 15
    minutes.  So each request is one of `BoundedCalls`: on a thread of its own, for which the caller waits.  A client makes one
    request at a time: one that was not answered is waited for before the next, and says since when the store is silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from offload.bounded_calls import BoundedCalls, NoAnswer
from offload.errors import DivergenceError

__all__ = ["GroupStore", "StoreLost", "advice", "capital"]

T = TypeVar("T")
_PAUSE_S = 0.02


def capital(text: str) -> str:
    """At the begin of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


def advice(closed: bool) -> str:
    """What to do about a store that is lost."""
    if closed:
        return "Look at the process and the host that served it. End the processes and load the last checkpoint in new ones."
    return "Look at the network between this host and that one, and at that host."


class StoreLost(DivergenceError):
    """The store does not answer, or has closed the connection.

    Attributes:
        found: which store, and what was found of it.
        closed: the connection is over; otherwise answers may come yet.
    """

    def __init__(self, who: str, where: str, found: str, *, closed: bool) -> None:
        super().__init__(f"{capital(where)} {found}. Expected an answer. {advice(closed)} ({capital(who)}.)")
        self.found, self.closed = f"{where} {found}", closed


class GroupStore:
    """A store of torch, as ``who`` ("rank 2 in attach") asks it.

    Attributes:
        timeout_s: how long an answer may take, where a request says nothing else.
    """

    def __init__(self, store: Any, who: str, timeout_s: float) -> None:
        self._store, self.who, self.timeout_s = store, who, timeout_s
        self._calls = BoundedCalls()

    @staticmethod
    def of_all(who: str, timeout_s: float) -> GroupStore:
        """That of the default process group."""
        return GroupStore(distributed_c10d._get_default_store(), who, timeout_s)

    @staticmethod
    def of_this_process(who: str, timeout_s: float) -> GroupStore:
        """One that no other process sees."""
        return GroupStore(dist.HashStore(), who, timeout_s)

    def set(self, key: str, text: str) -> None:
        """Keep ``text``, which must not be empty: to some stores that is no value."""
        self._ask(lambda: self._store.set(key, text))

    def add(self, key: str, amount: int) -> int:
        """Count, and return what was counted so far."""
        return self._ask(lambda: int(self._store.add(key, amount)))

    def set_once(self, key: str, text: str) -> None:
        """Keep ``text`` unless another rank has: all get what the first one kept."""
        if self.is_first(key):
            self.set(key, text)

    def is_first(self, key: str) -> bool:
        """No rank has asked this before: what it keeps there counts."""
        return self.add(f"{key}/kept", 1) == 1

    def get_once(self, key: str) -> str:
        """What ``set_once`` has kept there; "" where no rank has."""
        return self.get(key) if self.add(f"{key}/kept", 0) else ""

    def has(self, key: str, within_s: float | None = None) -> bool:
        """Whether something is kept there."""
        return self._ask(lambda: bool(self._store.check([key])), within_s)

    def get(self, key: str) -> str:
        """What is kept there, once something is.

        Raises:
            StoreLost: nothing is, within the time.
        """
        deadline = time.monotonic() + self.timeout_s
        # torch's own wait for a key keeps the client from every other request.
        while not self.has(key):
            if time.monotonic() > deadline:
                raise self._lost(f"has kept nothing as {key!r} for {self.timeout_s:g} s")
            time.sleep(_PAUSE_S)
        return self._ask(lambda: bytes(self._store.get(key)).decode())

    def within(self, request: Callable[[], T], within_s: float | None = None) -> T:
        """What ``request``, in which torch asks the store, returns or raises.

        Raises:
            StoreLost: it, or one before it, is not answered within the time.
        """
        try:
            return self._calls.make(request, self.timeout_s if within_s is None else within_s)
        except NoAnswer as error:
            raise self._lost(str(error)) from None

    def _ask(self, request: Callable[[], T], within_s: float | None = None) -> T:
        """As ``within``, and StoreLost if the connection is over."""
        try:
            return self.within(request, within_s)
        except StoreLost:
            raise
        except RuntimeError as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise self._lost(f"is gone: {said}", closed=True) from error

    def _lost(self, found: str, *, closed: bool = False) -> StoreLost:
        store = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        at = f" at {store.host}:{store.port}" if hasattr(store, "host") else ""
        return StoreLost(self.who, f"the process group's store{at}", found, closed=closed)
