"""Matrix optimizers beside plain PyTorch: a plain run of one, and whether parameters and states are its own, bit for bit.

Tests of owners compare with it; it never attaches anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, net, train
from tests.support.values import copies
from zhooks.optim import tensors_in


def plain(kind: str, steps: Iterable[int]) -> tuple[nn.Module, Optimizer]:
    model = net()
    optimizer = MATRIX_OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def orthogonal(grad: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(grad, full_matrices=False)
    return left @ right


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    """Collective where the model is sharded."""
    for value, other in zip(copies(model.parameters()), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other.detach(), rtol=0, atol=0)


def check_states(found: dict[str, Any], expected: Optimizer) -> None:
    """A full state is what the plain optimizer has, tensor by tensor."""
    wanted = expected.state_dict()
    assert found["state"].keys() == wanted["state"].keys()
    for index, states in wanted["state"].items():
        assert found["state"][index].keys() == states.keys()
        for one, other in zip(tensors_in(found["state"][index]), tensors_in(states), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
