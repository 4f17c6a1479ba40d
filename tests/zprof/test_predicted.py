"""Traces of simulations: every command says that they are predicted, and diff and report set them beside a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.zprof_command import Zprof
from tests.support.zprof_pages import data_of
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.rows import Row, RowKind, placed


@pytest.fixture
def plan(zprof: Zprof) -> Path:
    """As ``zprof simulate`` writes one: of the first of 16 ranks."""
    rows = sample_rows(units=5, level="alloc")
    return write_trace(Path("plan.zprof"), rows, simulated="h100", host="h100 (simulated)", world=16)


def test_every_command_says_that_it_is_predicted(plan: Path, zprof: Zprof) -> None:
    report = zprof("report", plan).stdout
    assert "held at the peak, by category (predicted)" in report and "time (predicted)" in report
    assert "simulated: this rank stands for all 16" in report and "reconciliation" not in report
    assert json.loads(zprof("report", plan, "--json").stdout)["runs"][0]["simulated"] == "h100"
    assert "(predicted)" in zprof("check", plan, "--max", "device.peak=1TiB").stdout
    assert "rank 0, predicted for h100 x 16:" in zprof("check", plan).stdout
    for page in ("timeline", "flamegraph"):
        assert zprof(page, plan, "-o", f"{page}.html").exit_code == 0
        said = "Predicted, not measured: h100" if page == "timeline" else "predicted for h100"
        assert said in json.dumps(data_of(Path(f"{page}.html")))
    for kind in ("perfetto", "speedscope", "csv", "prometheus", "tensorboard", "torch-snapshot"):
        found = zprof("export", plan, "--format", kind, "-o", f"out.{kind}")
        assert found.exit_code == 0 and ": predicted; " in found.stdout, kind
    assert " predicted " in zprof("top", plan, "--once").stdout
    assert "was simulated for cpu" in zprof("frag", plan).stdout


def test_diff_sets_a_plan_beside_every_rank_of_a_run(plan: Path, zprof: Zprof) -> None:
    Path("run").mkdir()
    for rank in (0, 1):
        write_trace(Path(f"run/{rank}.zprof"), sample_rows(units=4, level="alloc"), rank=rank, world=2)
    found = zprof("diff", plan, "run", "--fail-on", "step.median_ms>+1000000%")
    assert found.exit_code == 0, found.stderr
    assert "plan.zprof (predicted)" in found.stdout and "run (measured)" in found.stdout
    assert "plan.zprof is of 16 ranks, run/0.zprof of 2: not of one job" in found.stdout
    assert "rank 1 appeared" not in found.stdout
    said = json.loads(zprof("diff", plan, "run", "--json").stdout)
    assert [each["rank"] for each in said["ranks"]] == [0, 1]
    assert {each["a"]["simulated"] for each in said["ranks"]} == {"h100"}
    assert {each["b"]["simulated"] for each in said["ranks"]} == {None}
    broken = zprof("diff", plan, "run", "--fail-on", "device.peak<-1%")
    assert broken.exit_code == 3 and broken.stderr.count("device.peak is ") == 2


def test_what_a_run_held_before_its_first_step_is_not_set_beside_a_plan(plan: Path, zprof: Zprof) -> None:
    start = 1_000_000_000
    building = [
        Row(RowKind.ALLOC, placed("parameter", "device"), "model", 900 * MIB, start + 10, 0, 1),
        Row(RowKind.FREE, placed("parameter", "device"), "model", 900 * MIB, start + 20, 0, 1),
    ]
    held = Row(RowKind.ALLOC, placed("parameter", "device"), "model", 100 * MIB, start + 30, 0, 2)
    steps = [
        Row(kind, what, "", 0, start + 1000 * (4 * number + place))
        for number in range(1, 4)
        for place, (kind, what) in enumerate(
            [(RowKind.BEGIN, "forward"), (RowKind.END, "forward"), (RowKind.BEGIN, "step"), (RowKind.END, "step")]
        )
    ]
    saving = [Row(RowKind.ALLOC, placed("parameter", "device"), "model", 500 * MIB, start + 90_000, 0, 3)]
    run = write_trace(Path("run.zprof"), [*building, held, *steps, *saving])
    plain = json.loads(zprof("diff", run, run, "--json").stdout)["ranks"][0]["b"]["measures"]
    beside = json.loads(zprof("diff", plan, run, "--json").stdout)["ranks"][0]["b"]["measures"]
    assert (plain["device.peak"], plain["device.parameter.peak"]) == (900 * MIB, 900 * MIB)
    assert (beside["device.peak"], beside["device.parameter.peak"]) == (100 * MIB, 100 * MIB)


def test_a_report_of_a_run_shows_a_plan_beside_it(plan: Path, zprof: Zprof) -> None:
    run = write_trace(Path("run.zprof"), sample_rows(units=4, level="alloc"))
    shown = zprof("report", run, "--against", plan).stdout
    assert "predicted and measured" in shown and "plan.zprof (predicted)" in shown and "run.zprof (measured)" in shown
    said = json.loads(zprof("report", run, "--against", plan, "--json").stdout)
    assert said["against"]["ranks"][0]["a"]["simulated"] == "h100" and said["runs"][0]["simulated"] is None
    assert zprof("report", run, "--against", run).exit_code == zprof("report", plan, "--against", plan).exit_code == 2


def test_a_simulation_and_a_run_are_not_one_report(plan: Path, zprof: Zprof) -> None:
    run = write_trace(Path("run.zprof"), sample_rows(steps=1), rank=1, world=16)
    found = zprof("report", plan, run)
    assert found.exit_code == 1 and "of a run, " in found.stderr and "`zprof diff`" in found.stderr
