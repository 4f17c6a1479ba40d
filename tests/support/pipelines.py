"""A small GPT divided into stages, its schedules, the plain model they are held against, and a run of both side by side.

Tests of pipelines call it.  Every rank computes the plain losses for itself; ``Run`` alone attaches the stages, and asserts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    schedules,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import zhooks
from tests.support.torches import where_torch_has

VOCABULARY, DIM, CONTEXT, ROWS, BLOCKS = 17, 16, 6, 8, 4
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dual-pipe": getattr(schedules, "ScheduleDualPipeV", None),
}
DUAL_PIPE = pytest.param("dual-pipe", marks=where_torch_has(schedules, "ScheduleDualPipeV"))


class Block(nn.Module):
    """Attention over the past and a feed-forward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).unflatten(-1, (2, 3 * DIM // 2)).transpose(1, 2).chunk(3, dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Part(nn.Module):
    """The blocks of one stage; the first also embeds, the last also says what comes next."""

    def __init__(self, blocks: int, *, ends: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM) if "first" in ends else None
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(DIM, VOCABULARY) if "last" in ends else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def parts(stages: int, blocks: int = BLOCKS) -> list[nn.Module]:
    """All stages of the model, the same numbers on every rank."""
    torch.manual_seed(7)
    ends = ["first"] + [""] * (stages - 2) + ["last"]
    return [Part(blocks // stages, ends=end) for end in ends]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: int64 [ROWS, CONTEXT], and what comes after each."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mesh_of(pp: int, dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))


@dataclass
class Pipeline:
    """This rank's stages of a model, in a schedule."""

    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    mine: dict[int, nn.Module]
    first: bool
    last: bool
    mesh: DeviceMesh

    def step(self, number: int) -> float | None:
        """One step of the schedule on this rank's share of the batch; the mean loss, where the last stage is."""
        inputs, targets = share(self.mesh, batch_of(number))
        losses: list[Tensor] = []
        kwargs: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*((inputs,) if self.first else ()), **kwargs)
        return mean_over(self.mesh, torch.stack(losses).mean()) if self.last else None


def share(mesh: DeviceMesh, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The rows of this data rank."""
    rank, world = mesh["dp"].get_local_rank(), mesh["dp"].size()
    inputs, targets = batch
    return inputs.chunk(world)[rank], targets.chunk(world)[rank]


def mean_over(mesh: DeviceMesh, loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return float(total) / mesh["dp"].size()


def pipeline(
    mesh: DeviceMesh, modules: dict[int, nn.Module], name: str, stages: int, microbatches: int, **more: Any
) -> Pipeline:
    """A schedule over the stages ``modules`` of this rank, of ``stages`` in all."""
    group, device = mesh["pp"].get_group(), torch.device("cpu")
    made = [PipelineStage(module, index, stages, device, group=group, **more) for index, module in modules.items()]
    kind = SCHEDULES[name]
    multi = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(made if multi else made[0], microbatches, loss_fn=loss_of)
    return Pipeline(schedule, modules, 0 in modules, stages - 1 in modules, mesh)


def mine_of(mesh: DeviceMesh, every: list[nn.Module], *, folded: bool = False) -> dict[int, nn.Module]:
    """The stages of this rank: every pp-th, or those at the same distance from both ends (a V)."""
    rank, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
    if folded:
        return {index: every[index] for index in (rank, len(every) - 1 - rank)}
    return {index: module for index, module in enumerate(every) if index % size == rank}


class Plain:
    """The same model in one process, trained on whole batches."""

    def __init__(self, stages: int, make: Any, blocks: int = BLOCKS) -> None:
        self.stages = parts(stages, blocks)
        self.model = nn.Sequential(*self.stages)
        self.optimizer = make(self.model.parameters())

    def step(self, number: int) -> float:
        inputs, targets = batch_of(number)
        loss = loss_of(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Run:
    """A pipeline whose stages are attached, beside the plain model."""

    def __init__(
        self, pp: int, schedule: str, policy: dict[str, Any], *, stages: int = 0, microbatches: int = 4, blocks: int = 4
    ) -> None:
        self.mesh = mesh_of(pp, dist.get_world_size() // pp)
        self.stages = stages or pp * (1 if schedule in ("gpipe", "1f1b") else 2)
        self.mine = mine_of(self.mesh, parts(self.stages, blocks), folded=schedule in ("zbv", "dual-pipe"))
        chosen = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}} | policy
        self.attachments = [zhooks.attach(part, mesh=self.mesh, policy=chosen) for part in self.mine.values()]
        self.pipe: Pipeline = pipeline(self.mesh, self.mine, schedule, self.stages, microbatches)
        self.optimizer = SGD([param for part in self.mine.values() for param in part.parameters()])
        self.plain = Plain(self.stages, SGD, blocks)

    def step(self, number: int, *, tolerance: float = 1e-5) -> None:
        """Train one step here and plainly: the same loss."""
        loss, expected = self.pipe.step(number), self.plain.step(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert loss is None or loss == pytest.approx(expected, abs=tolerance), (number, loss, expected)

    def close(self, *, tolerance: float = 1e-5) -> None:
        """Detach: the same parameters, rank by rank and stage by stage."""
        for attachment in self.attachments:
            attachment.detach()
        for index, part in self.mine.items():
            for (name, found), expected in zip(part.named_parameters(), self.plain.stages[index].parameters(), strict=True):
                assert (found - expected).abs().max() < tolerance, (index, name)
