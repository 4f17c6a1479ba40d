"""The first step of a script whose forwards nobody records: only its update is known, and no figure says more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.analysis.analysis import Analysis
from zprof.analysis.measures import measures
from zprof.analysis.steps import ONLY_UPDATE
from zprof.rows import Row, RowKind, placed
from zprof.trace.reader import Trace

MS = 1_000_000
#: Begin and end of each optimizer step, in ms.
UPDATES = ((100, 101), (150, 151), (200, 201))


def plain(path: Path, updates: tuple[tuple[int, int], ...] = UPDATES, forward: tuple[int, int] | None = None) -> Path:
    """A script without zhooks, whose first step holds most in its forward; ``forward`` is the one that was recorded."""
    def at(ms: int) -> int:
        return HEADER.mono_ns + ms * MS

    rows = [Row(RowKind.COUNTER, "rss", "", 1 << 28, at(ms)) for ms in range(0, 210, 10)]
    rows += [Row(RowKind.ALLOC, placed("activation", "device"), "a", 4096, at(90), 0, 1)]
    rows += [Row(RowKind.FREE, placed("activation", "device"), "a", 4096, at(95), 0, 1)]
    rows += [Row(RowKind.ALLOC, placed("temporary", "device"), "a", 1024, at(100), 0, 2)]
    for begin, end in updates:
        rows += [Row(RowKind.BEGIN, "step", "SGD", 0, at(begin)), Row(RowKind.END, "step", "SGD", 0, at(end))]
    if forward is not None:
        rows += [Row(RowKind.BEGIN, "forward", "m", 0, at(forward[0])), Row(RowKind.END, "forward", "m", 0, at(forward[1]))]
    notes = {"collectives": {"why": ""}}
    return write_trace(path, sorted(rows, key=lambda row: row.time_ns), level="alloc", notes=notes)


def figures(path: Path) -> dict[str, Any]:
    trace = Trace.open(path)
    return dict(measures(Analysis.of(trace)))


def test_the_first_step_of_a_plain_script_has_no_time_and_the_others_have(tmp_path: Path) -> None:
    found = figures(plain(tmp_path / "run.zprof"))
    assert found["step.first_ms"] == ONLY_UPDATE
    assert (found["step.count"], found["step.median_ms"], found["step.max_ms"]) == (3, 50, 50)
    assert found["update.ms_per_step"] == 1


def test_a_plain_script_of_one_step_has_a_count_and_an_update_and_no_figure_of_a_step(tmp_path: Path) -> None:
    found = figures(plain(tmp_path / "run.zprof", UPDATES[:1]))
    assert (found["step.count"], found["update.ms_per_step"]) == (1, 1)
    for name in ("step.median_ms", "step.p95_ms", "step.max_ms", "exposed.ms_per_step", "exposed.percent"):
        assert found[name] == ONLY_UPDATE


@pytest.mark.parametrize(("forward", "whole"), [((80, 90), True), ((110, 120), False)])
def test_a_forward_before_the_first_update_makes_the_first_step_whole(
    forward: tuple[int, int], whole: bool, tmp_path: Path
) -> None:
    steps = Analysis.of(Trace.open(plain(tmp_path / "run.zprof", forward=forward))).steps
    assert steps.unseen is (None if whole else ONLY_UPDATE) and steps.warm.unseen is None
    assert steps.bounds[0, 0] - HEADER.mono_ns == (80 if whole else 100) * MS


def test_the_report_says_what_of_the_first_step_it_saw(tmp_path: Path, zprof: Zprof) -> None:
    plain(Path("run.zprof"))
    told = zprof("report", "run.zprof").stdout
    assert f"step 0: {ONLY_UPDATE}" in told.splitlines()
    assert "step 50 ms median, the slowest took 50 ms" in told
    asked = zprof("report", "run.zprof", "--at", "step:0").stdout
    assert "held at most in step 0 (only its update was seen), by category" in asked and "device: 1 KiB at" in asked
    assert "held at most in step 1, by category" in zprof("report", "run.zprof", "--at", "step:1").stdout
    [run] = json.loads(zprof("report", "run.zprof", "--json").stdout)["runs"]
    assert run["steps"] == {"count": 3, "timed": 2, "marked_by": "step", "first_unseen": ONLY_UPDATE.why}
    assert (run["measures"]["step.first_ms"], run["unseen"]["step.first_ms"]) == (None, ONLY_UPDATE.why)


def test_a_report_of_one_step_does_not_call_it_the_whole_recording(zprof: Zprof) -> None:
    plain(Path("run.zprof"), UPDATES[:1])
    told = zprof("report", "run.zprof").stdout.splitlines()
    assert str(ONLY_UPDATE) in told and not any("the whole recording counts as one" in line for line in told)


def test_the_first_step_of_zhooks_is_whole(tmp_path: Path, zprof: Zprof) -> None:
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    [run] = json.loads(zprof("report", "run.zprof", "--json").stdout)["runs"]
    assert run["steps"]["first_unseen"] is None and run["measures"]["step.first_ms"] > 0
    assert "step 0" not in "".join(run["not_recorded"])


def test_a_limit_on_the_first_step_fails_and_says_why(zprof: Zprof) -> None:
    plain(Path("run.zprof"))
    done = zprof("check", "run.zprof", "--max", "step.first_ms=1s")
    assert done.exit_code == 3 and f"step.first_ms is absent: {ONLY_UPDATE}" in done.stdout
    assert zprof("check", "run.zprof", "--max", "step.max_ms=51ms").exit_code == 0
    told = json.loads(zprof("check", "run.zprof", "--json").stdout)["runs"][0]
    assert told["measures"]["step.first_ms"] is None and told["unseen"]["step.first_ms"] == ONLY_UPDATE.why


def test_runs_are_not_compared_by_a_first_step_that_was_not_seen(zprof: Zprof) -> None:
    plain(Path("a.zprof"))
    plain(Path("b.zprof"), ((100, 109), *UPDATES[1:]))
    told = zprof("diff", "a.zprof", "b.zprof", "--json")
    assert told.exit_code == 0, told.output
    failed = zprof("diff", "a.zprof", "b.zprof", "--fail-on", "step.first_ms>+1%")
    assert failed.exit_code == 3 and f"step.first_ms is absent: {ONLY_UPDATE}" in failed.stderr


def test_pages_and_exports_draw_no_first_step_that_was_not_seen(tmp_path: Path) -> None:
    from zprof.show.exports.tensorboard import write
    from zprof.show.pages.timeline import timeline
    from zprof.show.pages.tree import flamegraph

    trace = Trace.open(plain(tmp_path / "run.zprof"))
    page = timeline([trace])
    assert f"step 0: {ONLY_UPDATE}" in page["report"]["not_recorded"] and page["report"]["step_ms"] == 50
    assert "step 0, its update" in page["names"] and "step 0" not in page["names"] and "step 1" in page["names"]
    assert f"step 0: {ONLY_UPDATE}" in flamegraph(Trace.open(trace.path), 0)["missing"]
    assert not any("step" in line for line in flamegraph(Trace.open(trace.path), 1)["missing"])
    write([Trace.open(trace.path)], tmp_path / "events")
    written = b"".join(path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file())
    assert written.count(b"time/step ms") == 2
    one = timeline([Trace.open(plain(tmp_path / "one.zprof", UPDATES[:1]))])
    assert (one["report"]["steps"], one["report"]["step_ms"]) == (1, None) and one["units"]["unseen"] == ONLY_UPDATE.why


