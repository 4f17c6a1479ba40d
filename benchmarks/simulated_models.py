"""Six models of other kinds, with a batch and a loss each, for training that is measured and simulated alike.

`simulated_worker.py` runs them on a CPU and on the virtual device. It never knows which of the two it is on, and no shape
depends on a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workload

__all__ = ["MODELS", "Model"]

Batch = tuple[Tensor, ...]
VOCAB = 2048


@dataclass(frozen=True, slots=True)
class Model:
    """How to make one and its batch, on the default device, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def _tokens(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).remainder(VOCAB).view(rows, length)


def _applied(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


SHAPE = workload.Shape(layers=6, dim=256, heads=4, vocab=VOCAB, length=128, batch=4)


class Residual(nn.Module):
    """Two 3x3 convolutions beside a way past them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.past = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.past(x))


class ConvNet(nn.Module):
    """Images [rows, 3, 32, 32] and labels to the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            Residual(before, width, 1 if index == 0 else 2)
            for index, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
        )
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Experts(nn.Module):
    """Top-1 routing into experts of a fixed capacity: tokens beyond it pass by.  Source: arXiv:2101.03961."""

    def __init__(self, dim: int, experts: int, capacity: float) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.wide = nn.Parameter(torch.empty(experts, dim, 4 * dim))
        self.narrow = nn.Parameter(torch.empty(experts, 4 * dim, dim))
        self.experts, self.capacity = experts, capacity
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.wide, self.narrow):
            nn.init.normal_(weight, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        room = math.ceil(self.capacity * rows.shape[0] / self.experts)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        place = F.one_hot(chosen, self.experts).cumsum(0).gather(1, chosen[:, None])[:, 0] - 1
        kept = place < room
        slot = torch.where(kept, chosen * room + place, self.experts * room)
        taken = rows.new_zeros(self.experts * room + 1, rows.shape[-1]).index_copy(0, slot, rows)
        inside = F.gelu(torch.bmm(taken[:-1].view(self.experts, room, -1), self.wide))
        out = torch.bmm(inside, self.narrow).flatten(0, 1)
        back = F.pad(out, (0, 0, 0, 1)).index_select(0, slot)
        added: Tensor = (back * (weights * kept)[:, None]).view_as(x)
        return x + added


class MixtureOfExperts(nn.Module):
    """Attention and experts in turn; tokens and targets to the mean cross entropy."""

    def __init__(self, dim: int = 192, layers: int = 4, experts: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers: Any = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True), Experts(dim, experts, 1.25)])
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, attention, experts in self.layers:
            inner = norm(x)
            x = experts(x + attention(inner, inner, inner, need_weights=False)[0])
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """Three layers of LSTM over tokens."""

    def __init__(self, dim: int = 320) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(3))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.1, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _encoder_decoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, decoded, labels = batch
    logits = model(input_ids=tokens, decoder_input_ids=decoded).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    adapted = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)
    return get_peft_model(LlamaForCausalLM(config), adapted)


def _lora_batch() -> Batch:
    # A mask of four dimensions is used as it is: of others transformers asks for values.
    future = torch.ones(128, 128, dtype=torch.bool).tril()[None, None]
    return _tokens(4, 128), _tokens(4, 128), future


def _lora_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels, mask = batch
    return F.cross_entropy(model(input_ids=tokens, attention_mask=mask).logits.flatten(0, 1), labels.flatten())


def _rows(rows: int, length: int) -> Callable[[], Batch]:
    return lambda: (_tokens(rows, length), _tokens(rows, length))


MODELS: dict[str, Model] = {
    "GPT": Model(lambda: workload.GPT(SHAPE), _rows(4, 128), _applied),
    "conv net": Model(ConvNet, lambda: (torch.ones(16, 3, 32, 32), torch.arange(16)), _applied),
    "MoE": Model(MixtureOfExperts, _rows(4, 128), _applied),
    "encoder-decoder": Model(
        _encoder_decoder, lambda: (_tokens(4, 128), _tokens(4, 64), _tokens(4, 64)), _encoder_decoder_loss
    ),
    "LoRA": Model(_lora, _lora_batch, _lora_loss),
    "recurrent": Model(Recurrent, _rows(8, 64), _applied),
}
