"""What a collective is called, what a transport promises, and collectives under way.

Every transport (``alone.py``, ``stock.py``, ``p2p.py``, ``shared_memory.py``) is built of these; callers hold a ``Transport``
and wait for the ``Work`` it returns, which raises DivergenceError when the ranks do not meet in time.  It moves nothing
itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import DivergenceError
from offload.work import Work
from zhooks.layout import Axis, Layout

GATHER, REDUCE, CONTROL = 0, 1, 2
CHANNELS = (GATHER, REDUCE, CONTROL)

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective is for: the channel it is ordered in, the verb and the unit, and the unit's number."""

    channel: int
    what: str
    key: str
    number: int = 0


class Transport(Protocol):
    """Collectives over the ranks of one axis.  Every tensor is 1-D and contiguous, on the mesh's device."""

    axis: Axis
    name: str
    nbytes: int
    """Memory of its own that messages pass through, mapped by this rank; constant, whatever the model."""
    closed: bool
    """Nothing can be sent any more: the ranks have parted."""

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        """Start filling ``full`` [layout.padded] from every rank's ``shard`` [layout.shard_numel], same dtype.

        ``shard`` may alias this rank's ranges of ``full``.  Both are kept alive until the work is done.
        """

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        """Start summing ``full`` over the ranks; this rank's ranges land in ``out``, which must not alias ``full``."""

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        """Start summing ``full`` [layout.padded] over the ranks, in place, on every rank."""

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        """Combine a small tensor over the ranks in place: op is "sum", "max" or "min"."""

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the axis' first rank."""

    def close(self) -> None:
        """Give back groups and memory; the transport is not used again."""


#: What Gloo says of a rank whose process has ended, or has closed its group.
_PARTED = re.compile(r"(closed|reset) by peer|[Bb]roken pipe")


class BackendWork:
    """Works of a torch backend; a wait that fails or runs out of time says which rank, unit and call."""

    __slots__ = ("_axis", "_call", "_keep", "_timeout", "_works")

    def __init__(self, call: Call, works: list[dist.Work], keep: list[Tensor], axis: Axis, timeout: timedelta | None) -> None:
        self._call, self._works, self._keep, self._axis, self._timeout = call, works, keep, axis, timeout

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
            except RuntimeError as error:
                found = f"the backend said: {error}"
                if _PARTED.search(str(error)):
                    others = [rank for rank in self._axis.ranks if rank != self._axis.ranks[self._axis.rank]]
                    who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
                    raise gone(self._call, self._axis, who, f"; {found}") from error
                raise stuck(self._call, self._axis, self._timeout, found) from error
        self._keep = []

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def gone(call: Call, axis: Axis, who: str, found: str = "") -> DivergenceError:
    """The error of a rank whose peers have ended; ``who`` of them, and what the backend found."""
    return DivergenceError(
        f"rank {axis.ranks[axis.rank]} in {call.what} {call.key}: expected every rank of axis {axis.name} to make the same "
        f"call, found {who} gone: killed, or ended by an error of its own{found}. Look at that rank's own output first."
    )


def stuck(call: Call, axis: Axis, timeout: timedelta | float | None, found: str) -> DivergenceError:
    """The error of a rank that waits for others in vain."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return DivergenceError(
        f"rank {axis.ranks[axis.rank]} in {call.what} {call.key}: expected every rank of axis {axis.name} to make the same "
        f"call within {seconds} s; {found}. Let every rank run the same model code, or raise [comm] timeout_s."
    )


class TwoSteps:
    """An all-reduce of ``full`` in place as a reduce-scatter, then an all-gather, which starts when the first is waited for."""

    __slots__ = ("_arguments", "_first", "_over")

    def __init__(self, transport: Transport, call: Call, full: Tensor, layout: Layout) -> None:
        part = torch.empty(layout.shard_numel, dtype=full.dtype, device=full.device)
        self._arguments = (transport, call, full, part, layout)
        self._first = transport.reduce_scatter(call, full, part, layout)
        self._over = False

    def wait(self) -> None:
        transport, call, full, part, layout = self._arguments
        self._first.wait()
        transport.all_gather(call, part, full, layout).wait()
        self._over = True

    def done(self) -> bool:
        return self._over
