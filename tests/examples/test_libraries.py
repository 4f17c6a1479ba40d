"""The examples of Trainer, PEFT and TRL: each runs as its page says, on two ranks, small and for a few steps.

pytest runs them in processes of their own, which have imported the libraries, and slowly under torchrun. What these
libraries train is held to the plain run in tests/zhooks/integrations; here it is that the programs run and write what they say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import launch
from tests.support.paths import ROOT

OPTIONS = ["--steps", "2", "--layers", "1", "--width", "32", "--source", str(ROOT / "zhooks")]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# TRL and Hugging Face would report their use.
ENVIRONMENT = os.environ | {"CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def by_forks(where: Path, program: str) -> str:
    """What the program has printed on all ranks."""
    ranks = launch(2, program, *OPTIONS, at=where, environment=ENVIRONMENT)
    assert not any(rank.returncode for rank in ranks), "\n".join(rank.stderr for rank in ranks)
    return "".join(rank.stdout for rank in ranks)


def by_torchrun(where: Path, program: str) -> str:
    command = [sys.executable, *TORCHRUN, program, *OPTIONS]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=500, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("run", [by_forks, pytest.param(by_torchrun, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "needs", "writes"),
    [
        pytest.param("finetune.py", ("accelerate",), "finetuned/model.safetensors", id="finetune"),
        pytest.param("lora.py", ("peft",), "adapter/adapter_model.safetensors", id="lora", marks=pytest.mark.slow),
        pytest.param("sft.py", ("trl",), "sft/model.safetensors", id="sft", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_on_two_ranks_and_writes_its_folder(
    tmp_path: Path, name: str, needs: tuple[str, ...], writes: str, run: Callable[[Path, str], str]
) -> None:
    for library in ("transformers", *needs):
        pytest.importorskip(library)
    said = run(tmp_path, str(ROOT / "examples" / name))
    assert "over 2 ranks" in said and (tmp_path / writes).is_file()
    assert "with activations at their peak: " in said and "call memory() again" not in said
