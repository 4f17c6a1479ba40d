"""Save and resume by the Attachment: a run that was stopped goes on bit for bit, and what is saved is what was there.

pytest runs it, on one, two and four ranks. Faults are test_save_faults.py's.
"""

from __future__ import annotations

import json
import os
import random
import stat
import warnings
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from offload.shards import read_manifest
from tests.support.inside import flats_of, tier_of
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.resuming import Run, batch, net, stir
from tests.support.slow import slow
from tests.support.values import full, same

# ---- going on


@on_ranks(1, 2, stage=(0, 3), kind=("adamw", "sgd"))
def test_a_run_that_was_stopped_goes_on_bit_for_bit(stage: int, kind: str) -> None:
    extra = {"step": 3, "name": "läufer", "shape": (1, 2), 4: [None, True, float("inf")]}
    policy = {"stage": stage, "units": {"min_numel": 0}}
    run = Run(policy, kind=kind)
    run.train(range(3))
    with folder() as path:
        run.save(path / "run", extra=extra)
        drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        run.train(range(3, 6))
        wanted = run.everything()
        run.attachment.detach()
        again = Run(policy, kind=kind, seed=5)
        stir()
        assert again.load(path / "run") == extra
        assert (random.random(), numpy.random.rand(), torch.rand(()).item()) == drawn
        again.train(range(3, 6))
    assert again.losses == run.losses[3:] and same(again.everything(), wanted)


@on_ranks(1, 2, 4, stage=(1, 2), transport=("auto", "p2p", "stock"))
def test_every_stage_and_transport_goes_on(stage: int, transport: str) -> None:
    policy = {"stage": stage, "units": {"min_numel": 0, "max_numel": 32}, "comm": {"transport": transport}}
    if place()[1] == 1:
        del policy["comm"]
    goes_on(policy, kind="amsgrad")


