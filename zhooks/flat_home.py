"""The home of one flat buffer's ranges: the ranks that share it, and how a range is combined and made whole over them.

``flat.py`` makes it, every tensor with a range of the buffer keeps it.  It never leads to a parameter; see Note [Home and
owner] in ``home.py``.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from offload.errors import ShardedOpError
from zhooks.comm import CONTROL, Call, Transport
from zhooks.kind import Kind, Ownership
from zhooks.layout import Layout
from zhooks.mesh import PP, SHARD
from zhooks.overflow import Watch
from zhooks.sharded import ShardedTensor

__all__ = ["FlatHome"]


class FlatHome:
    """See ``home.Home``."""

    def __init__(
        self, name: str, number: int, kind: Kind, layout: Layout, ownership: Ownership, transport: Transport, buffer_nbytes: int
    ) -> None:
        self.name, self.number, self.buffer_nbytes = name, number, buffer_nbytes
        self.sharded = not ownership.whole and layout.world > 1
        #: Transports of the other axes, by name, for what is settled over more than the data ranks.
        self.beside: dict[str, Transport] = {}
        self._device, self._layout, self._transport = kind.device, layout, transport
        self._watch: weakref.ref[Watch] | None = None

    @property
    def watch(self) -> Watch | None:
        """Who watches the gradients, as long as there is one."""
        return None if self._watch is None else self._watch()

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._watch = None if watch is None else weakref.ref(watch)

    def assemble(self, tensor: ShardedTensor) -> Tensor:
        layout, spec = self._layout, tensor._spec
        self._check(self._transport, spec.name)
        piece = torch.zeros(layout.shard_numel, dtype=tensor.dtype, device=self._device)
        start, local = spec.pieces[0].local if spec.pieces else 0, tensor._local
        piece[start : start + local.numel()].copy_(local)
        full = torch.empty(layout.padded, dtype=tensor.dtype, device=self._device)
        self._transport.all_gather(Call(CONTROL, "full_tensor", spec.name, self.number), piece, full, layout).wait()
        return spec.whole(spec.within(full, layout.starts[spec.index]).clone())

    def all_reduce(self, tensor: Tensor, op: str, axes: tuple[str, ...] = (SHARD,)) -> None:
        call = Call(CONTROL, f"all-reduce {op}", self.name, self.number)
        for axis in axes:
            if axis == PP:
                # Units of other stages have other names.
                call = Call(CONTROL, f"all-reduce {op}", "all stages")
            if axis != SHARD and axis in self.beside:
                self._check(self.beside[axis], self.name)
                self.beside[axis].all_reduce(call, tensor, op)
            elif axis == SHARD and self.sharded:
                self._check(self._transport, self.name)
                self._transport.all_reduce(call, tensor, op)

    def _check(self, transport: Transport, name: str) -> None:
        if transport.closed:
            raise ShardedOpError(
                f"tensor of {name}: expected an attached model, found that it was detached and its ranks have parted. Take "
                "full_tensor() or norms before detach(), or what the plain model has; to_local() still is this rank's range."
            )

    def spans(self, axis: str) -> bool:
        return axis in self.beside and self.beside[axis].axis.world > 1

    def first(self, axis: str) -> bool:
        if axis == SHARD:
            return not self.sharded or self._transport.axis.rank == 0
        return axis not in self.beside or self.beside[axis].axis.rank == 0
