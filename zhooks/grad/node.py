"""The node of autograd's graph that stands for a flat's parameters: gathered values out, gradients back to the ``Reducer``.

``run/runtime.py`` makes it, ``unit/flat.py`` calls it for the values of a forward that is differentiated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zhooks.grad.stacks import accumulates
from zhooks.grad.user_hooks import put_off_hooks
from zhooks.refusals import too_old
from zhooks.unit import Flat

if TYPE_CHECKING:
    from zhooks.grad.reduce import Reducer
    from zhooks.grad.scaling import Scaling


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
    def scaling(self) -> Scaling | None:
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
        return flat.fresh_views()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        reducer = ctx.node.reducer
        if reducer is None:
            raise too_old(f"backward of unit {ctx.flat.name}")
        ctx.flat.backward_came(ctx)
        if ctx.flat.node_asked:
            put_off_hooks(ctx, ctx.flat)
        parts, accumulating = ctx.flat.plain_grads(grads), accumulates(ctx)
        if accumulating:
            # As a leaf that was frozen after its forward: what the graph has for it is dropped.
            # Asked past the sharded tensor's own functions, which would take longer than all else here.
            with torch._C.DisableTorchFunctionSubclass():
                wanted = [param.requires_grad for param in ctx.flat.params]
            parts = [part if want else None for part, want in zip(parts, wanted, strict=True)]
        return (None, None, *reducer.ready(ctx.flat, parts, accumulating))
