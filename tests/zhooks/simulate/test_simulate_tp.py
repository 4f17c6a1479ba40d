"""Layers divided over ``tp`` in a simulation: what torch's own collectives take and move, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from tests.support.slow import slow
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt
from tests.support.virtual import on_virtual
from zhooks.simulate import Simulation, simulate

WIDTH, ROWS = 512, 256
PRODUCT = 2 * ROWS * WIDTH * 4 * WIDTH


def build(mesh: DeviceMesh | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
    if mesh is not None:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def step(model: nn.Module) -> None:
    model(torch.empty(ROWS, WIDTH, device="virtual")).square().mean().backward()
    model.zero_grad()


def simulated(change: Any = step, **given: Any) -> Simulation:
    return simulate(build, change, **given)


@on_virtual(t=(2, 4))
def test_over_tp_a_rank_computes_and_holds_its_share_and_sums_what_rows_give(t: int) -> None:
    whole, divided = simulated(), simulated(world=t, mesh={"shard": 1, "tp": t})
    assert whole.flops == 5 * PRODUCT and divided.flops == whole.flops // t
    assert divided.device.holders["parameter"] * t == whole.device.holders["parameter"]
    # One all-reduce of the output, for the first layer's input needs no gradient.
    assert divided.link_nbytes == pytest.approx(2 * (t - 1) / t * ROWS * WIDTH * 4, rel=1e-3)
    assert divided.exposed_s > 0 and not divided.races


@on_virtual(sequence=(*slow(False), True))
def test_a_gpt_over_shard_and_tp_has_no_use_that_is_unordered(sequence: bool) -> None:
    def built(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = divide(plain_gpt(), mesh["tp"], sequence=sequence)
        return model, torch.optim.AdamW(model.parameters())

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens, targets = (tensor.to("virtual") for tensor in batch(0))
        loss_of(model, tokens, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    policy = {"units": {"min_numel": 0}, "optimizer": {"tier": "host"}, "activation": {"checkpoint": "unit"}}
    found = simulate(built, trained, world=8, mesh={"replicate": 2, "shard": 2, "tp": 2}, policy=policy)
    assert not found.races, "\n".join(map(str, found.races))
    assert found.link_nbytes > 0


@on_virtual()
def test_a_collective_of_the_step_s_own_is_counted() -> None:
    def averages(model: nn.Module) -> None:
        step(model)
        dist.all_reduce(torch.empty(1 << 20, device="virtual"))

    plain, more = simulated(world=4), simulated(averages, world=4)
    assert more.link_nbytes - plain.link_nbytes == 2 * 3 / 4 * (4 << 20)


@on_virtual()
def test_what_depends_on_other_ranks_is_refused_by_name() -> None:
    def sends(model: nn.Module) -> None:
        dist.send(torch.empty(8, device="virtual"), 1)

    with pytest.raises(zhooks.SimulationError, match="found a send or a receive between two ranks"):
        simulated(sends, world=2)
    assert not dist.is_initialized()
