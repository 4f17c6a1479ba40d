"""A small GPT whose saved activations are counted by hand, attached under any policy; ``made`` are those to detach.

Tests of activations in ``attachment.memory()`` and in ``zprof report`` run it. It asserts only that a backward gave gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks

BATCH, SEQ, HIDDEN, HEADS, LAYERS, WORDS = 4, 16, 32, 2, 4, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.proj = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.between, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.before(x)).split(hidden, 2)
        q, k, v = (part.view(batch, seq, HEADS, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(2, 3) / 4).softmax(-1)
        x = x + self.proj((scores @ v).transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Embedding(WORDS, HIDDEN), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def attached(stage: int = 3, model: Callable[[], nn.Module] = GPT, disk: str = "", **activation: Any) -> Any:
    torch.manual_seed(0)
    policy: dict[str, Any] = {"stage": stage, "units": {"min_numel": 0}, "activation": activation}
    made.append(zhooks.attach(model(), policy=policy | ({"disk": {"path": disk}} if disk else {})))
    return made[-1]


made: list[Any] = []


def forward(attachment: Any, batch: int = BATCH) -> Tensor:
    out: Tensor = attachment.model(torch.randint(0, WORDS, (batch, SEQ)))
    return out


def backward(attachment: Any, out: Tensor) -> None:
    out.sum().backward()
    assert next(attachment.model.parameters()).grad is not None
