"""A small residual net on a mesh whose ranks all compute the same, for tests of partitioned activations; asserts nothing."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.events import Recorder
from tests.support.live_storages import storages_in_python

WIDTH, ROWS, BLOCKS = 32, 64, 6
#: Bytes of one block's input.
INPUT = WIDTH * ROWS * 4


class Block(nn.Module):
    """Dropout-free, with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        made = self.down(F.gelu(self.up(self.norm(x))))
        return x + (made if mask is None else made * mask)


class Net(nn.Module):
    """[ROWS, 8] to [ROWS, 1]; its first and its last layer are too small to be recomputed."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.leave(x)
        return out


def policy_of(stage: int = 0, **activation: Any) -> dict[str, Any]:
    """Every block a unit, everything cut however small."""
    return {
        "stage": stage,
        "units": {"names": ["blocks.*"]},
        "comm": {"timeout_s": 60},
        "activation": {"checkpoint": "unit", "partition": "tp", "min_bytes": 0, **activation},
    }


def attached(policy: dict[str, Any], make: Any = Net, tp: int | None = None) -> tuple[Any, Any]:
    """The same net on every rank, attached over dp x tp (all ranks on tp by default), and its attachment."""
    torch.manual_seed(1)
    model = make()
    return model, zhooks.attach(model, policy=policy, mesh=mesh_of(tp))


def plain(make: Any = Net) -> Any:
    torch.manual_seed(1)
    return make()


def mesh_of(tp: int | None = None) -> Any:
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world // (tp or world), tp or world), mesh_dim_names=("dp", "tp"))


def batch(step: int = 0) -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


def step_of(model: nn.Module, step: int = 0, *more: Tensor) -> list[Tensor]:
    """The loss of one step and all gradients, which are cleared."""
    loss = model(batch(step), *more).square().mean()
    loss.backward()
    return [loss.detach(), *grads_of(model)]


def grads_of(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for param in model.parameters():
        grad: Any = param.grad
        found.append(grad.full_tensor().clone() if hasattr(grad, "full_tensor") else grad.clone())
    model.zero_grad()
    return found


def alive() -> int:
    """Bytes of every live storage that torch allocated."""
    gc.collect()
    return sum(storage.nbytes() for storage in storages_in_python())


def moved(recorder: Recorder) -> list[tuple[str, int]]:
    """Gathers of activations: unit and bytes."""
    return [(e.key, e.nbytes) for e in recorder.events if (e.kind, e.what) == ("end", "gather activation")]
