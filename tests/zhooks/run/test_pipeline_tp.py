"""Stages whose layers are divided over ``tp``: pipeline, tensor and data axes in one mesh, equal to the plain model.

pytest runs it over four ranks; tests/support/tp_gpt.py has the model.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.tp_gpt import SEQ, Gpt, batch, divide, loss_of, plain_gpt
from tests.support.values import sharded


class Half(nn.Module):
    """The embeddings and the first block of a divided GPT, or its second block and the head."""

    def __init__(self, model: Gpt, index: int) -> None:
        super().__init__()
        self.ends = nn.ModuleList([model.tokens, model.places] if index == 0 else [model.norm, model.head])
        self.block, self.index = model.blocks[index], index

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 0:
            x = self.ends[0](x) + self.ends[1](torch.arange(SEQ))
        x = self.block(x)
        return x if self.index == 0 else self.ends[1](self.ends[0](x))


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


@on_ranks(4)
def test_stages_that_are_divided_over_tp_train_as_the_plain_model() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, plain = mesh["pp"].get_local_rank(), plain_gpt(2)
    half, expected = Half(divide(plain_gpt(2), mesh["tp"]), index), Half(plain, index)
    attachment = zhooks.attach(half, mesh=mesh, policy={"stage": 3, "units": {"min_numel": 0}})
    stage = PipelineStage(half, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 2, loss_fn=cross_entropy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (half, plain)]
    for number in range(6):
        tokens, targets = batch(number)
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        wanted = loss_of(plain, tokens, targets)
        wanted.backward()
        if losses:
            assert float(torch.stack(losses).detach().mean()) == pytest.approx(float(wanted.detach()), abs=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), value in zip(half.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(sharded(found).full_tensor(), value, atol=1e-5), name
    attachment.detach()
