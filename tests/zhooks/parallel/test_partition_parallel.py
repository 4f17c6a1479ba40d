"""Every composition of stage, tensor parallelism, partitioned activations and tier, against the plain model in one process.

pytest runs it on four ranks: 2 data ranks x 2 of the ``tp`` axis. A diagonal by default.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.events import Recorder
from tests.support.on_ranks import on_ranks
from tests.support.partition_nets import moved
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt

STEPS, LAYERS = 5, 3
TIERS = ("device", "host", "disk")
#: stage, partition, tier, sequence parallel
PRODUCT = list(itertools.product((0, 1, 2, 3), ("none", "tp"), TIERS, (False, True)))
DIAGONAL = [(0, "tp", "host", False), (1, "tp", "device", False), (2, "tp", "disk", False), (3, "tp", "device", True)]


def plain_losses() -> list[float]:
    model = plain_gpt(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def losses_of(stage: int, partition: str, tier: str, sequence: bool, folder: str) -> tuple[list[float], list[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank: Any = mesh.get_local_rank("dp")
    model = divide(plain_gpt(LAYERS), mesh["tp"], sequence=sequence)
    activation = {"checkpoint": "unit", "partition": partition, "tier": tier, "min_bytes": 0}
    if sequence:
        activation["sharded_inputs"] = ["blocks.*"]
    policy = {"stage": stage, "units": {"names": ["blocks.*"]}, "activation": activation, "disk": {"path": folder}}
    attachment = zhooks.attach(model, policy={**policy, "comm": {"timeout_s": 60}}, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, recorder = [], Recorder()
    with attachment.observe(recorder):
        for step in range(STEPS):
            recorder.clear()
            loss = loss_of(model, *batch(step, rank, 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / 4)
    attachment.detach()
    return losses, [key for key, _ in moved(recorder)]


def compare(rows: list[tuple[int, str, str, bool]]) -> None:
    expected = plain_losses()
    with tempfile.TemporaryDirectory() as folder:
        for stage, partition, tier, sequence in rows:
            found, keys = losses_of(stage, partition, tier, sequence, folder)
            assert found == pytest.approx(expected, abs=1e-5), (stage, partition, tier, sequence)
            cut = partition == "tp" and not sequence
            assert keys == ([f"blocks.{n}" for n in reversed(range(LAYERS))] if cut else []), (stage, tier)


@pytest.mark.slow
@on_ranks(4, limit_s=180.0)
def test_compositions_train_as_the_plain_model() -> None:
    compare(DIAGONAL)


@pytest.mark.slow
@on_ranks(4, limit_s=900.0)
def test_every_composition_trains_as_the_plain_model() -> None:
    compare(PRODUCT)
