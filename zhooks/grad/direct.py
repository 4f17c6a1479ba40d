"""Gradients that a custom autograd ``Function`` returns for a parameter it was given as it is, outside its module's forward.

``run/runtime.py`` calls it where a trainable parameter is read with grad off, as fused losses do (TRL's, Liger's).  What
autograd would add to ``.grad`` is this rank's alone, and whole: it goes to the ``Reducer``, as the gradients of the flat's node
do.  It never reduces, and leaves gradients alone that are shards already.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from offload.errors import ShardedOpError
from zhooks.grad.node import Node
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["refuse_saved", "watch_direct"]

#: As torch does from there on; older ones are tried, see `_unpacking_loses_hooks`.
_KEEPS_HOOKS = Version(torch.__version__) >= Version("2.13")


def watch_direct(flat: Flat, node: Node) -> None:
    """Hear of gradients that autograd accumulates into parameters of ``flat`` itself; again changes nothing."""
    with torch._C.DisableTorchFunctionSubclass():
        for param in flat.params:
            # What the user registers on a sharded parameter is kept elsewhere: torch's own table is ours.
            bare: Any = param
            if param.requires_grad and not bare._backward_hooks:
                watched = _Direct(param, node)
                param.register_hook(watched.before)
                param.register_post_accumulate_grad_hook(watched.after)


def refuse_saved(param: Any) -> None:
    """A graph saves the parameter itself.

    Raises:
        ShardedOpError: torch would lose the hooks of `watch_direct` when the parameter is unpacked.
    """
    if _KEEPS_HOOKS:
        return
    with torch._C.DisableTorchFunctionSubclass():
        watched = isinstance(param, ShardedTensor) and param.is_leaf and bool(param._backward_hooks)
    if watched and _unpacking_loses_hooks():
        name = param.local_shard.spec.name
        raise ShardedOpError(
            f"This torch loses the gradient hooks of parameter {name}. Expected a torch that keeps a parameter's "
            f"hooks where a custom autograd Function saves it, found {torch.__version__}, which loses them: its gradient would "
            "be only this rank's. Pass `weight * 1` to the Function, or install torch 2.13."
        )


@cache
def _unpacking_loses_hooks() -> bool:
    """Whether a leaf has no hooks any more once hooks like ours have unpacked it, as in torch 2.8."""
    heard: list[Tensor] = []

    class _Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, leaf: Tensor) -> Tensor:
            ctx.save_for_backward(leaf)
            return leaf.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert ctx.saved_tensors
            return grad

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        leaf.register_hook(heard.append)
        saves: Any = _Saves
        saves.apply(leaf).backward()
    return not heard


class _Direct:
    """One parameter: its gradient is put aside while autograd accumulates, and put back after."""

    def __init__(self, param: Tensor, node: Node) -> None:
        self._param, self._node = param, node
        self._kept: Tensor | None = None
        self._plain = False

    def before(self, grad: Tensor | None) -> None:
        self._plain = False
        param: Any = self._param
        if grad is None or isinstance(grad, ShardedTensor) or not param.local_shard.owner or self._node.reducer is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if not _accumulates(param):
                if not param.local_shard.owner.layout.world > 1:
                    return
                name = param.local_shard.spec.name
                raise ShardedOpError(
                    f"Cannot take autograd.grad with respect to {name}. Expected it to be used in its module's "
                    "forward, found a custom autograd Function that was passed the parameter itself, whose gradient is only "
                    "this rank's. Call backward(), or pass `weight * 1` to the Function."
                )
            self._kept, self._plain, param.grad = param.grad, True, None

    def after(self, param: Any) -> None:
        if not self._plain:
            return
        with torch._C.DisableTorchFunctionSubclass():
            grad, param.grad = param.grad, self._kept
            self._kept, self._plain = None, False
        reducer = self._node.reducer
        assert reducer is not None
        reducer.ready_directly(param.local_shard.owner, param.local_shard.spec.index, grad)


def _accumulates(param: Tensor) -> bool:
    """This backward adds to ``param.grad``: it is none of autograd.grad's."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:
        return False
