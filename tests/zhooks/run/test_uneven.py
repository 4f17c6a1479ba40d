"""Ranks that drop different layers train as under DistributedDataParallel: each unit is gathered once a pass, in one order.

pytest runs it over real ranks, and the arithmetic of orders in this process. Ranks that run out of batches are test_join.py's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zhooks
from offload.errors import BudgetError, DivergenceError
from tests.support.inside import short_waits
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from zhooks.run.schedule import Path, Walk

STEPS = 6
#: Small units joined, or every layer a unit of its own; the tied weight is one in both.
JOINED: dict[str, Any] = {}
APART: dict[str, Any] = {"units": {"min_numel": 0}}
#: A sum over three ranks adds in another order than DDP's.
TOLERANCE = 1e-5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Dropping(nn.Module):
    """An embedding that is used twice and once more as the head; a norm registered after the layers, and used before them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, drop: torch.Generator) -> Tensor:
        x = self.norm(self.embed(tokens))
        for number, layer in enumerate(self.layers):
            if number == 3:
                x = x + self.embed(tokens)
            if torch.rand((), generator=drop) > 0.6:
                x = layer(x)
        out: Tensor = self.head(x)
        return out


def train(model: nn.Module, run: nn.Module) -> list[float]:
    """Losses of this rank, whose tokens and dropped layers are its own."""
    rank, _ = place()
    drop, losses = torch.Generator().manual_seed(40 + rank), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = run(tokens, drop).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(
    2,
    3,
    policy=(
        JOINED,
        APART,
        *slow({**APART, "schedule": {"prefetch": 3}}, {**APART, "schedule": {"prefetch": 0, "reshard_after_forward": True}}),
        {**APART, "activation": {"checkpoint": "unit"}},
    ),
)
def test_ranks_that_drop_different_layers_train_as_under_ddp(policy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Dropping()
    plain = copy.deepcopy(model)
    uneven = {**policy, "schedule": {**policy.get("schedule", {}), "uneven": True}}
    attachment = zhooks.attach(model, policy=uneven)
    losses = train(model, model)
    attachment.detach()
    expected = train(plain, DistributedDataParallel(plain, find_unused_parameters=True))
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


class Chosen(nn.Module):
    """Runs its layers, units of one size, in the order it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def step_of(model: nn.Module, orders: tuple[list[int], ...]) -> None:
    model(torch.ones(2, 8), orders[place()[0]]).sum().backward()


@on_ranks(2, transport=("shm", *slow("stock", "p2p")))
def test_ranks_that_use_different_units_once_more_are_named_before_anything_is_updated(transport: str) -> None:
    # The backend's own collectives pair the two gathers with each other: their sizes are the same.
    orders = ([0, 1, 2, 1], [0, 1, 2, 0])
    policy: dict[str, Any] = {**APART, "comm": {"transport": transport, "timeout_s": 60}}
    # Gloo closes the connection of a rank that has waited in vain, which the other one may hear of first.
    named = r"set \[schedule\] uneven = true" + ("|Rank . is gone" if transport == "p2p" else "")
    torch.manual_seed(0)
    first = Chosen()
    with short_waits(zhooks.attach(first, policy=policy)), pytest.raises(DivergenceError, match=named):
        step_of(first, orders)
    torch.manual_seed(0)
    later = Chosen()
    attachment = zhooks.attach(later, policy=policy)
    step_of(later, ([0, 1, 2], [0, 1, 2]))
    with short_waits(attachment), pytest.raises(DivergenceError, match=named):
        step_of(later, orders)


def test_an_uneven_walk_launches_the_path_whatever_is_used() -> None:
    for used in ([2, 0, 2, 1], [1, 1, 0], [3, 2, 1, 0], []):
        walk = Walk(Path("p", [0, 1, 2, 3], recorded=True, uneven=True), 1)
        launched = [number for unit in used for number in walk.use(unit).launch]
        assert [*launched, *walk.finish()] == [0, 1, 2, 3], used


@on_ranks(2)
def test_the_budget_counts_all_units_for_a_first_pass() -> None:
    one = sum(param.numel() for param in Layer().parameters()) * 4
    policy: dict[str, Any] = {**APART, "budget": {"device": 16 * one}}
    zhooks.attach(Dropping(), policy=policy).detach()
    with pytest.raises(BudgetError, match=r"\[budget\] device"):
        zhooks.attach(Dropping(), policy={**policy, "schedule": {"uneven": True}})
