"""A small net whose blocks have dropout, running statistics and nested inputs, and a step of it as plain PyTorch takes it.

Tests of activations on tiers and of recomputation train it twice and compare. It attaches nothing and asserts nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.values import whole

SEED = 7


class Block(nn.Module):
    """Dropout, running statistics and a tensor saved by two operators."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(2 * width), nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, shift: dict[str, Tensor] | None = None) -> Tensor:
        hidden = self.norm(F.gelu(self.enter(x)))
        hidden = self.drop(hidden) * hidden.sigmoid()
        out = x + self.leave(hidden)
        out = out if scale is None else out * scale
        return out if shift is None else out + shift["by"]


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        scale, by = x.mean(), x.tanh()
        for block in self.blocks:
            x = block(x, scale, shift={"by": by})
        return self.leave(x)


def built() -> Net:
    torch.manual_seed(SEED)
    return Net()


def step_of(model: nn.Module, number: int, times: int = 1) -> list[Tensor]:
    """The loss and the gradients of one step that goes backward ``times`` times."""
    torch.manual_seed(100 + number)
    loss = model(torch.randn(5, 6)).square().mean()
    for turn in range(times):
        loss.backward(retain_graph=turn + 1 < times)
    notes = [loss.detach().clone(), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return notes
