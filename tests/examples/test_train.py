"""The command of `make train`: the GPT example on two ranks, short and small, held to the plain model.

pytest runs it in processes of its own, and slowly under torchrun as the command does; test_text.py tests the text the
example reads.
It never judges what is learned: three steps learn nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import launch
from tests.support.paths import ROOT

SMALL = {"--steps": 3, "--check-plain": 3, "--batch": 4, "--layers": 2, "--dim": 32, "--heads": 2, "--context": 32}


COMMAND = "torch.distributed.run --standalone --nproc_per_node"
PROGRAM = str(ROOT / "examples" / "train_gpt.py")


def by_forks(at: Path, *options: str) -> tuple[int, str, str]:
    ranks = launch(2, PROGRAM, *options, at=at, warn=("default", Warning))
    failed = any(rank.returncode for rank in ranks)
    return int(failed), "".join(rank.stdout for rank in ranks), "".join(rank.stderr for rank in ranks)


def by_torchrun(at: Path, *options: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", *COMMAND.split(), "2", PROGRAM, *options]
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("run", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
def test_make_train_trains_as_the_plain_model_and_saves_what_loads(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntrain: setup\n")[2].partition("\n\n")[0]
    assert COMMAND in recipe and "examples/train_gpt.py $(ARGS)" in recipe, "what follows is that command"
    small = [str(word) for pair in SMALL.items() for word in pair]
    where = ["--device", "cpu", "--source", str(ROOT / "zhooks"), "--out", "model.safetensors", "--json", "result.json"]
    code, said, complained = run(tmp_path, *small, *where)
    assert code == 0, complained
    assert "Warning" not in complained, complained
    assert "on cpu" in said and "What to try next" in said
    assert f"\n    torchrun --nproc-per-node 2 {PROGRAM} --stage 0\n" in said
    assert re.search(r"first 3 losses: at most \S+ from the plain run's", said)
    assert re.search(r"^\s*parameter\b.*", said, re.MULTILINE), "the memory table"
    assert "with activations at their peak: device " in said and "estimate of activations (ZeRO paper): " in said
    assert "stopped after" not in said
    assert re.search(r"^step 1, \d+ s: loss \d", said, re.MULTILINE), "a log need not wait for the fiftieth"
    heading = "Text that the model generates after 'def '"
    assert re.search(rf"^validation loss \S+ nats per byte\n\n{heading}\n\ndef ", said, re.MULTILINE)
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["world"], len(found["losses"]), found["skipped_steps"]) == (2, 3, 0)
    assert found["plain_difference"] <= 1e-4 and abs(found["reloaded_loss"] - found["held_out_loss"]) <= 1e-4
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) >= found["parameters"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "result.json"]


@pytest.fixture(scope="module")
def ended_by_time(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where rank 0 ran as make starts it, without the time for a second step, and what it said."""
    at = tmp_path_factory.mktemp("ended")
    made = subprocess.run(["make", "-n", "train", "NPROC=2"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    [command] = re.findall(r"export TRAIN_GPT_MAKE='([^']*)'", made.stdout)
    options = [str(word) for pair in (SMALL | {"--seconds": 0}).items() for word in pair]
    told = {**os.environ, "TRAIN_GPT_MAKE": command, "OMP_NUM_THREADS": "1"}
    ranks = launch(2, PROGRAM, *options, "--device", "cpu", "--source", str(ROOT / "zhooks"), at=at, environment=told)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr
    return at, ranks[0].stdout


def test_a_run_that_its_time_limit_ends_says_so_and_how_to_train_longer(ended_by_time: tuple[Path, str]) -> None:
    _, said = ended_by_time
    longer = 'make train NPROC=2 ARGS="--seconds 3600"'
    assert f"\nstopped after step 1 of 3 by --seconds 0; for longer: {longer}\n" in said
    assert re.search(r"^first 1 ", said, re.MULTILINE)


def test_what_to_try_next_is_said_as_make_started_it(ended_by_time: tuple[Path, str]) -> None:
    at, said = ended_by_time
    assert '\n    make train NPROC=2 ARGS="--stage 0"\n' in said
    [own] = re.findall(r"OMP_NUM_THREADS=1 (\S+) --nproc-per-node 2 your_script.py\n", said)
    assert (at / own).resolve() == Path(sys.executable).with_name("torchrun").resolve()
