"""Writes to a weight inside a forward, and weights that a forward keeps: right, or refused by name before anything is lost.

pytest runs it, on one rank and on two. Writes between steps are tests/zhooks/tensor's.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, same

STAGES = (0, 1, 2, 3)


class Looked(nn.Module):
    """An embedding whose forward rescales the rows that are looked up, and a layer above it."""

    def __init__(self, most: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.top = nn.Embedding(6, 4, max_norm=most), nn.Linear(4, 2)
        nn.init.normal_(self.rows.weight, std=5.0)

    def forward(self, numbers: Tensor) -> Tensor:
        out: Tensor = self.top(self.rows(numbers))
        return out


def train(model: nn.Module, numbers: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(numbers).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, stage=STAGES)
def test_rows_that_an_embedding_rescales_train_as_in_plain_pytorch_on_one_rank(stage: int) -> None:
    model, plain = Looked(1.0), Looked(1.0)
    zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    for one in (model, plain):
        train(one, torch.tensor([1, 4]))
    assert same(full(model), plain.parameters())


@on_ranks(2, stage=STAGES)
def test_an_embedding_that_rescales_what_each_rank_looks_up_is_refused_before_anything_changed(stage: int) -> None:
    model = Looked(1.0)
    with pytest.raises(zhooks.AttachError, match=r"^Cannot attach module rows. .* on 2 ranks, found 1\.0.*rows\.renorm_\("):
        zhooks.attach(model, policy={"stage": stage})
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert same(model.parameters(), Looked(1.0).parameters())
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"ignore": ["rows"]}})
    train(model, torch.tensor([place()[0]]))
    attachment.detach()


@on_ranks(2, stage=STAGES)
def test_rows_are_rescaled_after_the_step_as_the_refusal_says(stage: int) -> None:
    model = Looked(None)
    attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    before = full(model)[0]
    with attachment.gathered(model.rows.weight, write=True) as (rows,), torch.no_grad():
        rows.renorm_(2, 0, 1.0)
    assert torch.equal(full(model)[0], before.renorm(2, 0, 1.0))
    assert torch.equal(model(torch.arange(6)), model.top(before.renorm(2, 0, 1.0)))


class Clamping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@on_ranks(1, 2, stage=(0, 1, 2))
def test_a_write_that_every_rank_makes_alike_is_kept_where_the_weight_is_whole(stage: int) -> None:
    torch.manual_seed(0)
    model, plain = Clamping(4, 4), Clamping(4, 4)
    plain.load_state_dict(model.state_dict())
    zhooks.attach(model, policy={"stage": stage})
    for one in (model, plain):
        train(one, torch.ones(1, 4))
    assert same(full(model), plain.parameters())


@on_ranks(2)
def test_a_write_that_would_be_lost_is_refused_by_name() -> None:
    model = Clamping(4, 4)
    zhooks.attach(model, policy={"stage": 3})
    before = full(model)
    with pytest.raises(zhooks.ShardedOpError, match="Parameter weight is written in its own forward"):
        model(torch.ones(1, 4))
    assert same(full(model), before)


class Codebook(nn.Module):
    """Moves the rows that were looked up, through ``data``, as codebooks of quantised autoencoders do."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.randn(6, 4), requires_grad=trains)

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        if self.training:
            self.rows.data.index_add_(0, torch.tensor([1]), torch.ones(1, 4))
        return x + self.rows[1]


@on_ranks(1, 2, trains=(True, False), grad=(True, False))
def test_a_write_through_data_that_would_be_lost_is_refused_in_the_first_forward(trains: bool, grad: bool) -> None:
    model = Codebook(trains=trains)
    zhooks.attach(model, policy={"stage": 3, "parameter": {"tier": "host"}, "units": {"min_numel": 0}})
    model.eval()
    with torch.set_grad_enabled(not grad):
        model(torch.ones(1, 4))  # a sanity check of validation comes first
    before = full(model)
    model.train()
    with torch.set_grad_enabled(grad), pytest.raises(zhooks.ShardedOpError, match=r"rows.*a write that would be lost"):
        model(torch.ones(1, 4))
    assert same(full(model), before)


@on_ranks(2, stage=(0, 1))
def test_a_write_through_data_is_kept_where_the_weight_is_whole(stage: int) -> None:
    model, plain = Codebook(trains=False), Codebook(trains=False)
    zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
    for one in (model, plain):
        for _ in range(2):
            one(torch.ones(1, 4))
    assert same(full(model), plain.parameters())


class Keeping(nn.Module):
    """Keeps its weight in its first forward, and uses what it kept ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept or [self.weight]
        return (x * self.kept[0]).sum() + 100 * (x * self.weight).sum()


@on_ranks(2, stage=STAGES)
def test_a_weight_that_a_forward_keeps_has_its_old_value_where_it_is_gathered_at_use(stage: int) -> None:
    model = Keeping()
    zhooks.attach(model, policy={"stage": stage})
    with torch.no_grad():
        assert model(torch.ones(4)).item() == 404
        model.weight.fill_(2.0)
        assert model(torch.ones(4)).item() == (804 if stage == 3 else 808)
