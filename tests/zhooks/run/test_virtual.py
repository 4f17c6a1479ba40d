"""A model attached on the virtual device: every tier, at any number of ranks, and no race in what CUDA would be told."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.tier import Tier
from offload.virtual import ACCELERATOR, HOST, Races
from tests.support.inside import store_of
from tests.support.slow import slow
from tests.support.two_streams import BRANCHES
from tests.support.virtual import machine, on_virtual
from tests.support.zoo import ZOO

HOST_TIERS = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
DISK_TIERS = {cell: {"tier": "disk"} for cell in ("parameter", "gradient", "optimizer")}
POLICIES: dict[str, dict[str, Any]] = {
    "device": {},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "optimizer": {"tier": "disk"}, "precision": {"param": "bf16"}, "schedule": {"prefetch": 4}},
    "stage 2": {"stage": 2, "optimizer": {"tier": "host"}, "gradient": {"tier": "host"}, "schedule": {"prefetch": 0}},
    "host": HOST_TIERS,
    "host update": HOST_TIERS | {"optimizer": {"tier": "host", "compute": "host"}},
    "share on the device": HOST_TIERS | {"optimizer": {"tier": "host", "device_share": 0.4}},
    "share, host update": HOST_TIERS | {"optimizer": {"tier": "host", "device_share": 0.4, "compute": "host", "overlap": True}},
    "share, disk": DISK_TIERS | {"optimizer": {"tier": "disk", "device_share": 0.6, "overlap": True}},
    "disk": DISK_TIERS | {"schedule": {"prefetch": 4}},
    "activations on host": {"activation": {"tier": "host"}, "parameter": {"tier": "host"}},
    "activations on disk": {"activation": {"tier": "disk", "checkpoint": "unit"}, "optimizer": {"tier": "disk"}},
    "overlap": {"optimizer": {"overlap": True}},
    "overlap on disk": DISK_TIERS | {"optimizer": {"tier": "disk", "overlap": True}},
    "overlap on the host": HOST_TIERS | {"optimizer": {"tier": "host", "compute": "host", "overlap": True}},
    "arena": {"device": {"arena": "all"}, "activation": {"checkpoint": "unit"}},
}
#: Those that have what others have one by one.
FIRST = ("share, disk", "overlap on the host", "arena")


def train(name: str, policy: dict[str, Any], steps: int = 3) -> None:
    """As users do, up to ``detach``."""
    specimen = BRANCHES if name == BRANCHES.name else ZOO[name]
    with torch.device("virtual"):
        model = specimen.make()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **policy})
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        loss = specimen.loss(model, tuple(tensor.to("virtual") for tensor in specimen.batch(step, 0, 1)))
        loss.backward()
        if not attachment.policy.optimizer.overlap:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    attachment.detach()


@on_virtual(policy=(*FIRST, *slow(*(name for name in POLICIES if name not in FIRST))))
def test_no_use_of_memory_is_unordered_under_any_tier(policy: str) -> None:
    with machine(world=4) as made:
        races = Races()
        made.listeners.append(races)
        train("gpt", POLICIES[policy])
        gc.collect()
        assert races.checked > 1000
        assert not races.found, "\n".join(map(str, races.found))


@on_virtual(policy=("device", "host", "arena", "activations on host"))
def test_units_on_two_streams_are_not_freed_under_the_second(policy: str) -> None:
    with machine(world=4) as made:
        races = Races()
        made.listeners.append(races)
        train(BRANCHES.name, POLICIES[policy])
        gc.collect()
        assert races.checked > 300
        assert not races.found, "\n".join(map(str, races.found))


@on_virtual()
def test_updates_on_the_host_beside_backward_take_the_same_time_in_every_run_and_less_than_after_it() -> None:
    seconds = []
    for overlap in (True, True, False):
        with machine(world=2, kernel=1.0) as made:
            train("gpt", HOST_TIERS | {"optimizer": {"tier": "host", "compute": "host", "overlap": overlap}})
            made.current.synchronize()
            seconds.append(made.now)
    assert seconds[0] == seconds[1] < seconds[2]


@on_virtual()
def test_an_optimizer_that_one_side_s_kernel_refuses_updates_nothing_on_the_other() -> None:
    with machine() as made:
        with torch.device("virtual"):
            model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        update = {"tier": "host", "device_share": 0.5, "compute": "host", "kernel": "numba"}
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, **HOST_TIERS, "optimizer": update})
        optimizer = torch.optim.Adamax(model.parameters())
        model(torch.empty(4, 8, device="virtual")).sum().backward()
        with pytest.raises(zhooks.ShardedOpError, match=r"needs Adam, AdamW, SGD or Lion.*\b0 of 4 units had been updated"):
            optimizer.step()
        assert not optimizer.state
        made.current.synchronize()
        attachment.detach()


@on_virtual(world=(1, 2, 1024))
def test_what_rests_on_the_device_is_one_share_of_the_parameters(world: int) -> None:
    with machine(world=world) as made:
        with torch.device("virtual"):
            model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
        gc.collect()
        share = 4 * 256 * 256 * 4 // world
        assert share <= made.held[ACCELERATOR] <= share + 4096
        assert attachment.memory() is not None
        attachment.detach()
        del attachment
        gc.collect()
        assert made.held[ACCELERATOR] == 4 * 256 * 256 * 4


@on_virtual()
def test_states_on_the_host_tier_take_its_memory_and_none_of_the_device_s() -> None:
    with machine(world=2) as made:
        train("gpt", HOST_TIERS)
        gc.collect()
        assert made.peak[HOST] > 0 and made.held[ACCELERATOR] == 0


@on_virtual()
def test_a_prefetched_gather_overlaps_compute_and_one_on_demand_does_not() -> None:
    seconds = {}
    for prefetch in (0, 1):
        with machine(world=2, issue=0.0, kernel=0.25, network=3.0) as made, torch.no_grad():
            with torch.device("virtual"):
                model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), *[nn.Tanh()] * 12) for _ in range(6)])
            policy = {"units": {"min_numel": 0}, "schedule": {"prefetch": prefetch}}
            attachment = zhooks.attach(model, policy=policy)
            batch = torch.empty(4, 8, device="virtual")
            for _ in range(2):
                made.current.synchronize()
                begin = made.now
                model(batch)
            made.current.synchronize()
            seconds[prefetch] = made.now - begin
            attachment.detach()
    # Six gathers of 3 s, and six times 3.25 s of compute.
    assert seconds == {0: 37.5, 1: 22.5}


@on_virtual()
def test_a_budget_of_the_device_is_held_against_the_machine_s_memory() -> None:
    with machine(world=2, memory=(1 << 14, 1 << 40, 1 << 40)), pytest.raises(zhooks.BudgetError, match="device"):
        train("gpt", {"budget": {"device": "100%"}})


@on_virtual(share=(0, 0.2, 0.5, 0.9), update=("device", "host", "host, in backward"))
def test_what_passes_through_a_host_of_the_least_memory_waits_for_what_is_under_way(share: float, update: str) -> None:
    # Flats of 64 KiB an array: those of an update and of the next; two that are lent, and a parameter on its way.
    room = "576 KiB" if update == "host, in backward" else "512 KiB"
    compute = {"compute": update.partition(",")[0], "overlap": update == "host, in backward"}
    policy = {
        "units": {"min_numel": 0},
        "budget": {"host": room},
        "host": {"slab": "64 KiB"},
        **DISK_TIERS,
        "optimizer": {"tier": "disk", "device_share": share, **compute},
    }
    with machine():
        with torch.device("virtual"):
            model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        attachment = zhooks.attach(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.empty(2, 128, device="virtual")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        store = store_of(attachment)
        assert store.budget.high_water(Tier.HOST) == store.budget.limit(Tier.HOST)
        attachment.detach()
