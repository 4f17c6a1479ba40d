"""Sums instead of means, and functions that see gradients before and after their reduction, beside plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import copies


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank: int) -> Tensor:
    """Ranks have batches of other sizes."""
    return torch.randn(2 + 3 * rank, 6, generator=torch.Generator().manual_seed(rank))


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_a_sum_of_gradients_makes_uneven_batches_count_by_their_rows(stage: int) -> None:
    rank, world = place()
    model, plain = net(), net()
    zhooks.attach(model, policy={"stage": stage, "gradient": {"reduce": "sum"}})
    rows = torch.tensor(float(len(batch(rank))))
    if world > 1:
        dist.all_reduce(rows)
    (model(batch(rank)).square().sum() / rows).backward()
    whole = torch.cat([batch(each) for each in range(world)])
    (plain(whole).square().sum() / len(whole)).backward()
    expected = [param.grad for param in plain.parameters()]
    torch.testing.assert_close(copies(param.grad for param in model.parameters()), expected)


@on_ranks(2)
def test_apply_changes_the_mean_into_a_sum_and_accumulation_and_autograd_grad_follow() -> None:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy={"stage": 3})
    loss = model(batch(rank)).square().mean()
    mean = copies(torch.autograd.grad(loss, list(model.parameters())))
    attachment.apply({"stage": 3, "gradient": {"reduce": "sum"}})
    loss = model(batch(rank)).square().mean()
    torch.testing.assert_close(copies(torch.autograd.grad(loss, list(model.parameters()))), [2 * grad for grad in mean])
    with attachment.accumulate():
        for _ in range(2):
            model(batch(rank)).square().mean().backward()
    torch.testing.assert_close(copies(param.grad for param in model.parameters()), [4 * grad for grad in mean])


@on_ranks(1, 2, stage=(0, 1, 3), tier=("device", "host"))
def test_hooks_change_what_is_sent_and_what_is_kept(stage: int, tier: str) -> None:
    rank, world = place()
    if stage == 0 and tier == "host":
        return
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={"stage": stage, "gradient": {"tier": tier}, "units": {"min_numel": 0}})
    seen: list[tuple[str, str]] = []

    def compress(unit: str, gradient: Tensor) -> None:
        seen.append(("before", unit))
        gradient.copy_(gradient.to(torch.bfloat16))

    def double(unit: str, gradient: Tensor) -> None:
        seen.append(("after", unit))
        gradient.mul_(2)

    handle = attachment.register_reduce_hook(before=compress, after=double)
    model(batch(rank)).square().mean().backward()
    grads = copies(param.grad for param in model.parameters())
    expected = [torch.zeros_like(param) for param in plain.parameters()]
    for each in range(world):
        plain.zero_grad()
        plain(batch(each)).square().mean().backward()
        for total, param in zip(expected, plain.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad.to(torch.bfloat16).float() * 2 / world
    torch.testing.assert_close(grads, expected)
    assert {name for _, name in seen} == {line.split()[0] for line in attachment.describe().splitlines()[2:4]}
    handle.remove()
    seen.clear()
    model.zero_grad()
    model(batch(rank)).square().mean().backward()
    assert seen == []


@on_ranks(2)
def test_hooks_see_every_chunk_of_a_gradient_larger_than_a_buffer_once() -> None:
    model = nn.Linear(64, 64, bias=False)
    attachment = zhooks.attach(model, policy={"comm": {"buffer": "4 KiB"}})
    sent, kept = 0, 0

    def count_sent(unit: str, gradient: Tensor) -> None:
        nonlocal sent
        sent += gradient.numel()

    def count_kept(unit: str, gradient: Tensor) -> None:
        nonlocal kept
        kept += gradient.numel()

    attachment.register_reduce_hook(before=count_sent)
    attachment.register_reduce_hook(after=count_kept)
    model(torch.ones(1, 64)).sum().backward()
    assert (sent, kept) == (64 * 64, 64 * 32)


@on_ranks(1)
def test_a_hook_that_returns_a_gradient_or_is_no_function_is_refused() -> None:
    model = net()
    attachment = zhooks.attach(model)
    wrong: Any = lambda unit, gradient: gradient * 2  # noqa: E731
    handle = attachment.register_reduce_hook(before=wrong)
    with pytest.raises(zhooks.ShardedOpError, match="Expected it to return None, found Tensor"):
        model(batch(0)).sum().backward()
    handle.remove()
    with pytest.raises(zhooks.AttachError, match="Pass at least one"):
        attachment.register_reduce_hook()
