"""``attachment.grad_norms()``: norms by unit and of all units, equal to those of plain PyTorch's gradients.

pytest runs it on ranks over Gloo. It never asks how long a norm takes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.errors import AttachError, ShardedOpError
from offload.events import Recorder
from tests.support.inside import comm_of, transports_of
from tests.support.on_ranks import on_ranks, place
from tests.support.tp_gpt import batch, loss_of, plain_gpt
from tests.support.tp_runs import attached, data_place, mesh_of
from tests.support.unused_layer import made

UNITS: dict[str, Any] = {"units": {"names": ["first", "second", "unused"], "min_numel": 0}}
#: fp32 sums in another order; the same in bf16.
NEAR, NEAR_16 = 1e-5, 2e-2


def backward(model: nn.Module, number: int, *, mine: bool, times: float = 1.0) -> None:
    """One pass over this rank's rows, or over those of all ranks; the loss is multiplied."""
    rank, world = place()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    x = rows.chunk(world)[rank] if mine else rows
    (F.mse_loss(model(x).float(), torch.ones(x.shape[0], 3)) * times).backward()


def norms_of(plain: nn.Module) -> dict[str, float]:
    """By child module, of plain gradients."""
    grads = {name: [p.grad for p in child.parameters() if p.grad is not None] for name, child in plain.named_children()}
    return {name: float(nn.utils.get_total_norm(found)) if found else 0.0 for name, found in grads.items()}


def check(attachment: zhooks.Attachment, plain: nn.Module, near: float = NEAR) -> None:
    found, expected = attachment.grad_norms(), norms_of(plain)
    assert {name: found.units[name] for name in expected} == pytest.approx(expected, rel=near)
    assert found.total == pytest.approx(math.hypot(*expected.values()), rel=near)
    assert math.hypot(*found.units.values()) == pytest.approx(found.total)


def placed(tier: str, stage: int) -> dict[str, Any]:
    cells = ("gradient", "optimizer", *(("parameter",) if stage == 3 else ()))
    return {} if tier == "device" else {cell: {"tier": tier} for cell in cells}


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_norms_are_those_of_plain_gradients_at_every_stage_on_every_tier_and_of_sums(tier: str) -> None:
    for stage in range(4):
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage} | placed(tier, stage))
        assert attachment.grad_norms().total == 0.0, "nothing has a gradient yet"
        for number in range(2):
            backward(plain, number, mine=False)
            backward(model, number, mine=True)
            check(attachment, plain)
        with attachment.accumulate():
            for number in (2, 3):
                backward(plain, number, mine=False)
                backward(model, number, mine=True)
            check(attachment, plain)
        total = attachment.grad_norms().total
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(total, rel=NEAR)
        assert attachment.grad_norms().total == pytest.approx(min(0.5, total), rel=NEAR)
        attachment.detach()


@on_ranks(1, 2)
def test_a_loss_scale_of_the_policy_is_not_in_them_and_one_of_a_scaler_is_until_it_unscales() -> None:
    plain, model = made(), made()
    attachment = zhooks.attach(model, policy=UNITS | {"precision": {"param": "fp16", "loss_scale": 1024.0}})
    backward(plain, 0, mine=False)
    backward(model, 0, mine=True)
    check(attachment, plain, NEAR_16)
    attachment.detach()

    plain, model = made(), made()
    attachment = zhooks.attach(model, policy=UNITS)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))  # makes the scale
    backward(plain, 0, mine=False, times=8.0)
    backward(model, 0, mine=True, times=8.0)
    check(attachment, plain)
    scaler.unscale_(optimizer)
    plain.zero_grad()
    backward(plain, 0, mine=False)
    check(attachment, plain)


@on_ranks(2)
def test_bf16_gradients_and_frozen_parameters_count_as_they_are() -> None:
    plain, model = made(), made()
    attachment = zhooks.attach(model.bfloat16(), policy=UNITS)
    plain.first.requires_grad_(False)
    model.first.requires_grad_(False)
    backward(plain, 0, mine=False)
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).chunk(2)[place()[0]]
    F.mse_loss(model(rows.bfloat16()).float(), torch.ones(2, 3)).backward()
    check(attachment, plain, NEAR_16)


@on_ranks(4)
def test_replicas_and_ranks_of_one_shard_count_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (0, 1, 3):
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage}, mesh=mesh)
        backward(plain, 0, mine=False)
        backward(model, 0, mine=True)
        check(attachment, plain)
        attachment.detach()


@on_ranks(2, 4)
def test_over_tensor_parallel_ranks_every_element_counts_once() -> None:
    mesh = mesh_of(2)
    for stage in (0, 3):
        plain, (model, attachment) = plain_gpt(), attached(mesh, stage)
        rank, ranks = data_place(mesh)
        whole = [batch(0, data, ranks) for data in range(ranks)]
        (sum(loss_of(plain, *part) for part in whole) / ranks).backward()
        loss_of(model, *whole[rank]).backward()
        found = attachment.grad_norms()
        expected = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        assert found.total == pytest.approx(expected, rel=1e-4)
        assert float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(found.total, rel=1e-5)
        attachment.detach()


@on_ranks(2)
def test_one_exchange_is_made_however_many_units_there_are() -> None:
    model = made()
    attachment, recorder, calls = zhooks.attach(model, policy=UNITS), Recorder(), list[Any]()
    backward(model, 0, mine=True)
    attachment.grad_norms()

    def counted(exchange: Any) -> Any:
        return lambda call, *args: (calls.append(call), exchange(call, *args))[1]

    with pytest.MonkeyPatch.context() as patch, attachment.observe(recorder):
        for transport in transports_of(comm_of(attachment)):
            patch.setattr(transport, "all_reduce", counted(transport.all_reduce))
        recorder.clear()
        attachment.grad_norms()
    assert [call.what for call in calls] == ["grad_norms"]
    assert not recorder.names("gather") and not recorder.names("reduce")


@on_ranks(2)
def test_what_cannot_be_read_is_refused_on_every_rank_by_name() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=UNITS)
    backward(model, 0, mine=True)
    if place()[0] == 0:
        model.first.weight.grad = torch.zeros(9, 5)
    found = r"first\.weight\.grad as backward" if place()[0] == 0 else r"found 1 rank without"
    with pytest.raises(ShardedOpError, match=found):
        attachment.grad_norms()
    attachment.apply(UNITS | {"optimizer": {"overlap": True}})
    with pytest.raises(ShardedOpError, match=r"grad_norms expected gradients that stay .* overlap"):
        attachment.grad_norms()
    model.zero_grad()
    attachment.detach()
    with pytest.raises(AttachError, match="grad_norms expected an attached model"):
        attachment.grad_norms()
