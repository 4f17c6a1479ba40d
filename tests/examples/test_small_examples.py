"""The short examples learn something in a few steps, at a small size; ``slurm.sh`` starts a program on two ranks.

pytest runs the programs in its own process as one rank, one on two ranks, and slowly all under torchrun. It never judges
what is learned.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.forked import launch
from tests.support.paths import ROOT

FOLDER = ROOT / "examples"
TEXT = ["--source", str(ROOT / "zhooks")]

#: Program, its options at a small size, and the library it needs.
SMALL: dict[str, tuple[str, list[str], str]] = {
    "minimal": ("minimal", ["--steps", "12"], ""),
    "elastic": ("elastic", ["--steps", "12"], ""),
    "three tiers": ("three_tiers", ["--steps", "8", "--dim", "32", *TEXT], ""),
    "tiles": ("tiled_linear", ["--steps", "12", "--classes", "64"], ""),
    "bert": ("bert", ["--steps", "12", "--batch", "4", "--hidden", "32", "--layers", "1", *TEXT], "transformers"),
    "vit": ("vision", ["--steps", "12", "--batch", "16", "--size", "16", "--width", "16"], "transformers"),
    "resnet": ("vision", ["--model", "resnet", "--steps", "12", "--size", "16", "--width", "16"], "transformers"),
    "graph": ("graph", ["--steps", "20", "--batch", "8", "--width", "32"], "torch_geometric"),
    "diffusion": ("diffusion", ["--steps", "8", "--batch", "4", "--size", "8", "--width", "8"], "diffusers"),
}


def losses(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]


def declines(printed: str) -> bool:
    found = losses(printed)
    return len(found) >= 2 and found[-1] < found[0]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their folder is where modules come from, and the working folder is another."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("case", SMALL)
def test_an_example_learns_on_one_rank_and_leaves_nothing_behind(case: str, tmp_path: Path) -> None:
    name, options, library = SMALL[case]
    if library:
        pytest.importorskip(library)
    result = CliRunner().invoke(importlib.import_module(name).main, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert declines(result.stdout), result.stdout
    assert not list(tmp_path.iterdir())


def test_the_shortest_example_learns_on_two_ranks(tmp_path: Path) -> None:
    name, options, _ = SMALL["minimal"]
    first, second = launch(2, str(FOLDER / f"{name}.py"), *options, at=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert declines(first.stdout + second.stdout), first.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL)
def test_an_example_learns_under_torchrun_on_two_ranks(case: str, tmp_path: Path) -> None:
    name, options, library = SMALL[case]
    if library:
        pytest.importorskip(library)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = started([*torchrun, str(FOLDER / f"{name}.py"), *options], tmp_path)
    assert declines(done.stdout), done.stdout
    assert not list(tmp_path.iterdir())


def started(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}", **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_slurm_script_starts_a_program_on_every_rank_of_its_nodes(tmp_path: Path) -> None:
    tools, folder = tmp_path / "bin", tmp_path / "work"
    folder.mkdir()
    tools.mkdir()
    # What SLURM's own commands do on a job of one node.
    for name, does in (("scontrol", "echo localhost"), ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')):
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1]", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2"}
    more = {**job, "RANKS_PER_NODE": "2", "PORT": "0", "PYTHON": sys.executable, "PATH": f"{tools}:{os.environ['PATH']}"}
    # What the script starts, not what is trained there: a program that imports no torch. Ranks write files of their own:
    # lines of two processes mix where they share a pipe.
    program = tmp_path / "program.py"
    names = ("WORLD_SIZE", "OMP_NUM_THREADS")
    program.write_text(
        "import os, sys\n"
        "with open('rank-' + os.environ['RANK'], 'x') as told:\n"
        f"    print(*(os.environ[name] for name in {names}), *sys.argv[1:], file=told)\n"
    )
    started(["bash", str(FOLDER / "slurm.sh"), str(program), "--steps", "12"], folder, **more)
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(("rank-0", "rank-1"), "2 1 --steps 12\n")


def test_the_slurm_script_is_sound_and_without_a_program_says_how_it_is_used() -> None:
    script = str(FOLDER / "slurm.sh")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


def test_every_example_is_in_the_table() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*.sh")]):
        assert f"`{path.name}`" in table, path.name
    assert len((FOLDER / "minimal.py").read_text(encoding="utf-8").splitlines()) < 45
