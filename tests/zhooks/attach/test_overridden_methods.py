"""Models that override how nn.Module shows modules, parameters and buffers train as they do without zhooks.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import AttachError
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.slow import slow


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.encoder(x)))
        return out


def what_trains(model: Any, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
    every = nn.Module.named_parameters(model, *given, **named)
    return ((name, param) for name, param in every if param.requires_grad)


def state_of_the_head(model: Any, *given: Any, **named: Any) -> dict[str, Any]:
    every = nn.Module.state_dict(model, *given, **named)
    return {name: value for name, value in every.items() if "head" in name}


OVERRIDES: dict[str, dict[str, Callable[..., Any]]] = {
    "parameters": {
        "named_parameters": what_trains,
        "parameters": lambda model, recurse=True: (param for _, param in what_trains(model, recurse=recurse)),
    },
    "groups": {"parameters": lambda model: [{"params": [*model.head.parameters()], "lr": 0.1}]},
    "modules": {"modules": lambda model: iter([model]), "named_modules": lambda model, *_, **__: iter([("", model)])},
    "children": {"children": lambda model: iter([]), "named_children": lambda model: iter([])},
    "buffers": {"buffers": lambda model, recurse=True: iter([]), "named_buffers": lambda model, *_, **__: iter([])},
    "state": {"state_dict": state_of_the_head},
}


def made(kind: type[nn.Module], inside: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Linear(2, 2)) if inside else kind()


def tensors(module: nn.Module) -> Iterator[Tensor]:
    """All that a module has, by its own tables."""
    has = vars(module)
    yield from (tensor for table in ("_parameters", "_buffers") for tensor in has[table].values() if tensor is not None)
    for child in has["_modules"].values():
        if child is not None:
            yield from tensors(child)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([tensor for tensor in tensors(model) if tensor.requires_grad], lr=0.1)
    for seed in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(1, 2, stage=(*slow(0), 3))
def test_a_model_may_show_less_than_it_has(stage: int) -> None:
    for overrides, inside in itertools.product(OVERRIDES, (False, True)):
        kind = type(f"Overrides_{overrides}", (Plain,), OVERRIDES[overrides])
        model, plain = made(kind, inside), made(Plain, inside)
        attachment = zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 0}})
        train(model)
        train(plain)
        with folder() as path:
            attachment.save(path / "run")
            attachment.load(path / "run")
        attachment.detach()
        for found, expected in zip(tensors(model), tensors(plain), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0 if place()[1] == 1 else 1e-6)


def test_parameters_that_no_module_has_are_refused_before_they_train_apart() -> None:
    class Hides(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.Linear(2, 2)]

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            yield from super().parameters(recurse)
            yield from self.blocks[0].parameters()

    for model in (Hides(), nn.Sequential(Hides())):
        with pytest.raises(AttachError, match=r"parameters\(\) of Hides returns 2 trainable tensors that no module has"):
            zhooks.attach(model)
