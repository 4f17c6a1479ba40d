"""Checksums over replicas: what one rank holds otherwise is named on every rank, and what is equal is never accused.

pytest runs it, on real ranks. A bit is flipped in the memory of one rank, as a failing device would.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from tests.support.inside import flats_of
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.resuming import Run
from tests.support.values import whole


def policy(stage: int, every: int | None = 1, tier: str = "device", **more: Any) -> dict[str, Any]:
    cells = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer") if stage == 3}
    return {"stage": stage, "units": {"min_numel": 0}, "resilience": {"check_every": every}, **cells, **more}


def replicas() -> Any:
    """A mesh on which every rank holds what every other one does."""
    return init_device_mesh("cpu", (place()[1], 1), mesh_dim_names=("replicate", "shard"))


def flip(value: torch.Tensor) -> None:
    """One bit, past everything that counts writes."""
    words = value.to_local() if isinstance(value, zhooks.ShardedTensor) else value
    with torch.no_grad():
        words.detach().view(-1).view(torch.int32)[0] ^= 1


@on_ranks(2, 3, stage=(0, 3))
def test_a_bit_that_differs_on_one_rank_is_named_by_unit_parameter_and_rank_on_all(stage: int) -> None:
    rank, world = place()
    run = Run(policy(stage), mesh=replicas())
    run.train(range(2))
    if rank == 1:
        flip(dict(run.model.named_parameters())["3.weight"])
    with pytest.raises(zhooks.DivergenceError) as told:
        run.train(range(2, 3))
    words = str(told.value)
    everyone = ", ".join(map(str, range(world)))
    assert words.startswith("The replicas' values differ at step 2. Expected the same on ranks ")
    assert f"on ranks {everyone}, found that 3.weight of unit" in words
    assert ("differs on rank 1 only" if world > 2 else "differs on them, without a majority") in words
    assert re.search(r"[0-9a-f]{14} on rank 0, [0-9a-f]{14} on rank 1", words)
    assert "last equal at step 1" in words
    run.attachment.detach()


@on_ranks(2, tier=("device", "host"))
def test_a_state_of_the_optimizer_is_named_and_the_run_saves_and_loads_and_goes_on(tier: str) -> None:
    rank, _ = place()
    with folder() as path:
        run = Run(policy(3, tier=tier), mesh=replicas())
        run.train(range(2))
        run.save(path / "good")
        if rank == 0:
            flip(run.optimizer.state[dict(run.model.named_parameters())["0.bias"]]["exp_avg"])
        with pytest.raises(zhooks.DivergenceError, match=r"found that exp_avg of 0.bias of unit .* differs"):
            run.train(range(2, 3))
        run.save(path / "bad")
        run.load(path / "good")
        run.train(range(2, 4))
        expected = Run(policy(3, None, tier), mesh=replicas())
        expected.train(range(4))
        assert all(torch.equal(a, b) for a, b in zip(run.everything(), expected.everything(), strict=True))
        run.attachment.detach(), expected.attachment.detach()


@on_ranks(2)
def test_the_16_bit_copy_beside_masters_is_compared_too() -> None:
    rank, _ = place()
    half = policy(3, tier="host") | {"precision": {"param": "bf16"}}
    run = Run(half, mesh=replicas())
    run.train(range(2))
    if rank:
        copy = next(flat.storage.copy for flat in flats_of(run.attachment) if flat.layout.padded)
        assert copy is not None
        copy.tensor().view(torch.int16)[0] ^= 1
    with pytest.raises(zhooks.DivergenceError, match=r"found that the copy in torch.bfloat16 of .* of unit .* differs"):
        run.train(range(2, 3))
    run.attachment.detach()


@on_ranks(2, 3, stage=(0, 3))
def test_of_ignored_parameters_those_that_are_frozen_and_were_equal_must_stay_so(stage: int) -> None:
    rank, world = place()
    torch.manual_seed(0)
    units, frozen, trained, own = layers = [nn.Linear(6, 6) for _ in range(4)]
    model = nn.Sequential(*layers)
    frozen.requires_grad_(False), own.requires_grad_(False)
    if rank:
        # What is another on each rank from the start is the user's own.
        flip(own.weight)
    attachment = zhooks.attach(model, policy=policy(stage) | {"units": {"min_numel": 0, "ignore": ["1", "2", "3"]}})
    optimizer = torch.optim.SGD(units.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()

    step(), step()
    if rank == 1:
        flip(trained.weight), flip(own.weight)
    step()
    if rank == 1:
        flip(frozen.weight)
    who = "differs on rank 1 only" if world > 2 else "differs on them"
    with pytest.raises(zhooks.DivergenceError, match=f"found that 1.weight, which is frozen and not sharded, {who}"):
        step()
    if rank == 1:
        flip(frozen.weight)
    step()
    attachment.detach()


@on_ranks(2, stage=(0, 1, 3), kind=("adamw", "muon"))
def test_ranks_that_agree_train_as_ever(stage: int, kind: str) -> None:
    for mesh in (None, replicas()):
        losses = []
        for every in (1, None):
            run = Run(policy(stage, every), kind=kind, mesh=mesh)
            run.train(range(4))
            run.attachment.detach()
            losses.append(run.losses)
        assert losses[0] == losses[1]


@on_ranks(4, stage=(1, 3))
def test_of_ranks_that_shard_and_replicate_those_with_the_same_range_are_compared(stage: int) -> None:
    rank, _ = place()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Run(policy(stage), mesh=mesh)
    run.train(range(2))
    if rank == 3:
        flip(run.optimizer.state[dict(run.model.named_parameters())["3.weight"]]["exp_avg"])
    with pytest.raises(zhooks.DivergenceError, match=r"on ranks 1, 3, found that exp_avg of 3.weight of unit") as told:
        run.train(range(2, 3))
    assert "on rank 1, " in str(told.value)
    assert "last equal at step 1" in str(told.value)
    run.attachment.detach()


@on_ranks(2)
def test_ranks_are_compared_on_the_mesh_that_a_run_has_moved_to() -> None:
    rank, _ = place()
    run = Run(policy(3))
    run.train(range(2))
    run.attachment.reshard(replicas())
    run.train(range(2, 4))
    if rank:
        flip(dict(run.model.named_parameters())["3.weight"])
    with pytest.raises(zhooks.DivergenceError, match=r"at step 4\. .* found that 3.weight of unit .* last equal at step 3"):
        run.train(range(4, 5))
    run.attachment.detach()


@on_ranks(2)
def test_ranks_that_divide_layers_are_compared_with_nobody_and_train() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    attachment = zhooks.attach(model, policy=policy(0), mesh=mesh)
    for one in (model, plain):
        optimizer = torch.optim.AdamW(one.parameters())
        for _ in range(3):
            one(torch.ones(4, 6)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
    torch.testing.assert_close([whole(param) for param in model.parameters()], [whole(param) for param in plain.parameters()])
    attachment.detach()


@on_ranks(2)
def test_values_on_a_disk_are_compared_where_they_lie_and_every_so_many_steps() -> None:
    run = Run(policy(3, 2, "disk"), mesh=replicas())
    recorder = zhooks.Recorder()
    observation = run.attachment.observe(recorder)
    run.train(range(6))
    observation.close()
    assert [event.key for event in recorder.events if event.what == "replicas compared"] == ["step 2", "step 4"]
    run.attachment.detach()


@on_ranks(2)
def test_a_mesh_with_stages_is_refused_at_attach_and_at_apply() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "pp"))
    with pytest.raises(zhooks.AttachError, match=r"check_every.* found the axis pp"):
        Run(policy(3), mesh=mesh)
    run = Run(policy(3, None), mesh=mesh)
    with pytest.raises(zhooks.AttachError, match=r"check_every.* found the axis pp"):
        run.attachment.apply(policy(3))
    run.attachment.detach()
