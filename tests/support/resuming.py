"""A training run that can be saved and resumed: model, optimizer, schedule and losses, as a training script makes them.

Tests of checkpoints train it, save it and load it; it asserts nothing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import place
from tests.support.torches import Muon
from tests.support.values import full

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), amsgrad=True),
    "plain": lambda params: torch.optim.SGD(params, lr=0.05),
    "muon": lambda params: Muon([param for param in params if param.dim() == 2], lr=0.05),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)]
    return nn.Sequential(*layers)


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + place()[0]))


class Run:
    """A model, its optimizer and its schedule, as a training script makes them."""

    def __init__(self, policy: dict[str, Any], *, kind: str = "adamw", seed: int = 0, mesh: Any = None) -> None:
        self.model: Any = net(seed)
        self.attachment = zhooks.attach(self.model, policy=policy, mesh=mesh)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=7)
        self.losses: list[float] = []

    @property
    def objects(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def train(self, steps: range) -> None:
        for step in steps:
            loss = self.model(batch(step)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def save(self, path: Path, **more: Any) -> None:
        self.attachment.save(path, self.optimizer, objects=self.objects, **more)

    def load(self, path: Path) -> dict[str, Any]:
        return self.attachment.load(path, self.optimizer, objects=self.objects)

    def everything(self) -> list[Any]:
        """Parameters, buffers and states of this rank, and what the schedule says."""
        states = [value for param in self.model.parameters() for value in self.optimizer.state.get(param, {}).values()]
        ranges = [value.to_local() if isinstance(value, zhooks.ShardedTensor) else value for value in states]
        rate = torch.tensor(self.scheduler.get_last_lr())
        return [value.clone() for value in (*full(self.model), *self.model.buffers(), *ranges, rate)]


def stir() -> None:
    """Leave every generator somewhere else."""
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
