"""A small model with its data and optimizer, attached under a loss scale that overflows at once: for tests of scaling.

Every number is a function of step and rank, so that a plain run under a GradScaler sees the same. It asserts nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zhooks

HOT: dict[str, Any] = {"param": "fp16", "loss_scale": "dynamic", "initial_scale": 2.0**26, "growth_interval": 3}


class Model(nn.Module):
    """Three units and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs))) * self.gain


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 * number + rank)
    inputs = torch.randn(8, 16)
    return inputs, inputs[:, :4] ** 2


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **more)


def attached(precision: dict[str, Any], model: nn.Module | None = None, **more: Any) -> tuple[Any, zhooks.Attachment]:
    model = build() if model is None else model
    return model, zhooks.attach(model, policy={"units": {"min_numel": 0}, "precision": precision, **more})


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    inputs, wanted = batch(number, rank)
    return (model(inputs).float() - wanted).square().mean()
