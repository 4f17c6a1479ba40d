"""What a user keeps or changes at odd moments: gradients held across steps, writes in a forward, skipped units, mixed lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, same, sharded


@on_ranks(1)
def test_a_gradient_that_is_kept_is_not_overwritten_when_only_its_parameter_was_cleared() -> None:
    model = nn.Linear(3, 2)
    zhooks.attach(model)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    kept, model.bias.grad = model.bias.grad, None
    (5 * model(x)).sum().backward()
    assert kept.full_tensor().tolist() == [1.0, 1.0]
    assert sharded(model.bias.grad).full_tensor().tolist() == [5.0, 5.0]


@on_ranks(1)
def test_a_view_of_a_gradient_survives_zero_grad_and_the_next_backward() -> None:
    model = nn.Linear(3, 2)
    zhooks.attach(model)
    model(torch.ones(1, 3)).sum().backward()
    view = model.bias.grad.to_local().view(-1)
    model.zero_grad()
    (5 * model(torch.ones(1, 3))).sum().backward()
    assert view.tolist() == [1.0, 1.0]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.a(x) if first else self.b(x)


@on_ranks(2, stage=(1, 2, 3))
def test_ranks_may_take_other_branches_with_a_barrier_of_their_own_after_each_step(stage: int) -> None:
    torch.manual_seed(0)
    model = Branches()
    expected = [param.detach().clone() for param in model.parameters()]
    zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}, "comm": {"bucket": 256, "timeout_s": 60}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 512), place()[0] == 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        for value in expected:
            # Two rows of ones on one rank of two.
            value.add_(torch.ones_like(value), alpha=-0.1)
    assert same(full(model), expected)


@on_ranks(2)
def test_asking_for_the_storage_of_a_parameter_names_the_way_to_save() -> None:
    model = nn.Linear(4, 4)
    zhooks.attach(model)
    with pytest.raises(zhooks.ShardedOpError, match="save_full"):
        model.weight.untyped_storage()


class Skipping(nn.Module):
    """Blocks of which a rank may skip some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, skip: tuple[int, ...]) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in skip:
                x = torch.tanh(block(x))
        return x.square().mean()


@on_ranks(2, keeps=({"budget": {"device": "1GiB"}}, {"schedule": {"reshard_after_forward": False}}), skip=((5,), (2, 3, 4)))
def test_ranks_that_skip_units_keep_the_same_ones_gathered(keeps: dict[str, Any], skip: tuple[int, ...]) -> None:
    rank, world = place()
    torch.manual_seed(1)
    model, plain = Skipping(), Skipping()
    plain.load_state_dict(model.state_dict())
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 1}, **keeps})
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    x = torch.randn(4, 8)
    for _ in range(3):
        for _ in range(2):
            with torch.no_grad():
                value = model(x, skip if rank else ())
            # A rank that kept more than the other would be a pass ahead of it by now, and gather alone.
            torch.testing.assert_close(value, plain(x, skip if rank else ()).detach())
        model(x, skip if rank else ()).backward()
        (sum(plain(x, skip if each else ()) for each in range(world)) / world).backward()
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    attachment.detach()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))
