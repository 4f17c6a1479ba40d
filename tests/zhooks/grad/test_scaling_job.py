"""The main job's model, trained in each precision by its own script: 16 bits end where fp32 ends.

pytest runs it as users do, in processes of its own.  It never imports the script.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SMALL = ["--layers", "1", "--dim", "32", "--heads", "2", "--context", "32", "--batch", "8", "--steps", "200", "--seconds=900"]


def held_out_loss(precision: str, folder: Path) -> float:
    out = folder / f"{precision}.json"
    files = ["--out", str(folder / f"{precision}.safetensors"), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "examples/train_gpt.py", "--precision", precision, *SMALL, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: float = json.loads(out.read_text(encoding="utf-8"))["held_out_loss"]
    return found


@pytest.mark.slow
def test_fp16_and_bf16_end_within_two_percent_of_the_fp32_validation_loss(tmp_path: Path) -> None:
    wanted = held_out_loss("fp32", tmp_path)
    assert wanted < 3.5
    for precision in ("bf16", "fp16"):
        assert abs(held_out_loss(precision, tmp_path) / wanted - 1) < 0.02, precision
