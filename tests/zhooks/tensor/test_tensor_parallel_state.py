"""What an attachment over tp gives, takes, writes and holds: global values, files, and no buffer longer than it is used."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zhooks
from tests.support.inside import flats_of, pool_of
from tests.support.on_ranks import on_ranks
from tests.support.tp_gpt import batch, divide, loss_of, plain_gpt
from tests.support.tp_runs import FINE, attached, data_place, mean_over_data, mesh_of, train
from tests.support.values import full, sharded, whole


def folder() -> Path:
    """A folder all ranks share, made by the first."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return Path(made[0])


def done_with(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)


@pytest.mark.slow
@on_ranks(4)
def test_state_dicts_are_global_and_go_from_any_mesh_to_any_other() -> None:
    mesh = mesh_of(2)
    model, attachment = attached(mesh, 3, sequence=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, data_place(mesh), 2)
    values = full(model)
    state = attachment.state_dict(optimizer)
    assert bool(state) == (dist.get_rank() == 0)
    plain = plain_gpt(seed=1)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if state:
        plain.load_state_dict(state["model"])
        its.load_state_dict(state["optimizer"])
        assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), values, strict=True))
        assert all(its.state[param]["exp_avg"].shape == param.shape for param in plain.parameters())
    expected = train(model, optimizer, data_place(mesh), 2, first=2)
    attachment.detach()
    other, its_attachment = attached(mesh_of(1), 2, policy={"optimizer": {"tier": "host"}})
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    its_attachment.load_state_dict(state, again)
    for param, value in zip(other.parameters(), values, strict=True):
        assert torch.equal(whole(param), value)
    found = train(other, again, data_place(mesh_of(1)), 2, first=2)
    torch.testing.assert_close(mean_over_data(found), mean_over_data(expected), rtol=0, atol=1e-5)
    its_attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_save_and_load_go_on_bit_for_bit_in_one_folder() -> None:
    at, mesh = folder(), mesh_of(2)
    runs = []
    for resumed in (False, True):
        model, attachment = attached(mesh, 3, policy={"optimizer": {"tier": "host"}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if resumed:
            assert attachment.load(at / "run", optimizer) == {"step": 2}
        else:
            train(model, optimizer, data_place(mesh), 2)
            attachment.save(at / "run", optimizer, extra={"step": 2})
            assert len(list((at / "run").glob("*.safetensors"))) == 4
        losses = train(model, optimizer, data_place(mesh), 2, first=2)
        runs.append((losses, [sharded(param).to_local().clone() for param in model.parameters()]))
        attachment.save_full(at / "full.safetensors")
        full = load_file(at / "full.safetensors")
        assert all(torch.equal(sharded(param).full_tensor(), full[name]) for name, param in model.named_parameters())
        attachment.detach()
    assert runs[0][0] == runs[1][0] and all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))
    done_with(at)


@on_ranks(4)
def test_gathered_yields_and_takes_global_values() -> None:
    model, attachment = attached(mesh_of(2), 3)
    wide, norm = model.blocks[0].mlp.up.weight, model.norm.bias
    assert wide.shape == (64, 16) and wide.numel() == 64 * 16 and wide.to_local().dim() == 1
    held = sum(param.to_local().numel() for param in model.blocks[0].mlp.parameters())
    assert held < model.blocks[0].mlp.up.weight.numel()
    with attachment.gathered(wide, norm, write=True) as (value, other):
        assert type(value) is torch.Tensor and value.shape == (64, 16)
        if dist.get_rank() == 0:
            value.copy_(torch.arange(1024.0).view(64, 16))
            other.fill_(3.0)
    assert torch.equal(wide.full_tensor(), torch.arange(1024.0).view(64, 16))
    assert torch.equal(sharded(norm).full_tensor(), torch.full((16,), 3.0))
    with torch.no_grad():
        wide.copy_(torch.ones(64, 16))
        wide[0] = 2.0
    assert float(wide.detach().sum()) == 64 * 16 + 16
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(zhooks.ShardedOpError, match="Expected the whole tensor, found one rank's range"):
        torch.save(model.state_dict(), io.BytesIO())
    with torch.no_grad():
        wide.zero_()
    model.load_state_dict(kept)
    assert float(wide.detach().sum()) == 64 * 16 + 16
    attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_between_forward_and_backward_no_gathered_buffer_stays() -> None:
    for stash in ({}, {"activation": {"tier": "host", "min_bytes": 0}}):
        mesh = mesh_of(2)
        model, attachment = attached(mesh, 3, sequence=True, policy={"schedule": {"reshard_after_forward": True}} | stash)
        for step in range(2):
            flats = flats_of(attachment)
            buffers: dict[int, Any] = {}

            def noted(module: nn.Module, args: Any, flats: Any = flats, buffers: Any = buffers) -> None:
                for flat in flats:
                    if flat.full is not None:
                        buffers[flat.number] = flat.full.untyped_storage()._weak_ref()

            handles = [module.register_forward_pre_hook(noted) for module in model.modules() if not list(module.children())]
            loss = loss_of(model, *batch(step, *data_place(mesh)))
            pool_of(attachment).clear()
            for handle in handles:
                handle.remove()
            assert len(buffers) == len(flats)
            freed = [number for number, ref in buffers.items() if torch.UntypedStorage._expired(ref)]
            kept = [flat.name for flat in flats if flat.number not in freed]
            assert not kept, f"step {step}: gathered buffers of {kept} outlive the forward"
            loss.backward()
        attachment.detach()


