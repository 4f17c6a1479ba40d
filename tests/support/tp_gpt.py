"""A GPT as Megatron divides it: column- and row-parallel layers by ``parallelize_module``, with or without sequence parallel.

Tests of meshes with a ``tp`` axis build it twice, plain and divided, and compare. It starts no processes and asserts nothing.

Source: Megatron-LM, arXiv:1909.08053; sequence parallel: arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.torches import forget_redistributions

VOCAB, SEQ = 32, 8


class Attention(nn.Module):
    """Causal attention over however many heads this rank has."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        # A bias of k shifts all scores of a query alike: its gradient is rounding, which Adam would make steps of.
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=name != "k") for name in "qkv")
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made.unflatten(-1, (-1, self.head)).transpose(1, 2) for made in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """Two linear layers and a GELU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Gpt(nn.Module):
    """Tokens [batch, SEQ] of int64 to logits [batch, SEQ, VOCAB]."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, hidden), nn.Embedding(SEQ, hidden)
        self.blocks: Any = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(SEQ, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def plain_gpt(layers: int = 2, *, hidden: int = 16, heads: int = 4, seed: int = 0) -> Gpt:
    """The plain model, the same on every rank that gives the same seed."""
    generator = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        return Gpt(layers, hidden, heads)
    finally:
        torch.random.set_rng_state(generator)


def divide(model: Gpt, tp: DeviceMesh, *, sequence: bool = False) -> Gpt:
    """``model`` over the 1-D mesh ``tp``; ``sequence``: what lies between two blocks is divided over ``tp`` too.

    Without it the norms and the places stay plain parameters, the same on all ranks of ``tp``; with it they are DTensors.
    """
    forget_redistributions()
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["places"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
        plan["norm"] = SequenceParallel()
    for index in range(len(model.blocks)):
        at = f"blocks.{index}"
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        for name in ("attn.out", "mlp.down"):
            plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan[f"{at}.norm1"] = plan[f"{at}.norm2"] = SequenceParallel()
            for name in ("attn", "mlp"):
                plan[f"{at}.{name}"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    parallelize_module(model, tp, plan)
    return model


def batch(step: int, rank: int = 0, ranks: int = 1, *, size: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, int64 [size / ranks, SEQ]: the part of data rank ``rank`` of ``ranks``."""
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = torch.randint(VOCAB, (size, SEQ + 1), generator=generator).chunk(ranks)[rank]
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
