"""Axes that the search has where the job offers them: ``tp`` by its build and step, dtypes that are allowed, larger units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from offload.hardware import Hardware
from offload.policy import Policy
from tests.support.virtual import on_virtual
from zhooks import SimulationError
from zhooks.simulate import Proposals, find_policy, simulate
from zhooks.simulate.axes import candidates

WIDTH, ROWS, BLOCKS = 256, 2048, 2
UNITS = {"units": {"names": ["?"]}}


def whole(width: int = WIDTH) -> nn.Sequential:
    """Blocks of two matrices without biases, the first of which widens."""
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(*blocks)


def build(mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = whole()
    for block in model if mesh is not None else ():
        assert mesh is not None
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batch: int = 2, accumulation: int = 1) -> None:
    for _ in range(accumulation):
        model(torch.empty(micro_batch * ROWS, WIDTH, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def undivided(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)


def found(make: Callable[..., Any] = build, change: Callable[..., object] = step, **given: Any) -> Proposals:
    return find_policy(make, change, **{"world": 4, "policy": UNITS, "host": 0, "disk": 0, **given})


@on_virtual()
def test_where_one_sample_does_not_fit_a_rank_its_layers_are_divided_over_several() -> None:
    free = found(precision=["bf16"]).best[0]
    assert free.candidate.tp == 1
    one = lambda model, optimizer, *, micro_batch=1, accumulation=1: step(  # noqa: E731
        model, optimizer, micro_batch=micro_batch, accumulation=accumulation
    )
    tight = found(change=one, device=19 << 20)
    best = tight.best[0]
    assert best.candidate.tp > 1 and best.memory.device <= 19 << 20
    assert best.mesh == {"shard": 4 // best.candidate.tp, "tp": best.candidate.tp}
    # The ranks of an axis share the samples that they would have had.
    batch = best.candidate.batch
    assert batch is not None and batch.micro_batch * batch.accumulation == best.candidate.tp
    chosen: dict[str, Any] = {"micro_batch": batch.micro_batch, "accumulation": batch.accumulation}
    again = simulate(build, lambda *given: step(*given, **chosen), world=4, mesh=best.mesh, policy=best.policy)
    assert again.step_s == pytest.approx(best.simulation.step_s, rel=1e-9) and best.busy["collectives"] > 0
    assert 'Divide the model over mesh["tp"]' in tight.policy_text()


@pytest.mark.slow
@on_virtual()
def test_what_cannot_be_divided_is_named_and_the_rest_is_searched() -> None:
    def odd(mesh: DeviceMesh | None = None) -> Any:
        if mesh is not None and mesh["tp"].size() > 2:
            raise ValueError("4 ranks cannot share 6 heads")
        return build(mesh)

    def whatever(mesh: DeviceMesh | None = None) -> Any:
        return build()

    def breaks(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batch: int = 2, accumulation: int = 1) -> None:
        if micro_batch * accumulation > 2:
            raise RuntimeError("not so many")
        step(model, optimizer, micro_batch=micro_batch, accumulation=accumulation)

    small: dict[str, Any] = {"most": 12, "precision": ["bf16"]}
    assert "tp 4: build raised ValueError: 4 ranks cannot share 6 heads" in found(odd, most=1).notes
    assert 'tp 2: build returned a model with no parameter divided over mesh["tp"]' in found(whatever, most=1).notes
    assert any(note.startswith("tp: ranks that share samples") for note in found(change=undivided, most=1).notes)
    broken = found(change=breaks, **small)
    assert all(each.candidate.tp == 1 for each in broken.best)
    assert all(note.endswith("RuntimeError: not so many") for note in broken.notes if note.startswith("tp 2"))
    assert "not searched: tp" in str(found(odd, most=1))
    with pytest.raises(SimulationError, match=r"Write build\(mesh=None\)"):
        found(lambda mesh: build(mesh))


@pytest.mark.slow
@on_virtual()
def test_of_the_dtypes_that_are_allowed_the_quickest_is_found() -> None:
    both = found(precision=["fp32", "bf16"])
    assert both.best[0].policy.precision.param == "bf16" and "bf16" in str(both.best[0].candidate)
    kept = found(precision=["fp32"])
    assert {each.policy.precision.param for each in kept.best} == {"fp32"}
    assert both.best[0].simulation.step_s < kept.best[0].simulation.step_s
    assert found(precision=["bf16", "fp16"], most=1).notes == ("fp16: as large as bf16, no faster, and it needs a loss scale",)


@on_virtual()
def test_hardware_without_a_dtype_gets_another_that_is_allowed_or_none() -> None:
    proposals = found(hardware="v100-32", precision=["bf16", "fp16"])
    best = proposals.best[0]
    assert (best.policy.precision.param, best.policy.precision.loss_scale) == ("fp16", "dynamic")
    assert "bf16: v100-32 has no peak for it" in proposals.notes and "loss scale" in proposals.policy_text()
    with pytest.raises(SimulationError, match="a precision that v100-32 computes in, found bf16"):
        found(hardware="v100-32", precision=["bf16"])
    for wrong in (["bf17"], [], "bf16"):
        with pytest.raises(SimulationError, match="expected precision as a list of some of fp32, bf16, fp16"):
            found(precision=wrong)


@pytest.mark.slow
@on_virtual()
def test_units_are_joined_where_the_latency_of_many_small_ones_is_what_takes_long() -> None:
    def many() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)])
        return model, torch.optim.AdamW(model.parameters())

    def small(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(64, 64, device="virtual")).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    slow = Hardware.of("h100").replaced(link={"latency": "2 ms", "short_latency": "2 ms"})
    keeps = {"units": {"names": ["?", "??"], "min_numel": 0}}
    apart = simulate(many, small, world=8, hardware=slow, policy={**keeps, "stage": 3})
    proposals = find_policy(many, small, world=8, hardware=slow, policy=keeps)
    best = proposals.best[0]
    assert best.candidate.min_numel and best.policy.units.min_numel == best.candidate.min_numel
    assert best.simulation.step_s < apart.step_s


@pytest.mark.slow
@on_virtual()
def test_the_choice_is_as_quick_as_the_best_of_all_candidates_simulated() -> None:
    # No memory to speak of between them: what is quicker is all that counts.
    chosen = found(precision=["bf16", "fp32"], device=24 << 20)
    base = Policy.of(UNITS)
    quickest = float("inf")
    from zhooks.simulate.job import Job

    job = Job(build, step, 4, Hardware.of("h100"))
    listed = candidates(
        base, 4, tiers=[chosen.best[0].candidate.tiers.parameter], host_updates=False, batched=job.batched(),
        divided=(1, 2, 4), dtypes=("bf16", "fp32"),
    )  # fmt: skip
    for each in listed:
        batch = each.batch
        assert batch is not None
        given = {"micro_batch": batch.micro_batch, "accumulation": batch.accumulation}
        one = simulate(
            build, lambda *made, given=given: step(*made, **given), world=4, mesh=each.mesh(4), policy=each.policy(base),
            check_races=False,
        )  # fmt: skip
        if one.device.nbytes <= 24 << 20:
            quickest = min(quickest, one.step_s)
    assert chosen.best[0].simulation.step_s <= 1.005 * quickest
