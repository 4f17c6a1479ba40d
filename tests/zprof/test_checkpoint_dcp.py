"""``zprof checkpoint`` on folders of torch.distributed.checkpoint: shown, verified and converted, and what is wrong refused."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.zprof_command import Zprof

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def saved(path: Path) -> dict[str, Any]:
    state = {"model": model().state_dict(), "optim": {"state.0.weight.exp_avg": torch.ones(7, 5)}}
    others = {"ema": {"0.bias": torch.ones(7)}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state, **others}, checkpoint_id=path, no_dist=True)
    return state


def test_a_folder_says_what_it_holds_and_is_converted(tmp_path: Path, zprof: Zprof) -> None:
    state = saved(tmp_path / "dcp")
    told = json.loads(zprof("checkpoint", "show", tmp_path / "dcp", "--json").stdout)
    assert (told["ranks"], told["model"], told["states"], told["other"], told["objects"]) == (1, 9, 1, ["ema.0.bias"], 1)
    assert told["tensors"]["model.0.weight"] == "float32 [7, 5]"
    assert "model.1.num_batches_tracked  int64 []" in zprof("checkpoint", "show", tmp_path / "dcp").stdout
    assert "ok, 1 file," in zprof("checkpoint", "verify", tmp_path / "dcp").stdout
    result = zprof("checkpoint", "convert", tmp_path / "dcp", "--optimizer", "-o", tmp_path / "m.safetensors")
    assert result.exit_code == 0, result.stderr
    assert "left out" in result.stdout
    assert "ema.0.bias" in result.stdout
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found.pop("state.0.weight.exp_avg"), torch.ones(7, 5))
    assert found.keys() == state["model"].keys()
    assert all(torch.equal(found[name], value) for name, value in state["model"].items())
    assert zprof("checkpoint", "convert", tmp_path / "dcp", "--to", "torch", "-o", tmp_path / "m.pt").exit_code == 0
    assert torch.load(tmp_path / "m.pt", weights_only=True)["model"].keys() == found.keys()


@on_ranks(2)
def test_what_ranks_wrote_in_shards_is_converted_whole() -> None:
    """Under FSDP2 and attached, in chunks over rows and over parts of rows."""
    with folder() as shared:
        for name in ("fsdp2", "zhooks"):
            net = model()
            attachment = None
            if name == "fsdp2":
                fully_shard(net)
            else:
                attachment = zhooks.attach(net, policy={"stage": 3, "units": {"min_numel": 0}})
            optimizer = torch.optim.AdamW(net.parameters())
            net(torch.randn(4, 5)).sum().backward()
            optimizer.step()
            weights, states = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=shared / name)
            whole, parts = get_state_dict(net, optimizer, options=WHOLE)
            if place()[0] == 0:
                check_converted(shared / name, whole, parts["state"])
            dist.barrier()
            if attachment is not None:
                attachment.detach()


def check_converted(path: Path, whole: dict[str, Any], states: Any) -> None:
    from offload.dcp import DistributedModel

    found = DistributedModel(path)
    assert (found.facts()["ranks"], found.facts()["other"]) == (2, [])
    assert all(found.verify(number, lambda nbytes: None) for number in range(len(found.files())))
    values, kept = dict(found.tensors()), dict(found.states())
    assert values.keys() == whole.keys()
    assert all(torch.equal(values[name], value) for name, value in whole.items())
    wanted = {f"state.{name}.{key}": value for name, state in states.items() for key, value in state.items()}
    assert kept.keys() == wanted.keys()
    assert all(torch.equal(kept[name], value) for name, value in wanted.items())


class Ran:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_the_metadata_is_run(tmp_path: Path, zprof: Zprof) -> None:
    saved(tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    metadata.storage_meta = Ran(tmp_path / "ran")
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    assert zprof("checkpoint", "verify", tmp_path / "dcp").exit_code == 0
    assert not (tmp_path / "ran").exists()


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks[0] = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([7, 5]))


def lacking(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks.clear()


def overlapping(metadata: Any) -> None:
    one = metadata.state_dict_metadata["model.0.weight"]
    one.size = torch.Size([14, 5])
    one.chunks.append(one.chunks[0])


def elsewhere(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../other.distcp"


def beyond(metadata: Any) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.0.weight":
            info.offset = 2**50


def shared(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = 0


def endless(metadata: Any) -> None:
    one = metadata.state_dict_metadata["model.0.weight"]
    one.size = torch.Size([2**58, 1])
    one.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), one.size)


def swapped(metadata: Any) -> None:
    kept = metadata.storage_data
    first, second = (next(key for key in kept if key.fqn == name) for name in ("model.0.weight", "model.2.weight"))
    kept[first], kept[second] = kept[second], kept[first]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (outside, "outside its shape"), (lacking, "0 elements of"), (overlapping, "overlap"), (elsewhere, "a file called"),
        (beyond, "bytes where"), (shared, "two chunks at byte"), (endless, ""), (swapped, "with a tensor other than"),
    ],
)  # fmt: skip
def test_metadata_that_lies_is_refused_in_one_line(tmp_path: Path, zprof: Zprof, change: Any, says: str) -> None:
    saved(tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    change(metadata)
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    for command in (["verify"], ["convert", "-o", tmp_path / "m.safetensors"]):
        result = zprof("checkpoint", *command, tmp_path / "dcp")
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert says in result.stderr


def test_damaged_and_missing_files_are_named_and_not_converted(tmp_path: Path, zprof: Zprof) -> None:
    state = saved(tmp_path / "dcp")
    path = tmp_path / "dcp/__0_0.distcp"
    raw = path.read_bytes()
    value = state["model"]["0.weight"].numpy().tobytes()
    path.write_bytes(raw.replace(value, value[:-1] + bytes([value[-1] ^ 1])))
    for command in (["verify"], ["convert", "-o", tmp_path / "m.safetensors"]):
        result = zprof("checkpoint", *command, tmp_path / "dcp")
        assert (result.exit_code, "whose checksum does not match" in result.stderr) == (1, True)
    path.write_bytes(raw[:-10])
    assert "__0_0.distcp" in zprof("checkpoint", "verify", tmp_path / "dcp").stderr
    path.unlink()
    assert "No such file" in zprof("checkpoint", "verify", tmp_path / "dcp").stderr
    assert not (tmp_path / "m.safetensors").exists()


def test_what_a_folder_does_not_say_is_refused_by_name(tmp_path: Path, zprof: Zprof) -> None:
    saved(tmp_path / "dcp")
    out = tmp_path / "m.safetensors"
    for options, code, says in [
        (["--dtype", "bf16"], 1, "which tensors are parameters"), (["--to", "dcp"], 2, "which is in this one"),
        (["--to", "torch", "--optimizer"], 1, "options of optimizer groups"),
    ]:
        result = zprof("checkpoint", "convert", tmp_path / "dcp", *options, "-o", out)
        assert (result.exit_code, result.stderr.count("\n"), says in result.stderr) == (code, 1, True)
