"""The race detector over every tier, prefetch, kind of activations and overlap, and over layers that are divided over tp.

The whole of it is slow; tests/zhooks/run/test_virtual.py and test_simulate_tp.py run a sample of it in every run.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.tiers import TIERS
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt
from tests.support.virtual import on_virtual
from tests.support.zoo import ZOO
from zhooks.simulate import simulate

Policy = dict[str, Any]

PREFETCH = (0, 1, 4)
ACTIVATIONS: dict[str, Policy] = {
    "kept": {},
    "recomputed": {"checkpoint": "unit"},
    "host": {"tier": "host", "min_bytes": 0},
    "disk": {"tier": "disk", "min_bytes": 0},
    "recomputed from disk": {"tier": "disk", "checkpoint": "unit", "min_bytes": 0},
}
#: How parameters are updated.
UPDATES: dict[str, Policy] = {
    "step": {},
    "overlap": {"overlap": True},
    "overlap on the host": {"overlap": True, "compute": "host"},
}


def policy(tier: str, prefetch: int, activation: str, update: str = "step") -> Policy:
    cells: Policy = {
        cell: {"tier": where} for cell, where in zip(("parameter", "gradient", "optimizer"), TIERS[tier], strict=True)
    }
    cells["optimizer"] |= UPDATES[update]
    return {
        "units": {"min_numel": 0},
        "schedule": {"prefetch": prefetch},
        "activation": ACTIVATIONS[activation],
        **cells,
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ZOO["gpt"].make()
    return model, adamw(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ZOO["gpt"].loss(model, tuple(tensor.to("virtual") for tensor in ZOO["gpt"].batch(0, 0, 1))).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@on_virtual(tier=tuple(TIERS), prefetch=PREFETCH)
def test_no_use_of_memory_is_unordered_under_any_activations_and_updates(tier: str, prefetch: int) -> None:
    found: list[str] = []
    for activation, update in itertools.product(ACTIVATIONS, UPDATES):
        if update == "overlap on the host" and "device" in TIERS[tier]:
            continue
        races = simulate(build, step, world=4, hardware="h100", policy=policy(tier, prefetch, activation, update)).races
        found += [f"{activation}, {update}: {race}" for race in races]
    assert not found, "\n".join(found)


@pytest.mark.slow
@on_virtual(tier=tuple(TIERS), sequence=(False, True))
def test_no_use_of_memory_is_unordered_where_layers_are_divided(tier: str, sequence: bool) -> None:
    def divided(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = divide(plain_gpt(), mesh["tp"], sequence=sequence)
        return model, adamw(model)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, *(tensor.to("virtual") for tensor in batch(0))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    found: list[str] = []
    mesh = {"replicate": 2, "shard": 2, "tp": 2}
    for prefetch, activation in itertools.product(PREFETCH, ("kept", "recomputed", "host")):
        races = simulate(
            divided, trained, world=8, mesh=mesh, hardware="h100", policy=policy(tier, prefetch, activation)
        ).races
        found += [f"prefetch {prefetch}, {activation}: {race}" for race in races]
    assert not found, "\n".join(found)
