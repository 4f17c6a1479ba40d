"""Every optimizer of torch that works element by element trains ranges as it trains whole parameters, states included.

pytest runs it, on one rank and on two, which are given the same batches: their mean is the gradient of plain PyTorch. What
tiers make of them is test_tiers_optim.py's, updates in backward test_overlap.py's.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow
from tests.support.values import full, whole

ELEMENTWISE: dict[str, Any] = {
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=1.0),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
}
#: What sees parameters whole (test_owners.py), all of them at once (test_lbfgs.py), or sparse gradients (below).
OTHERS = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5, bias=False))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> list[float]:
    """Rprop and RAdam change their ways after a few steps."""
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for param in model.parameters() for _, value in sorted(optimizer.state[param].items())]
    return [whole(torch.as_tensor(value)) for value in kept]


#: Every third; of the others `optim/test_tiers_optim.py` has each on a tier.
FEW = tuple(ELEMENTWISE)[::3]


@on_ranks(*slow(1), 2, name=(*FEW, *slow(*(name for name in ELEMENTWISE if name not in FEW))), stage=(*slow(0, 1, 2), 3))
def test_it_trains_ranges_and_their_states_as_plain_parameters(name: str, stage: int) -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    ours, theirs = (ELEMENTWISE[name](one.parameters()) for one in (model, plain))
    assert trained(model, ours) == pytest.approx(trained(plain, theirs), rel=1e-5)
    torch.testing.assert_close(full(model), [param.detach() for param in plain.parameters()], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(states(model, ours), states(plain, theirs), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(full(model)[0], next(net().parameters()), atol=1e-3), "it trained"
    attachment.detach()


@on_ranks(1, 2)
def test_sparse_adam_is_refused_with_torchs_own_words_and_nothing_changed() -> None:
    model = net()
    zhooks.attach(model)
    before = full(model)
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(zhooks.ShardedOpError, match="SparseAdam does not support dense gradients"):
        torch.optim.SparseAdam(model.parameters()).step()
    assert all(map(torch.equal, full(model), before))


def test_every_optimizer_of_torch_has_its_test() -> None:
    found = {name for name, _ in inspect.getmembers(torch.optim, inspect.isclass) if name != "Optimizer"}
    assert ELEMENTWISE.keys() <= found <= ELEMENTWISE.keys() | OTHERS
