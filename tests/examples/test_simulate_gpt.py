"""The jobs of ``simulate_gpt.py``, and the commands that docs/how-to/simulation.md shows with them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.zprof_traces import sample_rows, write_trace

JOBS = ROOT / "examples" / "simulate_gpt.py"


def shown() -> list[list[str]]:
    """The commands of the page, as words; but those that measure this machine for a minute, which have tests of their own."""
    text = (ROOT / "docs" / "how-to" / "simulation.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"zprof (?!bench )", line)]
    return [shlex.split(line, comments=True) for line in lines]


def run_page(folder: str) -> list[tuple[str, int, str]]:
    """In the process of the virtual device: each command of the page, its exit code, and what it printed."""
    from click.testing import CliRunner

    from zprof.cli import main

    before = Path.cwd()
    os.chdir(folder)
    try:
        found = [(" ".join(words), CliRunner().invoke(main, words[1:], prog_name="zprof")) for words in shown()]
    finally:
        os.chdir(before)
    return [(words, result.exit_code, result.output) for words, result in found]


@pytest.mark.slow
def test_the_commands_of_the_page_work_on_the_example(tmp_path: Path, virtual_ranks: Pool) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_trace(tmp_path / "run.zprof", sample_rows(steps=3, level="alloc"))
    [found] = virtual_ranks.run(f"{run_page.__module__}:run_page", folder=str(tmp_path))
    assert len(found) == len(shown()) >= 7
    for words, code, output in found:
        assert code == 0, f"{words}: {output}"
    assert "\nh100 x 16: " in found[0][2]


def simulate_billions() -> dict[str, float]:
    """In the process of the virtual device."""
    from zhooks import simulate
    from zprof.commands.jobs import load_job

    job = load_job(f"{JOBS}:billions")
    found = simulate(job.build, job.step, world=64, policy={"precision": {"param": "bf16"}}, check_races=False)
    return {"flops": found.flops, "nbytes": found.device.nbytes}


@pytest.mark.slow
def test_billions_of_parameters_are_simulated_without_their_memory(virtual_ranks: Pool) -> None:
    [found] = virtual_ranks.run(f"{simulate_billions.__module__}:simulate_billions")
    # Two FLOPs a parameter and token forward and four backward; attention and the head's loss come on top.
    least = 6 * 6.4e9 * 2 * 2048
    assert least < found["flops"] < 1.3 * least and found["nbytes"] < 80 << 30
