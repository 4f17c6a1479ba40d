"""Penalties in a loss that bring gradients and copies of parameters together with parameters: as plain PyTorch computes them.

pytest runs it, on one rank and on two. Expressions without a graph are test_expressions.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow
from tests.support.values import full, grad_of, same

#: A parameter, its Fisher information (a gradient squared), its old value, and a trained number.
Penalty = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PENALTIES: dict[str, Penalty] = {
    "elastic weight consolidation": lambda p, fisher, old, t: (fisher * (p - old) ** 2).sum(),
    "the information last": lambda p, fisher, old, t: ((p - old).pow(2) * fisher).sum(),
    "distance from the information": lambda p, fisher, old, t: (fisher - p).square().sum(),
    "distance from the old value": lambda p, fisher, old, t: F.mse_loss(p, old),
    "a choice by the information": lambda p, fisher, old, t: torch.where(fisher > 0.01, p, -p).sum(),
    "a fused product": lambda p, fisher, old, t: torch.addcmul(p, fisher, old).sum(),
    "a norm": lambda p, fisher, old, t: (fisher * p).norm(),
    "a product of matrices": lambda p, fisher, old, t: (p.t() @ fisher).sum(),
    "a trained number": lambda p, fisher, old, t: (fisher * t).sum(),
    "a list": lambda p, fisher, old, t: torch._foreach_mul([p], [fisher])[0].sum(),
}


def trained(name: str, *, stage: int | None) -> tuple[list[Tensor], Tensor]:
    """The parameters after three steps with that penalty, and the gradient of the number."""
    torch.manual_seed(0)
    model, number = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Parameter(torch.tensor(2.0))
    if stage is not None:
        zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    model(torch.ones(2, 4)).square().mean().backward()
    weights = [(p, grad_of(p).detach().clone() ** 2, p.detach().clone()) for p in model.parameters() if p.dim() == 2]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.full((2, 4), step + 1.0)).square().mean()
        for weight, fisher, old in weights:
            loss = loss + PENALTIES[name](weight, fisher, old, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.detach() for p in model.parameters()] if stage is None else full(model)
    return values, torch.zeros(()) if number.grad is None else number.grad


@on_ranks(*slow(1), 2, stage=(*slow(0), 1, 3))
def test_penalties_with_gradients_and_old_values_train_as_in_plain_pytorch(stage: int) -> None:
    for name in PENALTIES:
        (values, number), (plain, plain_number) = trained(name, stage=stage), trained(name, stage=None)
        assert same(values, plain), name
        assert torch.equal(number, plain_number), name
