"""A straggler or a slow link: the step is the slowest rank's, and the others wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.hardware import Hardware
from tests.support.virtual import on_virtual
from zhooks import Simulation, Slowdown

POLICY = {"units": {"names": ["?"]}, "precision": {"param": "bf16"}}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU()) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.empty(16384, 1024, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def simulated(world: int = 16, **given: Any) -> Simulation:
    return zhooks.simulate(build, step, world=world, policy=POLICY, check_races=False, **given)


@on_virtual()
def test_a_rank_that_computes_at_half_the_speed_makes_all_others_wait() -> None:
    alike, late = simulated(), simulated(slow=Slowdown([5], compute=2.0))
    assert late.compute_s == pytest.approx(2 * alike.compute_s)
    assert late.rank == 5 and late.step_s > 1.5 * alike.step_s
    assert late.waiting_s == pytest.approx(late.step_s - alike.step_s) and alike.waiting_s == 0.0
    assert "this is rank 5, the slowest" in str(late) and "slowest" not in str(alike)
    # Fifteen devices wait instead of computing.
    assert alike.joules is not None and late.joules is not None
    assert alike.joules < late.joules < 2 * alike.joules * late.step_s / alike.step_s


@on_virtual()
def test_half_a_node_s_network_is_what_a_network_of_half_the_bandwidth_is() -> None:
    fast = Hardware.of("h100").replaced(network={"bandwidth": "40 Gb/s"})
    slow = fast.replaced(network={"bandwidth": "20 Gb/s"})
    one_node = simulated(hardware=fast, slow=[Slowdown(range(8, 16), network=2.0)])
    every_node = simulated(hardware=slow)
    assert one_node.step_s == pytest.approx(every_node.step_s) and one_node.waiting_s > 0
    assert one_node.compute_s == pytest.approx(every_node.compute_s)
    assert one_node.hardware == "h100" and one_node.network_nbytes == every_node.network_nbytes


@on_virtual()
def test_a_slow_link_inside_a_node_does_not_slow_computation() -> None:
    alike, late = simulated(8), simulated(8, slow=Slowdown([0], link=50.0))
    assert late.step_s > alike.step_s and late.compute_s == pytest.approx(alike.compute_s)
    assert late.exposed_s > alike.exposed_s


@on_virtual()
def test_slowdowns_that_cannot_be_are_refused_and_none_is_none() -> None:
    with pytest.raises(zhooks.SimulationError, match=r"slow expected compute to be a factor of at least 1.0.*, found 0.5"):
        simulated(slow=Slowdown([0], compute=0.5))
    with pytest.raises(zhooks.SimulationError, match=r"slow expected ranks as numbers from 0 to 15, found \[16\]"):
        simulated(slow=Slowdown([16], link=2.0))
    with pytest.raises(zhooks.SimulationError, match=r"slow expected ranks as numbers from 0 to 15, found \[\]"):
        simulated(slow=Slowdown([], link=2.0))
    wrong: Any
    for wrong, found in ((5, "5"), ([0.5], r"\[0.5\]")):
        with pytest.raises(zhooks.SimulationError, match=f"slow expected ranks as numbers from 0 to 15, found {found}"):
            simulated(slow=Slowdown(wrong, compute=2.0))
    for wrong in (5, [5]):
        with pytest.raises(zhooks.SimulationError, match="slow expected a Slowdown, or several of them, found 5"):
            simulated(slow=wrong)
    assert simulated(slow=[Slowdown([3])]).as_dict() == simulated().as_dict()
