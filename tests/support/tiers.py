"""Policies that put states on tiers, and one way to train a model of the zoo under them or in plain PyTorch.

Tests of tiers compare what ``run`` returns. It asserts only that ``detach`` leaves a plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import hooks_left, place
from tests.support.values import copies, same
from tests.support.zoo import ZOO

TIERS: dict[str, tuple[str, str, str]] = {
    "device": ("device", "device", "device"),
    "host": ("host", "host", "host"),
    "disk": ("disk", "disk", "disk"),
    "mixed": ("host", "disk", "disk"),
    "states": ("device", "device", "host"),
}
AWAY = tuple(TIERS)[1:]
Loop = Callable[[nn.Module, torch.optim.Optimizer, zhooks.Attachment | None], Any]


def policy(tier: str, stage: int = 3, **more: Any) -> dict[str, Any]:
    """Every module with parameters its own unit, the three cells on these tiers."""
    cells = zip(("parameter", "gradient", "optimizer"), TIERS[tier], strict=True)
    return {"stage": stage, "units": {"min_numel": 0}, **{cell: {"tier": where} for cell, where in cells}, **more}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1, **options)


def loss_of(model: nn.Module, number: int, name: str = "mlp") -> Tensor:
    rank, world = place()
    return ZOO[name].loss(model, ZOO[name].batch(number, rank, world))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, name: str = "mlp") -> float:
    loss = loss_of(model, number, name)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def three_steps(name: str = "mlp") -> Loop:
    return lambda model, optimizer, _: [step(model, optimizer, number, name) for number in range(3)]


def run(
    loop: Loop, chosen: dict[str, Any] | None, name: str = "mlp", build: Callable[[], nn.Module] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> tuple[Any, list[Tensor]]:  # fmt: skip
    """What the loop returns and the parameters after it, under a policy or in plain PyTorch."""
    model = ZOO[name].build(7) if build is None else build()
    attachment = None if chosen is None else zhooks.attach(model, policy=chosen)
    result = loop(model, optimizer(model), attachment)
    values = copies(model.parameters())
    if attachment is not None:
        attachment.detach()
        assert same(copies(model.parameters()), values)
        assert not hooks_left(model) and not any(isinstance(p, zhooks.ShardedTensor) for p in model.parameters())
    return result, values
