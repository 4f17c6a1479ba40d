"""The one piece of work every driver of the benchmark runs: a small GPT-2 style decoder and its fixed-seed data.

`worker.py` builds it and every function of `drivers.py` wraps it. It never knows that it is wrapped: no collective, no
rank and no precision is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_SEED = 1234
DATA_SEED = 7
INIT_STD = 0.02
BATCHES = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model and of one rank's batch; `batch` sequences of `length` tokens."""

    layers: int
    dim: int
    heads: int
    vocab: int
    length: int
    batch: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(layers=4, dim=256, heads=4, vocab=4096, length=128, batch=2),
    "small": Shape(layers=8, dim=512, heads=8, vocab=8192, length=128, batch=2),
    "medium": Shape(layers=12, dim=768, heads=12, vocab=8192, length=128, batch=2),
}


class Block(nn.Module):
    """One pre-LayerNorm decoder block, [batch, length, dim] in and out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.ln1 = nn.LayerNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim)
        self.proj = nn.Linear(shape.dim, shape.dim)
        self.ln2 = nn.LayerNorm(shape.dim)
        self.fc = nn.Linear(shape.dim, 4 * shape.dim)
        self.out = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.ln1(x))
        widened: Tensor = self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return x + widened

    def _attend(self, x: Tensor) -> Tensor:
        # As many heads as this rank has, where the layer is divided.
        split = (-1, x.shape[-1] // self.heads)
        query, key, value = (part.unflatten(-1, split).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return projected


class GPT(nn.Module):
    """Tokens and targets, both int64 [batch, length], to the mean cross entropy, a 0-d fp32 tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.dim)
        self.wpe = nn.Embedding(shape.length, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(shape: Shape) -> GPT:
    """The model with the same weights in every process: matrices normal(0, 0.02), the rest as torch leaves it."""
    torch.manual_seed(INIT_SEED)
    model = GPT(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, INIT_STD)
    return model


def rank_batches(shape: Shape, *, rank: int, world: int, of: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's (tokens, targets) of `BATCHES` fixed global batches of `of * shape.batch` sequences.

    With `world < of` (one process that stands for all ranks) a rank's part is larger, so every driver sees the same
    global batch and must end at the same loss.
    """
    generator = torch.Generator().manual_seed(DATA_SEED)
    rows = of * shape.batch // world
    chains = [_chain(shape, of * shape.batch, generator) for _ in range(BATCHES)]
    mine = [chain[rank * rows : (rank + 1) * rows] for chain in chains]
    return [(chain[:, :-1].contiguous(), chain[:, 1:].contiguous()) for chain in mine]


def _chain(shape: Shape, sequences: int, generator: torch.Generator) -> Tensor:
    """A noisy affine chain of tokens, int64 [sequences, length + 1]: learnable, and free of any file."""
    columns = [torch.randint(0, shape.vocab, (sequences,), generator=generator)]
    for _ in range(shape.length):
        noise = torch.randint(0, 4, (sequences,), generator=generator)
        columns.append((columns[-1] * 5 + 17 + noise) % shape.vocab)
    return torch.stack(columns, dim=1)
