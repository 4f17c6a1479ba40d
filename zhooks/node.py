"""The node of autograd's graph that stands for a flat's parameters: gathered values out, gradients back to the ``Reducer``.

``attach.py`` makes it, ``flat.py`` calls it for the values of a forward that is differentiated.  It never gathers and never
reduces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zhooks.flat import Flat
from zhooks.grad import accumulates, put_off_hooks
from zhooks.reduce import Reducer
from zhooks.refusals import too_old


class Node:
    """What ``Flat.node`` is: the gathered values as a node of the graph.

    A graph keeps its nodes, where no collector sees what they refer to; a module may keep a graph (the weight that
    ``nn.utils.spectral_norm`` leaves there).  So nodes reach the attachment through this alone, until it is closed.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer: Reducer | None = reducer

    def __call__(self, flat: Flat) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = Gather.apply(self, flat, *flat.params)  # type: ignore[no-untyped-call]
        return out

    @property
    def scaling(self) -> Any:
        """Who scales what the nodes are given; None once closed."""
        return None if self.reducer is None else self.reducer.scaling

    def close(self) -> None:
        """The attachment is over."""
        self.reducer = None


class Gather(torch.autograd.Function):
    """Parameters in, full plain tensors out; backward reduces.  Forwards that are open at the same time share one."""

    @staticmethod
    def forward(ctx: Any, node: Node, flat: Flat, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.node, ctx.flat = node, flat
        ctx.set_materialize_grads(False)
        return flat.graph_views()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        reducer = ctx.node.reducer
        if reducer is None:
            raise too_old(f"backward of unit {ctx.flat.name}")
        if ctx.flat.node_asked:
            put_off_hooks(ctx, ctx.flat)
        return (None, None, *reducer.ready(ctx.flat, ctx.flat.views.parts(grads), accumulates(ctx)))
