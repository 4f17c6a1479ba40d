"""Ranks with different numbers of batches train as under DistributedDataParallel's Join.

pytest runs it over real ranks. Ranks that use different layers are test_uneven.py's.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zhooks
from offload.errors import DivergenceError
from tests.support.on_ranks import on_ranks, place
from tests.support.values import sharded

#: A sum over three ranks adds in another order than DDP's.
TOLERANCE = 1e-6


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def data(rank: int) -> list[Tensor]:
    """2, 5 and 3 batches."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=draw) for _ in range((2, 5, 3)[rank])]


@on_ranks(2, 3, policy=({}, {"stage": 1}, {"optimizer": {"tier": "host"}}))
def test_a_rank_that_has_run_out_of_batches_adds_nothing(policy: dict[str, Any]) -> None:
    rank, _ = place()
    model = net()
    plain = DistributedDataParallel(copy.deepcopy(model))
    expected, losses, idle = [], [], []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    with Join([plain]):
        for batch in data(rank):
            loss = plain(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in attachment.join(data(rank)):
        loss = model(batch).square().mean()
        # What a repeated batch comes to must not count, not even where it is not finite.
        (loss * float("inf") if attachment.idle else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        idle.append(attachment.idle)
        if not attachment.idle:
            losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    assert idle == [False] * len(data(rank)) + [True] * (5 - len(data(rank)))
    assert not attachment.idle
    attachment.detach()
    # Join leaves the parameters of the rank that ran out last on all.
    for one, other in zip(model.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@on_ranks(1)
def test_one_rank_has_its_batches_and_no_more() -> None:
    attachment = zhooks.attach(net())
    assert [int(batch) for batch in attachment.join(torch.arange(3))] == [0, 1, 2]
    assert list(attachment.join([])) == []


@on_ranks(2)
def test_a_rank_without_any_batch_is_named_on_every_rank() -> None:
    attachment = zhooks.attach(net())
    with pytest.raises(DivergenceError, match=r"join expected at least one batch on every rank, found none on rank 1\."):
        list(attachment.join([0, 1] if place()[0] == 0 else []))
    assert list(attachment.join([place()[0]])) == [place()[0]]


@on_ranks(2)
def test_autograd_grad_on_a_rank_that_has_run_out_adds_zeros() -> None:
    model = net()
    attachment = zhooks.attach(model)
    weight, rank = model[0].weight, place()[0]
    sums = []
    for batch in attachment.join(data(rank)):
        (grad,) = torch.autograd.grad(model(batch).sum(), [weight])
        sums.append(sharded(grad).full_tensor())
    attachment.detach()
    (alone,) = torch.autograd.grad(model(data(1)[4]).sum(), [model[0].weight])
    torch.testing.assert_close(sums[4], alone / 2, rtol=0, atol=TOLERANCE)
