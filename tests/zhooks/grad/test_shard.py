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
from zhooks.grad.shard import GradientShard, StoreShard


@pytest.fixture(params=["device", "host", "disk"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GradientShard]:
    tier = {"tier": request.param}
    attachment = zhooks.attach(nn.Linear(3, 5), policy={"gradient": tier, "optimizer": tier, "disk": {"path": str(tmp_path)}})
    (gradient,) = runtime_of(attachment).reducer.gradients.values()
    assert isinstance(gradient.shard, StoreShard) is (request.param != "device") is not gradient.shard.direct
    yield gradient.shard
    attachment.detach()


def test_what_is_put_is_what_parameters_claim(shard: GradientShard) -> None:
    assert shard.reserve() and not shard.reserve(), "one gradient at a time"
    values = torch.arange(float(shard.values().numel()))
    shard.put(0, values, add=False)
    shard.put(0, values, add=True)
    shard.put(16, torch.ones(5), add=True)
    owner, nbytes = owner_of(shard.at)
    assert owner and nbytes == 4 * values.numel()
    weight, bias = shard.claim(0), shard.claim(1)
    shard.hand_over()
    assert torch.equal(weight.to_local(), 2 * values[:15])
    assert torch.equal(bias.to_local(), 2 * values[16:21] + 1)


def test_another_gradient_never_writes_what_somebody_keeps(shard: GradientShard) -> None:
    shard.reserve()
    shard.overwritten().fill_(1.0)
    kept = shard.claim(0)
    shard.hand_over()
    shard.reserve()
    shard.overwritten().fill_(2.0)
    assert torch.equal(kept.to_local(), torch.ones(15))


def test_a_gradient_that_comes_by_itself_joins_those_that_are_kept(shard: GradientShard) -> None:
    shard.reserve()
    weight = shard.claim(0)
    shard.hand_over()
    bias = shard.keep(1, torch.full((5,), 3.0))
    again = shard.keep(1, torch.full((5,), 4.0))
    assert torch.equal(bias.to_local(), torch.full((5,), 3.0)), "its range of the shard is its own"
    assert torch.equal(again.to_local(), torch.full((5,), 4.0))
    assert owner_of(memory_of(weight)) == owner_of(memory_of(bias))
