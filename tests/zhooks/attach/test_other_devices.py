"""Devices that are neither a CPU nor a GPU with streams: what torch knows nothing of is refused, what has no streams trains.

Types of device without a module or without streams are made of the accelerator of the tests, by hiding what it has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support import forked
from tests.support.on_ranks import hooks_left, on_accelerators


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """``owner`` has no such attribute inside."""
    hidden = getattr(owner, name)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, hidden)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to("accel")


def trained(net: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number in range(3):
        net(torch.full((4, 16), 1.0 + number, device="accel")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().cpu() for value in net.state_dict().values()]


@on_accelerators(1)
def test_a_type_of_device_that_torch_has_no_module_for_is_refused_in_a_line_and_the_model_left_alone() -> None:
    net = model()
    with without(torch, "accel"), pytest.raises(zhooks.CapabilityError) as raised:
        zhooks.attach(net)
    assert str(raised.value) == (
        "Cannot use device accel:0. Expected a type of device that computes, found that torch has no module torch.accel for "
        "it; import the package that registers it, or move the model to another device"
    )
    assert not hooks_left(net) and all(type(param) is nn.Parameter for param in net.parameters())
    zhooks.attach(net).detach()


def trains_without_streams(tier: str) -> None:
    """In a process of its own: whether a device has streams is asked once."""
    from tests.accelerator.accel import load

    accel = load()
    net = model()
    expected = trained(copy.deepcopy(net))

    def refused(*_: Any) -> Any:
        raise RuntimeError("this backend has no streams")

    accel.current_stream = refused
    cells = {name: {"tier": tier} for name in ("parameter", "gradient", "optimizer")}
    attachment = zhooks.attach(net, policy={"units": {"classes": ["Linear"], "min_numel": 0}, **cells})
    found = trained(net)
    attachment.detach()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_device_without_streams_trains_with_the_bits_of_plain_training(accelerators: object, tier: str) -> None:
    done = forked.python("-c", f"from {__name__} import trains_without_streams; trains_without_streams({tier!r})")
    assert done.returncode == 0, done.stderr
