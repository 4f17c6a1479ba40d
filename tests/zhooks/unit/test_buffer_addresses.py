"""Buffers of collectives keep their addresses in the arena: for registered memory, or a graph of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import zhooks
from tests.support.on_ranks import on_accelerators
from zhooks.comm import stock

Addresses = list[tuple[str, int, int]]


@contextmanager
def passed() -> Iterator[Addresses]:
    """What the backend's collectives write and read, by address."""
    seen: Addresses = []

    def noted(name: str) -> Any:
        real = getattr(stock, name)

        def call(out: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
            seen.append((name, out.data_ptr(), given.data_ptr()))
            return real(out, given, **options)

        return mock.patch.object(stock, name, call)

    with noted("_all_gather"), noted("_reduce_scatter"):
        yield seen


@on_accelerators(2)
def test_buffers_of_collectives_keep_their_addresses_in_the_arena_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    device = f"accel:{torch.accelerator.current_device_index()}"
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(5))).to(device)
    policy = {"units": {"min_numel": 0, "names": ["?"]}, "device": {"arena": "all"}}
    attachment = zhooks.attach(net, policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    steps: list[Addresses] = []
    for _ in range(4):
        with passed() as seen:
            net(torch.ones(4, 32, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(seen)
    assert len(steps[0]) > 10 and all(step == steps[0] for step in steps)
    attachment.detach()
