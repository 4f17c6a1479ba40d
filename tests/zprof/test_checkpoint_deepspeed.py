"""``zprof checkpoint`` on folders of DeepSpeed: what they hold, whether they are whole, and their parameters as safetensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from offload.deepspeed import VALUE, read
from tests.support.deepspeed_folders import unpacked
from tests.support.zprof_command import Zprof


@pytest.mark.parametrize("name", ["z2-fp32-2", "z3-bf16-2", "z3-fp32-2-universal/global_step3_universal"])
def test_parameters_and_states_are_written_whole(tmp_path: Path, zprof: Zprof, name: str) -> None:
    unpacked(tmp_path, [name.partition("/")[0]])
    result = zprof("checkpoint", "convert", tmp_path / name, "--optimizer", "-o", tmp_path / "m.safetensors")
    assert result.exit_code == 0, result.stderr
    found, saved = load_file(tmp_path / "m.safetensors"), read(tmp_path / name)
    for param in saved.params.values():
        value = param.values[VALUE].elements(0, param.numel).reshape(param.shape)
        assert torch.equal(found.pop(param.name), value)
        if param.group is not None:
            assert found.pop(f"state.{param.name}.step") == 3
            moment = param.values["exp_avg"].elements(0, param.numel).reshape(param.shape)
            assert torch.equal(found.pop(f"state.{param.name}.exp_avg"), moment)
            assert found.pop(f"state.{param.name}.exp_avg_sq").shape == param.shape
    assert found.keys() == {"seen"}


def test_a_folder_says_what_it_holds(tmp_path: Path, zprof: Zprof) -> None:
    unpacked(tmp_path, ["z3-bf16-2"])
    told = json.loads(zprof("checkpoint", "show", tmp_path / "z3-bf16-2", "--json").stdout)
    assert (told["format"], told["step"], told["ranks"], told["frozen"]) == ("DeepSpeed 0.19.8, ZeRO-3", 3, 2, 2)
    assert told["dtypes"] == ["bfloat16", "float32"]
    assert told["holds"]["state exp_avg"] == 4 * (told["elements"] - 56)
    assert "ZeRO-3" in zprof("checkpoint", "show", tmp_path / "z3-bf16-2").stdout


def test_a_folder_is_verified_as_far_as_it_has_checksums(tmp_path: Path, zprof: Zprof) -> None:
    unpacked(tmp_path, ["z2-fp32-2", "z2-fp32-2-legacy"])
    assert "ok, 3 files," in zprof("checkpoint", "verify", tmp_path / "z2-fp32-2").stdout
    assert "3 without checksums" in zprof("checkpoint", "verify", tmp_path / "z2-fp32-2-legacy").stdout
    damaged = tmp_path / "z2-fp32-2/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    param = read(tmp_path / "z2-fp32-2").params["b.weight"]
    raw, value = bytearray(damaged.read_bytes()), param.values["exp_avg"].elements(0, param.numel).numpy().tobytes()
    raw[raw.index(value) + 5] ^= 4
    damaged.write_bytes(raw)
    result = zprof("checkpoint", "verify", tmp_path / "z2-fp32-2")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in result.stderr


def test_a_damaged_value_is_not_converted(tmp_path: Path, zprof: Zprof) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    path = tmp_path / "z2-fp32-2/global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    param = read(tmp_path / "z2-fp32-2").params["b.weight"]
    raw, value = bytearray(path.read_bytes()), param.values["exp_avg"].elements(0, param.numel).numpy().tobytes()
    raw[raw.index(value) + 5] ^= 4
    path.write_bytes(raw)
    result = zprof("checkpoint", "convert", "--optimizer", tmp_path / "z2-fp32-2", "-o", tmp_path / "m.safetensors")
    assert (result.exit_code, "whose checksum does not match" in result.stderr) == (1, True)
    assert not (tmp_path / "m.safetensors").exists()


def test_a_folder_is_converted_for_torch_and_its_distributed_loader(tmp_path: Path, zprof: Zprof) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    for kind, name in (("torch", "state.pt"), ("dcp", "folder")):
        result = zprof("checkpoint", "convert", tmp_path / "z2-fp32-2", "--optimizer", "--to", kind, "-o", tmp_path / name)
        assert result.exit_code == 0, result.stderr
    saved = read(tmp_path / "z2-fp32-2")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["model"].keys() == saved.params.keys() | saved.buffers.keys() | saved.tied.keys()
    groups = [saved.groups[number]["lr"] for number in range(2)]
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == groups
    param = saved.params["a.weight"]
    for key, name in ((VALUE, "model.a.weight"), ("exp_avg", "optim.state.a.weight.exp_avg")):
        top, _, rest = name.partition(".")
        parts = {top: {rest: torch.zeros(param.shape)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(parts, checkpoint_id=tmp_path / "folder", no_dist=True)
        assert torch.equal(parts[top][rest], param.values[key].elements(0, param.numel).reshape(param.shape))


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, zprof: Zprof) -> None:
    unpacked(tmp_path, ["z0-fp32-2"])
    for command in (["show"], ["verify"], ["convert", "-o", tmp_path / "m.safetensors"]):
        result = zprof("checkpoint", *command, tmp_path / "z0-fp32-2")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "as stage 0 has none" in result.stderr
