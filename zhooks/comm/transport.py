"""What a collective is called, and what a transport promises.

Every transport (``alone.py``, ``stock.py``, and those of ``OPENERS``) is built of these; callers hold a ``Transport``
and wait for the ``Work`` it returns, which raises DivergenceError when the ranks do not meet in time.  It moves nothing
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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

    @property
    def words(self) -> str:
        """What a user knows of it: the method that it is a step of ("save: agree"), or else the verb and the unit."""
        method, step, _ = self.what.partition(": ")
        return method if step or self.key.startswith("all ") else f"{self.what} {self.key}"


Nbytes = Sequence[Sequence[int]]
"""Bytes by writer, then by reader."""


class Transport(Protocol):
    """Collectives over the ranks of one axis.  Every tensor is 1-D and contiguous, on the mesh's device."""

    axis: Axis
    name: str
    nbytes: int
    """Memory of its own that messages pass through, mapped by this rank; constant, whatever the model."""
    closed: bool
    """Nothing can be sent any more: the ranks have parted."""

    @property
    def channels(self) -> Collection[int]:
        """Those that calls may use."""

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        """Start filling ``full`` [layout.padded] from every rank's ``shard`` [layout.shard_numel], same dtype.

        ``shard`` may alias this rank's ranges of ``full``.  Both are kept alive until the work is done.
        """

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        """Start summing ``full`` over the ranks; this rank's ranges land in ``out``, which must not alias ``full``."""

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        """Start summing ``full`` [layout.padded] over the ranks, in place, on every rank."""

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        """Start sending every rank what this one has for it, from where that lies; what others send lands where it shall lie.

        Args:
            sends: for each reader, this rank among them, 1-D ranges of memory; kept alive until the work is done.
            receives: for each writer the ranges that it fills: as many as it sends, of the same dtypes and lengths; none may
                alias one of ``sends``.
            nbytes: what each writer has for each reader: the same on every rank.
        """

    def order(self) -> int:
        """A number that stands for the gathers started since it was last asked; 0 where a call meets its own kind alone."""

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        """Combine a small tensor over the ranks in place: op is "sum", "max" or "min"."""

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        """Start the same with a tensor of the host, kept alive until the work is done; returns at once where that can be."""

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the axis' first rank."""

    def interrupt(self) -> None:
        """End the waits of those who wait for this rank: a wait has failed.  Nothing is sent until ``renew``."""

    def renew(self, opened: Transport) -> None:
        """Go on with the connections of ``opened``, a new transport of this kind over the same axis; it is not used itself.

        What was under way is not waited for any more.
        """

    def close(self) -> None:
        """Give back groups and memory; the transport is not used again."""


class TwoSteps:
    """An all-reduce of ``full`` in place as a reduce-scatter, then an all-gather, which starts when the first is waited for."""

    __slots__ = ("_arguments", "_first", "_over")

    def __init__(self, transport: Transport, call: Call, full: Tensor, layout: Layout) -> None:
        shard = torch.empty(layout.shard_numel, dtype=full.dtype, device=full.device)
        self._arguments = (transport, call, full, shard, layout)
        self._first = transport.reduce_scatter(call, full, shard, layout)
        self._over = False

    def wait(self) -> None:
        transport, call, full, shard, layout = self._arguments
        self._first.wait()
        transport.all_gather(call, shard, full, layout).wait()
        self._over = True

    def done(self) -> bool:
        return self._over
