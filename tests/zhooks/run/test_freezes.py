"""Parameters that are frozen between a forward and its backward: for one look at the model (PEFT's ``disable_adapter``), or
for the backward itself (a discriminator, while its generator trains).

pytest runs it on one rank and on two. The oracle is plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.averaging import average_gradients
from tests.support.on_ranks import on_ranks, place
from tests.support.values import copies, whole

EVERY_UNIT = {"min_numel": 0}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def trained(net: nn.Sequential, rank: int, world: int) -> list[Tensor]:
    """Three steps, each of which looks at the frozen model before its backward."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    mine = batch().chunk(world)[rank]
    for _ in range(3):
        loss = net(mine).square().mean()
        net[2].requires_grad_(False)
        with torch.no_grad():
            reference = net(mine)
        net[2].requires_grad_(True)
        (loss + (net(mine) * reference).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copies(net.parameters())


@on_ranks(1, 2, stage=(1, 3), tier=("device", "host"))
def test_a_pass_for_values_alone_leaves_the_layout_to_the_backward_around_it(stage: int, tier: str) -> None:
    rank, world = place()
    attached = model()
    zhooks.attach(attached, policy={"stage": stage, "units": EVERY_UNIT, "optimizer": {"tier": tier}})
    for value, other in zip(trained(attached, rank, world), trained(model(), 0, 1), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@on_ranks(1, 2)
def test_a_freeze_that_stays_is_followed_by_the_next_training_pass() -> None:
    attached = model()
    zhooks.attach(attached, policy={"stage": 3, "units": EVERY_UNIT})
    attached(batch()).mean().backward()
    attached.zero_grad()
    attached[2].requires_grad_(False)
    with torch.no_grad():
        attached(batch())
    attached(batch()).mean().backward()
    grads: list[Any] = [param.grad for param in attached.parameters()]
    assert [grad is None for grad in grads] == [False, False, True, True, False, False]


@on_ranks(2)
def test_a_differentiated_pass_in_between_is_refused_in_backward_not_computed_otherwise() -> None:
    attached = model()
    zhooks.attach(attached, policy={"stage": 3, "units": EVERY_UNIT})
    loss = attached(batch()).mean()
    attached[2].requires_grad_(False)
    attached(batch())
    with pytest.raises(zhooks.ShardedOpError, match="frozen or unfrozen"):
        loss.backward()


@on_ranks(1, 2, stage=(1, 3), checkpoint=("none", "unit"))
def test_what_is_frozen_when_backward_runs_gets_no_gradient_as_in_the_plain_model(stage: int, checkpoint: str) -> None:
    rank, world = place()
    attached, plain = model(), model()
    zhooks.attach(attached, policy={"stage": stage, "units": EVERY_UNIT, "activation": {"checkpoint": checkpoint}})
    for step in range(2):
        for net in (attached, plain):
            loss = net(batch().chunk(world)[rank]).square().mean()
            net[2].weight.requires_grad_(False)
            net[4].requires_grad_(False)
            loss.backward()
            net.requires_grad_(True)
        average_gradients(plain, world)
        for ours, theirs in zip(attached.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) is (theirs.grad is None), step
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours.grad), theirs.grad)


class Adversaries(nn.Module):
    """One unit: the discriminator is used outside the forward, and first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)


def played(net: Adversaries, rank: int, world: int) -> list[Tensor]:
    """Two rounds, in which each of the two is frozen while the other one learns."""
    sides = (net.generator, net.discriminator)
    optimizers = [torch.optim.SGD(side.parameters(), lr=0.5) for side in sides]
    mine = batch().chunk(world)[rank]
    for _ in range(2):
        for turn in range(2):
            sides[turn].requires_grad_(True)
            sides[1 - turn].requires_grad_(False)
            true = net.discriminator(mine).sigmoid().mean()
            made = net.discriminator(net(mine)).sigmoid().mean()
            (made - true if turn else -made).backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()
    return copies(net.parameters())


@on_ranks(1, 2, stage=(1, 3))
def test_what_is_unfrozen_trains_by_its_use_outside_the_forward_too(stage: int) -> None:
    rank, world = place()
    attached = Adversaries()
    zhooks.attach(attached, policy={"stage": stage})
    for value, other in zip(played(attached, rank, world), played(Adversaries(), 0, 1), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
