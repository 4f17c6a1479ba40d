"""What only a GPU can show: the same loop on CUDA, alone and through NCCL, equals plain training there."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; the CPU tests hold the same over Gloo"),
]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)).cuda()


def train(under: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 64, (4, 16), generator=generator).cuda()
        loss = F.cross_entropy(under(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(under.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def nccl() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_training_on_a_gpu_equals_plain_training(stage: int) -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    zhooks.attach(attached, policy={"stage": stage, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected


def test_bf16_units_are_gathered_and_released_on_a_gpu() -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    attachment = zhooks.attach(attached, policy={"precision": {"param": "bf16"}, "units": {"min_numel": 0}})
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    found = train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-3))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert attachment.memory().transient["gathered units"] == 0


def test_an_attachment_over_nccl_trains(nccl: None) -> None:
    plain = model()
    attached = copy.deepcopy(plain)
    attachment = zhooks.attach(attached)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert train(attached, torch.optim.AdamW(attached.parameters(), lr=1e-2)) == expected
    attachment.detach()
