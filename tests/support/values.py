"""Full values of models and tensors, sharded or not, and whether two lists of them hold the same bits.

Tests of what training and saving leave behind compare with it; it never attaches or trains anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zhooks import ShardedTensor


def sharded(tensor: Tensor | None) -> ShardedTensor:
    """``tensor``, which is sharded."""
    assert isinstance(tensor, ShardedTensor)
    return tensor


def grad_of(tensor: Tensor) -> Tensor:
    """The gradient of what has one."""
    assert tensor.grad is not None
    return tensor.grad


def full(model: nn.Module) -> list[Tensor]:
    """The full values of a model's parameters, which are sharded, every one of them.  Collective."""
    return [sharded(param).full_tensor() for param in model.parameters()]


def whole(tensor: Any) -> Tensor:
    """A detached copy of the full value of a parameter, gradient or state.  Collective where it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def copies(tensors: Iterable[Any]) -> list[Tensor]:
    """Full values of sharded tensors, copies of plain ones.  Collective where a tensor is sharded."""
    return [whole(tensor) for tensor in tensors]


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether both hold the same values, one by one; fails where one holds more than the other."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
