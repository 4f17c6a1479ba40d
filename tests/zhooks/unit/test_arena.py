"""Training with memory reserved ahead: every bit as without it, in every product, and refused where a budget has no room.

pytest runs it. The arena by itself is tests/offload/memory/test_arena.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from offload.errors import BudgetError
from tests.support.inside import pool_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow

WIDTH, BLOCKS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def policy(arena: str, **more: Any) -> dict[str, Any]:
    units = {"classes": ["Block", "Embedding", "Linear"], "min_numel": 0}
    return {"stage": 3, "units": units, "device": {"arena": arena}, "comm": {"transport": "p2p"}, **more}


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 50, (2, 6 + 2 * (step % 2)), generator=generator)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        x = batch(step, rank)
        loss = F.cross_entropy(model(x).float().flatten(0, 1), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(chosen: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], zhooks.Attachment, nn.Module]:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy=chosen)
    losses = run(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(3), rank)
    with attachment.gathered() as full:
        values = {str(number): value.clone() for number, value in enumerate(full)}
    return losses, values, attachment, model


def compared(stage: int, precision: str, arena: str) -> zhooks.Attachment:
    """Training without and with it is bit-equal; returns the attachment with it."""
    more: dict[str, Any] = {"stage": stage, "activation": {"checkpoint": "unit"}}
    if precision != "fp32":
        more["precision"] = {"param": precision}
    without, with_it = trained(policy("none", **more)), trained(policy(arena, **more))
    assert with_it[0] == without[0]
    assert all(torch.equal(with_it[1][name], without[1][name]) for name in without[1])
    without[2].detach()
    return with_it[2]


@on_ranks(
    1, 2,
    case=((1, "bf16", "all"), (3, "fp32", "all"), *slow((0, "fp32", "states"), (2, "fp32", "all"), (3, "bf16", "states"))),
)  # fmt: skip
def test_training_is_bit_equal_with_and_without_it_at_every_stage(case: tuple[int, str, str]) -> None:
    attachment = compared(*case)
    arena = pool_of(attachment).arena
    assert arena is not None
    report = arena.report()
    assert report.used <= report.peak <= report.reserved
    # Nothing fell back but what a longer second batch kept.
    assert report.fell_back <= (BLOCKS + 1 if case[2] == "all" else 0), report
    attachment.detach()
    assert pool_of(attachment).arena is None and arena.report().reserved == 0


@pytest.mark.slow
@on_ranks(1, 2, precision=("fp32", "bf16"), arena=("states", "all"))
def test_training_is_bit_equal_in_every_product(precision: str, arena: str) -> None:
    for stage in (0, 1, 2, 3):
        compared(stage, precision, arena).detach()


@on_ranks(1, 2, limit_s=180.0)
def test_apply_plans_anew_and_training_goes_on_as_without() -> None:
    more: dict[str, Any] = {"activation": {"checkpoint": "unit"}}
    rank, _ = place()
    losses = []
    for changes in ([], ["all", "none"]):
        model = net()
        attachment = zhooks.attach(model, policy=policy("none", **more))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        seen = run(model, optimizer, range(2), rank)
        for step in (2, 3):
            if changes:
                arena = changes[step - 2]
                attachment.apply(policy(arena, **more))
                assert (pool_of(attachment).arena is not None) == (arena == "all")
                assert ("arena, unused" in attachment.memory().transient) == (arena == "all")
            seen += run(model, optimizer, range(step, step + 1), rank)
        attachment.detach()
        losses.append(seen)
    assert losses[0] == losses[1]


@on_ranks(2, limit_s=180.0)
def test_a_budget_without_memory_for_it_is_refused_and_the_model_is_as_it_was() -> None:
    model = net()
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(BudgetError, match=r"\[budget\] device"):
        zhooks.attach(model, policy=policy("states", budget={"device": "4 KiB"}))
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
