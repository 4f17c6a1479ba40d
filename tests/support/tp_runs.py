"""Training runs over a mesh with a ``tp`` axis, and what they are compared by. Asserts in ``same_run`` alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zhooks
from tests.support.tp_gpt import Gpt, batch, divide, loss_of, plain_gpt

STEPS = 10
#: Every block a unit of its own, however small.
FINE: dict[str, Any] = {"units": {"min_numel": 0}}


def mesh_of(tp: int, replicate: int = 0) -> DeviceMesh:
    """dp x tp over all ranks, or replicate x shard x tp."""
    data = dist.get_world_size() // tp
    if replicate:
        return init_device_mesh("cpu", (replicate, data // replicate, tp), mesh_dim_names=("replicate", "shard", "tp"))
    return init_device_mesh("cpu", (data, tp), mesh_dim_names=("dp", "tp"))


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's place among the data ranks of its slice, and their number."""
    tp = mesh["tp"].size()
    return dist.get_rank() // tp, dist.get_world_size() // tp


def attached(mesh: DeviceMesh, stage: int, *, sequence: bool = False, policy: dict[str, Any] | None = None) -> tuple[Gpt, Any]:
    """The GPT divided over ``mesh["tp"]``, and its attachment."""
    model = divide(plain_gpt(), mesh["tp"], sequence=sequence)
    return model, zhooks.attach(model, policy=FINE | {"stage": stage} | (policy or {}), mesh=mesh)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, at: tuple[int, int], steps: int, *, clip: float = 0.5, first: int = 0
) -> list[float]:
    """Steps from number ``first`` on, with a clip where one is given; the losses of this data rank."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step, *at))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def mean_over_data(losses: list[float]) -> Tensor:
    """All tp ranks have the same loss, so that the mean over all is the mean over the data ranks."""
    found = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(found)
    return found / dist.get_world_size()


def same_run(stage: int, tp: int, *, replicate: int = 0, sequence: bool = False, policy: dict[str, Any] | None = None) -> None:
    """Ten steps equal the plain model's: losses within 1e-5, parameters close."""
    plain = plain_gpt()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), (0, 1), STEPS)
    mesh = mesh_of(tp, replicate)
    model, attachment = attached(mesh, stage, sequence=sequence, policy=policy)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data_place(mesh), STEPS)
    torch.testing.assert_close(mean_over_data(losses), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, zhooks.ShardedTensor) and param.shape == other.shape and param.stride() == other.stride()
        torch.testing.assert_close(param.full_tensor(), other.detach(), rtol=0, atol=2e-4)
    attachment.detach()
