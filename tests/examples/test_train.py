"""The command of `make train`: the GPT example under torchrun on two ranks, short and small, held to the plain model.

pytest runs it in processes of its own; test_text.py tests the text the example reads.
It never judges what is learned: three steps learn nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.source_rules import ROOT

SMALL = {"--steps": 3, "--check-plain": 3, "--batch": 4, "--layers": 2, "--dim": 32, "--heads": 2, "--context": 32}


def test_make_train_trains_as_the_plain_model_and_saves_what_loads(tmp_path: Path) -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ntrain: setup\n")[2].partition("\n\n")[0]
    command = "torch.distributed.run --standalone --nproc_per_node"
    assert command in recipe and "examples/train_gpt.py $(ARGS)" in recipe, "what follows is that command"
    torchrun = [sys.executable, "-m", *command.split(), "2", str(ROOT / "examples" / "train_gpt.py")]
    small = [str(word) for pair in SMALL.items() for word in pair]
    where = ["--device", "cpu", "--source", str(ROOT / "zhooks"), "--out", "model.safetensors", "--json", "result.json"]
    done = subprocess.run(
        [*torchrun, *small, *where],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert "on cpu" in done.stdout and "What to try next" in done.stdout
    assert re.search(r"first 3 losses: at most \S+ from the plain run's", done.stdout)
    assert re.search(r"^\s*parameter\b.*", done.stdout, re.MULTILINE), "the memory table"
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["world"], len(found["losses"]), found["skipped_steps"]) == (2, 3, 0)
    assert found["plain_difference"] <= 1e-4 and abs(found["reloaded_loss"] - found["held_out_loss"]) <= 1e-4
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) >= found["parameters"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "result.json"]
