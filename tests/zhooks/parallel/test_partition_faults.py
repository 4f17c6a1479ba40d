"""Partitioned activations where ranks disagree: named on every rank, and the model trains on afterwards.

pytest runs it on pools of ranks; tests/zhooks/activation/test_partition.py gives them equal inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import DivergenceError
from offload.events import Recorder
from tests.support.on_ranks import on_ranks
from tests.support.partition_nets import BLOCKS, ROWS, WIDTH, Net, attached, batch, grads_of, moved, plain, policy_of, step_of
from tests.support.values import same


class Noisy(Net):
    """Adds ``noise`` before block 2."""

    noise: Any = 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number == 2:
                x = x + self.noise
            x = block(x, mask=mask)
        out: Tensor = self.leave(x)
        return out


@on_ranks(2)
def test_inputs_that_differ_are_named_on_every_rank_and_the_model_trains_on() -> None:
    model, attachment = attached(policy_of(3), Noisy)
    rank = dist.get_rank()
    model.noise = torch.zeros(WIDTH)
    model.noise[5] = 1e-7 * rank
    for _ in range(2):
        with pytest.raises(DivergenceError, match=r"unit blocks\.2: input 0, torch\.float32 of shape \[64, 32\]\. Expected the "
                           r"same on all ranks of axis tp \(0, 1\), found different values on rank 1 than on rank 0 \(3 more "
                           r"differ\)\. Use the same .* \[activation\] sharded_inputs"):  # fmt: skip
            step_of(model)
        model.zero_grad()
    mask = torch.ones(ROWS, 1) - rank
    model.noise = torch.zeros(())
    with pytest.raises(DivergenceError, match=r"unit blocks\.0: input mask, torch\.float32 of shape \[64, 1\]"):
        step_of(model, 0, mask)
    model.zero_grad()
    net = plain(Noisy)
    recorder = Recorder()
    with attachment.observe(recorder):
        for step in range(2):
            assert same(step_of(model, step), step_of(net, step))
    assert len(moved(recorder)) == 2 * BLOCKS
    attachment.detach()


@on_ranks(2)
def test_inputs_of_other_shapes_are_named_and_nobody_waits() -> None:
    model, attachment = attached(policy_of())
    rows = ROWS - dist.get_rank()
    with pytest.raises(DivergenceError, match=r"unit blocks\.0: its inputs\. .*a different number, shapes or dtypes"):
        model(batch()[:rows])
    assert same(step_of(model), step_of(plain()))
    attachment.detach()


@on_ranks(4)
def test_ranks_that_share_the_units_are_told_too() -> None:
    model, attachment = attached(policy_of(3), Noisy, tp=2)
    rank = dist.get_rank()
    model.noise = torch.full((), float(rank == 1))
    with pytest.raises(DivergenceError, match=r"unit blocks\.2" if rank < 2 else "found some that differ on other ranks"):
        model(batch())
    model.noise = torch.zeros(())
    assert same(step_of(model), step_of(plain(Noisy)))
    attachment.detach()


@on_ranks(2)
def test_plain_inputs_that_are_shards_are_left_alone_where_the_policy_says_so() -> None:
    rank = dist.get_rank()
    model, attachment = attached(policy_of(sharded_inputs=["blocks.[2-9]"]), Noisy)
    model.noise = torch.full((), float(rank))
    net = plain(Noisy)
    net.noise = model.noise
    recorder = Recorder()
    with attachment.observe(recorder):
        assert same(step_of(model), step_of(net))
    assert [key for key, _ in moved(recorder)] == ["blocks.1", "blocks.0"]
    attachment.detach()


class Twice(Noisy):
    """Its last block, which is given what differs, has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.late = self.blocks[2]
        self.blocks = self.blocks[:3]


@on_ranks(2)
def test_such_a_unit_is_known_by_each_name_of_a_module_that_has_several() -> None:
    model, attachment = attached(policy_of(sharded_inputs=["late"]), Twice)
    assert "Matches nothing here" not in attachment.describe()
    net = plain(Twice)
    model.noise = net.noise = torch.full((), float(dist.get_rank()))
    recorder = Recorder()
    with attachment.observe(recorder):
        assert same(step_of(model), step_of(net))
    assert [key for key, _ in moved(recorder)] == ["blocks.1", "blocks.0"]
    attachment.detach()


class Parted(Net):
    """Two graphs of one pass: what the first block makes, and what the others make of that."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        early = self.blocks[0](self.enter(x))
        late = early.detach().requires_grad_()
        for block in self.blocks[1:]:
            late = block(late)
        return early.sum(), self.leave(late).sum()


@on_ranks(2, transport=("stock",))
def test_a_rank_that_has_dropped_its_graph_says_so_instead_of_sending_other_bytes(transport: str) -> None:
    model, attachment = attached(policy_of() | {"comm": {"timeout_s": 300, "transport": transport}}, Parted)
    early, late = model(batch())
    if dist.get_rank() == 1:
        # Block 1 was given a leaf, which is not cut: opening block 2's input gathers block 0's ahead on both ranks.
        early = None
        late.backward()
    else:
        freed = r"^Rank 1 does not .* unit blocks\.0\. .*rank 1 sent nothing, because it has already freed"
        with pytest.raises(DivergenceError, match=freed):
            (early + late).backward()
    model.zero_grad()
    notes = []
    for each in (model, plain(Parted)):
        early, late = each(batch())
        (early + late).backward()
        notes.append(grads_of(each))
    assert same(*notes)
    attachment.detach()


@pytest.mark.slow
@on_ranks(2)
def test_a_backward_that_only_one_rank_runs_is_a_divergence_that_names_the_unit() -> None:
    model, attachment = attached(policy_of() | {"comm": {"timeout_s": 5.0}})
    loss = model(batch()).square().mean()
    if dist.get_rank() == 0:
        with pytest.raises(DivergenceError, match=r"Expected every rank in gather activation blocks\.5.*axis tp"):
            loss.backward()
    dist.barrier()
    del attachment
