"""Collectives of one rank: a copy, or nothing.  ``choose_transport.py`` uses it for an axis of one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offload.work import DONE, Work
from zhooks.comm.ranges import copy
from zhooks.comm.transport import CHANNELS, Call, Nbytes, Transport
from zhooks.layout import Axis, Layout


class Alone:
    """One rank: every collective is a copy, or nothing where source and destination are the same memory."""

    name = "alone"
    channels = CHANNELS
    nbytes = 0
    closed = False

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        if shard.data_ptr() != full.data_ptr():
            full.copy_(shard)
        return DONE

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return DONE

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        return DONE

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        copy(sends[0], receives[0])
        return DONE

    def order(self) -> int:
        return 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        return None

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        return DONE

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        return None

    def interrupt(self) -> None:
        return None

    def renew(self, opened: Transport) -> None:
        return None

    def close(self) -> None:
        return None
