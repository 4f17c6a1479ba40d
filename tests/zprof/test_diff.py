"""``zprof diff``: what changed between two runs, rank by rank, and which changes fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click import BadParameter
from hypothesis import given
from hypothesis import strategies as st

from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.analysis.limits import parse_change
from zprof.rows import Row, RowKind, placed

START = 1_000_000_000


@pytest.fixture
def zprof(zprof: Zprof) -> Zprof:
    write_trace(Path("a.zprof"), sample_rows(units=4))
    write_trace(Path("b.zprof"), sample_rows(units=5, level="alloc"))
    return zprof


def holding(path: Path, nbytes: int, *, unit: str = "a", **header: Any) -> Path:
    rows = [
        Row(RowKind.COUNTER, placed("parameter", "device"), unit, nbytes, START + 1),
        Row(RowKind.BEGIN, "compute", unit, 0, START + 2),
        Row(RowKind.END, "compute", unit, 0, START + 3),
    ]
    return write_trace(path, rows, **header)


def folder(name: str, *nbytes: int, first: int = 0) -> None:
    Path(name).mkdir()
    for rank, held in enumerate(nbytes, first):
        holding(Path(name) / f"run.{rank}.zprof", held * MIB, rank=rank, world=len(nbytes) + first)


def test_a_run_compared_with_itself_has_not_changed(zprof: Zprof) -> None:
    result = zprof("diff", "a.zprof", "a.zprof", "--fail-on", "device.peak>+0%", "--fail-on", "device.peak>+0B")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "no measure changed\n", "")


def test_what_grew_is_shown_by_measure_category_and_unit(zprof: Zprof) -> None:
    result = zprof("diff", "a.zprof", "b.zprof")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "host.peak 36 MiB 45 MiB +9 MiB +25%" in lines
    assert any(line.startswith("activation on device 0 B 72.5 MiB +72.5 MiB") for line in lines)
    assert "model.layers.4 on host 0 B 9 MiB +9 MiB" in lines
    assert "units that appeared: model.layers.4" in lines
    assert not any("step.count" in line for line in lines)


def test_what_vanished_is_named(zprof: Zprof) -> None:
    assert "units that vanished: model.layers.4" in zprof("diff", "b.zprof", "a.zprof").stdout


def test_a_measure_that_only_one_run_has_is_shown_without_a_change(zprof: Zprof) -> None:
    write_trace(Path("idle.zprof"), [])
    lines = [" ".join(line.split()) for line in zprof("diff", "idle.zprof", "a.zprof").stdout.splitlines()]
    assert "step.count absent 5" in lines
    assert any(line.startswith("absent from idle.zprof: step.count, ") for line in lines)


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        ("device.peak>+10%", False),
        ("device.peak>+9.99%", True),
        ("device.peak<=110MiB", True),
        ("device.peak<-5%", False),
        ("device.peak > + 9 MiB", True),
    ],
)
def test_expressions_are_about_the_change_with_a_sign_and_about_the_run_without(
    zprof: Zprof, expression: str, fails: bool
) -> None:
    holding(Path("before.zprof"), 100 * MIB)
    holding(Path("after.zprof"), 110 * MIB)
    result = zprof("diff", "before.zprof", "after.zprof", "--fail-on", expression)
    assert result.exit_code == (3 if fails else 0)
    assert ("FAILED" in result.stderr) == fails


def test_every_expression_that_fails_is_listed(zprof: Zprof) -> None:
    holding(Path("before.zprof"), 100 * MIB)
    holding(Path("after.zprof"), 80 * MIB)
    limits = ["device.peak<-5%", "device.peak>+2%", "device.parameter.peak<-10MiB"]
    result = zprof("diff", "before.zprof", "after.zprof", *[word for limit in limits for word in ("--fail-on", limit)])
    assert result.exit_code == 3
    assert result.stderr.splitlines() == [
        "after.zprof: FAILED: device.peak<-5%: device.peak is 80 MiB, was 100 MiB (-20 MiB, -20%)",
        "after.zprof: FAILED: device.parameter.peak<-10MiB: device.parameter.peak is 80 MiB, was 100 MiB (-20 MiB, -20%)",
    ]


def test_growth_from_nothing_fails_every_percentage(zprof: Zprof) -> None:
    holding(Path("before.zprof"), 0)
    holding(Path("after.zprof"), 1)
    result = zprof("diff", "before.zprof", "after.zprof", "--fail-on", "device.peak>+1000%", "--json")
    assert result.exit_code == 3
    changed = {change["name"]: change for change in json.loads(result.stdout)["changed"]}
    assert changed["device.peak"] == {"name": "device.peak", "rank": 0, "a": 0.0, "b": 1.0, "percent": None}


def test_a_measure_that_cannot_be_compared_fails(zprof: Zprof) -> None:
    write_trace(Path("idle.zprof"), [])
    for a, b in (("idle.zprof", "a.zprof"), ("a.zprof", "idle.zprof")):
        result = zprof("diff", a, b, "--fail-on", "step.median_ms>+2%")
        assert result.exit_code == 3
        why = "step.median_ms is absent: no optimizer step was recorded"
        assert result.stderr == f"idle.zprof: FAILED: step.median_ms>+2%: {why}\n"


def test_ranks_are_compared_each_with_itself_and_the_worst_is_shown(zprof: Zprof) -> None:
    folder("before", 100, 200, 300)
    folder("after", 100, 260, 310)
    result = zprof("diff", "before", "after", "--fail-on", "device.peak>+10%")
    assert result.exit_code == 3
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "device.peak 200 MiB 260 MiB +60 MiB +30% 1" in lines
    assert result.stderr == (
        "after/run.1.zprof: FAILED: device.peak>+10%: device.peak is 260 MiB, was 200 MiB (+60 MiB, +30%)\n"
    )


def test_ranks_that_only_one_run_has_are_named(zprof: Zprof) -> None:
    folder("before", 1, 2)
    folder("after", 1, 2, 3)
    assert "rank 2 appeared" in zprof("diff", "before", "after").stdout.splitlines()
    assert json.loads(zprof("diff", "after", "before", "--json").stdout)["only_in_one"] == ["rank 2 vanished"]


def test_runs_without_a_rank_in_common_are_refused(zprof: Zprof) -> None:
    folder("before", 1, 2)
    folder("after", 1, 2, first=2)
    result = zprof("diff", "before", "after")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "expected a rank that the other run has too" in result.stderr


def test_json_has_both_runs_what_changed_and_what_failed(zprof: Zprof) -> None:
    result = zprof("diff", "a.zprof", "b.zprof", "--fail-on", "host.peak>+20%", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"], result.stderr) == (3, False, "")
    assert told["ranks"][0]["a"]["measures"]["host.peak"] == 36 * MIB
    assert {"name": "host.peak", "rank": 0, "a": 36 * MIB, "b": 45 * MIB, "percent": 25.0} in told["changed"]
    assert told["units"] == {"appeared": ["model.layers.4"], "vanished": []}
    assert [failed["expression"] for failed in told["failed"]] == ["host.peak>+20%"]
    assert told["held_at_peak"]["category"][0]["name"] == "activation on device"


def test_names_from_a_trace_are_shown_as_they_are_and_command_nothing(zprof: Zprof) -> None:
    holding(Path("before.zprof"), 1, unit="[red]x[/red]")
    holding(Path("after.zprof"), 1, unit="[/red]\x1b[2J\n")
    result = zprof("diff", "before.zprof", "after.zprof")
    assert result.exit_code == 0
    assert "[red]x[/red] on device" in result.stdout
    assert "units that appeared: [/red]?[2J?" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("device.peak>2%", "a change in percent needs a sign, e.g. device.peak>+2%"),
        ("devize.peak>+2%", "no such measure; did you mean device.peak"),
        ("device.peak>+2ms", "device.peak is in bytes"),
        ("device.peak=2", "expected NAME>VALUE or NAME<VALUE"),
        ("device.peak>", "expected NAME>VALUE or NAME<VALUE"),
        ("device.peak>>2", "expected a number such as 38GiB"),
        ("step.median_ms>+2GiB", "step.median_ms is in ms"),
    ],
)
def test_an_expression_that_cannot_be_meant_is_wrong_usage(zprof: Zprof, expression: str, said: str) -> None:
    result = zprof("diff", "a.zprof", "b.zprof", "--fail-on", expression)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@given(
    comparison=st.sampled_from([">", ">=", "<", "<="]),
    sign=st.sampled_from(["", "+", "-"]),
    amount=st.integers(0, 300),
    unit=st.sampled_from(["", "B", "%"]),
    before=st.integers(0, 300),
    after=st.integers(0, 300),
)
def test_an_expression_holds_when_its_words_do(
    comparison: str, sign: str, amount: int, unit: str, before: int, after: int
) -> None:
    text = f"device.peak{comparison}{sign}{amount}{unit}"
    if unit == "%" and not sign:
        with pytest.raises(BadParameter):
            parse_change(text)
        return
    limit = parse_change(text)
    right = -amount if sign == "-" else amount
    left = float(after - before) if sign else float(after)
    if unit == "%":
        # Without division: a change from 0 is above, or below, every percentage.
        left, right = float(100 * (after - before)), right * before
        if not before and after:
            left, right = float("inf"), 0
    expected = {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[comparison]
    if left != right:
        assert limit.broken(after, before) == expected
