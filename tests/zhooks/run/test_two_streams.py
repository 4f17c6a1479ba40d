"""No race where units are used on several streams, and where a shard is read while its unit is on its way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import zhooks
from offload.virtual import Races
from tests.support.on_ranks import on_accelerators
from tests.support.schedules import SCHEDULES, schedule
from tests.support.slow import slow
from tests.support.two_streams import BRANCHES, TOWERS
from tests.support.virtual import machine, on_virtual

HOST_TIERS = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
POLICIES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST_TIERS,
    "arena": {"device": {"arena": "all"}},
    "activations on host": {"activation": {"tier": "host", "min_bytes": 0}},
}


def losses_of_two_streams(**policy: Any) -> list[float]:
    model = BRANCHES.build(7).to("accel")
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}, **policy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = BRANCHES.loss(model, tuple(tensor.to("accel") for tensor in BRANCHES.batch(step, 0, 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = [loss.item() for loss in losses]
    attachment.detach()
    return found


# Of one rank no collective is waited for: what was prefetched from one stream was read from the other before it was there.
@on_accelerators(1, tier=("host", *slow("device")), prefetch=(1, *slow(2)))
def test_a_unit_that_was_prefetched_from_one_stream_is_there_when_another_uses_it(tier: str, prefetch: int) -> None:
    found = []
    for mode, seed in SCHEDULES:
        with schedule(mode, seed):
            found.append(losses_of_two_streams(parameter={"tier": tier}, schedule={"prefetch": prefetch}))
    assert all(losses == found[0] for losses in found), found


@on_virtual(policy=tuple(POLICIES))
def test_units_that_two_streams_use_in_turn_are_freed_after_both(policy: str) -> None:
    with machine(world=4) as made:
        races = Races()
        made.listeners.append(races)
        with torch.device("virtual"):
            model = TOWERS.make()
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **POLICIES[policy]})
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            TOWERS.loss(model, tuple(tensor.to("virtual") for tensor in TOWERS.batch(step, 0, 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        attachment.detach()
        gc.collect()
        assert races.checked > 300
        assert not races.found, "\n".join(map(str, races.found))


def _reads(ahead: nn.Linear) -> Callable[..., None]:
    weight: Any = ahead.weight

    def hook(*_: Any) -> None:
        weight.to_local().sum()

    return hook


@on_virtual(prefetch=(1, 4))
def test_a_shard_that_is_read_while_its_unit_is_gathered_ahead_waits_for_its_copy(prefetch: int) -> None:
    with machine(world=4) as made, torch.no_grad():
        races = Races()
        made.listeners.append(races)
        with torch.device("virtual"):
            layers = [nn.Linear(8, 8) for _ in range(6)]
        model = nn.Sequential(*layers)
        policy = {"units": {"min_numel": 0}, "schedule": {"prefetch": prefetch}, **HOST_TIERS}
        attachment = zhooks.attach(model, policy=policy)
        for layer, ahead in pairwise(layers):
            layer.register_forward_pre_hook(_reads(ahead))
        for _ in range(2):
            model(torch.empty(4, 8, device="virtual"))
        attachment.detach()
        assert races.checked > 100
        assert not races.found, "\n".join(map(str, races.found))
