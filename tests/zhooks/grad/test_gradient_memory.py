"""Whose memory a gradient is: freed with the last reference to it, never written again while there is one.

pytest runs it, on one and two ranks. What `memory()` says of other states is test_memory.py's.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zhooks
from tests.support.held_levels import Levels
from tests.support.inside import store_of
from tests.support.on_ranks import on_ranks, place


class Two(nn.Module):
    """Two branches in one unit, of which a forward uses the first, the second or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return sum((getattr(self, name)(x).square().mean() for name in use.split("+")), torch.zeros(()))


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + place()[0]))


def gradients(attachment: Any) -> tuple[int, int]:
    rows = [row for row in attachment.memory().rows if row.what == "gradient"]
    return sum(row.nbytes for row in rows), sum(row.formula for row in rows)


def storages(model: nn.Module) -> list[StorageWeakRef]:
    return [StorageWeakRef(param.grad.to_local().untyped_storage()) for param in model.parameters()]


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_zero_grad_frees_what_gradients_hold_and_they_come_again(stage: int) -> None:
    for more in ({}, {"precision": {"param": "bf16"}}, {"device": {"arena": "states"}}):
        model = Two()
        attachment = zhooks.attach(model, policy={"stage": stage, **more})
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(batch(step), "one+two").backward()
            held, formula = gradients(attachment)
            assert held == formula > 0
            known = storages(model)
            optimizer.step()
            optimizer.zero_grad()
            assert gradients(attachment) == (0, 0)
            assert all(one.expired() for one in known), "the memory is gone, not only uncounted"
            with torch.no_grad():
                model(batch(step), "one")
            assert gradients(attachment) == (0, 0)
        attachment.detach()


@on_ranks(1, 2, stage=(2, 3), tier=("host", "disk"))
def test_zero_grad_frees_gradients_on_tiers(stage: int, tier: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, levels = Two(), Levels()
        states = {cell: {"tier": tier} for cell in ("gradient", "optimizer")}
        attachment = zhooks.attach(model, policy={"stage": stage, **states, "disk": {"path": folder}})
        optimizer, heard = torch.optim.AdamW(model.parameters()), attachment.observe(levels)
        for step in range(3):
            model(batch(step), "one+two").backward()
            held, formula = gradients(attachment)
            assert held == formula > 0 and levels.of(f"gradient on {tier}") >= held
            optimizer.step()
            optimizer.zero_grad()
            assert gradients(attachment) == (0, 0)
        store_of(attachment).flush()
        assert not [what for (what, _), level in levels.counters.items() if what.startswith("gradient") and level]
        heard.close()
        attachment.detach()


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_gradients_that_are_zeroed_stay_where_they_are(stage: int) -> None:
    model = Two()
    attachment = zhooks.attach(model, policy={"stage": stage})
    seen = set()
    for step in range(3):
        model(batch(step), "one+two").backward()
        seen.add(tuple(param.grad.to_local().data_ptr() for param in model.parameters()))
        model.zero_grad(set_to_none=False)
    assert len(seen) == 1
    attachment.detach()


KEPT = {
    "gradient": lambda grad: grad,
    "range": lambda grad: grad.to_local(),
    "detached": lambda grad: grad.detach(),
    "view of the range": lambda grad: grad.to_local()[:4],
    "list": lambda grad: [[grad]][0][0],
}


@on_ranks(1, 2, stage=(0, 1, 2, 3), tier=("device", "host"))
def test_what_the_loop_keeps_of_a_gradient_is_never_written_again(stage: int, tier: str) -> None:
    if tier == "host" and stage < 2:
        tier = "device"
    for keep in KEPT.values():
        model = Two()
        attachment = zhooks.attach(model, policy={"stage": stage, "gradient": {"tier": tier}, "optimizer": {"tier": tier}})
        for first in ("one+two", "one", "two"):
            model(batch(0), first).backward()
            mine = [keep(param.grad) for param in model.parameters() if param.grad is not None]
            values = [value.to_local().clone() if hasattr(value, "to_local") else value.clone() for value in mine]
            for after in ("one", "two", "one+two"):
                model.zero_grad()
                model(batch(1), after).backward()
                model(batch(2), "one+two").backward()
            for value, before in zip(mine, values, strict=True):
                assert torch.equal(value.to_local() if hasattr(value, "to_local") else value, before)
            del mine, value
            model.zero_grad()
        attachment.detach()


@on_ranks(1, 2, stage=(0, 1, 2, 3), tier=("device", "host"))
def test_gradients_of_branches_that_come_one_by_one_share_their_memory(stage: int, tier: str) -> None:
    if tier == "host" and stage < 2:
        tier = "device"
    model, plain = Two(), Two()
    attachment = zhooks.attach(model, policy={"stage": stage, "gradient": {"tier": tier}, "optimizer": {"tier": tier}})
    x = torch.ones(4, 8)
    for use in ("one", "two", "one+two"):
        model(x, use).backward()
        plain(x, use).backward()
    held, formula = gradients(attachment)
    assert held == formula
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    one = model.one.weight.grad.to_local().clone()
    model.two.weight.grad = None
    model(x, "two").backward()
    assert torch.equal(model.one.weight.grad.to_local(), one)
    attachment.detach()


def test_a_gradient_that_was_set_aside_is_added_to_by_nobody() -> None:
    model = Two()
    attachment = zhooks.attach(model)
    model(batch(0), "one").backward()
    aside, model.one.weight.grad = model.one.weight.grad, None
    before = aside.to_local().clone()
    model(batch(1), "one+two").backward()
    assert torch.equal(aside.to_local(), before) and model.one.weight.grad is not aside
    attachment.detach()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_deep_copy_of_a_gradient_outlives_the_model(stage: int) -> None:
    model = Two()
    attachment = zhooks.attach(model, policy={"stage": stage})
    model(batch(0), "one+two").backward()
    kept = [param.grad for param in model.parameters()]
    values = [grad.to_local().clone() for grad in kept]
    attachment.detach()
    del attachment, model
    assert all(torch.equal(grad.to_local(), value) for grad, value in zip(kept, values, strict=True))
