"""``zprof check``: limits in every unit, verdicts for people, programs and CI, and what is never called kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import MIB, sample_rows, write_trace
from zprof.analysis.coverage import Coverage
from zprof.analysis.limits import Limit, parse_limit, percent, shown
from zprof.analysis.measured import Measured
from zprof.analysis.measures import MEASURES
from zprof.commands.check import Verdict, junit
from zprof.rows import Row, RowKind, placed


@pytest.fixture
def zprof(zprof: Zprof) -> Zprof:
    write_trace(Path("run.zprof"), sample_rows())
    return zprof


def holding(path: Path, nbytes: int, **header: Any) -> Path:
    return write_trace(path, [Row(RowKind.COUNTER, placed("parameter", "device"), "a", nbytes, 1_000_000_001)], **header)


# Verdicts.


def test_limits_that_hold_are_said_and_the_exit_code_is_0(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof", "--max", "device.peak=69MiB", "--min", "step.count=5")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "run.zprof: ok: device.peak is 69 MiB, at most 69 MiB\nrun.zprof: ok: step.count is 5, at least 5\n"
    )


def test_a_broken_limit_comes_first_and_the_exit_code_is_3(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof", "--max", "host.peak=1GiB", "--max", "device.peak=68.5 MiB", "--min", "step.count=6")
    assert result.exit_code == 3
    assert result.stdout.splitlines()[:2] == [
        "run.zprof: FAILED: device.peak is 69 MiB, at most 68.5 MiB",
        "run.zprof: FAILED: step.count is 5, at least 6",
    ]


def test_a_byte_over_the_limit_is_over_it_and_the_line_says_how_far(zprof: Zprof) -> None:
    holding(Path("one.zprof"), 100 * MIB + 1)
    result = zprof("check", "one.zprof", "--max", "device.peak=100MiB")
    assert result.exit_code == 3
    assert result.stdout == (
        "one.zprof: FAILED: device.peak is 100 MiB, at most 100 MiB (104857601 to 104857600)\n"
    )
    assert zprof("check", "one.zprof", "--max", "device.peak=104857601").exit_code == 0


def test_every_rank_of_a_folder_is_held_to_every_limit(zprof: Zprof) -> None:
    for rank, nbytes in enumerate((5, 9, 7)):
        Path("ranks").mkdir(exist_ok=True)
        holding(Path(f"ranks/run.{rank}.zprof"), nbytes * MIB, rank=rank, world=3)
    result = zprof("check", "ranks", "--max", "device.peak=8MiB")
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        "ranks/run.1.zprof: FAILED: device.peak is 9 MiB, at most 8 MiB",
        "ranks/run.0.zprof: ok: device.peak is 5 MiB, at most 8 MiB",
        "ranks/run.2.zprof: ok: device.peak is 7 MiB, at most 8 MiB",
    ]


def test_without_limits_the_measures_are_printed(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof")
    assert result.exit_code == 0
    assert "device.peak                      69 MiB" in result.stdout
    assert "  absent: pinned.peak: not sampled: nothing reported pinned\n" in result.stdout


def test_all_measures_are_listed_with_their_meaning(zprof: Zprof) -> None:
    result = zprof("check", "--measures")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(MEASURES)


# What is not called kept.


def test_what_a_recording_does_not_say_fails_a_limit_on_it_in_one_line(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof", "--max", "pinned.peak=1GiB")
    assert (result.exit_code, result.stderr) == (3, "")
    assert result.stdout == (
        "run.zprof: FAILED: pinned.peak is absent: not sampled: nothing reported pinned; asked for at most 1 GiB\n"
    )


def test_a_recording_that_is_not_whole_is_never_ok(zprof: Zprof) -> None:
    whole = Path("run.zprof").read_bytes()
    Path("cut.zprof").write_bytes(whole[:-10])
    result = zprof("check", "cut.zprof", "--max", "device.peak=1GiB", "--junit", "out.xml")
    assert result.exit_code == 1
    assert "ok: device.peak" in result.stdout
    assert result.stderr.startswith("cut.zprof: ends inside a chunk")
    errors = ElementTree.parse("out.xml").getroot().findall("testsuite/testcase/error")
    assert len(errors) == 1
    assert json.loads(zprof("check", "cut.zprof", "--max", "device.peak=1GiB", "--json").stdout)["ok"] is False


@pytest.mark.parametrize("missing", ["none.zprof", "empty"])
def test_a_run_that_is_not_there_is_one_line(zprof: Zprof, missing: str) -> None:
    Path("empty").mkdir()
    result = zprof("check", missing, "--max", "device.peak=1GiB")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(missing)


# Wrong usage.


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("devise.peak=3", "devise.peak: no such measure; did you mean device.peak"),
        ("zzzzzzzz=3", "zzzzzzzz: no such measure; zprof check --measures lists them"),
        ("device.peak=3ms", "'device.peak=3ms': device.peak is in bytes, expected e.g. 38GiB or 512MB, found 'ms'"),
        ("device.peak=3%", "device.peak is in bytes"),
        ("step.p95_ms=3GiB", "step.p95_ms is in ms, expected e.g. 120ms or 1.5s, found 'GiB'"),
        ("gather.bytes_per_s=3GiB", "gather.bytes_per_s is in bytes/s, expected e.g. 3GiB/s"),
        ("step.count=3s", "step.count is in count, expected e.g. 12"),
        ("device.peak", "'device.peak': expected NAME=VALUE, e.g. device.peak=38GiB"),
        ("device.peak=", "expected NAME=VALUE"),
        ("device.peak=much", "expected a number such as 38GiB or 512MB, found 'much'"),
        ("device.peak=nan", "expected a number"),
        ("device.peak=1e400", "expected a number"),
        ("device.peak=3\x1b[31m", "expected a number"),
        ("energy.joules_per_step=3MJ", "energy.joules_per_step is in J"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_wrong_usage(zprof: Zprof, limit: str, said: str) -> None:
    result = zprof("check", "run.zprof", "--max", limit)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("limit", "amount"),
    [
        ("device.peak=38GiB", 38 * 2**30),
        ("device.peak = 38 gib ", 38 * 2**30),
        ("device.peak=1.5MB", 1.5e6),
        ("device.peak=17", 17),
        ("rss.growth=-1KiB", -1024),
        ("step.p95_ms=1.5s", 1500),
        ("step.p95_ms=250us", 0.25),
        ("step.p95_ms=450", 450),
        ("step.p95_ms=2 min 14s", 134_000),
        ("exposed.percent=40%", 40),
        ("gather.bytes_per_s=3GiB/s", 3 * 2**30),
        ("energy.joules_per_step=2kJ", 2000),
        ("oom.count=0", 0),
    ],
)
def test_values_take_the_units_of_their_measure(limit: str, amount: float) -> None:
    assert parse_limit(limit, ">").amount == pytest.approx(amount)


@given(text=st.text(max_size=60) | st.from_regex(r"[a-z.]{1,12}[=<>+]{1,3}[0-9.]{0,6}[A-Za-z%/]{0,4}"))
def test_any_text_is_a_limit_or_wrong_usage_of_one_line(text: str) -> None:
    try:
        parse_limit(text, ">")
    except click.BadParameter as error:
        assert "\n" not in error.message


@given(before=st.floats(-1e15, 1e15), value=st.floats(-1e15, 1e15))
def test_percent_has_the_sign_of_the_change(before: float, value: float) -> None:
    assert (percent(before, value) > 0) == (value > before) or abs(value - before) < 1e-300
    assert shown(value, "bytes")


# For programs.


def test_json_has_every_measure_and_verdict(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof", "--max", "device.peak=1MiB", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"]) == (3, False)
    assert told["runs"][0]["measures"]["device.peak"] == 69 * MIB
    assert told["limits"] == [
        {
            "path": "run.zprof",
            "rank": 0,
            "measure": "device.peak",
            "unit": "bytes",
            "bound": "max",
            "limit": MIB,
            "value": 69 * MIB,
            "why": None,
            "ok": False,
        }
    ]


def test_junit_has_a_case_for_each_limit_and_counts_what_failed(zprof: Zprof) -> None:
    result = zprof("check", "run.zprof", "--max", "device.peak=1MiB", "--max", "host.peak=1GiB", "--junit", "out.xml")
    assert result.exit_code == 3
    root = ElementTree.parse("out.xml").getroot()
    (suite,) = root.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert set(cases) == {"max device.peak=1MiB on rank 0", "max host.peak=1GiB on rank 0"}
    failure = cases["max device.peak=1MiB on rank 0"].find("failure")
    assert failure is not None and failure.get("message") == "run.zprof: FAILED: device.peak is 69 MiB, at most 1 MiB"
    assert [path.name for path in Path().iterdir() if "tmp" in path.name] == []


@given(path=st.text(st.characters(codec=None), min_size=1, max_size=40), damage=st.text(max_size=40))
def test_junit_stays_xml_whatever_files_are_called(path: str, damage: str) -> None:
    run = Measured(path, 0, {"device.peak": 5.0}, damage, Coverage("alloc", True, False, ()), {}, frozenset())
    limit = Limit(MEASURES["device.peak"], ">", "value", 3.0, "device.peak=3")
    root = ElementTree.fromstring(junit([run], [Verdict(run, limit, 5.0)]))
    case = root.find("testsuite/testcase")
    assert case is not None
    # XML reads white space in attributes as spaces; all else that it can hold is there.
    kept = "".join(c for c in path if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff")
    assert (case.get("classname") or "").split() == kept.split() or any(c in kept for c in "\r\x85\u2028")


def test_the_report_never_takes_the_place_of_the_run_or_of_nothing(zprof: Zprof) -> None:
    before = Path("run.zprof").read_bytes()
    result = zprof("check", "run.zprof", "--max", "device.peak=1GiB", "--junit", "./run.zprof")
    assert (result.exit_code, Path("run.zprof").read_bytes()) == (1, before)
    assert result.stderr == "run.zprof: is the run to check; name another file with --junit\n"
    result = zprof("check", "run.zprof", "--max", "device.peak=1GiB", "--junit", "missing/out.xml")
    assert (result.exit_code, result.stderr) == (1, "missing/out.xml: cannot be written: No such file or directory\n")


def test_names_of_files_cannot_command_the_terminal(zprof: Zprof) -> None:
    holding(Path("a\x1b[31m\n.zprof"), 5)
    result = zprof("check", "a\x1b[31m\n.zprof", "--max", "device.peak=1")
    assert result.exit_code == 3
    assert result.stdout == "a?[31m?.zprof: FAILED: device.peak is 5 B, at most 1 B\n"
