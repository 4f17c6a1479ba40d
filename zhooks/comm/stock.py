"""The backend's own collectives: that of the device's type (NCCL on CUDA), Gloo where the policy asks for it.

``choose_transport.py`` opens it with process groups of its own for gathers and for reductions, which need no common order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.work import Work
from zhooks.comm.lost_rank import AgreedFailure, BackendWork, interrupt_group
from zhooks.comm.ranges import ScatteredBytes, Staged, copy
from zhooks.comm.transport import CONTROL, GATHER, OPS, Call, Nbytes, Transport
from zhooks.layout import Axis, Layout

#: A tensor of the host up to this size goes by the host's network, one of a GPU's model above it by the GPU's.
HOST_NBYTES = 1 << 20

# torch 2.13 renamed these; the old names warn there and are the only ones before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Stock:
    """The backend's own collectives, with groups of their own for gathers and reductions, which need no common order.

    Args:
        groups: by channel that is used on this axis; that of CONTROL takes tensors of the host, too.
    """

    name = "stock"
    nbytes = 0
    closed = False

    def __init__(
        self, axis: Axis, groups: dict[int, dist.ProcessGroup], device: torch.device, failure: AgreedFailure
    ) -> None:
        self.axis, self._device, self._failure = axis, device, failure
        self._groups, self.channels = groups, frozenset(groups)
        # The backend pairs calls by their order alone: two gathers of one size would pass each other's values unseen.
        self._order = 0

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        group = self._groups[call.channel]
        with self._failure.starting(call, self.axis):
            works = [_all_gather(all_, own, group=group, async_op=True) for all_, own in self._pairs(full, shard, layout)]
        if works and call.channel == GATHER:
            self._order = zlib.crc32(f"{call.what} {call.key}".encode(), self._order)
        return self._track(call, full, works)

    def reduce_scatter(self, call: Call, full: Tensor, out: Tensor, layout: Layout) -> Work:
        group = self._groups[call.channel]
        with self._failure.starting(call, self.axis):
            works = [_reduce_scatter(own, all_, group=group, async_op=True) for all_, own in self._pairs(full, out, layout)]
        return self._track(call, full, works)

    def order(self) -> int:
        order, self._order = self._order, 0
        return order

    def _pairs(self, full: Tensor, shard: Tensor, layout: Layout) -> Iterator[tuple[Tensor, Tensor]]:
        """Each segment of the full buffer with this rank's range of it in the shard."""
        step = 0
        for segment in layout.segments:
            numel = segment.numel // self.axis.world
            yield full[segment.start : segment.start + segment.numel], shard[step : step + numel]
            step += numel

    def all_reduce(self, call: Call, tensor: Tensor, op: str) -> None:
        moved = self._sent(tensor)
        self.start_all_reduce(call, moved, op).wait()
        if moved is not tensor:
            tensor.copy_(moved)

    def start_all_reduce(self, call: Call, tensor: Tensor, op: str) -> Work:
        self._refuse_given_up(call)
        with self._failure.starting(call, self.axis):
            work = dist.all_reduce(tensor, op=OPS[op], group=self._groups[CONTROL], async_op=True)
        return self._track(call, tensor, [work])

    def all_reduce_flat(self, call: Call, full: Tensor, layout: Layout) -> Work:
        with self._failure.starting(call, self.axis):
            work = dist.all_reduce(full, group=self._groups[call.channel], async_op=True)
        return self._track(call, full, [work])

    def exchange(
        self, call: Call, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], nbytes: Nbytes
    ) -> Work:
        # The backend takes one tensor each way, and splits of it; what is this rank's own need not pass through it.
        rank = self.axis.rank
        source = ScatteredBytes([one for reader, ranges in enumerate(sends) if reader != rank for one in ranges])
        target = ScatteredBytes([one for writer, ranges in enumerate(receives) if writer != rank for one in ranges])
        going = [0 if reader == rank else count for reader, count in enumerate(nbytes[rank])]
        coming = [0 if writer == rank else row[rank] for writer, row in enumerate(nbytes)]
        sent = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device)
        received = torch.empty(target.nbytes, dtype=torch.uint8, device=self._device)
        source.read(0, sent)
        with self._failure.starting(call, self.axis):
            work = dist.all_to_all_single(received, sent, coming, going, group=self._groups[call.channel], async_op=True)
        copy(sends[rank], receives[rank])
        return Staged(self._track(call, sent, [work]), [(received, target)])

    def broadcast(self, call: Call, tensor: Tensor) -> None:
        self._refuse_given_up(call)
        moved = self._sent(tensor).contiguous()
        with self._failure.starting(call, self.axis):
            work = dist.broadcast(moved, src=self.axis.ranks[0], group=self._groups[CONTROL], async_op=True)
        self._track(call, moved, [work]).wait()
        if moved is not tensor:
            tensor.copy_(moved)

    def _refuse_given_up(self, call: Call) -> None:
        """A collective of the device's that ran out of time wrote nothing, and held nobody up: what follows may not be kept."""
        for group in self._groups.values() if self._device.type != "cpu" else ():
            backend: Any = group._get_backend(self._device)
            # NCCL's has it; others may not.
            if hasattr(backend, "get_error") and backend.get_error().name != "SUCCESS":
                found = RuntimeError(f"an earlier collective of {self.axis.name} on {self._device.type} did not complete")
                raise self._failure.ended_by(found, call, self.axis)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Where a tensor is sent from: facts of the host from there, whole parameters of it by the device's faster links."""
        return tensor if tensor.device == self._device or tensor.nbytes <= HOST_NBYTES else tensor.to(self._device)

    def interrupt(self) -> None:
        for group in self._groups.values() if self._device.type == "cpu" else ():
            interrupt_group(group, self.axis)

    def renew(self, opened: Transport) -> None:
        assert isinstance(opened, Stock)
        for group in dict.fromkeys(self._groups.values()):
            dist.destroy_process_group(group)
        self._groups, self._order = opened._groups, 0

    def close(self) -> None:
        self.closed = True
        for group in dict.fromkeys(self._groups.values()):
            dist.destroy_process_group(group)
        self._groups = {}

    def _track(self, call: Call, moved: Tensor, works: list[dist.Work]) -> Work:
        return BackendWork(call, self.axis, self._failure, works, [], ordered=moved.device.type != "cpu")
