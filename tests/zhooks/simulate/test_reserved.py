"""What torch's allocator would have reserved for a simulated step: its rounding, its segments, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.hardware import Hardware
from tests.support.virtual import on_virtual
from zhooks import Simulation

MIB = 1 << 20


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU()) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.empty(4096, 1024, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def simulated(**given: Any) -> Simulation:
    return zhooks.simulate(build, step, world=8, policy={"units": {"names": ["?"]}}, check_races=False, **given)


@on_virtual()
def test_the_allocator_reserves_whole_segments_of_what_a_step_holds() -> None:
    plain, found = simulated(), simulated(allocator="")
    assert plain.reserved is None and found.reserved is not None
    assert found.device == plain.device and found.step_s == plain.step_s, "looking changes nothing"
    assert found.reserved.nbytes >= found.reserved.allocated >= found.device.nbytes
    assert found.reserved.nbytes % (2 * MIB) == 0 and not found.reserved.failed and found.fits
    assert "reserved by torch's allocator" in str(found) and found.as_dict()["reserved"]["nbytes"] == found.reserved.nbytes


@on_virtual()
def test_a_device_that_holds_the_tensors_but_not_their_blocks_does_not_fit() -> None:
    found = simulated(allocator="")
    assert found.reserved is not None
    tight = Hardware.of("h100").replaced(device={"memory": found.device.nbytes + 4096})
    less = simulated(hardware=tight, allocator="")
    assert less.reserved is not None and less.reserved.failed and not less.fits
    assert "the allocator failed" in str(less) and simulated(hardware=tight).fits


@on_virtual()
def test_settings_that_torch_would_refuse_are_refused_before_anything_is_built() -> None:
    with pytest.raises(zhooks.PolicyError, match="allocator settings are not valid"):
        simulated(allocator="expandable:True")
