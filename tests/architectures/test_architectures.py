"""Architectures of the libraries people train, attached against plain: a sample of families by default, all of them when slow.

pytest runs it; ``python -m tests.architectures`` runs any of them and prints the table of docs/explanation/architectures.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.architectures.sweep import Result, read, sweep, table
from tests.architectures.train import JOB, Trained, close, differences
from tests.support.ranks import Pool
from tests.support.slow import slow

#: Of every kind one: decoder, images, state space, a denoiser with skips, graphs; mixture, encoder-decoder (one is in
#: test_trainer.py, too), a cache in every forward, windows of images, speech, two towers.
SAMPLE = (
    "transformers/llama", "transformers/vit", "transformers/mamba", "diffusers/UNet2DConditionModel", "geometric/GATConv",
    *slow("transformers/mixtral", "transformers/t5", "transformers/xlm", "transformers/swin"),
    *slow("transformers/wav2vec2", "transformers/blip"),
)  # fmt: skip
MODES = ["eager", "host-recomputed"]
WORLDS = pytest.mark.parametrize("world", [1, 2, 4], ids=["world1", "world2", "world4"])


@WORLDS
@pytest.mark.parametrize("name", SAMPLE)
def test_it_trains_attached_exactly_as_plain(name: str, world: int, ranks: Callable[[int], Pool]) -> None:
    pytest.importorskip(name.partition("/")[0].replace("geometric", "torch_geometric"))
    built, verdicts = ranks(world).run(JOB, limit_s=600.0, name=name, modes=MODES)[0]
    assert [(verdict.mode, verdict.ended, verdict.why) for verdict in verdicts] == [(mode, "equal", "") for mode in MODES]
    assert built and all(verdict.units > 1 for verdict in verdicts)


@pytest.mark.slow
@WORLDS
@pytest.mark.parametrize("library", ["diffusers", "geometric", "transformers"])
def test_all_of_a_library_train_attached_exactly_as_plain(library: str, world: int, tmp_path: Path) -> None:
    module = importlib.import_module(f"tests.architectures.of_{library}")
    results = sweep([f"{library}/{kind}" for kind in module.types()], world, MODES, tmp_path / "results.jsonl")
    wrong = [one for one in results if one.ended not in ("equal", "rounded", "skipped")]
    assert not wrong, table(wrong)
    assert sum(one.ended == "equal" for one in results) > len(results) / 2


def test_a_sweep_names_what_it_skips_keeps_it_and_does_not_try_it_again(tmp_path: Path) -> None:
    kept = tmp_path / "results.jsonl"
    found = sweep(["geometric/NoSuchConv"], 1, ["eager"], kept)
    assert [(one.ended, "has no NoSuchConv" in one.why) for one in found] == [("skipped", True)]
    assert read(kept) == found
    before = kept.read_bytes()
    assert sweep(["geometric/NoSuchConv"], 1, ["eager"], kept) == found
    assert kept.read_bytes() == before
    assert "geometric/NoSuchConv: skipped (eager on 1)" in table(found)


def test_a_type_that_raises_in_one_mode_is_tried_alone_in_each(tmp_path: Path) -> None:
    found = sweep(["nothing/here"], 1, ["eager", "host"], tmp_path / "results.jsonl")
    assert [(one.mode, one.ended) for one in found] == [("eager", "raised"), ("host", "raised")]
    assert all("KeyError" in one.why for one in found)


def test_the_table_counts_by_world_and_mode_and_gives_every_reason() -> None:
    same = Result("a/x", 2, "eager", "equal", "", "X", 1.0, 3)
    rows = [same, replace(same, name="a/y", ended="differs", why="loss of step 0")]
    assert table(rows).splitlines()[1].split() == ["2", "eager", "1", "0", "1", "0", "0", "0"]
    assert "a/y: differs (eager on 2): loss of step 0" in table(rows)


def test_what_is_one_bit_off_is_close_and_what_is_off_by_more_is_not() -> None:
    expected = Trained([[1.0]], {"w": torch.tensor([1.0])})
    assert close(Trained([[1.0]], {"w": torch.tensor([1.0000001])}), expected, 0)
    assert not close(Trained([[1.0]], {"w": torch.tensor([1.001])}), expected, 0)
    assert not close(Trained([[1.001]], {"w": torch.tensor([1.0])}), expected, 0)


def test_a_loss_or_a_parameter_that_is_one_bit_off_is_a_difference() -> None:
    one, next_one = torch.tensor(1.0), torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    expected = Trained([[1.0, 2.0]], {"w": one})
    assert differences(Trained([[2.0]], {"w": one.clone()}), expected, 1) == ""
    assert "loss of step 0" in differences(Trained([[2.0000002]], {"w": one}), expected, 1)
    assert "w by" in differences(Trained([[1.0]], {"w": next_one}), expected, 0)
    assert "names" in differences(Trained([[1.0]], {"v": one}), expected, 0)
