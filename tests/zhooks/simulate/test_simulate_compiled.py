"""Compiled models in a simulation: what makes kernels is refused by name, what runs torch's operations is simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.compiling import compiling
from tests.support.slow import slow
from tests.support.virtual import on_virtual
from zhooks.simulate import Simulation, simulate

WIDTH = 256


def simulated(compiled: str, **given: Any) -> Simulation:
    def build() -> nn.Module:
        def block() -> nn.Sequential:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

        model: Any = nn.Sequential(block(), block())
        if compiled == "blocks":
            for each in model:
                each.compile(**given)
        elif compiled == "wrapped":
            for number, each in enumerate(model):
                model[number] = torch.compile(each, **given)
        elif compiled == "whole":
            model = torch.compile(model, **given)
        return model

    def step(model: nn.Module) -> None:
        model(torch.empty(64, WIDTH, device="virtual")).square().mean().backward()
        model.zero_grad()

    with compiling():
        return simulate(build, step, world=2, policy={"units": {"min_numel": 0}})


@pytest.mark.slow
@on_virtual(compiled=("blocks", *slow("wrapped"), "whole"))
def test_what_inductor_compiles_is_refused_by_name(compiled: str) -> None:
    with pytest.raises(zhooks.SimulationError, match=r"expected code that is not compiled, .* Simulate it uncompiled"):
        simulated(compiled)
    with torch.compiler.set_stance("force_eager"):
        found = simulated(compiled)
    assert found == simulated("no"), "as the refusal advises"


@on_virtual()
def test_blocks_that_run_torch_s_own_operations_take_what_they_take_uncompiled() -> None:
    plain, compiled = simulated("no"), simulated("blocks", backend="aot_eager")
    assert compiled.flops == plain.flops and not compiled.races
    assert compiled.compute_s == pytest.approx(plain.compute_s, rel=0.05)
