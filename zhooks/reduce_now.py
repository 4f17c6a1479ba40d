"""Reductions beside the plain ones: those autograd.grad waits for at once, and the sum of a range over its replicas.

``reduce.py`` calls it, on every rank at the same place of its canonical order.  It never touches a parameter's ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.device import beside
from zhooks.comm import REDUCE, Alone, Call, Comm, Work, all_reduce_flat
from zhooks.flat import Flat
from zhooks.grad import Gradient, hooked
from zhooks.layout import flat_layout
from zhooks.reduce_pieces import Long
from zhooks.sharded import ShardedTensor

Mean = Callable[[Tensor], Tensor]


def begin_replicas(comm: Comm, flat: Flat, out: Tensor, work: Work) -> Work:
    """When ``work`` has made the reduced range ``out``, start summing it over the replicate axis, in place.  Collective.

    The caller's stream waits for neither before it waits for what is returned.
    """
    replicate = comm.replicate
    if isinstance(replicate, Alone):
        return work
    layout = flat_layout([out.numel()], world=replicate.axis.world, itemsize=out.element_size())
    with beside(out.device, "reduce"):
        work.wait()
        return all_reduce_flat(replicate, Call(REDUCE, "reduce replicas", flat.name, flat.number), out, layout)


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
        work, out = all_reduce_flat(comm.shard, call, once.partial, flat.layout), once.partial
    else:
        out = torch.empty(flat.shard_numel, dtype=flat.kind.reduce, device=flat.kind.device)
        work = comm.shard.reduce_scatter(call, once.partial, out, flat.layout)
    begin_replicas(comm, flat, out, work).wait()
    return out


def _long(comm: Comm, once: Gradient, grads: Sequence[Tensor | None], call: Call) -> Tensor:
    flat = once.flat
    once.hand(grads)
    out = torch.empty(flat.shard_numel, dtype=flat.kind.reduce, device=flat.kind.device)
    long = Long(once, 1.0, out)
    for piece in long.pieces():
        partial, part = long.fill(piece)
        begin_replicas(comm, flat, part, long.start(comm.shard, call, piece, partial, part)).wait()
        long.land(piece, partial, part)
    return out
