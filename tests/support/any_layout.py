"""A small model's training over dp, dp x tp or stages of a pipeline, saved in one layout and loaded in any other.

Tests of checkpoints run ``save`` and ``load`` on the ranks of two pools.  ``load`` asserts that what was loaded is what was
saved, bit for bit, or as this run's dtype rounds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from tests.support.on_ranks import place
from tests.support.pipelines import Pipeline, pipeline
from tests.support.resharding import policy_of
from tests.support.torches import forget_redistributions

# Whatever 2, 3 and 4 ranks divide.
VOCABULARY, DIM, SEQUENCE, ROWS, BLOCKS = 12, 12, 4, 12, 6
MICROBATCHES = 3


class Block(nn.Module):
    """A feed-forward layer, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Part(nn.Module):
    """Some blocks, by the names they have in the whole model; the first part also embeds, the last says what comes next."""

    def __init__(self, blocks: range) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM) if blocks.start == 0 else None
        self.blocks = nn.ModuleDict({str(block): Block() for block in blocks})
        self.head = nn.Linear(DIM, VOCABULARY) if blocks.stop == BLOCKS else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def part_of(stage: int, stages: int, seed: int) -> Part:
    """One stage of the model that ``seed`` begins with, however many there are."""
    torch.manual_seed(seed)
    whole = Part(range(BLOCKS)).state_dict()
    part = Part(range(BLOCKS * stage // stages, BLOCKS * (stage + 1) // stages))
    part.load_state_dict({name: whole[name] for name in part.state_dict()})
    return part


def divided(part: Part, tp: DeviceMesh) -> Part:
    """The same over the ranks of ``tp``."""
    forget_redistributions()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in part.blocks:
        plan |= {f"blocks.{name}.up": ColwiseParallel(), f"blocks.{name}.down": RowwiseParallel()}
    parallelize_module(part, tp, plan)
    return part


class Run:
    """One run on this rank.

    Args:
        mesh: "dp", "dp x tp" (two ranks on tp, or three of three) or "pp" (two stages, or three of three).
        dtype: "fp32", "mixed" (computed in bf16, masters of fp32) or "bf16" (masters, too).
    """

    def __init__(self, folder: Path, *, stage: int, tier: str, mesh: str, dtype: str, seed: int = 0) -> None:
        rank, world = place()
        size = 1 if mesh == "dp" else 3 if world == 3 else 2
        self.stages = size if mesh == "pp" else 1
        self.data = world // size
        # Stages come before the data ranks, which come before places on tp.
        self.number, self.at = (rank // self.data, rank % self.data) if mesh == "pp" else (0, rank // size)
        axes: dict[str, dict[str, int]] = {"dp x tp": {"dp": self.data, "tp": size}, "pp": {"pp": size, "dp": self.data}}
        sizes = axes.get(mesh, {})
        self.mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
        self.model = part_of(self.number, self.stages, seed)
        if dtype == "bf16":
            self.model.to(torch.bfloat16)
        if mesh == "dp x tp" and self.mesh is not None:
            divided(self.model, self.mesh["tp"])
        policy = policy_of(folder, stage, tier, half=dtype == "mixed")
        self.attachment = zhooks.attach(self.model, policy=policy, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.pipe: Pipeline | None = None
        if mesh == "pp" and self.mesh is not None:
            self.pipe = pipeline(self.mesh, {self.number: self.model}, "gpipe", self.stages, MICROBATCHES)

    def train(self, first: int, steps: int) -> list[float]:
        """The mean losses over all rows, on all ranks."""
        return [self.step(number) for number in range(first, first + steps)]

    def step(self, number: int) -> float:
        drawn = torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=torch.Generator().manual_seed(number))
        mine = drawn.chunk(self.data)[self.at]
        inputs, targets = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        losses: list[Tensor] = []
        if self.pipe is None:
            losses.append(F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()))
            losses[0].backward()
        else:
            given: dict[str, Any] = {"target": targets, "losses": losses} if self.pipe.last else {}
            self.pipe.schedule.step(*((inputs,) if self.pipe.first else ()), **given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean([float(loss.detach()) for loss in losses])

    def named(self) -> dict[str, list[Any]]:
        """Parameters and their states by name, whole, on the first rank of each stage."""
        whole = self.attachment.state_dict(self.optimizer)
        if not whole:
            return {}
        states = whole["optimizer"]["state"].values()
        return {name: [value, state] for (name, value), state in zip(whole["model"].items(), states, strict=True)}


def mean(losses: list[float]) -> float:
    """Of all that all ranks have."""
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1])


def save(path: str, **setup: Any) -> list[float]:
    """Train, save each stage to a folder of ``path`` and what it is whole beside; the losses of the steps after that."""
    run = Run(Path(path), **setup)
    run.train(0, 2)
    run.attachment.save(Path(path) / f"stage{run.number}", run.optimizer, extra={"step": 2})
    whole = run.named()
    if whole:
        torch.save(whole, Path(path) / f"whole{run.number}.pt")
    losses = run.train(2, 2)
    run.attachment.detach()
    return losses


def load(path: str, **setup: Any) -> list[float]:
    """Load the folders of all stages, compare, and train on."""
    run = Run(Path(path), seed=5, **setup)
    folders = sorted(Path(path).glob("stage?"))
    assert run.attachment.load(folders, run.optimizer) == {"step": 2}
    saved: dict[str, Any] = {}
    for file in sorted(Path(path).glob("whole?.pt")):
        saved |= torch.load(file, weights_only=True)
    masters = torch.bfloat16 if setup["dtype"] == "bf16" else torch.float32
    for name, (value, states) in run.named().items():
        wanted, kept = saved[name]
        assert states.keys() == kept.keys(), name
        for found, was in ((value, wanted), *((states[key], kept[key]) for key in states if states[key].dim())):
            assert found.dtype is masters and torch.equal(found, was.to(masters)), name
        assert states["step"] == kept["step"] == 2
    losses = run.train(2, 2)
    run.attachment.detach()
    return losses
