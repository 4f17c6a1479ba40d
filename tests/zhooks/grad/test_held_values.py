"""Gathered values that a forward goes on holding after their unit is released: one node of the graph all the same.

pytest runs it.  Gradients are compared bit for bit: two nodes would average each use of a weight by itself.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

import zhooks
from tests.support.averaging import average_gradients
from tests.support.on_ranks import on_ranks, place
from tests.support.values import grad_of

WIDTH, WORDS = 24, 40


class Words(nn.Embedding):
    """Leaves the weight that its forward used in ``seen``, where somebody made that a list."""

    seen: list[Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen.append(self.weight)
        return super().forward(tokens)


class Tied(nn.Module):
    """Words to vectors, blocks, and vectors to words by the same weight, of which the forward holds a row meanwhile."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.used = used
        self.words = Words(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        held = self.words.weight[0]
        for block in self.blocks:
            x = block(x)
        return self.out(x + held if self.used else x)


def made(*, used: bool = True) -> Tied:
    torch.manual_seed(3)
    return Tied(used=used)


def tokens(rank: int) -> Tensor:
    return torch.randint(0, WORDS, (6, 5), generator=torch.Generator().manual_seed(rank))


def loss(model: nn.Module, rank: int) -> Tensor:
    out: Tensor = model(tokens(rank))
    return out.logsumexp(-1).mean() + out.pow(2).mean()


@on_ranks(1, 2, used=(True, False), checkpoint=("none", "unit"))
def test_uses_of_a_weight_add_up_before_ranks_do_whatever_the_forward_holds(used: bool, checkpoint: str) -> None:
    rank, world = place()
    plain, model = made(used=used), made(used=used)
    zhooks.attach(model, policy={"units": {"min_numel": 100}, "activation": {"checkpoint": checkpoint}})
    for step in range(2):
        for one in (plain, model):
            one.zero_grad()
            loss(one, 10 * step + rank).backward()
        average_gradients(plain, world)
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            found = param.grad
            assert isinstance(found, zhooks.ShardedTensor), name
            assert torch.equal(found.full_tensor(), grad_of(expected)), name


@on_ranks(2)
def test_what_was_held_keeps_its_values_and_is_freed_with_its_holder() -> None:
    rank, _ = place()
    model = made()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 100}})
    kept: list[Tensor] = []
    model.words.seen = kept
    loss(model, rank).backward()
    model.words.seen = None
    with attachment.gathered(model.words.weight):
        assert torch.equal(kept[0], model.words.weight)
    gone = weakref.ref(kept[0])
    kept.clear()
    assert gone() is None


@on_ranks(2)
def test_a_graph_that_outlives_passes_without_gradients_still_gets_them_all() -> None:
    rank, world = place()
    plain, model = made(), made()
    zhooks.attach(model, policy={"units": {"min_numel": 100}})
    for one in (plain, model):
        kept: list[Tensor] = []
        one.words.seen = kept
        value = loss(one, rank)
        one.words.seen = None
        with torch.inference_mode():
            one(tokens(rank))
        with torch.no_grad():
            one(tokens(rank))
        (value + loss(one, rank + 5) + kept[0].pow(3).sum()).backward()
    average_gradients(plain, world)
    grad = model.words.weight.grad
    assert isinstance(grad, zhooks.ShardedTensor) and plain.words.weight.grad is not None
    assert torch.allclose(grad.full_tensor(), plain.words.weight.grad, rtol=1e-6, atol=1e-7)
