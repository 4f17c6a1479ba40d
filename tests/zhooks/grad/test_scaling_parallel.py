"""The policy's loss scale where models are divided, staged, or reduced once: every rank skips what one rank overflowed.

pytest runs it on ranks over Gloo; tests/zhooks/grad/test_scaling.py holds the arithmetic to plain PyTorch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.pipelines import Run
from tests.support.scaling_model import HOT, adamw, attached, loss_of
from tests.support.tp_runs import attached as divided
from tests.support.tp_runs import data_place, mesh_of, train
from tests.support.values import copies, same

COOL = {"param": "fp16", "loss_scale": "dynamic", "initial_scale": 2.0**10}


def blown_up(module: object, grads: tuple[Any, ...], _: object) -> tuple[Any, ...]:
    """A backward hook that overflows on one rank."""
    return tuple(grad * torch.inf if grad is not None and dist.get_rank() == 1 else grad for grad in grads)


@pytest.mark.slow
@on_ranks(4)
def test_a_divided_model_in_fp16_follows_fp32_and_skips_together() -> None:
    mesh = mesh_of(2)
    at, losses = data_place(mesh), {}
    for name, precision in (("fp32", {}), ("fp16", COOL)):
        model, attachment = divided(mesh, 3, policy={"precision": precision})
        losses[name] = train(model, adamw(model), at, 4)
        if name == "fp16":
            before, scale = copies(model.parameters()), attachment.loss_scale
            optimizer = adamw(model)
            # One tp rank of one data rank alone: what it holds of a weight overflows, and nobody else's does.
            handle = model.blocks[0].register_full_backward_hook(blown_up)
            train(model, optimizer, at, 1, clip=0.0, first=4)
            handle.remove()
            assert same(before, copies(model.parameters())) and attachment.loss_scale == scale / 2
            assert [overflow.step for overflow in attachment.overflows] == [4]
        attachment.detach()
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=1e-3)


@on_ranks(2)
def test_what_accumulates_unreduced_is_unscaled_once() -> None:
    rank, _ = place()
    found = []
    for together in (False, True):
        model, attachment = attached(HOT | {"initial_scale": 2.0**12}, stage=2)
        optimizer = adamw(model)
        for step in range(3):
            if together:
                with attachment.accumulate():
                    for part in range(2):
                        loss_of(model, 2 * step + part, rank).backward()
            else:
                for part in range(2):
                    loss_of(model, 2 * step + part, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((copies(model.parameters()), attachment.loss_scale, len(attachment.overflows)))
        attachment.detach()
    for one, two in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert found[0][1:] == found[1][1:]


@on_ranks(2)
def test_stages_of_a_pipeline_scale_and_unscale_each_for_itself() -> None:
    run = Run(2, "1f1b", {"stage": 2, "precision": COOL})
    for number in range(4):
        run.step(number, tolerance=2e-2)
    assert all(attachment.loss_scale == 2.0**10 and not attachment.overflows for attachment in run.attachments)
    run.close(tolerance=2e-2)


@on_ranks(2, optimizers=(1, 2))
def test_ranks_of_several_stages_agree_on_an_overflow_of_any(optimizers: int) -> None:
    rank, world = place()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    # The first stage of the last rank has nothing that decays, so its optimizer comes to the second stage first.
    stages = [nn.LayerNorm(4) if rank else nn.Linear(4, 4), nn.Linear(4, 4)]
    policy = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}}
    attachments = [zhooks.attach(stage, mesh=mesh, policy=policy) for stage in stages]
    whole = [[*stages[0].parameters(), *stages[1].parameters()]]
    held = whole if optimizers == 1 else [[*stage.parameters()] for stage in stages]
    groups = [[{"params": [p for p in each if p.ndim > 1]}, {"params": [p for p in each if p.ndim == 1]}] for each in held]
    made = [torch.optim.SGD(each, lr=0.1) for each in groups]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, sick in enumerate((None, (0, 1), (1, 0), None)):
        before = [copies(stage.parameters()) for stage in stages]
        scaler.scale(stages[1](stages[0](torch.ones(2, 4))).square().sum()).backward()
        if sick is not None and sick[0] == rank:
            stages[sick[1]].bias.grad.to_local().fill_(torch.inf)
        for optimizer in made:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        for stage, values in zip(stages, before, strict=True):
            assert same(values, copies(stage.parameters())) is (sick is not None), (step, rank)
        assert scaler.get_scale() == 8.0 / 2 ** min(step, 2), (step, rank)
    for attachment in attachments:
        attachment.detach()


@on_ranks(2)
def test_stages_whose_scalers_unscale_another_number_of_times_agree_on_an_overflow() -> None:
    rank, world = place()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    # Two dtypes and two optimizers on the last stage, one of each on the first.
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double() if rank else nn.Linear(4, 4), nn.Linear(4, 4))
    attachment = zhooks.attach(model, mesh=mesh, policy={"units": {"min_numel": 0}, "comm": {"timeout_s": 60}})
    parts = [model[:2], model[2]] if rank else [model]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, sick in enumerate((None, 0, 1, None)):
        before = copies(model.parameters())
        x = torch.ones(2, 4)
        for layer in model:
            x = layer(x.to(layer.weight.dtype))
        scaler.scale(x.float().sum()).backward()
        if rank == sick:
            model[2].bias.grad.to_local().fill_(torch.inf)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        assert same(before, copies(model.parameters())) is (sick is not None), (step, rank)
        assert scaler.get_scale() == 8.0 / 2 ** min(step, 2), (step, rank)
        named = [name for overflow in attachment.overflows if overflow.step == step for _, name in overflow.parameters]
        assert named == (["2.bias"] if rank == sick else []), (step, rank)
    attachment.detach()
