"""Tensors of the user's own made of an attached parameter: their gradients are theirs, or refused, never another's.

pytest runs it. What a copy computes and how it follows the model is test_sharded_state.py's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zhooks
from tests.support.averaging import average_gradients
from tests.support.on_ranks import on_ranks, place
from tests.support.values import grad_of, whole


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def rows() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(place()[0]))


@on_ranks(2)
def test_a_sharded_copy_gets_no_gradient_that_nobody_reduces() -> None:
    model = net()
    zhooks.attach(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    alone = model[0].weight.detach().clone().requires_grad_()
    made = nn.Parameter(model[0].weight.detach().clone())
    late = copy.deepcopy(frozen).requires_grad_(True)
    for use in (copy.deepcopy(model), late, lambda x: alone * 2.0, lambda x: made * 2.0):
        with pytest.raises(zhooks.ShardedOpError, match=r"backward expected .* found that of a copy of \d\.(weight|bias)"):
            use(rows()).sum().backward()
    frozen(rows())
    model(rows()).sum().backward()
    assert model[0].weight.grad is not None and alone.grad is None


@on_ranks(1, 2)
def test_a_copy_that_every_rank_has_whole_trains_by_itself() -> None:
    model, plain = net(), net()
    zhooks.attach(model, policy={"stage": 0})
    copied = copy.deepcopy(model)
    for one in (copied, plain):
        one(rows()).square().sum().backward()
    for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(ours.grad), grad_of(theirs))
    assert model[0].weight.grad is None


@on_ranks(1, 2, stage=(0, 3))
def test_a_detached_parameter_that_is_to_have_a_gradient_of_its_own_is_refused(stage: int) -> None:
    model = net()
    zhooks.attach(model, policy={"stage": stage})
    weight: Any = model[0].weight
    data = weight.data
    for make in (weight.detach().requires_grad_, lambda: nn.Parameter(weight), lambda: setattr(data, "requires_grad", True)):
        with pytest.raises(zhooks.ShardedOpError, match=r"requires_grad of a detached 0\.weight.*full_tensor\(\)"):
            make()
    own = weight.full_tensor().requires_grad_()
    F.linear(rows(), own).sum().backward()
    assert own.grad is not None and weight.grad is None


class Passing(nn.Module):
    """Gives its parameters to a checkpoint as inputs."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.weight, self.reentrant = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x, w: torch.tanh(x @ w), self.first(x), self.weight, use_reentrant=self.reentrant)
        return out


@on_ranks(1, 2, reentrant=(True, False))
def test_a_parameter_that_is_an_input_of_a_checkpoint_gets_its_gradient(reentrant: bool) -> None:
    model, plain = Passing(reentrant=reentrant), Passing(reentrant=reentrant)
    zhooks.attach(model)
    for one in (model, plain):
        one(rows()).square().sum().backward()
    average_gradients(plain, place()[1])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.grad), theirs.grad)
