"""The model of the example: a small GPT over bytes, written the way one would write it with no thought of sharding.

`train_gpt.py` builds it, trains it and loads it again from the saved file. It never imports zhooks and never asks
which rank it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a GPT; `context` is the longest sequence, in bytes."""

    layers: int = 4
    dim: int = 192
    heads: int = 6
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each behind a LayerNorm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp_up = nn.Linear(config.dim, 4 * config.dim)
        self.mlp_down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        hidden: Tensor = self.mlp_up(self.mlp_norm(x))
        x = x + self.mlp_down(F.gelu(hidden, approximate="tanh"))
        return x

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return projected


class GPT(nn.Module):
    """Bytes [batch, length] (int64) to the logits of each next byte [batch, length, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        angles = rotation_angles(tokens.shape[1], self.config.dim // self.config.heads, device=tokens.device)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotation_angles(length: int, head_dim: int, *, device: torch.device) -> Tensor:
    """The angle by which each position turns each pair of a head's numbers, fp32 [length, head_dim / 2].

    Source: rotary position embedding, arXiv:2104.09864; base 100 because the context is short.
    """
    frequencies = 100.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    return torch.outer(torch.arange(length, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + half]) of `x` [..., length, head_dim], so that products depend on distance alone."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, *, length: int, context: int, seed: int) -> bytes:
    """Continue `prompt` by `length` bytes; the same weights and seed give the same text on every rank."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(length):
        logits = model(tokens[:, -context:].to(device))[:, -1].float().cpu()
        following = torch.multinomial(torch.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return bytes(tokens[0].tolist())
