"""What a user keeps or changes at odd moments: gradients held across steps, writes in a forward, skipped units, mixed lists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place


@on_ranks(1)
def test_a_gradient_that_is_kept_is_not_overwritten_when_only_its_parameter_was_cleared() -> None:
    model = nn.Linear(3, 2)
    zhooks.attach(model)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    kept, model.bias.grad = model.bias.grad, None
    (5 * model(x)).sum().backward()
    assert kept.full_tensor().tolist() == [1.0, 1.0]
    assert model.bias.grad.full_tensor().tolist() == [5.0, 5.0]


@on_ranks(1)
def test_a_view_of_a_gradient_survives_zero_grad_and_the_next_backward() -> None:
    model = nn.Linear(3, 2)
    zhooks.attach(model)
    model(torch.ones(1, 3)).sum().backward()
    view = model.bias.grad.to_local().view(-1)
    model.zero_grad()
    (5 * model(torch.ones(1, 3))).sum().backward()
    assert view.tolist() == [1.0, 1.0]


class Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@on_ranks(2)
def test_a_write_inside_a_forward_that_would_be_lost_is_refused_by_name() -> None:
    model = Clamping(4, 4)
    zhooks.attach(model)
    with pytest.raises(zhooks.ShardedOpError, match="parameter weight: expected its forward to read it"):
        model(torch.ones(1, 4))


@on_ranks(2, foreach=(True, False))
def test_one_optimizer_may_hold_attached_and_other_parameters(foreach: bool) -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    zhooks.attach(model)
    optimizer = torch.optim.AdamW([*model.parameters(), other], lr=0.1, foreach=foreach)
    before = model.weight.full_tensor()
    (model(torch.ones(1, 4)) * other).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.full_tensor(), before)
    assert not torch.equal(other.detach(), torch.ones(4))


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
    zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}, "comm": {"bucket": 256, "timeout_s": 60}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 512), place()[0] == 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()


@on_ranks(2)
def test_asking_for_the_storage_of_a_parameter_names_the_way_to_save() -> None:
    model = nn.Linear(4, 4)
    zhooks.attach(model)
    with pytest.raises(zhooks.ShardedOpError, match="save_full"):
        model.weight.untyped_storage()
