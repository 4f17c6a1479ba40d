"""The reduction of one parameter larger than any buffer may be: piece by piece, through staging of bounded size.

``reduce.py`` launches and lands the pieces in its canonical order; this room fills them from what autograd handed over, and
says where what comes back belongs.  It never waits for other ranks.

Note: [The same bits]
    A piece holds the same elements of every rank's range as the whole would, cast and added in the same order, and transports
    that add in rank order (shm, p2p) do so element by element: how a gradient is cut does not show in it.  The backend's own
    collectives promise no order of additions, cut or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.arena import Use
from offload.errors import ShardedOpError
from zhooks.comm import DONE, Call, Transport, Work, all_reduce_flat
from zhooks.grad import Gradient, has_hooks
from zhooks.pieces import Piece, even, in_order, pieces_of, read
from zhooks.sharded import ShardedTensor


class Long:
    """One reduction of a long flat buffer.

    Args:
        scale: what pieces are multiplied by before they are sent.
        into: where the result goes, [shard_numel] in the reduce dtype; None is the gradient the parameter has, or gets.
    """

    def __init__(self, gradient: Gradient, scale: float, into: Tensor | None = None) -> None:
        flat = gradient.flat
        self.gradient, self.flat, self._scale = gradient, flat, scale
        self._run = flat.ownership.whole or flat.layout.world == 1
        self._parts = gradient.take_parts()
        # Every piece takes buffers of the same size, the last too: so the pool has them again.
        self._room = flat.pool.bound // flat.kind.wide
        self._left = 0
        self._adds = False
        #: The gradient's shard is to be claimed when all ranks are known.
        self.claims = False
        #: Where the result is made, for the user's hooks or for autograd.
        self.apart = into
        if into is None:
            self._choose(kept=any(part is gradient._shard for part in self._parts))
        plain = flat.kind.reduce == flat.kind.master and (self.apart is not None or (self.claims and not gradient.tiered))
        #: What comes back needs no landing: it is received where it belongs.
        self.direct = into is not None or plain

    def _choose(self, *, kept: bool) -> None:
        """Whether the result is the gradient, is added to one, or goes through the user's hooks first."""
        gradient, flat = self.gradient, self.flat
        if has_hooks(flat):
            self.apart = torch.empty(flat.shard_numel, dtype=flat.kind.master, device=flat.kind.device)
        elif kept or (not gradient.reserved and gradient.free()):
            gradient.reserved = self.claims = True
        else:
            self._adds = True

    def pieces(self) -> Iterator[Piece]:
        """The pieces, in order; each is filled, started and landed."""
        flat = self.flat
        layout = even(flat.layout.padded, 1) if self._run else flat.layout
        pieces = list(pieces_of(layout, self._room, flat.layout.align * (flat.layout.world if self._run else 1)))
        self._left = len(pieces)
        yield from pieces

    def fill(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """What this rank sends of a piece, and where the sum will be."""
        numel = piece.numel
        own = self._target()[piece.local : piece.local + numel] if self.direct else None
        if self._run:
            partial = own if own is not None else self._take(self._room)[:numel]
            self._copy(piece.local, partial)
            out = partial
        else:
            partial = self._take(self._room)[: numel * len(piece.starts)]
            for rank, start in enumerate(piece.starts):
                self._copy(start, partial[rank * numel : (rank + 1) * numel])
            out = own if own is not None else self._take(self._room // len(piece.starts), "communication on device")[:numel]
        if self._scale != 1.0:
            partial.mul_(self._scale)
        return partial, out

    def start(self, transport: Transport, call: Call, piece: Piece, partial: Tensor, out: Tensor) -> Work:
        """Start summing a piece over the ranks."""
        if self.flat.layout.world == 1:
            return DONE
        if self._run:
            return all_reduce_flat(transport, call, partial, even(piece.numel, self.flat.layout.world))
        return transport.reduce_scatter(call, partial, out, piece.layout)

    def land(self, piece: Piece, partial: Tensor, out: Tensor) -> bool:
        """The sum of a piece is there; whether it was the last."""
        if not self.direct:
            self._settle(self._target()[piece.local : piece.local + piece.numel], out)
            self.flat.pool.give(out)
        if partial is not out:
            self.flat.pool.give(partial)
        self._left -= 1
        if not self._left:
            self._parts = []
        return not self._left

    def _settle(self, target: Tensor, out: Tensor) -> None:
        known = out[: target.numel()].to(target.device)
        target.add_(known) if self._adds else target.copy_(known)

    def _target(self) -> Tensor:
        """The range that the result is put into, or added to, in memory."""
        if self.apart is not None:
            return self.apart
        grad = self.flat.params[0].grad
        if self.claims or self.gradient.reserved:
            return self.gradient.shard
        if not isinstance(grad, ShardedTensor):
            raise ShardedOpError(
                f"{self.flat.specs[0].name}.grad: expected a sharded gradient, found {type(grad).__name__}. A custom autograd "
                "Function read the parameter outside its module's forward; read it inside, or set grad to None."
            )
        return grad._local

    def _take(self, numel: int, what: str = "gradient on device") -> Tensor:
        flat = self.flat
        taken = flat.pool.take(numel, flat.kind.reduce, flat.kind.device, Use.SUMS)
        if flat.bus.active:
            flat.bus.hold(what, flat.name, taken.untyped_storage())
        return taken

    def _copy(self, start: int, out: Tensor) -> None:
        """Elements of the flat buffer from ``start`` on: the first part copied, others added, zeros where there is nothing."""
        spec = self.flat.specs[0]
        known = min(max(self.flat.layout.numels[0] - start, 0), out.numel())
        if not self._parts:
            known = 0
        for number, part in enumerate(self._parts):
            if number == 0 and part.data_ptr() + start * part.element_size() == out.data_ptr():
                continue  # what no_sync summed up lies where it is to be reduced
            values = in_order(part, spec.part_stride) if part.shape == spec.part_shape else part
            read(values, start, out[:known], add=number > 0)
        out[known:].zero_()


@dataclass(slots=True)
class Landing:
    """A reduction under way."""

    gradient: Gradient
    work: Work
    partial: Tensor
    out: Tensor
    into_shard: bool
    whole: bool
    long: Long | None = None
    piece: Piece | None = None
    #: The sum over the replicas has been started: ``work`` is that.
    replicas: bool = False
