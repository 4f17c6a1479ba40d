"""A model whose blocks widen, so that no buffer of one fits where the last one's was: for tests of the arena."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

DIM, LAYERS, VOCAB = 64, 12, 320


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Widening(nn.Module):
    """Each block is wider than the last: none of its buffers fits where the last one's were."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(*(Block(72 + 12 * layer) for layer in range(LAYERS)))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))
