"""Rules of precision, stochastic rounding and calibration where models are divided over tp, or staged over pp.

pytest runs it on ranks over Gloo; what each of them does on data ranks alone is held to plain PyTorch in its own file.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.pipelines import Run
from tests.support.pipelines import mesh_of as staged
from tests.support.slow import slow
from tests.support.tp_gpt import divide, plain_gpt
from tests.support.tp_runs import FINE, attached, data_place, mean_over_data, mesh_of, train
from tests.support.values import full, whole

# Ranks that draw other numbers have other bits after one; more are for the loss to move.
STEPS = 4
#: How far losses in bf16 are from those in fp32 at most. What is not trained at all is 1 % away in the fourth step.
NEAR = 6e-3
NORMS = [{"match": "*norm*", "precision.param": "fp32"}]


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def same_on_all(values: list[Tensor]) -> bool:
    """Every rank has these bits."""
    mine = torch.cat([value.detach().double().flatten() for value in values])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return torch.equal(least, most)


@pytest.mark.slow
@on_ranks(4, stage=(3, *slow(1)))
def test_rules_give_units_of_a_divided_model_their_own_dtype(stage: int) -> None:
    mesh, plain = mesh_of(2), plain_gpt()
    expected = train(plain, adamw(plain), (0, 1), 2)
    model, attachment = attached(mesh, stage, sequence=stage == 3, policy={"precision": {"param": "bf16"}, "rule": NORMS})
    seen: dict[str, Any] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = (module.weight.dtype, args[0].dtype)

        return hook

    kinds = (nn.LayerNorm, nn.Linear)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(look(name)) for name, module in named]
    losses = train(model, adamw(model), data_place(mesh), 2)
    for name, dtypes in seen.items():
        assert set(dtypes) == {torch.float32 if "norm" in name else torch.bfloat16}, (name, dtypes)
    assert mean_over_data(losses).tolist() == pytest.approx(expected, rel=NEAR)
    assert same_on_all(full(model))
    for handle in handles:
        handle.remove()
    attachment.detach()


@on_ranks(4, tier=("host", *slow("device")))
def test_what_ranks_of_tp_hold_alike_is_rounded_alike(tier: str) -> None:
    mesh, plain = mesh_of(2), plain_gpt()
    expected = train(plain, adamw(plain, 1e-3), (0, 1), STEPS)
    model = divide(plain_gpt().bfloat16(), mesh["tp"])
    cell = {"tier": tier}
    rounding = {"parameter": cell, "gradient": cell, "optimizer": {**cell, "rounding": "stochastic", "seed": 3}}
    attachment = zhooks.attach(model, policy=FINE | rounding, mesh=mesh)
    losses = train(model, adamw(model, 1e-3), data_place(mesh), STEPS)
    assert mean_over_data(losses)[-1].item() == pytest.approx(expected[-1], rel=NEAR)
    attachment.detach()
    kept = [param for param in model.parameters() if not isinstance(param, DTensor)]
    assert kept and all(param.dtype is torch.bfloat16 for param in model.parameters())
    assert same_on_all([whole(param.detach()) for param in model.parameters()])


@pytest.mark.slow
@on_ranks(4)
def test_calibration_of_a_divided_model_proposes_the_same_on_every_rank() -> None:
    mesh = mesh_of(2)
    model, attachment = attached(mesh, 3)
    with attachment.calibrate(prefer="fp16") as calibration:
        train(model, adamw(model), data_place(mesh), 3)
    proposal = calibration.proposal
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, proposal.toml())
    assert set(texts) == {proposal.toml()}
    # What a rank measured of its columns and rows is what the plain model has in all of them.
    plain = plain_gpt()
    largest = max(param.abs().max().item() for param in plain.blocks[0].parameters())
    assert {ranges.unit for ranges in proposal.ranges} >= {"blocks.0", "blocks.1"}
    (block,) = (ranges for ranges in proposal.ranges if ranges.unit == "blocks.0")
    assert block.weight == pytest.approx(largest, rel=0.1)
    attachment.detach()
    model, attachment = attached(mesh, 3, policy=proposal.values())
    losses = train(model, adamw(model), data_place(mesh), 4)
    expected = train(plain, adamw(plain), (0, 1), 4)
    assert mean_over_data(losses).tolist() == pytest.approx(expected, rel=1e-3)
    attachment.detach()


@on_ranks(4)
def test_stages_of_a_pipeline_have_rules_rounding_and_calibrations_of_their_own() -> None:
    rules = [{"match": f"*.{norm}.*", "precision.param": "fp32"} for norm in ("before", "between")]
    run = Run(2, "1f1b", {"stage": 3, "precision": {"param": "bf16"}, "rule": rules})
    for number in range(3):
        run.step(number, tolerance=2e-2)
    run.close(tolerance=2e-2)

    run = Run(2, "gpipe", {"stage": 3})
    (attachment,) = run.attachments
    with attachment.calibrate() as calibration:
        for number in range(2):
            run.step(number)
    assert {advice.unit for advice in calibration.proposal.advice}
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, calibration.proposal.toml())
    assert texts[0] == texts[1] and texts[2] == texts[3], "data ranks of one stage agree"
    run.close()


@on_ranks(2)
def test_a_stage_that_is_rounded_stochastically_trains_beside_one_that_is_not() -> None:
    mesh = staged(2, 1)
    stage = dist.get_rank()
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, dtype=torch.bfloat16 if stage else torch.float32)
    rounding = {"optimizer": {"rounding": "stochastic"}} if stage else {}
    attachment = zhooks.attach(layer, policy={"units": {"min_numel": 0}, **rounding}, mesh=mesh)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(16, 8, dtype=layer.weight.dtype)
    losses = []
    for _ in range(20):
        loss = layer(x).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    attachment.detach()


@pytest.mark.slow
@on_ranks(2)
def test_a_mesh_of_tp_alone_calibrates_and_rounds() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model, attachment = attached(mesh, 3, sequence=True)
    with attachment.calibrate() as calibration:
        train(model, adamw(model), data_place(mesh), 2)
    assert "stochastic" in str(calibration)
    attachment.detach()
    model = divide(plain_gpt().bfloat16(), mesh["tp"], sequence=True)
    attachment = zhooks.attach(model, policy=FINE | {"optimizer": {"rounding": "stochastic"}}, mesh=mesh)
    plain = plain_gpt()
    expected = train(plain, adamw(plain, 1e-3), (0, 1), 10)
    assert train(model, adamw(model, 1e-3), data_place(mesh), 10) == pytest.approx(expected, rel=NEAR)
    attachment.detach()
    assert same_on_all([whole(param.detach()) for param in model.parameters()])
