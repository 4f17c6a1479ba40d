"""``zprof checkpoint``: what a saved folder holds, whether it is whole, and its parameters as safetensors.

pytest runs it; ranks save the folders, and the command reads them in this process, which is none of them.
"""

from __future__ import annotations

import json
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zhooks
from offload.shards import Manifest, read_manifest
from tests.support.inside import checksum_of
from tests.support.ranks import Pool
from tests.support.tp_runs import attached, mesh_of
from tests.support.zprof_command import Zprof

HERE = "tests.zprof.test_checkpoint"


class Net(nn.Module):
    """A kernel that memory goes through in another order, a number, buffers, a tied and an ignored parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.out, self.tied = nn.BatchNorm2d(5), nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.tied.weight, self.scale, self.left = self.out.weight, nn.Parameter(torch.tensor(0.5)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(self.conv(x)).mean((2, 3)) * self.scale
        made: Tensor = self.out(seen) + self.tied(seen)
        return made


def save(path: str, policy: dict[str, Any]) -> None:
    """A step of training, ``path/run`` saved, and ``path/full.safetensors`` beside it."""
    model = Net()
    units = {"min_numel": 0, "max_numel": 40, "ignore": ["left"]}
    attachment = zhooks.attach(model, policy={"units": units} | policy)
    optimizer = torch.optim.AdamW([param for name, param in model.named_parameters() if not name.startswith("left")], lr=0.01)
    model(torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    attachment.save(f"{path}/run", optimizer, extra={"step": 1})
    attachment.save_full(f"{path}/full.safetensors")
    state = attachment.state_dict(optimizer)
    if attachment.rank == 0:
        torch.save(state, f"{path}/state.pt")


def save_over_tp(path: str) -> None:
    _, attachment = attached(mesh_of(2), 3)
    attachment.save(f"{path}/run", ())
    attachment.save_full(f"{path}/full.safetensors")


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Pool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    ranks(2).run(f"{HERE}:save", path=str(path), policy={"stage": 3})
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to damage."""
    path = tmp_path / "run"
    path.mkdir()
    for file in (folder / "run").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def rewritten(path: Path, **about: Any) -> None:
    """The manifest with another ``about``, and a checksum that fits; None takes a key away."""
    manifest = read_manifest(path)
    changed = {key: value for key, value in {**manifest.about, **about}.items() if value is not None}
    content = Manifest(**{**manifest.model_dump(), "about": changed}).model_dump()
    (path / "manifest.json").write_text(json.dumps({"checksum": checksum_of(content), "manifest": content}))


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same tensors; what is tied has one of its names."""
    assert wanted.keys() - found.keys() <= {"tied.weight"} and found.keys() <= wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


# ---- convert


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 1), (2, 3)])
def test_the_parameters_of_a_folder_are_those_that_save_full_writes(
    ranks: Callable[[int], Pool], tmp_path: Path, zprof: Zprof, world: int, stage: int
) -> None:
    ranks(world).run(f"{HERE}:save", path=str(tmp_path), policy={"stage": stage})
    result = zprof("checkpoint", "convert", tmp_path / "run", "-o", tmp_path / "one.safetensors")
    assert result.exit_code == 0, result.stderr
    equal(load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "full.safetensors"))
    assert stat.S_IMODE((tmp_path / "one.safetensors").stat().st_mode) == 0o600


def test_a_manifest_that_does_not_say_whose_files_are_is_refused(copied: Path, zprof: Zprof) -> None:
    rewritten(copied, places=None)
    result = zprof("checkpoint", "show", copied)
    assert result.exit_code == 1 and "a manifest that contradicts itself (KeyError: 'places')" in result.stderr
    assert "Load it with the program that saved it" in result.stderr


@pytest.mark.slow
def test_parts_over_tp_are_joined_where_the_manifest_says_whose_they_are(
    ranks: Callable[[int], Pool], tmp_path: Path, zprof: Zprof
) -> None:
    ranks(4).run(f"{HERE}:save_over_tp", path=str(tmp_path))
    run, flats = tmp_path / "run", read_manifest(tmp_path / "run").about["flats"]
    for flat in flats:
        for param in flat["params"]:
            if "tp" in param:
                dim, count = param["tp"]
                part = [size // count if at == dim else size for at, size in enumerate(param["shape"])]
                param["part_stride"] = list(torch.empty(part, device="meta").stride())
    rewritten(run, flats=flats, places=[[rank // 2, 0, rank % 2] for rank in range(4)])
    assert zprof("checkpoint", "convert", run, "-o", tmp_path / "one.safetensors").exit_code == 0
    equal(load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "full.safetensors"))


def test_optimizer_states_are_those_that_state_dict_gives(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    out = tmp_path / "m.safetensors"
    assert zprof("checkpoint", "convert", folder / "run", "-o", out, "--optimizer", "--dtype", "bf16").exit_code == 0
    found, model = load_file(out), Net()
    wanted = torch.load(folder / "state.pt", weights_only=True)["optimizer"]["state"]
    names = [name for name, _ in model.named_parameters() if not name.startswith("left")]
    states = {f"state.{names[index]}.{key}": value for index, entry in wanted.items() for key, value in entry.items()}
    assert {name for name in found if name.startswith("state.")} == states.keys()
    for name, value in states.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def test_a_file_of_torch_holds_what_state_dict_gives(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    out = tmp_path / "state.pt"
    result = zprof("checkpoint", "convert", folder / "run", "-o", out, "--to", "torch", "--optimizer")
    assert result.exit_code == 0, result.stderr
    found, wanted = torch.load(out, weights_only=True), torch.load(folder / "state.pt", weights_only=True)
    equal(found["model"], wanted["model"])
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert found["optimizer"]["state"].keys() == wanted["optimizer"]["state"].keys()
    for index, entry in wanted["optimizer"]["state"].items():
        assert all(torch.equal(found["optimizer"]["state"][index][key], value) for key, value in entry.items())
    assert zprof("checkpoint", "convert", folder / "run", "-o", out, "--to", "torch").exit_code == 1
    assert zprof("checkpoint", "convert", folder / "run", "-o", out, "-f", "--to", "torch", "--max-file", "1GB").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_folder_for_torch_distributed_is_loaded_by_it(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    out = tmp_path / "dcp"
    result = zprof("checkpoint", "convert", folder / "run", "-o", out, "--to", "dcp", "--optimizer")
    assert result.exit_code == 0, result.stderr
    model = Net()
    optimizer = torch.optim.AdamW([param for name, param in model.named_parameters() if not name.startswith("left")], lr=1.0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    read, states = get_state_dict(model, optimizer, options=flat)
    values: dict[str, Any] = dict(read)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"model": values, "optim": states}, checkpoint_id=str(out), no_dist=True)
    wanted = torch.load(folder / "state.pt", weights_only=True)
    equal(values, wanted["model"])
    assert values.keys() == wanted["model"].keys()
    set_state_dict(model, optimizer, model_state_dict=model.state_dict() | values, optim_state_dict=states, options=flat)
    loaded = optimizer.state_dict()
    assert loaded["param_groups"][0]["lr"] == 0.01
    for index, entry in wanted["optimizer"]["state"].items():
        assert all(torch.equal(loaded["state"][index][key], value) for key, value in entry.items())


def test_a_dtype_is_that_of_the_parameters_alone(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    assert zprof("checkpoint", "convert", folder / "run", "-o", tmp_path / "m.safetensors", "--dtype", "bf16").exit_code == 0
    found, wanted = load_file(tmp_path / "m.safetensors"), load_file(folder / "full.safetensors")
    assert torch.equal(found["conv.weight"], wanted["conv.weight"].bfloat16())
    assert torch.equal(found["norm.running_var"], wanted["norm.running_var"])


def test_values_that_a_dtype_cannot_hold_are_refused_by_name(
    ranks: Callable[[int], Pool], tmp_path: Path, zprof: Zprof
) -> None:
    ranks(1).run(f"{HERE}:save_large", path=str(tmp_path))
    result = zprof("checkpoint", "convert", tmp_path / "run", "-o", tmp_path / "m.safetensors", "--dtype", "fp16")
    assert result.exit_code == 1 and result.stderr.startswith("weight: expected values that torch.float16 can hold")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file() or path.name != "run") == []


def save_large(path: str) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e6)
    zhooks.attach(model).save(f"{path}/run", ())


def test_several_files_have_the_index_that_transformers_reads(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    out = tmp_path / "model"
    assert zprof("checkpoint", "convert", folder / "run", "-o", out, "--max-file", "300B").exit_code == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {name: value for file in files for name, value in load_file(out / file).items()}
    assert {name: file for file in files for name in load_file(out / file)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    equal(found, load_file(folder / "full.safetensors"))
    assert zprof("checkpoint", "convert", folder / "run", "-o", tmp_path / "small").exit_code == 0
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.safetensors"]


def test_what_is_there_already_stays(folder: Path, tmp_path: Path, zprof: Zprof) -> None:
    file = tmp_path / "m.safetensors"
    file.write_text("mine")
    (tmp_path / "model").mkdir()
    for output in (file, tmp_path / "model", tmp_path / "none" / "model", tmp_path / "none" / "m.safetensors"):
        result = zprof("checkpoint", "convert", folder / "run", "-o", output)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert file.read_text() == "mine" and list((tmp_path / "model").iterdir()) == []
    assert zprof("checkpoint", "convert", folder / "run", "-o", file, "-f").exit_code == 0
    equal(load_file(file), load_file(folder / "full.safetensors"))
    assert zprof("checkpoint", "convert", folder / "run", "-o", file, "-f", "--max-file", "1MB").exit_code == 2
    assert zprof("checkpoint", "convert", folder / "run", "-o", tmp_path / "new", "--max-file", "lots").exit_code == 2


# ---- verify


def test_a_whole_folder_is_verified(folder: Path, zprof: Zprof) -> None:
    result = zprof("checkpoint", "verify", folder / "run")
    assert result.exit_code == 0 and "ok, 2 files," in result.stdout


def test_every_damaged_file_is_named_and_nothing_is_converted(copied: Path, tmp_path: Path, zprof: Zprof) -> None:
    first, second = copied / "rank-00000.safetensors", copied / "rank-00001.safetensors"
    raw = bytearray(first.read_bytes())
    raw[len(raw) // 2] ^= 1
    first.write_bytes(raw)
    told = json.loads(zprof("checkpoint", "verify", copied, "--json").stdout)
    assert (told["ok"], list(told["damaged"])) == (False, [first.name])
    second.unlink()
    result = zprof("checkpoint", "verify", copied)
    assert result.exit_code == 1 and result.stdout == ""
    assert [line.partition(". ")[0] for line in result.stderr.splitlines()] == [f"Cannot read {first}", f"Cannot read {second}"]
    assert zprof("checkpoint", "convert", copied, "-o", tmp_path / "m.safetensors").exit_code == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file() or path != copied] == []


# ---- show


def test_a_folder_says_what_it_holds(folder: Path, zprof: Zprof) -> None:
    told = json.loads(zprof("checkpoint", "show", folder / "run", "--json").stdout)
    model = Net()
    numel = sum(param.numel() for name, param in model.named_parameters() if not name.startswith("left"))
    assert (told["ranks"], told["stage"], told["elements"]) == (2, 3, numel)
    assert told["mesh"] == {"shard": 2, "replicate": 1, "tp": 1} and told["torch"] == torch.__version__
    assert (told["optimizers"], told["extra"], told["dtypes"]) == (["AdamW"], ["step"], ["float32"])
    files = list((folder / "run").glob("*.safetensors"))
    assert told["bytes"] == sum(file.stat().st_size for file in files)
    assert told["holds"]["parameters"] == told["holds"]["state exp_avg"] >= 4 * numel
    text = zprof("checkpoint", "show", folder / "run").stdout
    assert "AdamW" in text and "state exp_avg_sq" in text


@pytest.mark.parametrize("what", ["nothing", "a file", "another folder"])
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, zprof: Zprof, what: str) -> None:
    path = tmp_path / "there"
    if what == "a file":
        path.write_text("{}")
    elif what == "another folder":
        path.mkdir()
    for command in (["show"], ["verify"], ["convert", "-o", tmp_path / "m.safetensors"]):
        result = zprof("checkpoint", *command, path)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert "Expected a checkpoint that attachment.save() wrote" in result.stderr


def test_a_manifest_that_contradicts_itself_is_refused_whatever_it_says(copied: Path, tmp_path: Path, zprof: Zprof) -> None:
    flats = read_manifest(copied).about["flats"]

    def changed(number: int, **about: Any) -> list[Any]:
        return [{**flat, **about} if at == number else flat for at, flat in enumerate(flats)]

    def param(**about: Any) -> list[Any]:
        number = next(at for at, flat in enumerate(flats) if len(flat["params"][0]["shape"]) == 4)
        return changed(number, params=[{**flats[number]["params"][0], **about}, *flats[number]["params"][1:]])

    wrong: list[dict[str, Any]] = [
        {"flats": None}, {"flats": 3}, {"flats": [{}]}, {"flats": changed(0, padded=2**70)}, {"flats": changed(0, padded=-4)},
        {"flats": changed(0, shard_numel=3)}, {"flats": changed(0, segments=[[4, 4]])}, {"flats": changed(0, dtype="pickle")},
        {"flats": [*flats, flats[0]]}, {"flats": param(start=10**6)}, {"flats": param(shape=[1])}, {"flats": param(name=7)},
        {"flats": param(stride=[0, 0, 0, 0])}, {"flats": param(stride=[1, 1, 1, 1])}, {"flats": param(tp=[9, 2])},
        {"flats": param(tp=[0, 0])}, {"places": [[0, 0, 0]]}, {"places": [[0, 0, 0], [0, 0, 0]]}, {"places": "two"},
        {"places": [[0, 0, 0], [0, 1, 0]]}, {"places": [[0, 0, 0], [0, 0, 1]]},
    ]  # fmt: skip
    before = (copied / "manifest.json").read_bytes()
    for about in wrong:
        (copied / "manifest.json").write_bytes(before)
        rewritten(copied, **about)
        result = zprof("checkpoint", "convert", copied, "-o", tmp_path / "m.safetensors")
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), (about, result.output, result.exception)
        assert not (tmp_path / "m.safetensors").exists()
