"""Optimizers that know parameters otherwise than by groups and state are refused by name; names in groups go with them.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.matrix_optimizers import batch, net, train
from tests.support.on_ranks import on_ranks
from tests.support.plain_matrices import orthogonal
from tests.support.torches import Muon
from tests.support.values import full

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60, "buffer": "2KiB"}}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


class Known(torch.optim.Optimizer):
    """Has Adam's update, in sign alone, for some parameters that it was given beside its groups."""

    def __init__(self, params: Iterable[nn.Parameter], known: Any) -> None:
        super().__init__(params, {"lr": 0.02})
        self.known = known

    def is_adam(self, param: Tensor) -> bool:
        return param in self.known or id(param) in self.known

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(param.grad.sign() if self.is_adam(param) else orthogonal(param.grad), alpha=-0.02)


class Holder:
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params = set(params)

    def __contains__(self, param: Any) -> bool:
        return param in self.params


class Buffers(torch.optim.Optimizer):
    """Keeps momentum in a dict of its own, by parameter."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.02})
        self.buffers: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                buffer = self.buffers.setdefault(param, torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.add_(orthogonal(buffer), alpha=-0.02)


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer with the same groups, then draws parameters to slow ones."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", param.detach().clone())
            param.copy_(slow.lerp_(param, 0.5))


class Scaled(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for scale, param in zip(group["scales"], group["params"], strict=True):
                param.add_(orthogonal(param.grad), alpha=-0.02 * scale)


def scaled(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Scaled([{"params": params, "scales": [0.5**place for place in range(len(params))]}], {})


REFUSED: dict[str, tuple[Any, str]] = {
    "list": (lambda params: Known(params, params[-1:]), r"Known\.known\[\.\.\.\]"),
    "ids": (lambda params: Known(params, {id(params[-1])}), r"Known\.known\[\.\.\.\] \(its id\)"),
    "dict": (lambda params: Known(params, {params[-1]: True}), r"Known\.known \(a key\)"),
    "object": (lambda params: Known(params, Holder(params[-1:])), r"Known\.known\.params"),
    "buffers": (Buffers, r"Buffers cannot train .*\.buffers \(a key\)"),
    "lookahead": (lambda params: Lookahead(Muon(params)), r"Lookahead\.base, an optimizer of its own"),
    "scales": (scaled, r"Scaled cannot train .*param_groups\[0\]\['scales'\], a list as long as params"),
}


@on_ranks(2, case=tuple(REFUSED))
def test_an_optimizer_that_keeps_parameters_elsewhere_is_refused_by_name_before_anything_changed(case: str) -> None:
    model = net()
    zhooks.attach(model, policy=POLICY)
    made, reason = REFUSED[case]
    optimizer = made(matrices(model))
    before = [value.clone() for value in full(model)]
    model(batch(0)).square().mean().backward()
    with pytest.raises(zhooks.ShardedOpError, match=f"(?s){reason}"):
        optimizer.step()
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


class KeepsLate(torch.optim.Optimizer):
    """Puts parameters into an attribute when it is told to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if group.get("late"):
                    self.last = param
                param.add_(orthogonal(param.grad), alpha=-0.02)


@on_ranks(2)
def test_a_parameter_that_is_kept_after_the_first_steps_is_refused_on_every_rank() -> None:
    model = net()
    zhooks.attach(model, policy=POLICY)
    optimizer = KeepsLate(matrices(model), {})
    train(model, optimizer, range(1))
    before = [value.clone() for value in full(model)]
    optimizer.param_groups[0]["late"] = True
    model(batch(1)).square().mean().backward()
    with pytest.raises(zhooks.ShardedOpError, match=r"KeepsLate\.last\. Keep that in state\[param\]"):
        optimizer.step()
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


class ByName(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                scale = {"0.weight": 1.0, "2.weight": 0.5}.get(name, 0.1)
                param.add_(orthogonal(param.grad), alpha=-0.02 * scale)


@on_ranks(1, 2)
def test_the_names_of_parameters_in_a_group_go_with_them() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        named = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
        optimizer = ByName(named, {})
        train(model, optimizer, range(4))
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named]
    for value, other in zip(full(models[1]), models[0].parameters(), strict=True):
        torch.testing.assert_close(value.detach(), other.detach(), rtol=0, atol=0)
