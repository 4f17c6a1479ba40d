"""``zprof plan``: the best policies of a job on the command line, the policy it writes, and how it ends badly."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.policy import Policy
from tests.support.torches import on_a_device_in_python
from tests.support.virtual import on_virtual
from zprof.cli import main

JOB = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(2)])
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer):
    model(torch.empty(512, 256, device="virtual")).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def reads(model, optimizer):
    return model(torch.empty(512, 256, device="virtual")).mean().item()

def job():
    return build, step

def needs_data():
    return build, reads
"""
KEEPS = '[units]\nmin_numel = 0\n[precision]\nparam = "bf16"\n'


@contextmanager
def folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as made:
        Path(made, "planned_job.py").write_text(JOB)
        Path(made, "keeps.toml").write_text(KEEPS)
        os.chdir(made)
        try:
            yield Path(made)
        finally:
            os.chdir(before)


def zprof(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], catch_exceptions=False)


@on_virtual()
def test_the_best_are_printed_and_the_first_is_written_as_a_policy() -> None:
    with folder() as here:
        given = ("--policy", "keeps.toml", "--precision", "fp32", "--world", "8", "-o", "found.toml", "--json")
        told = zprof("planned_job.py:job", *given)
        assert told.exit_code == 0, told.output
        found = json.loads(told.stdout)
        written = Policy.load(here / "found.toml")
        assert Policy.of(found["best"][0]["policy"]) == written
        assert written.precision.param == "fp32"
        # Ten, and of the best one at most two depths, two sizes of units and two shares.
        assert found["simulations"] <= 16 and told.stderr.count("simulated ") >= found["simulations"]
        again = zprof("planned_job.py:job", "--world", "8", "-o", "found.toml")
        assert again.exit_code == 1 and "exists already" in again.stderr


@on_a_device_in_python
@on_virtual()
def test_where_nothing_fits_it_ends_with_three_and_one_line() -> None:
    with folder():
        result = zprof("planned_job.py:job", "--world", "2", "--device", "10KiB", "--host", "0", "--disk", "0")
    assert result.exit_code == 3
    said = [line for line in result.stderr.splitlines() if not line.startswith("simulated ")]
    assert len(said) == 1 and "The least needed, by simulation, is device " in said[0]


@on_a_device_in_python
@on_virtual()
def test_a_step_that_needs_data_is_one_line_that_names_its_own() -> None:
    with folder():
        result = zprof("planned_job.py:needs_data", "--world", "2")
    assert result.exit_code == 1 and "planned_job.py:15" in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.py:job"], 2, "missing.py"),
        (["planned_job.py:jab"], 2, "did you mean job?"),
        (["planned_job.py:job", "--device", "much"], 2, "expected bytes or a size"),
        (["planned_job.py:job", "--precision", "bf17"], 2, "expected some of bf16, fp16 and fp32"),
        (["planned_job.py:job", "--nodes", "2", "--world", "4"], 2, "expected one of them"),
        (["planned_job.py:job", "--nodes", "0"], 2, "--nodes"),
        (["planned_job.py:job", "--hardware", "h10"], 1, "did you mean h100"),
        (["planned_job.py:job", "--policy", "keeps.toml", "-o", "keeps.toml", "-f"], 1, "is the input"),
        (["planned_job.py:job", "--policy", "none.toml"], 1, "none.toml"),
        (["planned_job.py:job", "-o", "gone/found.toml"], 1, "gone/found.toml: cannot be written"),
        (["planned_job.py:job", "--device", "81GiB"], 1, "expected device from 0 to the 80 GiB that h100 has"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_simulated(arguments: list[str], code: int, said: str) -> None:
    with folder():
        result = zprof(*arguments)
    assert result.exit_code == code and said in result.output and "simulated" not in result.output
