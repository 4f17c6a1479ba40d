"""The pipeline example runs under torchrun, learns what the plain model learns.

pytest runs it in processes of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def launched(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, str(ROOT / "examples" / "train_pipeline.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_a_short_run_has_the_losses_of_the_plain_model(tmp_path: Path) -> None:
    small = ["--steps", "3", "--check-plain", "3", "--dim", "24", "--context", "16", "--batch", "8"]
    done = launched(tmp_path, *small, "--source", str(ROOT / "zhooks"))
    assert done.returncode == 0, done.stderr
    assert "2 stages on 2 ranks" in done.stdout and "validation loss" in done.stdout
    assert "first 3 losses: at most" in done.stdout
    assert not list(tmp_path.iterdir())
