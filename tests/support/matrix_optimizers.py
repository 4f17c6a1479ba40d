"""Optimizers that see whole matrices, written as their users write them, and a small model for them.

Tests of owners train with them beside plain PyTorch; it asserts nothing.

Source: Shampoo, arXiv:1802.09568, algorithm 1; SOAP, arXiv:2409.11321, algorithm 3; Muon, Keller Jordan 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.torches import Muon


class Shampoo(Optimizer):
    """A statistic and its inverse root for every dim of a parameter, kept in lists."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05, every: int = 2, eps: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "every": every, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["statistics"] = [group["eps"] * torch.eye(length) for length in grad.shape]
            state["roots"] = [torch.eye(length) for length in grad.shape]
        state["step"] += 1
        update = grad
        for dim, length in enumerate(grad.shape):
            rows = grad.transpose(0, dim).reshape(length, -1)
            state["statistics"][dim].add_(rows @ rows.T)
            if state["step"] % group["every"] == 0:
                values, vectors = torch.linalg.eigh(state["statistics"][dim])
                state["roots"][dim] = vectors @ torch.diag(values.clamp_min(1e-8) ** (-0.5 / grad.dim())) @ vectors.T
            update = torch.tensordot(update, state["roots"][dim], dims=([0], [0]))
        param.add_(update, alpha=-group["lr"])


class Soap(Optimizer):
    """Adam in the eigenbasis of Shampoo's statistics; vectors have Adam's update."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "every": 3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (one, two) = self.state[param], group["betas"]
        if "step" not in state:
            state["step"], state["first"], state["second"] = 0, torch.zeros_like(grad), torch.zeros_like(grad)
            if grad.dim() == 2:
                state["left"], state["right"] = grad @ grad.T, grad.T @ grad
                state["basis"] = (torch.linalg.eigh(state["left"])[1], torch.linalg.eigh(state["right"])[1])
        state["step"] += 1
        turned = grad
        if grad.dim() == 2:
            turned = state["basis"][0].T @ grad @ state["basis"][1]
        state["first"].lerp_(turned, 1 - one)
        state["second"].mul_(two).addcmul_(turned, turned, value=1 - two)
        update = state["first"] / (state["second"].sqrt() + group["eps"])
        if grad.dim() == 2:
            update = state["basis"][0] @ update @ state["basis"][1].T
            state["left"].lerp_(grad @ grad.T, 1 - two)
            state["right"].lerp_(grad.T @ grad, 1 - two)
            if state["step"] % group["every"] == 0:
                left, right = torch.linalg.qr(state["left"] @ state["basis"][0])[0], state["basis"][1]
                state["basis"] = (left, torch.linalg.qr(state["right"] @ right)[0])
        param.add_(update, alpha=-group["lr"])


class MuonWithAdam(Optimizer):
    """Matrices by their momentum made orthogonal, the rest by Adam, with a counter a group and one of its own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02) -> None:
        every = list(params)
        matrices = {"params": [param for param in every if param.dim() == 2], "use_muon": True}
        super().__init__([matrices, {"params": [param for param in every if param.dim() != 2], "use_muon": False}], {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 0.1)
                rate = group["lr"] / group["count"]
                if group["use_muon"]:
                    left, _, right = torch.linalg.svd(state["momentum"], full_matrices=False)
                    param.add_(left @ right, alpha=-rate)
                else:
                    param.add_(state["momentum"].sign(), alpha=-rate)


def muon(params: Iterable[nn.Parameter]) -> Optimizer:
    return Muon([param for param in params if param.dim() == 2], lr=0.02)


def adafactor_of_transformers(params: Iterable[nn.Parameter]) -> Optimizer:
    from transformers.optimization import Adafactor

    made: Optimizer = Adafactor(params)
    return made


#: By name: what makes one of parameters.
MATRIX_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "muon": muon,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05, weight_decay=0.1),
    "adafactor_of_transformers": adafactor_of_transformers,
    "shampoo": Shampoo,
    "soap": Soap,
    "muon_with_adam": MuonWithAdam,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20, bias=False), nn.Linear(20, 3)]
    return nn.Sequential(*layers)


def batch(step: int) -> Tensor:
    """The same on every rank: means of equal gradients are the plain ones, bit for bit."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
