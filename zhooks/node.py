"""The node of autograd's graph that stands for a flat's parameters: gathered values out, gradients back to the ``Reducer``.

``attach.py`` makes it, ``flat.py`` calls it for the values of a forward that is differentiated.  It never gathers and never
reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zhooks.flat import Flat
from zhooks.grad import accumulates, put_off_hooks
from zhooks.reduce import Reducer


class Gather(torch.autograd.Function):
    """Parameters in, full plain tensors out; backward reduces.  Forwards that are open at the same time share one."""

    @staticmethod
    def forward(ctx: Any, reducer: Reducer, flat: Flat, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.reducer, ctx.flat = reducer, flat
        ctx.set_materialize_grads(False)
        return flat.graph_views()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.flat.node_asked:
            put_off_hooks(ctx, ctx.flat)
        return (None, None, *ctx.reducer.ready(ctx.flat, ctx.flat.views.parts(grads), accumulates(ctx)))


def make_node(reducer: Reducer) -> Callable[[Flat], tuple[Tensor, ...]]:
    """What ``Flat.node`` is: the gathered values as a node of the graph."""

    def node(flat: Flat) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = Gather.apply(reducer, flat, *flat.params)  # type: ignore[no-untyped-call]
        return out

    return node
