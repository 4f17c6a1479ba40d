"""The zoo: the small models that the parity matrix and other tests train, each with its data and its loss.

The oracle, the ranks' side and the tests look models up in ``ZOO`` by name; every number is a function of seed, step
and rank. It never knows what is done to a model: no placement, no process group, no precision.

Note: [Smooth]
Every model is smooth in its parameters. At a kink, as of ReLU, rounding alone decides which of two gradients is taken:
one activation of 2e-8 that the sum of four ranks' gradients, taken in another order, brings to the other side of zero
moves a gradient by 1 %, and no bound on rounding holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4
VOCABULARY = 24
LENGTH = 6


@dataclass(frozen=True, slots=True)
class Specimen:
    """One model of the zoo.

    ``make()`` builds it from torch's generator; ``draw(generator, step, rank)`` gives the rank's batch of that
    (micro) step, the model's positional inputs first and the target last; ``score(output, target)`` is the mean loss,
    0-d.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, int], tuple[Tensor, ...]]
    score: Callable[[Tensor, Tensor], Tensor]

    def build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def batch(self, step: int, rank: int, world: int) -> tuple[Tensor, ...]:
        assert rank < world
        return self.draw(torch.Generator().manual_seed(1000 * step + rank), step, rank)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, target = batch
        return self.score(model(*inputs), target)


def squared(output: Tensor, target: Tensor) -> Tensor:
    # Torch does so itself, but 2.8 has the backward fail for what it promoted.
    return 4.0 * F.mse_loss(output.to(torch.promote_types(output.dtype, target.dtype)), target)


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def draw_vectors(width: int, out: int) -> Callable[[torch.Generator, int, int], tuple[Tensor, ...]]:
    def draw(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
        return torch.randn(ROWS, width, generator=generator), torch.randn(ROWS, out, generator=generator)

    return draw


def draw_tokens(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- models


def make_mlp() -> nn.Sequential:
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.0))  # noqa: E731
    return nn.Sequential(nn.Linear(8, 16), block(), block(), block(), nn.Linear(16, 5))


class Attention(nn.Module):
    """Causal self-attention over [rows, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A decoder over tokens [rows, length]; ``tied`` shares the embedding with the output head."""

    def __init__(self, *, tied: bool, width: int = 16, heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_conv() -> nn.Sequential:
    # A bias before BatchNorm has no gradient but rounding noise, which an adaptive optimizer would magnify.
    def stage(channels: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.GELU())

    return nn.Sequential(stage(3, 6), stage(6, 6), stage(6, 8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))


def draw_images(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 3, 6, 6, generator=generator), torch.randn(ROWS, 5, generator=generator)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden)


def draw_sequences(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    return torch.randn(ROWS, LENGTH, 8, generator=generator), torch.randn(ROWS, LENGTH, 5, generator=generator)


class Translator(nn.Module):
    """nn.Transformer: its MultiheadAttention reads ``out_proj.weight`` without calling ``out_proj``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.body = nn.Transformer(width, 2, 2, 2, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        mask = torch.ones(written.shape[1], written.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.body(self.tokens(source), self.tokens(written), tgt_mask=mask))


def draw_pairs(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    source = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return source, *draw_tokens(generator, step, rank)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 12, mode="mean")
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.body(self.bag(words, offsets))


def draw_bags(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    # Bags of one to four words, one of them empty now and then.
    lengths = torch.randint(0, 5, (ROWS,), generator=generator)
    words = torch.randint(40, (int(lengths.sum()) + 1,), generator=generator)
    offsets = lengths.cumsum(0) - lengths
    return words, offsets, torch.randn(ROWS, 5, generator=generator)


class Mixture(nn.Module):
    """Experts chosen by the data: ``route`` [rows] names each row's expert, so an expert no row names is never
    called.
    """

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.leave = nn.Linear(width, 5)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = self.enter(x)
        weight = self.gate(x).softmax(-1).gather(1, route[:, None])
        mixed = x
        for number, expert in enumerate(self.experts):
            rows = (route == number).nonzero()[:, 0]
            if rows.numel():
                mixed = mixed.index_add(0, rows, weight[rows] * expert(x[rows]))
        return self.leave(mixed)


def draw_routed(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    # Even ranks use expert `step` alone, odd ranks also the next one; the other experts rest on every rank.
    route = torch.full((ROWS,), step % 4)
    route[ROWS // 2 :] = (step + rank % 2) % 4
    return torch.randn(ROWS, 8, generator=generator), route, torch.randn(ROWS, 5, generator=generator)


class Recursion(nn.Module):
    """One block used several times in one forward."""

    def __init__(self, width: int = 12, times: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.leave = nn.Linear(width, 5)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.times):
            x = x + self.block(x)
        return self.leave(x)


ZOO: dict[str, Specimen] = {
    specimen.name: specimen
    for specimen in (
        Specimen("mlp", make_mlp, draw_vectors(8, 5), squared),
        Specimen("gpt", lambda: GPT(tied=False), draw_tokens, next_token),
        Specimen("tied", lambda: GPT(tied=True), draw_tokens, next_token),
        Specimen("conv", make_conv, draw_images, squared),
        Specimen("lstm", Recurrent, draw_sequences, squared),
        Specimen("transformer", Translator, draw_pairs, next_token),
        Specimen("bag", Bag, draw_bags, squared),
        Specimen("mixture", Mixture, draw_routed, squared),
        Specimen("recursion", Recursion, draw_vectors(8, 5), squared),
    )
}
