"""A small model with a layer that no forward uses, the same on every rank and at every call.

Tests of gradients take it: accumulated, measured, reduced where some parameters have none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Net", "made"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(5, 9), nn.Linear(9, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def made() -> Net:
    torch.manual_seed(3)
    return Net()
