"""Checkpoints of DeepSpeed, loaded: training goes on as DeepSpeed's own continuation did, on other ranks, stages and tiers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zhooks
from offload.errors import CheckpointError
from offload.torchfiles import Made, TorchFile
from tests.support.deepspeed_folders import losses_of, program, unpacked
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.paths import ROOT

HOST = {"parameter": {"tier": "host"}, "optimizer": {"tier": "host"}}
FINE = {"units": {"min_numel": 0, "max_numel": 48}}


class Run:
    """The model that DeepSpeed trained, attached, from other values."""

    def __init__(self, policy: dict[str, Any], *, seed: int = 99) -> None:
        made = program()
        torch.manual_seed(seed)
        self.model = made.Net()
        self.attachment = zhooks.attach(self.model, policy=policy)
        self.optimizer = torch.optim.AdamW(made.groups(self.model), lr=1e-2)

    def go_on(self, world: int) -> list[float]:
        """Three steps over the batches that ``world`` ranks of DeepSpeed had; the mean losses."""
        made, losses = program(), []
        rank, ranks = place()
        for batch in made.batches(world)[made.STEPS :]:
            mine = [batch[2 * each : 2 * each + 2] for each in range(world)][rank::ranks]
            loss = torch.stack([made.loss_of(self.model, tokens) for tokens in mine]).mean()
            loss.backward()
            # DeepSpeed 0.19 clips by 1.0 unless it is told otherwise.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            if ranks > 1:
                torch.distributed.all_reduce(mean)
            losses.append(float(mean) / ranks)
        return losses


EXACT = [
    "z1-fp32-1", "z1-fp32-2", "z2-fp32-4", "z3-fp32-2", "z3-fp32-2-small", "z3-fp32-2-gathered", "z2-fp32-2-robin",
    "z2-fp32-2-legacy", "z2-fp32-4-universal/global_step3_universal", "z3-fp32-2-universal/global_step3_universal",
]  # fmt: skip
BF16 = ["z1-bf16-2", "z1-bf16-2-grad32", "z2-bf16-2", "z3-bf16-2"]


@pytest.mark.parametrize("name", EXACT + BF16)
def test_training_goes_on_as_in_deepspeed(tmp_path: Path, name: str) -> None:
    top = name.partition("/")[0]
    unpacked(tmp_path, [top])
    run = Run({"stage": 3} | ({"precision": {"param": "bf16"}} if name in BF16 else {}))
    extra = run.attachment.load(tmp_path / name, run.optimizer)
    assert (extra["epoch"], extra["global_steps"]) == (3, 3)
    assert run.optimizer.param_groups[1]["lr"] == 3e-3
    # Stage 3 of DeepSpeed sums bf16 gradients in another order.
    within = 2e-3 if name == "z3-bf16-2" else 1e-6
    assert run.go_on(int(top.split("-")[2])) == pytest.approx(losses_of(tmp_path, top)[3:], rel=0, abs=within)


@on_ranks(2, policy=({"stage": 3, **FINE}, {"stage": 2}, {"stage": 3, **HOST}, {"stage": 1, "optimizer": {"tier": "disk"}}))
def test_it_is_loaded_on_other_ranks_stages_and_tiers(policy: dict[str, Any]) -> None:
    with folder() as shared:
        if place()[0] == 0:
            unpacked(shared, ["z2-fp32-4", "z3-fp32-4"])
        torch.distributed.barrier()
        for name in ("z2-fp32-4", "z3-fp32-4"):
            run = Run(policy)
            run.attachment.load(shared / name, run.optimizer)
            assert run.go_on(4) == pytest.approx(losses_of(shared, name)[3:], rel=0, abs=1e-5)
            run.attachment.detach()


@on_ranks(2)
def test_what_one_rank_refuses_all_do_and_nothing_has_changed() -> None:
    with folder() as shared:
        if place()[0] == 0:
            unpacked(shared, ["z3-fp32-2"])
            path = shared / "z3-fp32-2/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
            path.write_bytes(path.read_bytes()[:-500])
        torch.distributed.barrier()
        run = Run({"stage": 3})
        before = from_first(run.attachment.state_dict(run.optimizer))
        with pytest.raises(CheckpointError, match="zero_pp_rank_1_mp_rank_00_optim_states"):
            run.attachment.load(shared / "z3-fp32-2", run.optimizer)
        after = from_first(run.attachment.state_dict(run.optimizer))
        assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
        assert before["optimizer"]["state"] == after["optimizer"]["state"] == {}


def test_a_storage_whose_checksum_does_not_match_is_found_before_anything_changes(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    path = tmp_path / "z2-fp32-2/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    run = Run({"stage": 3})
    state = TorchFile(path).root["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    raw, value = bytearray(path.read_bytes()), state.tensor().numpy().tobytes()
    raw[raw.index(value) + 2] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(CheckpointError, match="whose checksum does not match"):
        run.attachment.load(tmp_path / "z2-fp32-2", run.optimizer)
    assert not run.optimizer.state


def refused(run: Run, path: Path, optimizer: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        run.attachment.load(path, optimizer)
    return str(caught.value)


def test_other_optimizers_and_groups_are_refused_by_name(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    run, path = Run({"stage": 2}), tmp_path / "z2-fp32-2"
    groups = program().groups(run.model)
    assert "has no momentum" in refused(run, path, torch.optim.SGD(groups, lr=1.0))
    assert "decoupled_weight_decay = True, found False" in refused(run, path, torch.optim.Adam(groups, lr=1.0))
    assert "Expected 2 parameter groups, found 1 here" in refused(run, path, torch.optim.AdamW(run.model.parameters()))
    turned = [{**groups[0], "params": groups[1]["params"]}, {**groups[1], "params": groups[0]["params"]}]
    assert "group 0 with 3 parameters, found 4 here" in refused(run, path, torch.optim.AdamW(turned))
    assert "Expected one optimizer, found 2 here" in refused(run, path, [run.optimizer, torch.optim.AdamW(turned)])
    run.attachment.load(path, ())
    assert not run.optimizer.state
    with pytest.raises(CheckpointError, match="Expected one optimizer, found 0 here"):
        zhooks.attach(program().Net(), policy={"stage": 2}).load(path)


def test_frozen_parameters_that_were_left_out_are_named(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2-nofrozen"])
    run = Run({"stage": 2})
    assert "frozen.weight" in refused(run, tmp_path / "z2-fp32-2-nofrozen", run.optimizer)


def test_a_model_of_other_shapes_is_refused_by_its_first_difference(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z3-fp32-2"])
    model = program().Net()
    model.a = torch.nn.Linear(6, 8)
    attachment = zhooks.attach(model)
    with pytest.raises(CheckpointError, match=r"parameter a.weight of shape \[8, 6\] where the checkpoint has \[7, 6\]"):
        attachment.load(tmp_path / "z3-fp32-2", ())


def test_objects_in_the_client_state_come_back_as_notes(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2-client"])
    run = Run({"stage": 2})
    extra = run.attachment.load(tmp_path / "z2-fp32-2-client", run.optimizer)
    assert torch.equal(extra["table"], torch.arange(4.0))
    assert isinstance(extra["args"], Made)


def test_random_states_stay_and_a_save_afterwards_is_one_of_ours(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z3-fp32-2"])
    run = Run({"stage": 3})
    torch.manual_seed(5)
    run.attachment.load(tmp_path / "z3-fp32-2", run.optimizer)
    assert torch.initial_seed() == 5
    run.attachment.save(tmp_path / "ours", run.optimizer)
    shutil.rmtree(tmp_path / "z3-fp32-2")
    other = Run({"stage": 2}, seed=1)
    other.attachment.load(tmp_path / "ours", other.optimizer)
    assert other.go_on(2) == run.go_on(2)


def test_a_folder_of_torch_distributed_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    run = Run({"stage": 2})
    assert "found one of torch.distributed.checkpoint" in refused(run, tmp_path, run.optimizer)


@pytest.mark.slow
def test_what_the_installed_deepspeed_writes_goes_on_alike(tmp_path: Path) -> None:
    where = os.environ.get("DEEPSPEED_PATH")
    if where is None:
        pytest.skip("needs DeepSpeed: set DEEPSPEED_PATH to the folder that it is installed in")
    names = ["z1-fp32-2", "z2-fp32-2-robin", "z3-fp32-2-universal"]
    environment = {**os.environ, "PYTHONPATH": where, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/deepspeed_checkpoints.py"), str(tmp_path), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    for name in names:
        run = Run({"stage": 3})
        run.attachment.load(tmp_path / name, run.optimizer)
        assert run.go_on(2) == pytest.approx(losses_of(tmp_path, name)[3:], rel=0, abs=1e-6)
        run.attachment.detach()


def test_ignored_parameters_take_their_values_and_states(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    run = Run({"stage": 3, "units": {"ignore": ["b"]}})
    run.attachment.load(tmp_path / "z2-fp32-2", run.optimizer)
    assert run.go_on(2) == pytest.approx(losses_of(tmp_path, "z2-fp32-2")[3:], rel=0, abs=1e-6)
