"""Something under way: a copy, a disk request, a collective, an update; and how two or many of them are one.

Devices, the disk tier and the transports of ``zhooks.comm`` start it; whoever needs the result waits for it.  It starts nothing
but what `then` was given, and never polls: what follows is begun where its predecessor ended.

Note: [Two ways to wait]
    ``wait`` is for whoever computes with the result: on CUDA it orders the caller's current stream after the work and returns
    at once, elsewhere it blocks.  ``synchronize`` blocks until the host itself may use the result, whatever made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.events import During

__all__ = ["DONE", "Ending", "HostWork", "Work", "all_of", "during", "then"]


class Work(Protocol):
    """Something under way; dropping it neither stops it nor frees memory that it still uses."""

    def wait(self) -> None:
        """Until the caller's current stream, or on a CPU the caller, may use the result; see Note [Two ways to wait].

        Raises:
            ZhooksError: it failed; names what it was, and for what.
        """

    def done(self) -> bool:
        """Whether it is over, well or badly; never blocks and never raises."""


class HostWork(Work, Protocol):
    """Work whose end the host can wait for, and hears of: copies and disk requests, and what is made of them."""

    def synchronize(self) -> None:
        """Block until the host may use the result and the source may be given away; raises as ``wait``."""

    def when_over(self, call: Callable[[], None]) -> None:
        """Run ``call``, which must not raise, once it is over, well or badly: in the thread that ended it, or here."""


def during(work: Work) -> During | None:
    """When the device really does ``work``; None where no stream says so, and its end is noticed by who waits for it.

    What knows it has it as an attribute ``during``.
    """
    found: During | None = getattr(work, "during", None)
    return found


class Ending:
    """An end that threads wait for and hear of: what work that one thread makes for others is built on."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._change = threading.Lock()
        self._afterwards: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._over.is_set()

    def join(self) -> None:
        """Block until it has come."""
        self._over.wait()

    def when_over(self, call: Callable[[], None]) -> None:
        with self._change:
            if not self._over.is_set():
                self._afterwards.append(call)
                return
        call()

    def end(self) -> None:
        """It has come; what is to follow begins here."""
        with self._change:
            self._over.set()
            calls, self._afterwards = self._afterwards, []
        for call in calls:
            call()


class _Over:
    """Work that was over when it was made; badly where there is an error."""

    __slots__ = ("_error",)

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    synchronize = wait

    def done(self) -> bool:
        return True

    def when_over(self, call: Callable[[], None]) -> None:
        call()


#: Nothing is under way.
DONE = _Over()


def then(first: HostWork, follow: Callable[[], HostWork]) -> HostWork:
    """One work of two: ``follow`` starts the second where the first has ended well (in a disk's thread, say).

    Args:
        follow: may run in another thread, and must not refer to the streams current there; its error is that of the work.
    """
    return _Then(first, follow)


class _Then:
    def __init__(self, first: HostWork, follow: Callable[[], HostWork]) -> None:
        self._first: HostWork | None = first
        self._follow: Callable[[], HostWork] | None = follow
        self._second: HostWork = DONE
        self._begun = Ending()
        first.when_over(self._go_on)

    def wait(self) -> None:
        self._begun.join()
        self._second.wait()

    def synchronize(self) -> None:
        self._begun.join()
        self._second.synchronize()

    def done(self) -> bool:
        return self._begun.done() and self._second.done()

    @property
    def during(self) -> During | None:
        """The whole of it begins where the first does, which is no stream's."""
        second = during(self._second) if self._begun.done() else None
        return None if second is None else During(None, second.end)

    def when_over(self, call: Callable[[], None]) -> None:
        self._begun.when_over(lambda: self._second.when_over(call))

    def _go_on(self) -> None:
        """Start the second; an error is kept for who waits."""
        first, follow = self._first, self._follow
        # Both refer to memory that must not live as long as this does.
        self._first = self._follow = None
        assert first is not None and follow is not None
        try:
            first.synchronize()
            self._second = follow()
        except BaseException as error:
            self._second = _Over(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._begun.end()


def all_of(works: Sequence[Work]) -> Work:
    """One work of all of them: over when the last is."""
    return works[0] if len(works) == 1 else _All(works)


class _All:
    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    @property
    def during(self) -> During | None:
        """They are of one stream, in order."""
        parts = [during(work) for work in self._works]
        if not parts or parts[0] is None or parts[-1] is None:
            return None
        return During(parts[0].begin, parts[-1].end)
