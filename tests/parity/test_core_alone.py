"""The core trains as plain PyTorch does where no package that plugs into it can be imported; what needs one names it.

pytest runs it, in processes of its own.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.parity import oracle, run
from tests.parity.cells import Cell
from tests.parity.closeness import compare
from tests.parity.core_alone import PLUGGED
from tests.support.paths import ROOT

TIMEOUT_S = 600
SLOW = pytest.mark.slow


EVERY = tuple(product((1, 2, 3), ("device", "host", "disk")))
#: Package -> what needs it.
NEEDED = {
    "live": ("apply", "freeze"),
    "report": ("memory", "describe", "grad_norms", "noise_scale", "calibrate"),
    "whole": ("step",),
    "resilience": ("recover", "resume", "save_to_peers", "catch_preemption", "preempted", "exit_if_preempted"),
}
FEW = ((1, "host"), (2, "disk"), (3, "device"))


@pytest.mark.parametrize(
    ("world", "placed"), [(1, FEW[2:]), (2, FEW), pytest.param(1, EVERY, marks=SLOW), pytest.param(2, EVERY, marks=SLOW)]
)
def test_the_core_trains_without_the_packages_that_plug_into_it(
    world: int, placed: tuple[tuple[int, str], ...], tmp_path: Path
) -> None:
    assert {"cpu_transport", "simulate", "integrations", *NEEDED} <= set(PLUGGED)
    cells = [
        Cell("gpt", stage, world=world, accumulation="twice", optimizer="adamw", tier=tier)
        for stage, tier in placed
    ]
    names = [cell.name for cell in cells]
    program = [sys.executable, "-m", "tests.parity.core_alone"]
    started = [
        subprocess.Popen(
            [*program, str(rank), str(world), str(tmp_path), *names], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    assert [process.returncode for process in started] == [0] * world, "\n".join(said)
    every = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(world)]
    for cell in cells:
        compare(cell, run.gather([records[cell.name] for records, _ in every]), oracle.train(cell))
    for _, said in every:
        packages = {name: text.partition(" needs the package zhooks.")[2].partition(",")[0] for name, text in said.items()}
        expected = {name: package for package, names in NEEDED.items() for name in names}
        assert packages == expected, said
