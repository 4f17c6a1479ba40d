"""ZeRO over a model that ``parallelize_module`` has divided, against the plain model in one process.

Its functions run on 2 x 2 Gloo ranks; what other tests need of tensor parallelism is in tests/support/tp_runs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import zhooks
from tests.support.on_ranks import on_ranks
from tests.support.slow import slow
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt
from tests.support.tp_runs import FINE, attached, data_place, mesh_of, same_run, train
from tests.support.values import grad_of, sharded, whole


@on_ranks(2)
def test_the_divided_model_computes_what_the_plain_one_does() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for sequence in (False, True):
        plain, model = plain_gpt(), divide(plain_gpt(), mesh, sequence=sequence)
        expected, found = (loss_of(each, *batch(0)) for each in (plain, model))
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        for one, two in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(two.grad), one.grad)


HOST = {name: {"tier": "host"} for name in ("parameter", "gradient", "optimizer")}
DISK = {name: {"tier": "disk"} for name in ("parameter", "gradient", "optimizer")}


@on_ranks(4, limit_s=120.0, over=("dp x tp", *slow("replicas")))
def test_ten_steps_over_dp_and_tp_equal_the_plain_models(over: str) -> None:
    if over == "replicas":
        same_run(1, 1, replicate=2)
    else:
        same_run(3, 2, sequence=True, policy=HOST)


@pytest.mark.slow
@on_ranks(4, limit_s=300.0, stage=(0, 1, 2, 3), tp=(1, 2))
def test_every_stage_and_tier_over_dp_and_tp_equals_the_plain_model(stage: int, tp: int) -> None:
    host = {name: where for name, where in HOST.items() if name != "parameter" or stage in (0, 3)}
    for sequence in (False, True):
        for tiers in ({}, host):
            same_run(stage, tp, sequence=sequence, policy=tiers)
    for replicate in (2, 4 // tp):
        same_run(stage, tp, replicate=replicate, sequence=True)


@pytest.mark.slow
@on_ranks(4, limit_s=300.0, kernel=("torch", "numba"))
def test_optimizer_kernels_disk_and_recomputation_over_tp_equal_the_plain_model(kernel: str) -> None:
    same_run(3, 2, sequence=True, policy=DISK | {"optimizer": {"tier": "disk", "kernel": kernel}})
    same_run(3, 2, policy=HOST | {"activation": {"checkpoint": "unit", "tier": "host", "min_bytes": 0}})
    same_run(3, 2, sequence=True, policy={"activation": {"tier": "host", "min_bytes": 0}})


@pytest.mark.slow
@on_ranks(4)
def test_accumulation_and_evaluation_equal_the_plain_models() -> None:
    plain, mesh = plain_gpt(), mesh_of(2)
    for stage in (3, 1):
        model, attachment = attached(mesh, stage, sequence=stage == 3)
        assert f"tp x 2 (this is {mesh['tp'].get_local_rank()} of tp)" in attachment.describe()
        plain.zero_grad()
        for step in range(2):
            (loss_of(plain, *batch(step)) / 2).backward()
        with attachment.no_sync():
            (loss_of(model, *batch(0, *data_place(mesh))) / 2).backward()
        (loss_of(model, *batch(1, *data_place(mesh))) / 2).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(param.grad), other.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(batch(5)[0]), plain(batch(5)[0]))
        attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_totals_and_norms_count_every_element_once() -> None:
    mesh, plain = mesh_of(2), plain_gpt()
    for stage in (3, 0):
        model, attachment = attached(mesh, stage, sequence=True)
        plain.zero_grad()
        loss_of(plain, *batch(0)).backward()
        loss_of(model, *batch(0, *data_place(mesh))).backward()
        for order in (2.0, 1.0, float("inf")):
            norms = [
                torch.nn.utils.get_total_norm([grad_of(p) for p in each.parameters()], order, foreach=foreach)
                for each in (plain, model)
                for foreach in (False, True)
            ]
            for norm in norms[1:]:
                torch.testing.assert_close(norm + 0, norms[0], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                for mine, its in ((param, other), (grad_of(param), grad_of(other))):
                    for what in (torch.sum, torch.mean, torch.max, torch.min, torch.linalg.vector_norm, torch.count_nonzero):
                        torch.testing.assert_close(what(mine) + 0, what(its), rtol=1e-4, atol=1e-5)
                assert torch.equal(param, other) and not torch.equal(param, other + 1)
        attachment.detach()


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    mesh = mesh_of(2)
    model, attachment = attached(mesh, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [sharded(param).to_local().clone() for param in model.parameters()]
    scaler.scale(loss_of(model, *batch(0, *data_place(mesh)))).backward()
    if dist.get_rank() == 2:
        model.blocks[0].mlp.up.weight.grad.to_local()[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(sharded(param).to_local(), old) for param, old in zip(model.parameters(), before, strict=True))
    attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_a_penalty_outside_the_forward_and_autograd_grad_are_right() -> None:
    mesh, plain = mesh_of(2), plain_gpt()
    model, attachment = attached(mesh, 3, sequence=True)
    for each, at in ((plain, (0, 1)), (model, data_place(mesh))):
        (loss_of(each, *batch(0, *at)) + 1e-2 * sum(param.pow(2).sum() for param in each.parameters())).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=1e-4, atol=1e-6)
    chosen: list[Any] = [model.blocks[0].mlp.up.weight, model.blocks[1].attn.out.weight]
    found = torch.autograd.grad(loss_of(model, *batch(1, *data_place(mesh))), chosen)
    its: list[Any] = [plain.blocks[0].mlp.up.weight, plain.blocks[1].attn.out.weight]
    expected = torch.autograd.grad(loss_of(plain, *batch(1)), its)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), two, rtol=1e-4, atol=1e-6)
    attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_an_optimizer_with_state_goes_in_and_dtensors_come_out() -> None:
    plain, mesh = plain_gpt(), mesh_of(2)
    model = divide(plain_gpt(), mesh["tp"], sequence=True)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    whole_batch = (0, 1)
    train(plain, its, whole_batch, 2, clip=1e9)
    train(model, mine, whole_batch, 2, clip=0)
    placed = [getattr(param, "placements", None) for param in model.parameters()]
    objects = list(model.parameters())
    attachment = zhooks.attach(model, mine, policy=FINE | {"stage": 3}, mesh=mesh)
    train(plain, its, whole_batch, 2, clip=1e9)
    train(model, mine, data_place(mesh), 2, clip=1e9)
    attachment.detach()
    assert all(param is old for param, old in zip(model.parameters(), objects, strict=True))
    assert [getattr(param, "placements", None) for param in model.parameters()] == placed
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(param) is (DTensor if hasattr(param, "placements") else nn.Parameter) and isinstance(param, nn.Parameter)
        torch.testing.assert_close(whole(param).detach(), other.detach(), rtol=0, atol=2e-4)
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(mine.state[param][key]) is (DTensor if hasattr(param, "placements") else torch.Tensor)
            torch.testing.assert_close(whole(mine.state[param][key]), its.state[other][key], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(whole(param.grad), other.grad, rtol=1e-3, atol=1e-5)
    train(model, mine, whole_batch, 1, clip=0)


@on_ranks(2)
def test_a_dtensor_over_anything_but_the_tp_axis_is_refused_and_left_alone() -> None:
    tp = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    dp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    given: Any = nn.Linear(4, 6)
    cases: list[tuple[Any, Any, str]] = [
        (distribute_tensor(torch.zeros(6, 4), tp["tp"], [Shard(0)]), None, r"over the tp axis .* ranks \[0\]|found one over"),
        (distribute_tensor(torch.zeros(6, 4), dp["dp"], [Shard(0)]), dp, r"found one over ranks \[0, 1\] \(axes dp\)"),
        (distribute_tensor(torch.zeros(5, 4), tp["tp"], [Shard(0)]), tp, r"dim 0 of \(5, 4\) to divide evenly over 2 tp ranks"),
        (DTensor.from_local(torch.zeros(6, 4), tp["tp"], [Partial()]), tp, r"placed Shard\(dim\) or Replicate\(\) over tp"),
    ]
    for tensor, mesh, said in cases:
        given.weight = nn.Parameter(tensor)
        with pytest.raises(zhooks.AttachError, match=said):
            zhooks.attach(given, mesh=mesh)
        assert type(given.weight) is DTensor and not given._forward_pre_hooks
    given.weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), tp["tp"], [Shard(0)]))
    zhooks.attach(given, mesh=tp).detach()


@on_ranks(4)
def test_fully_shard_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2)
    model = divide(plain_gpt(), mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(zhooks.AttachError, match="found it wrapped in fully_shard"):
        zhooks.attach(model, mesh=mesh)


@on_ranks(4)
def test_what_tp_ranks_hold_alike_is_made_or_found_equal() -> None:
    mesh = mesh_of(2)
    model = divide(plain_gpt(), mesh["tp"])
    with torch.no_grad():
        model.norm.weight.fill_(dist.get_rank())
    with pytest.raises(zhooks.AttachError, match=r"sync=False\) expected equal values .* norm.weight"):
        zhooks.attach(model, mesh=mesh, sync=False)
    attachment = zhooks.attach(model, mesh=mesh)
    assert torch.equal(sharded(model.norm.weight).full_tensor(), torch.zeros(16))
    attachment.detach()
    zhooks.attach(model, mesh=mesh, sync=False).detach()


@on_ranks(2)
def test_memory_says_whose_part_it_counts_and_which_inputs_are_too_small_to_cut() -> None:
    for least, whole_inputs in ((1 << 20, True), (0, False)):
        activation = {"checkpoint": "unit", "partition": "tp", "min_bytes": least}
        model, attachment = attached(mesh_of(2), 3, policy={"activation": activation})
        attachment.memory()
        loss_of(model, *batch(0)).backward()
        told = " ".join(str(attachment.memory()).split())
        assert f"counted for rank {dist.get_rank()} of 2 on the tp axis" in told
        assert ("are kept whole, although the estimate divides them" in told) is whole_inputs
        attachment.detach()
