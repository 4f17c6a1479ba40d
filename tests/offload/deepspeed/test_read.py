"""Checkpoints that DeepSpeed wrote, read without it: the same values at every stage, and what is wrong is refused."""

from __future__ import annotations

import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.deepspeed import VALUE, find, is_deepspeed, read
from offload.errors import CheckpointError
from offload.torchfiles import Made
from tests.support.deepspeed_folders import unpacked

TWO = [
    "z1-fp32-2", "z2-fp32-2", "z2-fp32-2-robin", "z2-fp32-2-legacy", "z3-fp32-2", "z3-fp32-2-small", "z3-fp32-2-gathered",
]  # fmt: skip
FOUR = ["z2-fp32-4", "z3-fp32-4", "z2-fp32-4-universal/global_step3_universal"]


def values(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    saved = read(path)
    return {
        name: {key: found.elements(0, param.numel).reshape(param.shape) for key, found in param.values.items()}
        for name, param in saved.params.items()
    }


@pytest.mark.parametrize("names", [TWO, FOUR, ["z3-fp32-2-universal/global_step3_universal", "z3-fp32-2"]])
def test_the_same_run_at_any_stage_has_the_same_values(tmp_path: Path, names: list[str]) -> None:
    unpacked(tmp_path, [name.partition("/")[0] for name in names])
    first = values(tmp_path / names[0])
    assert sorted(first["a.weight"]) == ["exp_avg", "exp_avg_sq", VALUE]
    assert list(first["frozen.weight"]) == [VALUE]
    for name in names[1:]:
        found = values(tmp_path / name)
        assert found.keys() == first.keys()
        for param, kept in first.items():
            assert kept.keys() == found[param].keys()
            for key, value in kept.items():
                assert torch.allclose(value, found[param][key], rtol=0, atol=1e-6), (name, param, key)


@pytest.mark.parametrize("name", ["z1-bf16-2", "z1-bf16-2-grad32", "z2-bf16-2", "z3-bf16-2"])
def test_masters_of_a_bf16_run_are_fp32_and_its_weights_those_rounded(tmp_path: Path, name: str) -> None:
    unpacked(tmp_path, [name])
    saved = read(tmp_path / name)
    found = values(tmp_path / name)["a.weight"][VALUE]
    assert found.dtype is torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    assert saved.params["frozen.weight"].values[VALUE].dtype is torch.bfloat16


def test_ranges_are_read_over_the_ends_of_partitions(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-4", "z3-fp32-4"])
    for name in ("z2-fp32-4", "z3-fp32-4"):
        for param in read(tmp_path / name).params.values():
            whole = param.values[VALUE].elements(0, param.numel)
            for start in range(0, param.numel, 5):
                numel = min(7, param.numel - start)
                assert torch.equal(param.values[VALUE].elements(start, numel), whole[start : start + numel])


def test_what_the_run_said_is_read_and_objects_are_not_made(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2-client"])
    saved = read(tmp_path / "z2-fp32-2-client")
    assert (saved.stage, saved.ranks, saved.about["global_steps"], saved.tied) == (2, 2, 3, {"head.weight": "embed.weight"})
    assert saved.client["epoch"] == 3
    assert saved.client["pair"] == (1, [2.5])
    assert torch.equal(saved.client["table"], torch.arange(4.0))
    assert isinstance(saved.client["args"], Made)
    assert str(saved.client["args"].what) == "argparse.Namespace"
    assert [group["weight_decay"] for group in saved.groups] == [0.1, 0.0]
    assert saved.names(0) == ["embed.weight", "a.weight", "b.weight"]


def test_latest_names_the_checkpoint_and_a_folder_of_another_kind_is_none(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    root = tmp_path / "z2-fp32-2"
    assert find(root) == find(root / "global_step3") == root / "global_step3"
    assert is_deepspeed(root)
    assert not is_deepspeed(tmp_path)
    assert not is_deepspeed(tmp_path / "missing")
    (root / "latest").write_text("../other")
    with pytest.raises(CheckpointError, match=r'latest, which names "\.\./other"'):
        read(root)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return str(caught.value)


def test_what_is_missing_or_divided_otherwise_is_named(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z0-fp32-2", "z2-fp32-4", "z3-fp32-4"])
    assert "no optimizer states (*_optim_states.pt), as stage 0 has none" in refused(tmp_path / "z0-fp32-2")
    two, three = tmp_path / "z2-fp32-4/global_step3", tmp_path / "z3-fp32-4/global_step3"
    (two / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    assert "partitions over [4] ranks in 3 files" in refused(two)
    (three / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "without that of rank 1" in refused(three)
    for name, says in [
        ("mp_rank_01_model_states.pt", "2 parts over tensor or pipeline parallel ranks"),
        ("layer_00-model_00-model_states.pt", "layer_00-model_00-model_states.pt of a pipeline module"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "of a mixture of experts"),
    ]:
        (two / name).write_bytes(b"")
        assert says in refused(two)
        (two / name).unlink()


def test_names_that_were_taken_for_each_other_are_noticed(tmp_path: Path) -> None:
    # DeepSpeed's own conversion of round-robin gradients mixes up parameters of one size.
    unpacked(tmp_path, ["z2-fp32-4-universal"])
    zero = tmp_path / "z2-fp32-4-universal/global_step3_universal/zero"
    (zero / "a.bias").rename(zero / "kept")
    (zero / "norm.bias").rename(zero / "a.bias")
    (zero / "kept").rename(zero / "norm.bias")
    assert "fp32 values of a.bias that are not its weights in mp_rank_00_model_states.pt" in refused(zero.parent)


def changed_places(step: Path) -> None:
    one, other = (step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
    one.rename(step / "kept")
    other.rename(one)
    (step / "kept").rename(other)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], name: str | None = None) -> None:
    """The same archive with other records, under ``name``."""
    with zipfile.ZipFile(path) as archive:
        records = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, raw in records.items():
            top, _, rest = each.partition("/")
            archive.writestr(f"{name or top}/{rest}", change(rest, raw))


@pytest.mark.parametrize("name", ["z2-fp32-4", "z3-fp32-4"])
def test_files_of_two_ranks_that_have_changed_places_are_named(tmp_path: Path, name: str) -> None:
    unpacked(tmp_path, [name])
    step = tmp_path / name / "global_step3"
    changed_places(step)
    assert "which was written as zero_pp_rank_1_mp_rank_00_optim_states.pt" in refused(step)


def test_partitions_that_have_changed_places_are_noticed_where_files_do_not_say_their_names(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-4"])
    step = tmp_path / "z2-fp32-4/global_step3"
    for path in step.glob("*_optim_states.pt"):
        rewritten(path, lambda _, raw: raw, "archive")
    assert read(step).ranks == 4
    changed_places(step)
    assert "that are not its weights" in refused(step)


def test_a_file_of_another_step_among_them_is_named(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z3-fp32-2", "z2-fp32-2"])
    step = tmp_path / "z3-fp32-2/global_step3"
    steps = re.compile(rb"(global_steps(?:q.|r....)K)\x03", re.DOTALL)
    rewritten(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda _, raw: steps.sub(b"\\g<1>\x02", raw))
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt of a different step" in refused(step)
    step, three, two = tmp_path / "z2-fp32-2/global_step3", struct.pack("<f", 3), struct.pack("<f", 2)
    rewritten(step / "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda _, raw: two if raw == three else raw)
    assert "step of the optimizer, which differs between ranks" in refused(step)


def test_a_client_state_of_many_views_of_one_storage_is_refused(tmp_path: Path) -> None:
    unpacked(tmp_path, ["z2-fp32-2"])
    path = tmp_path / "z2-fp32-2/global_step3/mp_rank_00_model_states.pt"
    model, base = torch.load(path, weights_only=False), torch.zeros(4096)
    same = base.view(64, 64)
    torch.save(model | {"client": [same] * 40}, path)
    client = read(tmp_path / "z2-fp32-2").client["client"]
    assert all(each is client[0] for each in client)
    torch.save(model | {"client": [base.view(64, 64) for _ in range(40)]}, path)
    assert "larger than their file" in refused(tmp_path / "z2-fp32-2")


def mutated(root: Path, source: Path, seeds: range) -> list[str]:
    """What became of reading a folder of which one file was damaged, seed by seed."""
    out: list[str] = []
    for seed in seeds:
        dice, folder = random.Random(seed), root / str(seed)
        shutil.copytree(source, folder)
        path = dice.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
        raw = bytearray(path.read_bytes())
        for _ in range(dice.randint(1, 3)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        path.write_bytes(bytes(raw[: dice.randrange(len(raw))] if dice.random() < 0.2 else raw))
        try:
            saved = read(folder)
            for param in saved.params.values():
                for found in param.values.values():
                    found.elements(0, param.numel)
            out.append("")
        except CheckpointError as error:
            out.append(str(error))
        shutil.rmtree(folder)
    return out


def check_mutations(tmp_path: Path, seeds: range) -> None:
    names = ["z2-fp32-2", "z2-fp32-2-legacy", "z3-fp32-2", "z3-fp32-2-universal"]
    unpacked(tmp_path, names)
    for name in names:
        inner = "global_step3_universal" if "universal" in name else "global_step3"
        found: list[Any] = mutated(tmp_path, tmp_path / name / inner, seeds)
        assert any(found)
        assert all(not each or ("expected" in each.lower() and "found" in each) for each in found)


def test_damaged_folders_are_refused_by_name_or_read(tmp_path: Path) -> None:
    check_mutations(tmp_path, range(25))


@pytest.mark.slow
def test_thousands_of_damaged_folders_are_refused_by_name_or_read(tmp_path: Path) -> None:
    check_mutations(tmp_path, range(1000, 2000))
