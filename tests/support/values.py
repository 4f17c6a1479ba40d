"""Full values of models and tensors, sharded or not, and whether two lists of them hold the same bits.

Tests of what training and saving leave behind compare with it; it never attaches or trains anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zhooks


def full(model: nn.Module) -> list[Tensor]:
    """The full values of a model's parameters, which are sharded, every one of them.  Collective."""
    return [param.full_tensor() for param in model.parameters()]


def copies(tensors: Iterable[Any]) -> list[Tensor]:
    """Full values of sharded tensors, copies of plain ones.  Collective where a tensor is sharded."""
    return [t.full_tensor() if isinstance(t, zhooks.ShardedTensor) else t.detach().clone() for t in tensors]


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether both hold the same values, one by one; fails where one holds more than the other."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
