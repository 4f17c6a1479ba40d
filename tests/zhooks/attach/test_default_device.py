"""Training under another default device or dtype of torch: what zhooks makes for itself stays where it belongs.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.on_ranks import folder, on_ranks, place

HOST, DISK = {"tier": "host"}, {"tier": "disk"}
POLICIES: tuple[dict[str, Any], ...] = (
    {"stage": 1},
    {"stage": 3, "activation": {"checkpoint": "unit"}, "precision": {"loss_scale": "dynamic"}},
    {"stage": 3, "parameter": HOST, "gradient": HOST, "optimizer": HOST},
    {"stage": 3, "parameter": DISK, "gradient": DISK, "optimizer": DISK},
)


@contextmanager
def defaults(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def trained(policy: dict[str, Any] | None, optimizer: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    about: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    layers = [nn.Sequential(nn.Linear(6, 6, **about), nn.LayerNorm(6, **about)) for _ in range(2)]
    model = nn.Sequential(*layers)
    for param in model.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator, **about))
    attachment = None if policy is None else zhooks.attach(model, policy=policy)
    stepped = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for _ in range(2):
        x = torch.randn(4, 6, generator=generator, **about)
        rank, world = place() if attachment is not None else (0, 1)
        model(x.chunk(world)[rank]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepped.step()
        stepped.zero_grad()
    if attachment is not None:
        with folder() as path:
            attachment.save(path / "run", stepped)
            attachment.load(path / "run", stepped)
        attachment.load_state_dict(attachment.state_dict(stepped), stepped)
        attachment.detach()
    return [param.detach() for param in model.parameters()]


@on_ranks(1, 2)
def test_the_default_device_may_be_meta() -> None:
    # Adam's own counters of steps would be on meta, where plain PyTorch fails.
    for policy in POLICIES:
        with defaults("meta", torch.float32):
            found, expected = trained(policy, torch.optim.SGD), trained(None, torch.optim.SGD)
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, plain, rtol=0, atol=0 if place()[1] == 1 else 1e-6)


@pytest.mark.slow
@on_ranks(1, 2)
def test_the_default_dtype_may_be_wider_or_narrower_than_the_models() -> None:
    for policy in POLICIES:
        for dtype in (torch.float64, torch.bfloat16):
            with defaults(None, dtype):
                found, expected = trained(policy, torch.optim.Adam), trained(None, torch.optim.Adam)
            for mine, plain in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, plain, rtol=0, atol=0 if place()[1] == 1 else 1e-5)
