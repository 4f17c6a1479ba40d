"""The large-batch advice in ``zprof report``: from traces with a measured noise scale, and from a real run.

pytest runs it.  How good the measurement is tests/zhooks/report/test_noise_scale.py knows.
"""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zhooks
import zprof
from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.bench import store as bench_store
from zprof.cli import main
from zprof.rows import Row, RowKind


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_store, "bench_path", lambda: tmp_path / "bench.json")
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["report", "run.zprof", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def told() -> Any:
    return json.loads(run("--json"))["runs"][0]["large_batch"]


def shown() -> list[str]:
    lines = [" ".join(line.split()) for line in run().splitlines()]
    assert "large batch" in lines
    return lines[lines.index("large batch") :]


def write(*scales: int, batch: int, name: str = "GPT") -> None:
    rows = list(sample_rows())
    for at, scale in enumerate(scales):
        now = HEADER.mono_ns + 1000 * at
        for what, value in (("noise scale", scale), ("noise scale: batch", batch)):
            rows.append(Row(RowKind.COUNTER, what, name, value, now))
    write_trace(Path("run.zprof"), rows)


def test_a_run_that_measured_nothing_says_nothing() -> None:
    write_trace(Path("run.zprof"), sample_rows())
    assert told() == [] and "large batch" not in run()


def test_a_small_batch_may_grow_with_the_learning_rates_by_both_rules() -> None:
    write(500, 1000, batch=100)
    (found,) = told()
    assert (found["name"], found["noise_scale"], found["first"], found["batch"]) == ("GPT", 1000, 500, 100)
    assert [each["batch"] for each in found["growth"]] == [200, 400, 800]
    last = found["growth"][-1]
    assert (last["times"], last["sgd_lr"], last["adam_lr"]) == (8, 8.0, sqrt(8))
    assert last["steps"] == pytest.approx((1 + 1000 / 800) / (1 + 1000 / 100))
    assert last["samples"] == pytest.approx(8 * last["steps"])
    lines = shown()
    assert lines[1] == "GPT: noise scale about 1,000 samples (500 at first), batch 100"
    assert any("learning rate x k for SGD (linear), x sqrt(k) for Adam" in line for line in lines)
    assert "800 8 x 8 x 2.83 x 0.205 x 1.64" in lines


@pytest.mark.parametrize(
    ("scale", "batch", "words"),
    [(1000, 900, "as large as is useful"), (1000, 8000, "8 times the noise scale: one of about 1,000 takes about 1.8 times")],
)
def test_a_batch_at_or_above_the_noise_scale_is_told_so(scale: int, batch: int, words: str) -> None:
    write(scale, batch=batch)
    assert told()[0]["growth"] == [] and any(words in line for line in shown())


def test_no_name_can_steer_the_terminal() -> None:
    write(1000, batch=10, name="a\x1b[31mb")
    assert "\x1b" not in run()


def test_a_recorded_run_that_measured_has_its_estimate_in_the_report() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False)
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with zprof.record("run.zprof"), attachment.noise_scale(4) as noise:
        for _ in range(30):
            optimizer.zero_grad()
            for _ in range(4):
                model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    attachment.detach()
    estimate = noise.estimate
    assert estimate is not None and estimate.noise_scale is not None
    (found,) = told()
    assert (found["noise_scale"], found["batch"]) == (max(1, round(estimate.noise_scale)), 16)
    assert found["name"].startswith("Linear")
