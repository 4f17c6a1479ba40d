"""What a rank says whose peers are gone, or do not make its call in time: the rank, the unit and the call by name.

The transports start and wait for their calls through here.  It never decides how long a wait may take.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import DivergenceError
from zhooks.comm.agreed_failure import (
    GONE,
    OWN_OUTPUT,
    SAME_CALLS,
    AgreedFailure,
    as_subject,
    grace_of,
    internals,
    waiting,
)
from zhooks.comm.transport import Call
from zhooks.layout import Axis

__all__ = ["BackendWork", "Waits", "gone", "interrupt_group", "late"]

#: What Gloo says of a rank whose process has ended, or has closed its group.
_PARTED = re.compile(r"(closed|reset) by peer|[Bb]roken pipe")
#: What it says of calls in a group that this rank has closed itself.
_OVER = re.compile(r"pair closure|[Tt]imed out|[Cc]onnection refused|not connected|already closed")
#: So often a rank that waits looks whether another has found out that one is gone or late.
LOOK_S = 0.5
#: A tag that no call has, see ``p2p.tag_of``: its channel would be 3.
_NO_TAG = (1 << 31) - 1


class Waits:
    """How the calls over one axis are waited for.

    Args:
        timeout_s: for one wait.
        failure: what all ranks of the attachment agree on; None where they have not met.
    """

    def __init__(self, axis: Axis, timeout_s: float, failure: AgreedFailure | None) -> None:
        self.axis, self.timeout_s, self.failure = axis, timeout_s, failure

    @property
    def patience_s(self) -> float:
        """How long a wait lasts before the roll is called."""
        return self.timeout_s if self.failure is None else self.timeout_s - grace_of(self.timeout_s)

    def failed(self, call: Call, error: RuntimeError, suspects: Sequence[int] = ()) -> DivergenceError:
        """The error of a wait or a start that the backend has ended with ``error``."""
        parted = _PARTED.search(str(error)) is not None
        if self.failure is not None:
            found = f"the backend said: {str(error).splitlines()[0]}"
            return self.failure.fail(call, self.axis, found, kind="gone" if parted else "late", suspects=suspects)
        if parted:
            others = list(suspects) or [rank for rank in self.axis.ranks if rank != self.axis.ranks[self.axis.rank]]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
            return gone(call, self.axis, who, f"the backend said: {error}")
        return late(call, self.axis, timedelta(seconds=self.timeout_s), f"the backend said: {error}")

    @contextmanager
    def starting(self, call: Call) -> Iterator[None]:
        """What the backend says, inside, of a rank that is gone, with names; anything else as it is.

        Raises:
            DivergenceError: another rank's process has ended, or has closed its group.
        """
        over = self.failure is not None and self.failure.verdict is not None
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DivergenceError) or not (over or _PARTED.search(str(error)) or _OVER.search(str(error))):
                raise
            raise self.failed(call, error) from error


class BackendWork:
    """Works of a torch backend; a wait that fails or runs out of time names the rank, the unit and the call.

    Args:
        keep: what the works read or write, kept until they are done.
        peers: the rank that each of the works waits for; none where they are collectives.
        ordered: a wait orders the device's stream and does not hold the host; the backend itself limits how long they take.
    """

    __slots__ = ("_call", "_keep", "_ordered", "_peers", "_waits", "_works")

    def __init__(
        self,
        call: Call,
        works: list[dist.Work],
        keep: list[Tensor],
        waits: Waits,
        peers: Sequence[int] = (),
        *,
        ordered: bool = False,
    ) -> None:
        self._call, self._works, self._keep, self._waits, self._peers = call, works, keep, waits, peers
        self._ordered = ordered

    def wait(self) -> None:
        works, self._works = self._works, []
        deadline = None if self._ordered else time.monotonic() + self._waits.patience_s
        for place, work in enumerate(works):
            self._wait(work, deadline, self._peers[place : place + 1], works[place + 1 :])
        self._keep = []

    def _wait(self, work: dist.Work, deadline: float | None, peers: Sequence[int], later: Sequence[dist.Work]) -> None:
        try:
            if deadline is None:
                work.wait()
            elif peers or self._waits.failure is None:
                # A wait for a message closes its group when it runs out: it cannot be had in slices.
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            else:
                self._look(work, deadline, self._waits.failure)
        except DivergenceError:
            raise
        except RuntimeError as error:
            parted = self._parted(later) if peers and _PARTED.search(str(error)) else []
            raise self._waits.failed(self._call, error, [*peers, *parted]) from error

    def _parted(self, later: Sequence[dist.Work]) -> list[int]:
        """Whose connections are closed as well: a host's ranks are lost together."""
        found: list[int] = []
        for work, peer in zip(later, self._peers[-len(later) :], strict=False):
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if _PARTED.search(str(error)) is None:
                    # A wait that runs out closes the others, too.
                    break
                found.append(peer)
        return found

    def _look(self, work: dist.Work, deadline: float, failure: AgreedFailure) -> None:
        """Wait for a collective, in slices: ranks that wait for this one's peers may know more."""
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(LOOK_S, left))))
                return
            except RuntimeError:
                if work.is_completed():
                    break
                if left <= LOOK_S or failure.called(self._waits.axis):
                    raise
        # It may have come to its end after the slice had: what it says itself counts.
        work.wait()

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def interrupt_group(group: dist.ProcessGroup, axis: Axis) -> None:
    """Close this rank's connections of a group of Gloo's: whoever waits for it there is told at once.

    A receive that nobody answers does it, when its wait runs out; the group's own ``abort`` leaves them open.
    """
    backend: Any = group._get_backend(torch.device("cpu"))
    for peer in range(axis.world):
        if peer == axis.rank:
            continue
        try:
            backend.recv([torch.zeros(1, dtype=torch.float32, device="cpu")], peer, _NO_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if _PARTED.search(str(error)) is None:
                return


def gone(call: Call, axis: Axis, who: str, found: str = "") -> DivergenceError:
    """The error of a rank whose peers have ended; ``who`` of them, and what the backend found."""
    return DivergenceError(f"{as_subject(who)} {GONE}. {waiting(call, axis)} {OWN_OUTPUT} {internals(call, axis, found)}")


def late(call: Call, axis: Axis, timeout: timedelta, found: str) -> DivergenceError:
    """The error of a rank whose wait for others ran out of time."""
    return DivergenceError(
        f"Another rank is late. {waiting(call, axis, f' within {timeout.total_seconds()} s')} {SAME_CALLS} "
        f"If a rank is only slow, raise [comm] timeout_s. {internals(call, axis, found)}"
    )
