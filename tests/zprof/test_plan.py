"""``zprof plan``: the best policies of a job on the command line, the policy it writes, and how it ends badly."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.policy import Policy
from tests.support.terminal import on_a_terminal
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

def speaks():
    print("loaded")
    return lambda: print("building") or build(), step
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
    assert result.exit_code == 3 and result.stdout == ""
    verdict = result.stderr[result.stderr.index("find_policy: ") :].splitlines()
    assert re.match(
        r"find_policy: does not fit on 2 ranks of h100, by simulation: needs [\d.]+ \w+ on the device per rank, "
        r"the device has 10 KiB \(stage 3, ",
        verdict[0],
    )
    assert verdict[1:] == [
        "Use more ranks, hardware with more memory, or a smaller batch or model.",
        "Of host and disk 0 bytes may be used: allow more.",
        "To try smaller micro-batches, give step the parameters micro_batch and accumulation with defaults.",
    ]


@on_a_device_in_python
@on_virtual()
def test_what_it_is_doing_is_on_stderr_from_the_start_and_stdout_is_json_alone() -> None:
    with folder():
        result = zprof("planned_job.py:speaks", "--world", "2", "--most", "1", "--json")
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[:2] == ["loaded", "zprof: searching policies for planned_job.py:speaks on h100 x 2: about 1 simulation ..."]
    assert json.loads(result.stdout)["best"] and any(line.startswith("simulated 1: stage ") for line in said)
    assert "building" in said and "building" not in result.stdout


@on_a_device_in_python
def test_on_a_terminal_one_line_is_rewritten_and_gone_at_the_end() -> None:
    with folder() as here:
        words = ["-m", "zprof", "plan", "planned_job.py:job", "--hardware", "rtx4090", "--most", "1"]
        code, shown = on_a_terminal(words, here)
    assert code == 0, shown
    drawn = shown[: shown.rindex("simulated 1: ")]
    assert "searching policies for planned_job.py:job" in drawn and "\n" not in drawn
    after = shown.rpartition("\x1b[2K")[2]
    assert "rtx4090 x 1, " in after and "searching" not in after and "simulated 1" not in after
    assert "one node of rtx4090 has 1 device; --nodes or --world takes another number" in after
    assert "--precision bf16,fp32 tries bf16 as well" in after


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
