"""What a rank says whose peers are gone, or do not make its call in time: the rank, the unit and the call by name.

The transports start and wait for their calls through here.  It never decides how long a wait may take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from offload.errors import DivergenceError
from zhooks.comm.transport import Call
from zhooks.layout import Axis

#: What Gloo says of a rank whose process has ended, or has closed its group.
_PARTED = re.compile(r"(closed|reset) by peer|[Bb]roken pipe")


class BackendWork:
    """Works of a torch backend; a wait that fails or runs out of time names the rank, the unit and the call.

    Args:
        keep: what the works read or write, kept until they are done.
        timeout: for one wait; None leaves it to the backend.
    """

    __slots__ = ("_axis", "_call", "_keep", "_timeout", "_works")

    def __init__(self, call: Call, works: list[dist.Work], keep: list[Tensor], axis: Axis, timeout: timedelta | None) -> None:
        self._call, self._works, self._keep, self._axis, self._timeout = call, works, keep, axis, timeout

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            try:
                with naming_lost_ranks(self._call, self._axis):
                    if self._timeout is None:
                        work.wait()
                    else:
                        work.wait(self._timeout)
            except DivergenceError:
                raise
            except RuntimeError as error:
                raise late(self._call, self._axis, self._timeout, f"the backend said: {error}") from error
        self._keep = []

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


@contextmanager
def naming_lost_ranks(call: Call, axis: Axis) -> Iterator[None]:
    """What a torch backend says inside of a rank that is gone, with names; anything else as it is.

    Raises:
        DivergenceError: another rank's process has ended, or has closed its group.
    """
    try:
        yield
    except RuntimeError as error:
        if not _PARTED.search(str(error)):
            raise
        others = [rank for rank in axis.ranks if rank != axis.ranks[axis.rank]]
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
        raise gone(call, axis, who, f"; the backend said: {error}") from error


def gone(call: Call, axis: Axis, who: str, found: str = "") -> DivergenceError:
    """The error of a rank whose peers have ended; ``who`` of them, and what the backend found."""
    return DivergenceError(
        f"{_expected(call, axis)}, found {who} gone: killed, or ended by an error of its own{found}. Look at that rank's own "
        "output first."
    )


def late(call: Call, axis: Axis, timeout: timedelta | None, found: str) -> DivergenceError:
    """The error of a rank that waits for others in vain; None is the time that the process group allows."""
    within, advice = " within the process group's timeout", "init_process_group(timeout=...)"
    if timeout is not None:
        within, advice = f" within {timeout.total_seconds()} s", "[comm] timeout_s"
    return DivergenceError(
        f"{_expected(call, axis)}{within}; {found}. Let every rank run the same model code (where ranks drop layers, "
        f"set [schedule] uneven = true), or raise {advice}."
    )


def _expected(call: Call, axis: Axis) -> str:
    me = axis.ranks[axis.rank]
    return f"rank {me} in {call.what} {call.key}: expected every rank of axis {axis.name} to make the same call"