@on_ranks(4, stage=(0, 1, 3))
def test_a_mesh_with_replicas_goes_on(stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    goes_on({"stage": stage}, mesh=mesh)


@on_ranks(2, stage=(0, 2, 3), optimizer=("plain", "adamw"))
def test_masters_in_full_precision_go_on(stage: int, optimizer: str) -> None:
    goes_on({"stage": stage, "precision": {"param": "bf16", "reduce": "fp32"}}, kind=optimizer)


@on_ranks(1, 2, tiers=(("host", "host"), ("disk", "disk"), ("disk", "device"), *slow(("device", "disk"))), half=(False, True))
def test_a_run_on_tiers_goes_on_and_may_change_them(tiers: tuple[str, str], half: bool) -> None:
    """Saved from one tier, loaded onto another: the same bits, and new states are on their tier at once."""
    with folder() as path:
        runs = []
        for tier, seed in zip(tiers, (0, 5), strict=True):
            cells: dict[str, Any] = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
            if "disk" in tiers:
                cells["disk"] = {"path": str(path)}
            if half:
                cells["precision"] = {"param": "bf16", "reduce": "fp32"}
            runs.append(Run({"stage": 3, "units": {"min_numel": 0}, **cells}, seed=seed))
        run, again = runs
        run.train(range(2))
        run.model(batch(8)).sum().backward()
        run.save(path / "run")
        run.train(range(2, 4))
        stir()
        again.load(path / "run")
        states = [state for param in again.model.parameters() for state in again.optimizer.state[param].values()]
        tiers_of_states = {tier_of(state) for state in states if isinstance(state, zhooks.ShardedTensor)}
        assert tiers_of_states == {tiers[1]}
        again.train(range(2, 4))
        assert again.losses == run.losses[2:] and same(again.everything(), run.everything())
        run.load(path / "run")
        run.train(range(2, 4))
        assert run.losses[-2:] == again.losses and same(again.everything(), run.everything())


def goes_on(policy: dict[str, Any], *, kind: str = "adamw", mesh: Any = None) -> None:
    run = Run(policy, kind=kind, mesh=mesh)
    run.train(range(2))
    with folder() as path:
        run.save(path / "run")
        run.train(range(2, 4))
        again = Run(policy, kind=kind, seed=5, mesh=mesh)
        stir()
        again.load(path / "run")
        again.train(range(2, 4))
    assert again.losses == run.losses[2:] and same(again.everything(), run.everything())


@on_ranks(1, 2, stage=(0, 1, 2, 3), held=(True, False))
def test_an_accumulation_in_mid_flight_goes_on(stage: int, held: bool) -> None:
    """Between two backwards: gradients that are there, and inside no_sync the sums that still wait."""

    def accumulate(run: Run, micro: range) -> None:
        with run.attachment.no_sync() if held else nullcontext():
            for step in micro:
                run.model(batch(step)).square().mean().backward()

    policy = {"stage": stage, "units": {"min_numel": 0}}
    run, again = Run(policy), Run(policy, seed=5)
    run.train(range(1))
    accumulate(run, range(1, 3))
    with folder() as path:
        run.save(path / "run")
        stir()
        again.model(batch(0)).sum().backward()  # gradients that the load must replace
        again.load(path / "run")
    here = torch.get_rng_state()
    results = []
    for one in (run, again):
        torch.set_rng_state(here)
        accumulate(one, range(3, 4))
        one.train(range(4, 6))
        results.append(one.everything())
    assert again.losses == run.losses[-2:] and same(*results)


@on_ranks(2, stage=(0, 3))
def test_a_load_replaces_a_run_that_has_gone_elsewhere(stage: int) -> None:
    """In place: states, gradients and schedule of the same objects."""
    run = Run({"stage": stage})
    run.train(range(2))
    with folder() as path:
        run.save(path / "run")
        wanted = run.everything()
        run.train(range(2, 5))
        run.model(batch(9)).sum().backward()
        run.load(path / "run")
    assert same(run.everything(), wanted)
    with torch._C.DisableTorchFunctionSubclass():
        assert all(param.grad is None for param in run.model.parameters())
    run.train(range(2, 4))


# ---- what is saved


class Odd(nn.Module):
    """Tied, frozen, turned, empty and half-precision parameters; buffers that stay and buffers that do not."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("kept", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"calls": int(self.kept)}

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        hidden = self.two(self.one(x))
        return self.frozen(hidden).sum() + (hidden @ self.turned.t()).square().mean() + self.narrow.float().square().sum()


@on_ranks(1, 2, stage=(0, 1, 3))
def test_odd_parameters_two_optimizers_and_buffers_come_back(stage: int) -> None:
    def build(seed: int) -> tuple[Odd, Any, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = Odd()
        attachment = zhooks.attach(model, policy={"stage": stage, "units": {"max_numel": 32}})
        params = [param for param in model.parameters() if param.requires_grad]
        first = torch.optim.AdamW(params[:2], lr=0.01)
        groups: list[dict[str, Any]] = [{"params": params[2:3]}, {"params": params[3:], "lr": 0.2}]
        second = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
        return model, attachment, [first, second]

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            model(torch.randn(2, 5, generator=torch.Generator().manual_seed(step))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, attachment, optimizers = build(0)
    train(model, optimizers, range(2))
    other, again, others = build(1)
    with folder() as path:
        attachment.save(path / "run", optimizers)
        with torch.no_grad():
            other.frozen.weight.zero_()
        again.load(path / "run", others)
    assert other.told == {"calls": 5} and other.two.weight is other.one.weight and not other.frozen.weight.requires_grad
    for one, optimizers_of_it in ((model, optimizers), (other, others)):
        train(one, optimizers_of_it, range(2, 4))
    assert same(full(model), full(other)) and torch.equal(model.kept, other.kept)
    assert [group["lr"] for one in others for group in one.param_groups] == [0.01, 0.1, 0.2]


@on_ranks(2)
def test_each_rank_gets_its_own_buffers_back_and_equal_ones_are_written_once() -> None:
    run = Run({"stage": 3})
    run.model.register_buffer("common", torch.arange(3.0))
    run.train(range(2))
    mean = run.model[1].running_mean.clone()
    with folder() as path:
        run.save(path / "run")
        run.train(range(2, 4))
        run.model.common.zero_()
        run.load(path / "run")
        tensors = read_manifest(path / "run").files[1].tensors
    assert torch.equal(run.model[1].running_mean, mean) and torch.equal(run.model.common, torch.arange(3.0))
    assert "buffer/1.running_mean" in tensors and "buffer/common" not in tensors


@on_ranks(1, 2)
def test_living_optimizers_are_found_and_others_can_be_left_out() -> None:
    run = Run({"stage": 3})
    run.train(range(2))
    before = run.everything()
    with folder() as path:
        run.attachment.save(path / "run", objects=run.objects)
        run.attachment.save(path / "bare", ())
        manifest = (path / "bare" / "manifest.json").read_text()
        run.train(range(2, 3))
        run.attachment.load(path / "run", (), objects={})
        assert same(full(run.model), before[: len(full(run.model))])
        assert run.optimizer.state[run.model[0].weight]["step"] == 3
        run.attachment.load(path / "run", objects=run.objects)
        assert same(run.everything(), before)
        with pytest.raises(zhooks.CheckpointError, match=r"optimizers of the checkpoint \(none\), found AdamW.*optimizer=\(\)"):
            run.attachment.load(path / "bare")
    assert "exp_avg" not in manifest


@on_ranks(1, 2)
def test_saved_states_are_not_dropped_because_the_optimizer_is_built_after_the_load() -> None:
    run = Run({"stage": 3})
    run.train(range(2))
    saved, states = full(run.model), run.optimizer.state[run.model[0].weight]["exp_avg"].to_local().clone()
    with folder() as path:
        run.save(path / "run")
        run.attachment.detach()
        model: Any = net(seed=5)
        attachment = zhooks.attach(model)
        before = full(model)
        loads: list[Any] = [attachment.load, attachment.resume]
        for load in loads:
            with pytest.raises(zhooks.CheckpointError, match=r"checkpoint \(AdamW\), found none. Build them before"):
                load(path / "run", objects={})
            assert same(full(model), before)
        attachment.load(path / "run", (), objects={})
        assert same(full(model), saved)
        again = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        attachment.load(path / "run", objects={})
    assert torch.equal(again.state[model[0].weight]["exp_avg"].to_local(), states)


@on_ranks(1)
def test_every_schedule_of_torch_and_the_scaler_come_back() -> None:
    schedules = torch.optim.lr_scheduler
    run = Run({"stage": 3}, kind="sgd")
    run.train(range(2))
    made = {
        "step": lambda it: schedules.StepLR(it, 2),
        "milestones": lambda it: schedules.MultiStepLR(it, [2, 4, 4]),
        "lambda": lambda it: schedules.LambdaLR(it, lambda step: 0.9**step),
        "cycle": lambda it: schedules.OneCycleLR(it, max_lr=0.1, total_steps=20),
        "plateau": lambda it: schedules.ReduceLROnPlateau(it, patience=1),
        "chain": lambda it: schedules.SequentialLR(it, [schedules.ConstantLR(it), schedules.ExponentialLR(it, 0.9)], [3]),
        "restarts": lambda it: schedules.CosineAnnealingWarmRestarts(it, 3),
    }
    for name, make in made.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        objects: dict[str, Any] = {"schedule": make(run.optimizer), "scaler": scaler}
        run.train(range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(4):
                objects["schedule"].step(1.0) if name == "plateau" else objects["schedule"].step()
        scaler.scale(torch.ones(1))
        scaler.update(32.0)
        wanted = objects["schedule"].state_dict(), scaler.state_dict(), [group["lr"] for group in run.optimizer.param_groups]
        with folder() as path:
            run.attachment.save(path / "run", run.optimizer, objects=objects)
            fresh: dict[str, Any] = {"schedule": make(run.optimizer), "scaler": torch.amp.GradScaler("cpu")}
            run.attachment.load(path / "run", run.optimizer, objects=fresh)
        found = fresh["schedule"].state_dict()
        assert found == wanted[0] and {key: type(value) for key, value in found.items()} == {
            key: type(value) for key, value in wanted[0].items()
        }, name
        assert fresh["scaler"].state_dict() == wanted[1]
        assert [group["lr"] for group in run.optimizer.param_groups] == wanted[2], name


# ---- the folder


@on_ranks(2, stage=(0, 3))
def test_the_files_are_private_safetensors_and_the_manifest_says_what_is_in_them(stage: int) -> None:
    from safetensors import safe_open

    run = Run({"stage": stage})
    run.train(range(1))
    with folder() as path:
        run.save(path / "deep" / "run")
        place_of = path / "deep" / "run"
        assert sorted(os.listdir(place_of)) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
        assert os.listdir(place_of.parent) == ["run"]
        assert stat.S_IMODE(place_of.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in place_of.iterdir()} == {0o600}
        manifest = json.loads((place_of / "manifest.json").read_text())["manifest"]
        assert (manifest["version"], manifest["world"], manifest["about"]["stage"]) == (1, 2, stage)
        for number, flat in enumerate(manifest["about"]["flats"]):
            record = manifest["files"][place()[0]]
            with safe_open(place_of / record["name"], "pt") as file:
                assert set(file.keys()) == set(record["tensors"])
                value = file.get_tensor(f"{number:04d}/value")
                assert torch.equal(value, flats_of(run.attachment)[number].shard)
            assert flat["shard_numel"] == value.numel()
        names = {param["name"] for flat in manifest["about"]["flats"] for param in flat["params"]}
        assert names == {name for name, _ in run.model.named_parameters()}


@on_ranks(2)
def test_a_later_save_replaces_an_earlier_one_and_keeps_what_else_lies_there() -> None:
    run = Run({"stage": 3})
    with folder() as path:
        if place()[0] == 0:
            (path / "real").mkdir()
            (path / "link").symlink_to("real")
        run.save(path / "real", extra={"step": 0})
        if place()[0] == 0:
            (path / "real" / "notes.txt").write_text("mine")
        run.train(range(1))
        run.save(path / "link", extra={"step": 1})
        assert run.load(path / "real") == run.load(path / "link") == {"step": 1}
        assert sorted(os.listdir(path)) == ["link", "real"] and (path / "link").is_symlink()
        assert (path / "real" / "notes.txt").read_text() == "mine"


@on_ranks(2)
def test_events_say_what_was_saved_and_loaded() -> None:
    run = Run({"stage": 3, "units": {"min_numel": 0}})
    recorder = Recorder()
    with folder() as path, run.attachment.observe(recorder):
        run.save(path / "run")
        run.load(path / "run")
        size = (path / "run" / f"rank-{place()[0]:05d}.safetensors").stat().st_size
    names = [flat.name for flat in flats_of(run.attachment)]
    for what in ("save", "load"):
        assert [key for key, _, _ in recorder.spans(what)] == ["run", *names]
        assert [event.nbytes for event in recorder.events if event.what == what][-1] == size
