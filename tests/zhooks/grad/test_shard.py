"""The memory of gradients does the same on the device and on tiers, and is handed out once.

pytest runs it. What becomes of the memory over steps is test_gradient_memory.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zhooks
from offload.store import owner_of
from tests.support.inside import memory_of, runtime_of
from zhooks.grad import GradBuffer


@pytest.fixture(params=["device", "host", "disk"])
def gradient(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GradBuffer]:
    tier = {"tier": request.param}
    attachment = zhooks.attach(nn.Linear(3, 5), policy={"gradient": tier, "optimizer": tier, "disk": {"path": str(tmp_path)}})
    (gradient,) = runtime_of(attachment).reducer.gradients.values()
    assert (request.param == "device") is gradient.direct
    yield gradient
    attachment.detach()


def test_what_is_put_is_what_parameters_claim(gradient: GradBuffer) -> None:
    shard = gradient.reserve()
    assert shard is not None and gradient.reserve() is None, "one gradient at a time"
    values = torch.arange(float(shard.open().numel()))
    shard.put(0, values, add=False)
    shard.put(0, values, add=True)
    shard.put(16, torch.ones(5), add=True)
    owner, nbytes = owner_of(shard.at)
    assert owner and nbytes == 4 * values.numel()
    weight, bias = gradient.claim(0), gradient.claim(1)
    gradient.hand_over()
    assert torch.equal(weight.to_local(), 2 * values[:15])
    assert torch.equal(bias.to_local(), 2 * values[16:21] + 1)


def test_another_gradient_never_writes_what_somebody_keeps(gradient: GradBuffer) -> None:
    fill(gradient, 1.0)
    kept = gradient.claim(0)
    gradient.hand_over()
    fill(gradient, 2.0)
    assert torch.equal(kept.to_local(), torch.ones(15))


def fill(gradient: GradBuffer, value: float) -> None:
    shard = gradient.reserve()
    assert shard is not None
    shard.overwritten().fill_(value)


def test_a_gradient_that_comes_by_itself_joins_those_that_are_kept(gradient: GradBuffer) -> None:
    gradient.reserve()
    weight = gradient.claim(0)
    gradient.hand_over()
    bias = gradient.keep(1, torch.full((5,), 3.0))
    again = gradient.keep(1, torch.full((5,), 4.0))
    assert torch.equal(bias.to_local(), torch.full((5,), 3.0)), "its range of the shard is its own"
    assert torch.equal(again.to_local(), torch.full((5,), 4.0))
    assert owner_of(memory_of(weight)) == owner_of(memory_of(bias))
