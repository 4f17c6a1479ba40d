"""Gloo's send and receive as collectives: each rank hands every peer exactly the range that peer needs.

``open_transport.py`` opens it for ranks on several hosts.  Messages carry a tag made of the call, so a rank that makes
another call is never answered with the wrong bytes; it never uses Gloo's own ring collectives but to make small things
equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from offload.work import Work
from zhooks.comm import (
    CHANNELS,
    CONTROL,
    OPS,
    AgreedFailure,
    BackendWork,
    Call,
    Nbytes,
    ScatteredBytes,
    Staged,
    Transport,
    TwoSteps,
    copy,
    interrupt_group,
    messages,
)
from zhooks.layout import Axis, Layout

#: A tag is what torch lets through, 31 bits: the channel, the call's place in its sequence, and which call it is.
CHANNEL_BITS, SEQUENCE_BITS, CALL_BITS = 2, 6, 23


def tag_of(call: Call, sequence: int) -> int:
    """The tag of a channel's ``sequence``-th call.

    Gathers and reductions have tags of their own up to 2**23 numbers, which are 32,768 units: no rank takes one unit's bytes
    for another's.  Of a unit's parameters (full_tensor) a hash of the name must do.  The sequence tells a unit's passes
    apart; it may wrap, for no rank is more than a few calls ahead.
    """
    kind = zlib.crc32((f"{call.what} {call.key}" if call.channel == CONTROL else call.what).encode())
    which = (call.number + kind) % (1 << CALL_BITS)
    return (which << SEQUENCE_BITS | sequence % (1 << SEQUENCE_BITS)) << CHANNEL_BITS | call.channel


class PeerToPeer:
    """Collectives over one axis from tagged point-to-point messages; sums are taken in rank order."""

    name = "p2p"
    channels = CHANNELS
    nbytes = 0
    closed = False

    def __init__(self, axis: Axis, group: dist.ProcessGroup, failure: AgreedFailure) -> None:
        self.axis, self._group, self._failure = axis, group, failure
        self._sequence = [0, 0, 0]

    def _tag(self, call: Call) -> int:
        self._sequence[call.channel] += 1
        return tag_of(call, self._sequence[call.channel])

    def _peers(self) -> list[int]:
        world, rank = self.axis.world, self.axis.rank
        return [(rank + step) % world for step in range(1, world)]

    def _send(self, call: Call, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        with self._failure.starting(call, self.axis):
            work = dist.isend(tensor, self.axis.ranks[peer], group=self._group, tag=tag)
        assert work is not None
        return work

    def _receive(self, call: Call, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        with self._failure.starting(call, self.axis):
            work = dist.irecv(tensor, self.axis.ranks[peer], group=self._group, tag=tag)
        assert work is not None
        return work

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        works, rank, tag, whose = [], self.axis.rank, self._tag(call), list[int]()
        ranges = [layout.ranges(r) for r in range(self.axis.world)]
        step = 0
        for start, stop in ranges[rank]:
            own = shard[step : step + stop - start]
            for peer in self._peers():
                works.append(self._send(call, own, peer, tag))
                whose.append(self.axis.ranks[peer])
            if own.data_ptr() != full[start:stop].data_ptr():
                full[start:stop].copy_(own)
            step += stop - start
        for peer in self._peers():
            for start, stop in ranges[peer]:
                works.append(self._receive(call, full[start:stop], peer, tag))
                whose.append(self.axis.ranks[peer])
        return BackendWork(call, self.axis, self._failure, works, [shard, full], whose)

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        works, tag, whose = [], self._tag(call), list[int]()
        landed = {peer: torch.empty_like(out) for peer in self._peers()}
        for peer in self._peers():
            for start, stop in layout.ranges(peer):
                works.append(self._send(call, full[start:stop], peer, tag))
                whose.append(self.axis.ranks[peer])
        mine = layout.ranges(self.axis.rank)
        for peer in self._peers():
            step = 0
            for start, stop in mine:
                works.append(self._receive(call, landed[peer][step : step + stop - start], peer, tag))
                whose.append(self.axis.ranks[peer])
                step += stop - start
        pending = BackendWork(call, self.axis, self._failure, works, [full], whose)
        return _Sum(pending, full, out, landed, self.axis, mine)

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        return TwoSteps(self, call, full, layout)

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        works, rank, tag, whose = [], self.axis.rank, self._tag(call), list[int]()
        keep: list[Tensor] = []
        staged: list[tuple[Tensor, ScatteredBytes]] = []
        for peer in self._peers():
            for ranges in messages(sends[peer]):
                message = ranges.only
                if message is None:
                    message = torch.empty(ranges.nbytes, dtype=torch.uint8, device="cpu")
                    ranges.read(0, message)
                works.append(self._send(call, message, peer, tag))
                whose.append(self.axis.ranks[peer])
                keep.append(message)
        for peer in self._peers():
            for ranges in messages(receives[peer]):
                message = ranges.only
                if message is None:
                    message = torch.empty(ranges.nbytes, dtype=torch.uint8, device="cpu")
                    staged.append((message, ranges))
                works.append(self._receive(call, message, peer, tag))
                whose.append(self.axis.ranks[peer])
                keep.append(message)
        copy(sends[rank], receives[rank])
        return Staged(BackendWork(call, self.axis, self._failure, works, keep, whose), staged)

    def order(self) -> int:
        return 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        self.start_all_reduce(call, tensor, op).wait()

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        with self._failure.starting(call, self.axis):
            work = dist.all_reduce(tensor, op=OPS[op], group=self._group, async_op=True)
        return BackendWork(call, self.axis, self._failure, [work], [])

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        tag = self._tag(Call(CONTROL, call.what, call.key, call.number))
        if self.axis.rank == 0:
            works, whose = [self._send(call, tensor, peer, tag) for peer in self._peers()], self._peers()
        else:
            works, whose = [self._receive(call, tensor, 0, tag)], [0]
        peers = [self.axis.ranks[peer] for peer in whose]
        BackendWork(call, self.axis, self._failure, works, [tensor], peers).wait()

    def interrupt(self) -> None:
        interrupt_group(self._group, self.axis)

    def renew(self, opened: Transport) -> None:
        assert isinstance(opened, PeerToPeer)
        dist.destroy_process_group(self._group)
        self._group, self._sequence = opened._group, [0, 0, 0]

    def close(self) -> None:
        self.closed = True
        dist.destroy_process_group(self._group)


class _Sum:
    """A reduce-scatter under way: when all ranges are here they are added in rank order, the same on every rank."""

    __slots__ = ("_axis", "_full", "_landed", "_mine", "_out", "_pending")

    def __init__(
        self,
        pending: BackendWork,
        full: Tensor,
        out: Tensor,
        landed: dict[int, Tensor],
        axis: Axis,
        mine: tuple[tuple[int, int], ...],
    ) -> None:
        self._pending, self._full, self._out = pending, full, out
        self._landed, self._axis, self._mine = landed, axis, mine

    def wait(self) -> None:
        self._pending.wait()
        step = 0
        for start, stop in self._mine:
            low, high = step, step + stop - start
            values = [
                self._full[start:stop] if rank == self._axis.rank else self._landed[rank][low:high]
                for rank in range(self._axis.world)
            ]
            target = self._out[low:high]
            torch.add(values[0], values[1], out=target)
            for value in values[2:]:
                target.add_(value)
            step = high
        self._landed = {}

    def done(self) -> bool:
        return not self._landed
