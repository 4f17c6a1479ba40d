"""Reductions that are waited for at once: of gradients that autograd.grad asked for, and over the replicas of a range.

``reduce.py`` calls it, on every rank at the same place of its canonical order.  It never touches a parameter's ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zhooks.comm import REDUCE, Alone, Call, Comm, all_reduce_flat
from zhooks.flat import Flat
from zhooks.grad import Gradient, hooked
from zhooks.layout import flat_layout
from zhooks.reduce_pieces import Long
from zhooks.sharded import ShardedTensor

Mean = Callable[[Tensor], Tensor]


def sum_replicas(comm: Comm, flat: Flat, out: Tensor) -> None:
    """Sum a reduced range over the replicate axis, in place.  Collective."""
    replicate = comm.replicate
    if isinstance(replicate, Alone):
        return
    layout = flat_layout([out.numel()], world=replicate.axis.world, itemsize=out.element_size())
    all_reduce_flat(replicate, Call(REDUCE, "reduce replicas", flat.name, flat.number), out, layout).wait()


def selected(comm: Comm, flat: Flat, grads: Sequence[Tensor | None], mean: Mean) -> list[ShardedTensor | None]:
    """What autograd.grad or backward(inputs=...) gets: this rank's ranges of gradients, ``mean`` of their sums."""
    once = Gradient(flat, flat.pool)
    call = Call(REDUCE, "reduce for autograd.grad", flat.name, flat.number)
    out = _long(comm, once, grads, call) if flat.long else _whole(comm, once, grads, call)
    out = mean(out).to(flat.kind.master)
    made = [ShardedTensor(flat.local(index, out), spec) for index, spec in enumerate(flat.specs)]
    return [None if grad is None else hooked(tensor) for grad, tensor in zip(grads, made, strict=True)]


def _whole(comm: Comm, once: Gradient, grads: Sequence[Tensor | None], call: Call) -> Tensor:
    flat = once.flat
    once.partial = torch.zeros(flat.layout.padded, dtype=flat.kind.reduce, device=flat.kind.device)
    once.add(grads)
    if flat.ownership.whole:
        all_reduce_flat(comm.shard, call, once.partial, flat.layout).wait()
        out = once.partial
    else:
        out = torch.empty(flat.shard_numel, dtype=flat.kind.reduce, device=flat.kind.device)
        comm.shard.reduce_scatter(call, once.partial, out, flat.layout).wait()
    sum_replicas(comm, flat, out)
    return out


def _long(comm: Comm, once: Gradient, grads: Sequence[Tensor | None], call: Call) -> Tensor:
    flat = once.flat
    once.hand(grads)
    out = torch.empty(flat.shard_numel, dtype=flat.kind.reduce, device=flat.kind.device)
    long = Long(once, 1.0, out)
    for piece in long.pieces():
        partial, part = long.fill(piece)
        long.start(comm.shard, call, piece, partial, part).wait()
        sum_replicas(comm, flat, part)
        long.land(piece, partial, part)
    return out
