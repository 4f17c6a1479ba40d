"""What several ranks show together: one clock, who is late, who is slow, and which files make up a run."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.analysis.analysis import Analysis
from zprof.analysis.ranks import Lane, clocks, lane_of, skews, stragglers, traces_of
from zprof.rows import Row, RowKind, TraceError
from zprof.trace.reader import Trace

MS = 1_000_000
BEGIN_NS = HEADER.mono_ns


def lane(path: Path) -> Lane:
    return lane_of(Analysis.of(Trace.open(path)))


def rank_rows(late_ns: dict[str, int], work_ns: int = 20 * MS, steps: int = 6, shift_ns: int = 0) -> list[Row]:
    """Steps of 50 ms: each unit's gather begins at its place, but for what it is late by; ``work_ns`` of it is no wait."""
    rows = []
    for step in range(steps):
        begin = BEGIN_NS + shift_ns + step * 50 * MS
        rows.append(Row(RowKind.BEGIN, "forward", "model", 0, begin))
        for place, unit in enumerate(("a", "b")):
            at = begin + (place + 1) * MS + late_ns.get(unit, 0)
            rows.append(Row(RowKind.BEGIN, "gather", unit, 1 << 20, at))
            rows.append(Row(RowKind.END, "gather", unit, 1 << 20, at + MS // 2))
        rows.append(Row(RowKind.BEGIN, "wait gather", "b", 0, begin + 10 * MS))
        rows.append(Row(RowKind.END, "wait gather", "b", 0, begin + 60 * MS - work_ns - MS))
        rows.append(Row(RowKind.END, "forward", "model", 0, begin + 48 * MS))
        rows.append(Row(RowKind.BEGIN, "step", "SGD", 0, begin + 48 * MS))
        rows.append(Row(RowKind.END, "step", "SGD", 0, begin + 49 * MS))
    return sorted(rows, key=lambda row: row.time_ns)


def test_ranks_of_one_boot_share_a_clock_and_others_meet_by_the_wall(tmp_path: Path) -> None:
    third = {"boot": "other", "mono_ns": 5, "wall_ns": HEADER.wall_ns + 7}
    sent: dict[int, dict[str, Any]] = {0: {}, 1: {"host": "container"}, 2: third, 3: {"boot": ""}}
    lanes = [
        lane(write_trace(tmp_path / f"{rank}.zprof", rank_rows({}), rank=rank, world=4, **changes))
        for rank, changes in sent.items()
    ]
    found = clocks(lanes)
    assert [clock.by for clock in found] == ["monotonic", "monotonic", "wall", "wall"]
    assert [clock.offset_ns for clock in found] == [0, 0, BEGIN_NS - 5 + 7, 0]


def test_the_late_rank_of_each_unit_is_named_with_what_it_costs(tmp_path: Path) -> None:
    late = [{}, {"b": 3 * MS}, {"a": MS}, {}]
    lanes = [
        lane(write_trace(tmp_path / f"{rank}.zprof", rank_rows(each), rank=rank, world=4)) for rank, each in enumerate(late)
    ]
    found = skews(lanes)
    assert [(skew.what, skew.key, skew.rank, skew.late_ns, skew.times, skew.count) for skew in found] == [
        ("gather", "b", 1, 3 * MS, 6, 6),
        ("gather", "a", 2, MS, 6, 6),
    ]
    assert found[0].total_ns == 18 * MS
    assert skews(lanes, most=1) == found[:1]
    assert skews(lanes[:1]) == []


def test_clocks_that_are_apart_make_no_skew(tmp_path: Path) -> None:
    away = 77 * 3600 * 10**9
    header: dict[str, Any] = {"boot": "other", "host": "far", "mono_ns": BEGIN_NS + away}
    lanes = [
        lane(write_trace(tmp_path / "0.zprof", rank_rows({}), rank=0, world=2)),
        lane(write_trace(tmp_path / "1.zprof", rank_rows({}, shift_ns=away), rank=1, world=2, **header)),
    ]
    assert skews(lanes) == []


def test_ranks_that_recorded_different_lengths_are_compared_as_far_as_both_go(tmp_path: Path) -> None:
    lanes = [
        lane(write_trace(tmp_path / "0.zprof", rank_rows({}, steps=6), rank=0, world=2)),
        lane(write_trace(tmp_path / "1.zprof", rank_rows({"a": MS, "b": 2 * MS}, steps=4), rank=1, world=2)),
    ]
    assert [(skew.key, skew.rank, skew.count) for skew in skews(lanes)] == [("b", 1, 4), ("a", 1, 4)]


def test_the_skew_of_many_ranks_is_that_of_a_plain_count(tmp_path: Path) -> None:
    draw = random.Random(5)
    lanes = []
    plain: list[list[int]] = []
    for rank in range(5):
        begins = [BEGIN_NS + step * 10 * MS + draw.randrange(MS) for step in range(40)]
        rows = [row for at in begins for row in (Row(0, "reduce", "u", 8, at), Row(1, "reduce", "u", 8, at + 5))]
        lanes.append(lane(write_trace(tmp_path / f"{rank}.zprof", rows, rank=rank, world=5)))
        plain.append(begins)
    cost = [0] * 5
    for times_ in zip(*plain, strict=True):
        ordered = sorted(times_)
        cost[times_.index(ordered[-1])] += ordered[-1] - int((ordered[1] + ordered[2]) / 2)
    (skew,) = skews(lanes)
    assert (skew.rank, skew.total_ns) == (cost.index(max(cost)), max(cost))


def test_a_straggler_works_longer_than_the_median_rank_and_a_waiting_rank_is_none(tmp_path: Path) -> None:
    work = [20 * MS, 20 * MS, 26 * MS, 15 * MS]
    lanes = [
        lane(write_trace(tmp_path / f"{rank}.zprof", rank_rows({}, work_ns=each), rank=rank, world=4))
        for rank, each in enumerate(work)
    ]
    (slow,) = stragglers(lanes)
    assert (slow.rank, slow.work_ns - slow.median_ns) == (2, 6 * MS)
    assert stragglers([lanes[0], lanes[2]])[0].rank == 2
    assert stragglers([dataclasses.replace(each, work_ns=0) for each in lanes]) == []


def test_a_lane_keeps_the_collectives_of_its_rank_in_order(tmp_path: Path) -> None:
    later = {"mono_ns": BEGIN_NS + 5 * MS, "wall_ns": HEADER.wall_ns + 7 * MS}
    trace = Trace.open(write_trace(tmp_path / "t.zprof", sample_rows(steps=3, units=4), notes={"clock": later}))
    kept = lane_of(Analysis.of(trace))
    assert set(kept.begins) == {(what, f"model.layers.{unit}") for what in ("gather", "reduce") for unit in range(4)}
    assert {len(begins) for (what, _), begins in kept.begins.items() if what == "gather"} == {6}
    assert all(bool((begins[1:] > begins[:-1]).all()) for begins in kept.begins.values())
    assert [clock.drift_ns for clock in clocks([kept])] == [2 * MS]


# --- which files ------------------------------------------------------------------------------------------------------


def test_a_folder_is_its_traces_by_rank(tmp_path: Path) -> None:
    for name, rank in (("b", 0), ("a", 2), ("c", 1)):
        write_trace(tmp_path / f"{name}.zprof", rank_rows({}), rank=rank, world=3)
    (tmp_path / "notes.txt").write_text("no trace")
    assert [trace.path.name for trace in traces_of([tmp_path])] == ["b.zprof", "c.zprof", "a.zprof"]
    assert len(traces_of([tmp_path / "a.zprof", tmp_path])) == 3


def test_files_that_are_not_the_ranks_of_one_run_are_refused_in_one_line(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one.zprof", "two.zprof", "other.zprof"))
    write_trace(one, rank_rows({}), rank=1, world=2)
    write_trace(two, rank_rows({}), rank=1, world=2)
    write_trace(other, rank_rows({}), rank=0, world=3)
    (tmp_path / "empty").mkdir()
    for runs, said in (
        ([one, two], f"{two}: rank 1 is in {one} already; expected one trace per rank, name one of them"),
        ([one, other], f"{other}: of a run with 3 ranks, {one} of one with 2; report one run at a time, .*zprof diff"),
        ([tmp_path / "empty"], "empty: no .*zprof in this folder"),
        ([tmp_path / "none.zprof"], "none.zprof: cannot be read: No such file"),
    ):
        with pytest.raises(TraceError, match=said.replace("(", r"\(").replace(")", r"\)")) as caught:
            traces_of(runs)
        assert "\n" not in str(caught.value)
