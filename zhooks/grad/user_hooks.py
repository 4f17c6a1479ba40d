"""The user's hooks on parameters and their accumulation nodes: run once a gradient is reduced and about to be put in place.

``grad_buffer.py`` asks for them where it puts a gradient, ``node.py`` where a backward meets a node that somebody has asked
for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["has_hooks", "hooked", "put_off_hooks"]


def has_hooks(flat: Flat) -> bool:
    """The user watches or changes gradients of these parameters."""
    return any(spec.hooks or spec.post_hooks for spec in flat.specs)


def hooked(grad: ShardedTensor) -> ShardedTensor:
    """Pass a reduced gradient through the user's hooks, as autograd would before accumulating it."""
    for hook in tuple(grad.local_shard.spec.hooks.values()):
        replaced = hook(grad)
        if isinstance(replaced, ShardedTensor):
            grad = replaced
        elif replaced is not None:
            grad = ShardedTensor(grad.local_shard.spec.take(replaced).clone(), grad.local_shard.spec)
    return grad


class _Later:
    """A hook of autograd's accumulation node, which runs before ranks have reduced anything: it does nothing there.

    It stays in the node's own table, so that the user's handle removes it; the parameter's hooks call it on time.
    """

    def __init__(self, hook: Callable[..., Any], table: weakref.ref[Any], key: int) -> None:
        self._hook, self._table, self.key = hook, table, key

    def __call__(self, *_: Any) -> None:
        """Autograd's call, too early."""

    def landed(self, param: Tensor) -> None:
        """The gradient is there."""
        table = self._table()
        if table is not None and table.get(self.key) is self:
            with torch._C.DisableTorchFunctionSubclass():
                grad = param.grad
            self._hook((), (grad,))

    def lands(self, grad: Tensor) -> Any:
        """The gradient is reduced and about to be put in place; what the hook puts there instead, None for nothing."""
        table = self._table()
        if table is None or table.get(self.key) is not self:
            return None
        replaced = self._hook((grad,))
        return replaced[0] if isinstance(replaced, tuple) else replaced


def put_off_hooks(node: Any, flat: Flat) -> None:
    """Let hooks that the user has put on accumulation nodes run when the gradient is reduced and in place.

    Somebody has asked for the node of a parameter of ``flat`` (``p.view_as(p)``), as torch's optimizers in backward do.
    """
    for (edge, _), spec in zip(node.next_functions, flat.specs, strict=True):
        if edge is None:
            continue
        for later in _put_off(edge.register_prehook):
            spec.hooks[-1 - later.key] = later.lands
        for later in _put_off(edge.register_hook):
            spec.post_hooks[-1 - later.key] = later.landed


def _put_off(register: Callable[[Any], Any]) -> Iterator[_Later]:
    """What takes the place of a node's hooks of one kind, where nothing has yet."""
    # torch shows the table of a node's hooks only to who registers one.
    mine = register(_Later.__call__)
    table = mine.hooks_dict_ref()
    mine.remove()
    for key, hook in list(table.items()):
        if not isinstance(hook, _Later):
            table[key] = later = _Later(hook, mine.hooks_dict_ref, key)
            yield later
