"""Predicted peaks beside measured ones: the same training on two real ranks and on the virtual device, to a few bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zhooks
from tests.support.ranks import Pool
from tests.support.slow import slow
from tests.support.storage_peak import a_cpu, peak
from zhooks.simulation import simulate

WIDTH, ROWS, LENGTH = 128, 4, 32


class Attending(nn.Module):
    """Attention, dropout, a norm and an MLP, each with a kernel of its own on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.narrow(F.silu(self.wide(x))), 0.1)


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.norm = nn.Conv2d(ROWS, ROWS, 3, padding=1), nn.BatchNorm2d(ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.kernel(x[None])))[0]


BLOCKS = {"attention": Attending, "recurrent": Recurring, "convolution": Convolving}
HOST = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention, stage 3": ("attention", {"stage": 3}),
    "attention, recomputed, optimizer on disk": (
        "attention", {"activation": {"checkpoint": "unit"}, "optimizer": {"tier": "disk"}},
    ),
    "recurrent, on host": ("recurrent", HOST),
    "convolution, stage 0": ("convolution", {"stage": 0}),
    "convolution, stage 1": ("convolution", {"stage": 1}),
}  # fmt: skip


def programs(name: str) -> tuple[Callable[[], tuple[nn.Module, torch.optim.Optimizer]], Callable[..., None]]:
    """``build`` and ``step``, on whatever the default device is then."""
    batch: list[Tensor] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[BLOCKS[name]() for _ in range(3)], nn.Linear(WIDTH, WIDTH))
        batch[:] = [torch.ones(ROWS, LENGTH, WIDTH)]
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return build, step


def uneven() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Units of several sizes: more buffers of other sizes come back in a step than may lie idle."""
    widths = (96, 80, 100, 100, 100, 80)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def uneven_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 96, device="virtual")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_of_step(number: int, hardware: dict[str, Any]) -> int:
    policy = {"units": {"min_numel": 0}, "schedule": {"prefetch": 2}, **{cell: {"tier": "disk"} for cell in HOST}}
    return simulate(uneven, uneven_step, world=2, hardware=hardware, policy=policy, steps=number).device.nbytes


def measured(case: str, folder: str) -> int:
    """The peak of two steps on this rank, as zprof's recorder counts storages."""
    name, policy = CASES[case]
    build, step = programs(name)
    # What earlier work of this process has left is none of this model's.
    before = peak(Path(folder) / "before.zprof", lambda: None)
    model, _ = build()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "disk": {"path": folder}, **policy})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    found = peak(Path(folder) / "steps.zprof", lambda: [step(model, optimizer) for _ in range(2)])
    attachment.detach()
    return found - before


def simulated(case: str, hardware: dict[str, Any]) -> int:
    name, policy = CASES[case]
    policy = {"units": {"min_numel": 0}, **policy}
    return simulate(*programs(name), world=2, hardware=hardware, policy=policy, steps=3).device.nbytes


@pytest.mark.parametrize("case", [*slow("convolution, stage 0"), *(case for case in CASES if case != "convolution, stage 0")])
def test_the_peak_is_what_two_ranks_of_a_cpu_hold(case: str, ranks2: Pool, virtual_ranks: Pool, tmp_path: Path) -> None:
    held = max(ranks2.run(f"{__name__}:measured", case=case, folder=str(tmp_path)))
    (predicted,) = virtual_ranks.run(f"{__name__}:simulated", case=case, hardware=a_cpu())
    assert held / 1.03 <= predicted <= held * 1.03, f"{case}: predicted {predicted} bytes, measured {held}"
    if not case.startswith("recurrent"):
        # What is left is a few numbers'; of oneDNN's recurrent layers a copy that it makes inside is not known.
        assert abs(predicted - held) <= 4096, f"{case}: predicted {predicted} bytes, measured {held}"


def test_every_step_of_a_loop_has_the_same_peak(virtual_ranks: Pool) -> None:
    peaks = [virtual_ranks.run(f"{__name__}:peak_of_step", number=number, hardware=a_cpu()) for number in (3, 4, 5)]
    assert peaks == [peaks[0]] * 3
