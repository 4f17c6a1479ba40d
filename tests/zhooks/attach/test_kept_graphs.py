"""What a model keeps of earlier forwards: weights that are computed anew each time may stay, other graphs are refused by name.

pytest runs it over real ranks. That parameters themselves cannot be attached is plan/test_bad_input.py's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zhooks
from offload.errors import AttachError
from tests.support.on_ranks import on_ranks

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "old_weight_norm": torch.nn.utils.weight_norm,
    "old_spectral_norm": torch.nn.utils.spectral_norm,
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def reparametrized(name: str, *, used: bool) -> nn.Sequential:
    """A model with a reparametrized layer; ``used``: a forward has run, whose graph the layer may keep."""
    torch.manual_seed(1)
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's: the old ones are deprecated
        NORMS[name](model[0])
    if used:
        model(BATCH)
    return model


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(BATCH).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(1, 2, name=tuple(NORMS), used=(False, True))
def test_a_reparametrized_layer_trains_as_plain_and_after_detach(name: str, used: bool) -> None:
    plain, model = reparametrized(name, used=used), reparametrized(name, used=used)
    attachment = zhooks.attach(model)
    assert train(model) == train(plain)
    attachment.detach()
    assert train(model) == train(plain)


@on_ranks(1, 2)
def test_a_graph_that_a_module_keeps_is_refused_by_the_name_of_its_place() -> None:
    model = net()
    model[1].cache = model(BATCH)
    with pytest.raises(AttachError, match=r"found a graph of an earlier forward, kept in 1\.cache\. Set it to None or detach"):
        zhooks.attach(model)
    model[1].cache = torch.zeros(1)
    zhooks.attach(model).detach()


@on_ranks(1, 2)
def test_a_graph_that_somebody_else_keeps_is_refused_as_one() -> None:
    model = net()
    output: Tensor = model(BATCH)
    with pytest.raises(AttachError, match=r"found 2 references\. Drop graphs \(loss, outputs\) of earlier forwards"):
        zhooks.attach(model)
    del output
    zhooks.attach(model).detach()


@on_ranks(2)
def test_a_wrapper_that_lives_beside_the_model_is_refused_as_what_it_is() -> None:
    model = net()
    wrapped = DistributedDataParallel(model)
    wrapped(BATCH).sum().backward()
    with pytest.raises(AttachError, match=r"found DistributedDataParallel around the model.*delete the wrapper"):
        zhooks.attach(model)
    with pytest.raises(AttachError, match=r"wrapped in DistributedDataParallel.*Attach its \.module, and drop the wrapper"):
        zhooks.attach(wrapped)
    del wrapped
    zhooks.attach(model).detach()


@on_ranks(1, 2, stage=(0, 1, 3))
def test_a_model_frozen_while_an_earlier_loss_is_kept_is_attached_and_detached(stage: int) -> None:
    plain, model = net(), net()
    model.load_state_dict(plain.state_dict())
    kept = [model(BATCH).square().mean()]
    kept[0].backward()
    model.requires_grad_(False)
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    model[0].requires_grad_(True)
    kept.append(model(BATCH).square().mean())
    kept[1].backward()
    model.requires_grad_(False)
    attachment.detach()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any(param.requires_grad for param in model.parameters())
    assert torch.equal(model(BATCH), plain(BATCH))
