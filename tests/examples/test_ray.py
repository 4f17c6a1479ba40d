"""The example of Ray Train: two workers learn what plain training learns, and a second run goes on from what the first kept.

pytest starts the program as its page says, slowly, where Ray is installed. What Ray keeps of a session goes into a
temporary folder, and no process of it may outlive the program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F

from tests.support.paths import ROOT, SEARCH_PATH

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT, GPTConfig
from text import read_corpus, share, train_batch

SOURCES = ROOT / "zhooks"
# For what hangs: no test may fail because the machine is busy.
LIMIT_S = 1200


@pytest.fixture
def session() -> Iterator[Path]:
    """Where Ray puts sockets and logs: the path of a socket has 107 bytes at most, which pytest's own folder exceeds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def trained(steps: int, session: Path, out: Path) -> tuple[int, float]:
    """The last step of the example, and the loss it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # HOME, because Ray writes the token of its session there.
    environment |= {"RAY_TMPDIR": str(session), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "HOME": str(session)}
    environment |= {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1"}
    small = ["--steps", str(steps), "--every", "3", "--layers", "1", "--dim", "32", "--source", str(SOURCES)]
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), *small, "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^step (\d+): loss (\S+) on rank 0 of 2 workers$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found[1]), float(found[2])


def plain(steps: int) -> float:
    """The loss of rank 0's part of the last batch, in one process without zhooks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(1, 32, 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    corpus = read_corpus(SOURCES, max_nbytes=16 << 20, min_nbytes=80)
    for step in range(1, steps + 1):
        batch = train_batch(corpus.train, seed=0, step=step, rows=16, context=64)
        parts = [share(batch, rank=rank, world=2) for rank in range(2)]
        losses = [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) for inputs, targets in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[0].item()


@pytest.mark.slow
def test_ray_trains_as_plain_pytorch_over_two_runs_and_leaves_no_process(tmp_path: Path, session: Path) -> None:
    pytest.importorskip("ray", reason="pip install '.[ray]'")
    for steps in (2, 4):
        last, loss = trained(steps, session, tmp_path)
        assert last == steps and loss == pytest.approx(plain(steps), abs=2e-4)
    manifests = list((tmp_path / "gpt").glob("checkpoint_*/manifest.json"))
    assert len(manifests) == 1
    left = [process for process in psutil.process_iter() if str(session) in " ".join(_command(process))]
    assert not psutil.wait_procs(left, timeout=600)[1]


def _command(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:  # it has ended since
        return []
    return words