@pytest.mark.slow
@on_ranks(4)
def test_a_write_between_forward_and_backward_is_found() -> None:
    mesh = mesh_of(2)
    for stage in (3, 2):
        model, attachment = attached(mesh, stage)
        loss = loss_of(model, *batch(0, *data_place(mesh)))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss_of(model, *batch(0, *data_place(mesh))).backward()
        attachment.detach()


class Kept(nn.Module):
    """Saves a DTensor of its own, which it may change afterwards."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        grown = (x @ weight.t()).exp()
        out: Any = grown.sin()
        if self.writes:
            with torch.no_grad():
                grown.mul_(2.0)
        return out.full_tensor()


@on_ranks(2)
def test_a_dtensor_that_autograd_saved_comes_back_from_its_tier_and_knows_of_writes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for tier in ("device", "host"):
        plain, model = Kept(mesh["tp"]), Kept(mesh["tp"])
        policy = {"activation": {"tier": tier, "min_bytes": 0}, "precision": {"param": "bf16"}}
        attachment = zhooks.attach(model, policy=FINE | policy, mesh=mesh)
        for each in (plain.bfloat16(), model):
            each(torch.arange(6.0, dtype=torch.bfloat16).view(3, 2)).sum().backward()
        torch.testing.assert_close(whole(model.weight.grad), whole(plain.weight.grad).float(), rtol=2e-2, atol=1e-2)
        model.writes = True
        loss = model(torch.ones(3, 2, dtype=torch.bfloat16)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        attachment.detach()


class Written(nn.Module):
    """A layer that changes its own DTensor in its forward."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        self.register_buffer("scale", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor) and self.weight.shape == (4, 2)
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2.0)
        scale: Any = self.scale
        return x * self.weight.to_local().sum() * scale.to_local().sum()


@on_ranks(2)
def test_writes_in_a_forward_are_refused_and_divided_buffers_stay_divided() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model: Any = nn.Sequential(nn.Linear(2, 2), Written(mesh["tp"]))
    attachment = zhooks.attach(model, policy=FINE | {"precision": {"param": "bf16"}}, mesh=mesh)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    model(x).sum().backward()
    state = attachment.state_dict()
    if state:
        assert torch.equal(state["model"]["1.scale"], torch.arange(4.0)) and state["model"]["1.weight"].shape == (4, 2)
        state["model"]["1.scale"] = torch.arange(4.0) + 1
    attachment.load_state_dict(state)
    scale: Any = model[1].scale
    assert isinstance(scale, DTensor) and torch.equal(scale.to_local(), torch.arange(4.0).chunk(2)[dist.get_rank()] + 1)
    model[1].writes = True
    with pytest.raises(zhooks.ShardedOpError, match=r"Parameter 1\.weight is written in its own forward"):
        model(x)
    model[1].writes = False
    model(x).sum().backward()
    attachment.detach()


@on_ranks(4)
def test_two_pipeline_stages_do_not_save_to_one_folder() -> None:
    at, mesh = folder(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = dist.get_rank() // 2
    model = divide(plain_gpt(), mesh["tp"])
    attachment = zhooks.attach(model, policy=FINE, mesh=mesh)
    for save in (lambda: attachment.save(at / "run"), lambda: attachment.save_full(at / "full.safetensors")):
        with pytest.raises(zhooks.CheckpointError, match="found two that save to the same"):
            save()
    assert not list(at.iterdir())
    attachment.save(at / f"stage{stage}")
    attachment.load(at / f"stage{stage}")
    for param in model.parameters():
        param.grad = None
    (loss_of(model, *batch(0)) * (stage + 1)).backward()
    single = float(torch.linalg.vector_norm(model.head.weight.grad) + 0)
    both = torch.tensor([0.0, 0.0])
    both[stage] = float(torch.stack([torch.linalg.vector_norm(p.grad) + 0 for p in model.parameters()]).norm())
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(total + 0, both.norm())
    assert single < float(total)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    if stage == 1:
        model.norm.bias.grad.to_local().fill_(float("nan"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    attachment.detach()
    done_with(at)


@pytest.mark.slow
@on_ranks(4)
def test_a_divided_model_on_meta_is_filled_unit_by_unit() -> None:
    mesh = mesh_of(2)
    with torch.device("meta"):
        model = plain_gpt()
    divide(model, mesh["tp"])

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            (param.to_local() if isinstance(param, DTensor) else param).fill_(0.5)

    attachment = zhooks.attach(model, policy=FINE, mesh=mesh, init=init)
    assert all(torch.equal(sharded(param).full_tensor(), torch.full(param.shape, 0.5)) for param in model.parameters())
    loss_of(model, *batch(0, *data_place(mesh))).backward()
    attachment.detach()
