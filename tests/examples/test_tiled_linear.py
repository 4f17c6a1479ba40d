"""The example of a Linear in tiles: it is the Linear, and never gathered whole.

pytest runs it. The oracle is the plain ``nn.Linear``; what is gathered at once is read from the runtime's events.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.events import Event
from tests.support.on_ranks import on_ranks, place
from tests.support.paths import ROOT
from tests.support.slow import slow

sys.path.insert(0, str(ROOT / "examples"))
try:
    TiledLinear: Any = import_module("tiled_linear").TiledLinear
finally:
    sys.path.remove(str(ROOT / "examples"))

TILES = ((1, 1), (4, 1), (1, 3), (3, 2))


def test_tiles_compute_what_the_linear_computes() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 17)
    for tiles in TILES:
        for bias in (True, False):
            linear = nn.Linear(17, 13, bias)
            tiled = TiledLinear.of(linear, tiles=tiles)
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            torch.testing.assert_close(tiled(ours), linear(theirs))
            tiled(ours).square().sum().backward()
            linear(theirs).square().sum().backward()
            torch.testing.assert_close(ours.grad, theirs.grad)
            grads = {name: param.grad for name, param in tiled.named_parameters() if param.grad is not None}
            whole = tiled.whole_state(grads)
            torch.testing.assert_close(whole["weight"], linear.weight.grad)
            if bias:
                torch.testing.assert_close(whole["bias"], linear.bias.grad)


def test_states_go_from_the_linear_to_tiles_and_back_bit_for_bit() -> None:
    linear = nn.Linear(17, 13)
    for tiles in TILES:
        tiled = TiledLinear(17, 13, tiles=tiles)
        model = nn.ModuleDict({"head": tiled, "other": nn.Linear(2, 2)})
        plain = {f"head.{key}": value for key, value in linear.state_dict().items()}
        plain.update({f"other.{key}": value for key, value in model["other"].state_dict().items()})
        model.load_state_dict(tiled.cut_state(plain, "head."))
        back = tiled.whole_state(model.state_dict(), "head.")
        assert back.keys() == plain.keys()
        assert all(torch.equal(back[key], plain[key]) for key in plain)


def test_values_are_drawn_as_those_of_the_whole() -> None:
    tiled = TiledLinear(64, 64, tiles=(2, 16))
    assert all(float(param.detach().abs().max()) <= 64**-0.5 for param in tiled.parameters())


@pytest.mark.parametrize("tiles", [(0, 1), (14, 1), (1, 18)])
def test_tiles_without_a_feature_are_refused(tiles: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"TiledLinear expected from 1 to \d+ tiles over \d+ features, found"):
        TiledLinear(17, 13, tiles=tiles)


class Block(nn.Module):
    """A block, which is a unit, with a layer in tiles inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.tall: Any = nn.Linear(32, 96)
        self.wide: Any = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.tall(self.norm(x)).relu())


def blocks(*, tiled: bool) -> nn.Sequential:
    torch.manual_seed(0)
    both = Block(), Block()
    for block in both if tiled else ():
        block.tall = TiledLinear.of(block.tall, tiles=(4, 1))
        block.wide = TiledLinear.of(block.wide, tiles=(2, 3))
    return nn.Sequential(*both)


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out = []
    for _ in range(steps):
        loss = (model(torch.linspace(-1, 1, 64).view(2, 32)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out


class Gathered:
    """The most bytes that were gathered at once, and the largest single gather."""

    def __init__(self) -> None:
        self.now = self.most = self.largest = 0

    def on_event(self, event: Event) -> None:
        if event.what == "gather" and event.kind == "begin":
            self.now += event.nbytes
            self.most, self.largest = max(self.most, self.now), max(self.largest, event.nbytes)
        elif event.what == "release":
            self.now -= event.nbytes


@pytest.mark.slow
@on_ranks(*slow(1), 2, half=(0, *slow(1)))
def test_a_model_with_tiles_trains_like_the_plain_one_at_every_stage_and_tier(half: int) -> None:
    expected = losses(blocks(tiled=False))
    cells: list[dict[str, Any]] = [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"parameter": {"tier": "disk"}, "gradient": {"tier": "disk"}, "optimizer": {"tier": "disk"}},
        {"parameter": {"tier": "host"}, "optimizer": {"tier": "host"}},
        {"activation": {"checkpoint": "unit"}},
    ]
    for policy in cells[half::2]:
        model = blocks(tiled=True)
        attachment = zhooks.attach(model, policy={"units": {"classes": ["Block"]}, **policy})
        torch.testing.assert_close(losses(model), expected, msg=str(policy))
        attachment.detach()


@on_ranks(2, prefetch=(0, 1))
def test_one_tile_is_gathered_at_a_time_and_those_ahead(prefetch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TiledLinear.of(nn.Linear(64, 128), tiles=(8, 1)))
    tile = 64 * 16 * 4 + 16 * 4
    attachment = zhooks.attach(
        model, policy={"units": {"min_numel": 0}, "schedule": {"prefetch": prefetch, "reshard_after_forward": True}}
    )
    log = Gathered()
    attachment.observe(log)
    for _ in range(3):
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert log.largest == tile
    assert log.most <= (1 + prefetch) * tile
    assert log.now == 0


@on_ranks(2)
def test_the_state_of_a_tiled_run_loads_into_the_plain_model() -> None:
    model = blocks(tiled=True)
    attachment = zhooks.attach(model, policy={"units": {"classes": ["Block"]}})
    losses(model)
    state = attachment.state_dict()
    rank, _ = place()
    if rank == 0:
        values = state["model"]
        for number, block in enumerate(model):
            for name in ("tall", "wide"):
                values = getattr(block, name).whole_state(values, f"{number}.{name}.")
        plain = blocks(tiled=False)
        plain.load_state_dict(values)
        attached = attachment.detach()
        x = torch.linspace(-1, 1, 64).view(2, 32)
        torch.testing.assert_close(plain(x), attached(x))
    else:
        attachment.detach()
