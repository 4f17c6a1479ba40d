"""The examples of Trainer, PEFT and TRL: each runs as its page says, on two ranks, small and for a few steps.

pytest runs them in processes of their own. What these libraries train is held to the plain run in tests/zhooks/integrations;
here it is that the programs run and write what they say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_rules import ROOT

SMALL = ["--steps", "2", "--layers", "1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run(where: Path, name: str, *options: str, by: tuple[str, ...] = ()) -> str:
    """What the example has printed."""
    command = [sys.executable, *by, str(ROOT / "examples" / name), *options]
    # TRL and Hugging Face would report their use.
    environment = os.environ | {"CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "needs", "writes"),
    [
        pytest.param("finetune.py", ("accelerate",), "finetuned/model.safetensors", id="finetune"),
        pytest.param("lora.py", ("peft",), "adapter/adapter_model.safetensors", id="lora", marks=pytest.mark.slow),
        pytest.param("sft.py", ("trl",), "sft/model.safetensors", id="sft", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains_on_two_ranks_and_writes_its_folder(
    tmp_path: Path, name: str, needs: tuple[str, ...], writes: str
) -> None:
    for library in ("transformers", *needs):
        pytest.importorskip(library)
    said = run(tmp_path, name, *SMALL, "--width", "32", "--source", str(ROOT / "zhooks"), by=tuple(TORCHRUN))
    assert "over 2 rank(s)" in said and (tmp_path / writes).is_file()
