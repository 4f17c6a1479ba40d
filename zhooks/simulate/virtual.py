"""Collectives on paper: what takes how long, while every other rank of its stage is what this one is.

``on_paper``, one of ``comm.OPENERS``, opens it for models on the virtual device, over a process group of the "fake" backend.
Nothing moves: the machine is told how long each call takes and what memory it uses, on a stream for each channel as NCCL has
one for each group.  Small facts of the real host are combined as if all ranks of a stage had said the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import VirtualWork
from offload.virtual import NAME, Happening, Machine, Moment, access, running
from offload.work import DONE, Work
from zhooks.comm import CHANNELS, CONTROL, Call, Nbytes, Opening, Transport, TwoSteps
from zhooks.layout import Axis, Layout
from zhooks.simulate.virtual_stages import channel_of

__all__ = ["VirtualTransport", "on_paper"]

_CHANNEL = {0: "gather", 1: "reduce", CONTROL: "control"}


class VirtualTransport:
    """The collectives of one axis."""

    name = "virtual"
    channels = CHANNELS
    nbytes = 0
    closed = False

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._machine = running()
        self._channel = channel_of(axis.ranks)

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        return self._start(call, "all_gather", full.nbytes, reads=[shard], writes=[full])

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        return self._start(call, "reduce_scatter", full.nbytes, reads=[full], writes=[out])

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        if not self._machine.accelerated:
            # Of a CPU's ranks, through shared memory; with memory for a range.
            return TwoSteps(self, call, full, layout)
        return self._start(call, "all_reduce", full.nbytes, reads=[], writes=[full])

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        most = max(*(sum(row) for row in nbytes), *(sum(column) for column in zip(*nbytes, strict=True)))
        reads, writes = ([tensor for each in ends for tensor in each] for ends in (sends, receives))
        return self._start(call, "all_to_all", most, reads=reads, writes=writes)

    def order(self) -> int:
        return 0

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        if tensor.device.type == NAME:
            self._start(call, "all_reduce", tensor.nbytes, reads=[], writes=[tensor]).wait()
            return
        what, host = f"{call.what} {call.key}", self._machine.host
        every = None if self._channel is None else self._channel.values("all_reduce", [tensor])
        self._machine.communicate("all_reduce", self.axis.ranks, tensor.nbytes, host, what, [])
        if every is not None:
            rows = torch.stack([theirs for (theirs,) in every])
            tensor.copy_(rows.sum(0) if op == "sum" else rows.amax(0) if op == "max" else rows.amin(0))
        elif op == "sum":
            tensor.mul_(self.axis.world)

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        self.all_reduce(call, tensor, op)
        return DONE

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        if tensor.device.type == NAME:
            self._start(call, "broadcast", tensor.nbytes, reads=[], writes=[tensor]).wait()
        elif self._channel is not None:
            tensor.copy_(self._channel.values("broadcast", [tensor])[0][0])

    def interrupt(self) -> None:
        return None

    def renew(self, opened: Transport) -> None:
        return None

    def close(self) -> None:
        self.closed = True

    def _start(self, call: Call, kind: str, nbytes: int, *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
        """On the stream of the channel, after what the current one has been given."""
        machine = self._machine
        stream = machine.side(f"{_CHANNEL[call.channel]} over {self.axis.name}") if machine.costs.accelerated else machine.host
        machine.order(stream, machine.current)
        if self._channel is not None:
            self._channel.meet(kind, stream)
        accesses = [access(tensor, writes=False) for tensor in reads if tensor.numel()]
        accesses += [access(tensor, writes=True) for tensor in writes if tensor.numel()]
        happening = machine.communicate(kind, self.axis.ranks, nbytes, stream, f"{call.what} {call.key}", accesses)
        return _Collective(machine, machine.moment(stream), [*reads, *writes], happening)


class _Collective(VirtualWork):
    """Its tensors are kept until the caller's stream comes after it, as torch's NCCL group does."""

    def __init__(self, machine: Machine, moment: Moment, tensors: list[Tensor], happening: Happening) -> None:
        super().__init__(machine, moment, happening=happening)
        self._kept = tensors

    def wait(self) -> None:
        super().wait()
        self._kept = []


def on_paper(opening: Opening) -> VirtualTransport | None:
    """The transport of an axis of the virtual device; None for any other."""
    return VirtualTransport(opening.axis) if opening.device.type == NAME else None
