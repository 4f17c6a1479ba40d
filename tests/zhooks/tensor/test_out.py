"""Writes into attached parameters by name: `out=`, keyword tensors and every function of torch.nn.init, beside plain PyTorch.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.values import full, same


class Odd(nn.Module):
    """A matrix, a convolution's weight and a vector, of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.other = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5, 7))
        self.conv, self.vector = nn.Parameter(torch.randn(3, 3, 3)), nn.Parameter(torch.randn(7))


def pair(stage: int, **more: Any) -> tuple[Any, nn.Module, nn.Module]:
    model, plain = Odd(), Odd()
    return zhooks.attach(model, policy={"stage": stage, **more}), model, plain


def alike(model: nn.Module, plain: nn.Module) -> bool:
    return same(full(model), plain.parameters())


INTO: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda net: torch.zeros(5, 7, out=net.matrix),
    "eye": lambda net: torch.eye(5, 7, out=net.matrix),
    "arange": lambda net: torch.arange(7.0, out=net.vector),
    "add": lambda net: torch.add(net.matrix, net.other, alpha=2, out=net.matrix),
    "add another": lambda net: torch.add(torch.ones(5, 7), 3.0, out=net.matrix),
    "add broadcast": lambda net: torch.add(net.matrix, net.vector, out=net.other),
    "mm": lambda net: torch.mm(torch.ones(5, 5), net.matrix, out=net.other),
    "maximum": lambda net: torch.maximum(net.matrix, net.other, out=net.matrix),
    "cumsum": lambda net: torch.cumsum(net.matrix, 0, out=net.other),
    "normal": lambda net: torch.normal(0.0, 1.0, (5, 7), out=net.matrix),
    "randn": lambda net: torch.randn(5, 7, out=net.matrix),
    "cat": lambda net: torch.cat([net.other[2:], net.other[:2]], out=net.matrix),
    "keyword copy": lambda net: net.matrix.copy_(other=net.other),
    "keyword add": lambda net: net.matrix.add_(other=net.other, alpha=2),
    "keyword fill": lambda net: net.matrix.fill_(value=torch.tensor(2.0)),
    "keyword mul": lambda net: net.matrix.mul_(other=torch.ones(5, 7) * 3),
    "keyword lerp": lambda net: net.matrix.lerp_(end=net.other, weight=0.5),
    "keyword addcmul": lambda net: net.matrix.addcmul_(tensor1=net.other, tensor2=net.other, value=0.5),
}


@on_ranks(1, 2, stage=(0, 1, 3), tier=("device", "host"))
def test_what_is_written_into_a_parameter_by_name_is_there(stage: int, tier: str) -> None:
    tiers = {} if tier == "device" or stage == 1 else {"parameter": {"tier": "host"}, "optimizer": {"tier": "host"}}
    attachment, model, plain = pair(stage, **tiers)
    for name, into in INTO.items():
        ends: list[bool | str] = []
        for net in (plain, model):
            torch.manual_seed(3)
            with torch.no_grad():
                try:
                    ends.append(into(net) is None)
                except RuntimeError as error:
                    ends.append(str(error))
        assert ends[0] == ends[1], name
        assert alike(model, plain), name
    attachment.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_out_into_a_leaf_that_requires_grad_is_the_same_error_as_in_plain_pytorch(stage: int) -> None:
    attachment, model, plain = pair(stage)
    before = full(model)
    for net in (model, plain):
        for into in (lambda net: torch.zeros(5, 7, out=net.matrix), lambda net: torch.add(net.matrix, 1.0, out=net.other)):
            with pytest.raises(RuntimeError, match="out="):
                into(net)
    assert same(full(model), before)
    attachment.detach()


def initialisers() -> dict[str, Callable[[Tensor], Any]]:
    """Every function of torch.nn.init that fills a tensor, with what it must be given."""
    found = {name: function for name, function in inspect.getmembers(nn.init, inspect.isfunction) if name.endswith("_")}
    found = {name: function for name, function in found.items() if not name.startswith("_")}
    given: dict[str, dict[str, Any]] = {"constant_": {"val": 0.5}, "sparse_": {"sparsity": 0.4}}
    return {name: partial(function, **given.get(name, {})) for name, function in found.items()}


@on_ranks(1, 2, stage=(0, 1, 3))
def test_every_initialiser_fills_like_plain_pytorch(stage: int) -> None:
    attachment, model, plain = pair(stage)
    for name, fill in initialisers().items():
        before = full(model)
        for one in (plain, model):
            torch.manual_seed(3)
            fill(one.get_parameter("conv" if name == "dirac_" else "matrix"))
        assert alike(model, plain) and not same(full(model), before), name
    attachment.detach()
