"""Runs of more ranks than a screen holds: who stands out comes first, others in few lines, and one trace is open at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tests.support.many_ranks import LARGE, SLOW, job
from tests.support.zprof_command import Zprof, zprof_in
from tests.support.zprof_pages import column, data_of
from tests.support.zprof_traces import HEADER, sample_rows, write_trace
from zprof.analysis.outliers import distances, figures_of, spread
from zprof.analysis.ranks import Lane, Lanes, skews

MS = 1_000_000
WORLD = 50


@pytest.fixture
def zprof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zprof:
    return zprof_in(tmp_path, monkeypatch)


def lane(rank: int, *, step: int | None = 100 * MS, work: int | None = 60 * MS, peak: int | None = 1 << 30) -> Lane:
    header = dataclasses.replace(HEADER, rank=rank, world=1000)
    wait = None if step is None or work is None else step - work
    return Lane(header, None, {}, work, step, {"device": peak}, True, wait)


# --- who stands out ---------------------------------------------------------------------------------------------------


def test_a_rank_stands_out_in_each_figure_that_is_far_from_the_median() -> None:
    lanes = [lane(rank, work=60 * MS + rank % 7 * MS // 10) for rank in range(40)]
    lanes[3] = lane(3, work=90 * MS)
    lanes[9] = lane(9, peak=2 << 30)
    first, second, *others = distances(figures_of(lanes), range(40))
    assert (first.rank, [odd.figure for odd in first.odds]) == (9, ["device peak"])
    assert (second.rank, {odd.figure: odd.value for odd in second.odds}) == (3, {"own work": 90 * MS, "waiting": 10 * MS})
    assert first.score == 100, "ranks alike are taken to differ by a hundredth"
    assert not any(each.odds for each in others) and len(others) == 38


def test_ranks_that_differ_by_little_or_all_by_much_do_not_stand_out() -> None:
    close = [lane(rank, work=60 * MS) for rank in range(20)] + [lane(20, work=64 * MS, peak=(1 << 30) + (50 << 20))]
    assert not any(each.odds for each in distances(figures_of(close), range(21)))
    wide = [lane(rank, work=(40 + rank) * MS) for rank in range(21)]
    assert not any(each.odds for each in distances(figures_of(wide), range(21)))


def test_what_most_ranks_do_not_use_is_large_on_the_one_that_does() -> None:
    lanes = [lane(rank, peak=0) for rank in range(9)] + [lane(9, peak=5 << 20)]
    (first, *others) = distances(figures_of(lanes), range(10))
    assert first.rank == 9 and [odd.figure for odd in first.odds] == ["device peak"] and not any(each.odds for each in others)


def test_a_figure_that_was_not_seen_is_no_figure_of_that_rank() -> None:
    lanes = [lane(rank) for rank in range(5)] + [lane(5, step=None, work=None, peak=None)]
    figures = figures_of(lanes)
    assert [len(figure.values) for figure in figures] == [5, 5, 5, 5]
    assert distances(figures, range(6))[-1].odds == ()
    assert figures_of([lane(0, step=None, work=None, peak=None)]) == []
    assert spread(figures[0], [0, 1, 2, 3, 4]) is None


# --- in bounded memory ------------------------------------------------------------------------------------------------


def test_of_too_many_collectives_the_same_ones_are_kept_of_all_ranks() -> None:
    whole, few = Lanes(), Lanes(most=2000)
    for rank in range(10):
        begins = np.arange(1000, dtype=np.int64) * MS + (MS // 4 if rank == 4 else rank)
        each = dataclasses.replace(lane(rank), begins={("gather", "a"): begins, ("reduce", "a"): begins[:500] + MS // 2})
        whole.add(each)
        few.add(each)
    assert (whole.every, few.every) == (1, 8)
    assert sum(len(times) for each in few.all for times in each.begins.values()) <= 2000
    assert {times.base is None for each in few.all for times in each.begins.values()} == {True}
    (found, _), (thin, _) = skews(whole.all), skews(few.all)
    assert (thin.rank, thin.key, thin.late_ns) == (found.rank, found.key, found.late_ns) == (4, "a", MS // 4 - 5)
    assert (found.times, found.count, thin.times, thin.count) == (1000, 1000, 125, 125)


def test_lanes_keep_one_of_each_unit_where_even_those_are_too_many() -> None:
    kept = Lanes(most=1)
    for rank in range(3):
        kept.add(dataclasses.replace(lane(rank), begins={("gather", str(unit)): np.arange(9) for unit in range(4)}))
    assert {len(times) for each in kept.all for times in each.begins.values()} == {1}


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_of_many_ranks_begins_with_those_that_stand_out(zprof: Zprof) -> None:
    job(Path("runs"), WORLD)
    text = zprof("report", "runs").stdout
    assert text.index("\nranks\n") < text.index("\nheld at the peak")
    rows = [line.split() for line in text.partition("\nranks\n")[2].partition("\nheld at")[0].splitlines()]
    assert rows[2][:5] == [str(LARGE), "node1", "256", "MiB", "100"] and rows[3][:2] == [str(SLOW), "node0"]
    assert "own work +46%, waiting -86%" in text and "device peak +300%" in text
    assert [row[:3] for row in rows[5:8]] == [["48", "others,", each] for each in ("median", "lowest", "highest")]
    assert rows[5][3:5] == ["64", "MiB"]
    assert sum(row[:1] == [str(rank)] for row in rows for rank in range(WORLD) if rank != 48) == 2, "nobody else has a row"
    assert len(text.splitlines()) < 80


def test_json_has_the_score_of_every_rank_and_what_the_others_are_like(zprof: Zprof) -> None:
    job(Path("runs"), WORLD)
    ranks = json.loads(zprof("report", "runs", "--json").stdout)["ranks"]
    assert [each["rank"] for each in ranks["outliers"]] == [LARGE, SLOW] and ranks["others"]["count"] == WORLD - 2
    assert list(ranks["scores"])[:2] == [str(LARGE), str(SLOW)] and len(ranks["scores"]) == WORLD
    (odd,) = ranks["outliers"][0]["odd"]
    assert (odd["figure"], odd["value_bytes"], odd["median_bytes"]) == ("device peak", 256 << 20, 64 << 20)
    assert {odd["figure"] for odd in ranks["outliers"][1]["odd"]} == {"own work", "waiting"}
    over = {each["figure"]: each for each in ranks["others"]["figures"]}
    waits = [value for rank, value in ranks["wait_ms"].items() if int(rank) not in (LARGE, SLOW)]
    assert over["waiting"]["median_ms"] == pytest.approx(median(waits), abs=1e-5)
    assert (over["waiting"]["low_ms"], over["waiting"]["high_ms"]) == (min(waits), max(waits))
    assert ranks["skew_every"] == 1


def test_ranks_that_are_all_alike_are_said_to_be(zprof: Zprof) -> None:
    job(Path("runs"), WORLD, alike=True)
    text = zprof("report", "runs").stdout
    assert "\nno rank stands out\n" in text and "stands out in" not in text and f"{WORLD} ranks nearer the median" in text
    rows = zprof("report", "runs", "--top", "3").stdout.partition("\nranks\n")[2].splitlines()
    assert [bool(row.split()[0].isdigit()) for row in rows[2:5]] == [True] * 3, "who asks for ranks gets the farthest"


def test_a_trace_that_cannot_be_read_is_named_and_the_others_are_reported(zprof: Zprof) -> None:
    job(Path("runs"), WORLD)
    Path("runs/job7.3.zprof").write_bytes(b"torn")
    Path("runs/job7.4.zprof").unlink()
    write_trace(Path("runs/job7.4.zprof"), [], rank=4, world=WORLD)
    told = zprof("report", "runs", "--json")
    assert told.exit_code == 1
    body = json.loads(told.stdout)
    assert {Path(each["file"]).name for each in body["unreadable"]} == {"job7.3.zprof", "job7.4.zprof"}
    assert body["ranks"]["missing"] == [3, 4] and len(body["runs"]) == WORLD - 2
    text = zprof("report", "runs")
    assert text.exit_code == 1
    assert "left out: runs/job7.3.zprof: expected a trace of zprof, found something else" in text.stdout
    assert "left out: runs/job7.4.zprof: holds a header and no rows" in text.stdout
    assert f"not in this report, of {WORLD} ranks: 3, 4" in text.stdout


def test_what_is_said_of_many_traces_is_said_once(zprof: Zprof) -> None:
    job(Path("runs"), 20)
    for rank in range(6):
        # Killed: the end of the file is lost.
        path = Path(f"runs/job7.{rank}.zprof")
        os.truncate(path, path.stat().st_size - 5)
    (line,) = [line for line in zprof("report", "runs").stdout.splitlines() if "ends inside" in line]
    assert line == (
        "runs/job7.0.zprof, runs/job7.1.zprof, runs/job7.2.zprof, runs/job7.3.zprof and 2 more: "
        "ends inside a chunk: the run was killed, or is still writing"
    )


def test_what_to_run_next_names_just_the_files_that_were_read(zprof: Zprof) -> None:
    job(Path("runs"), WORLD)
    first = next_of(zprof, "runs")
    assert first[0].startswith(f"zprof timeline runs --rank {LARGE} --rank ") and "zprof timeline runs" in first
    for rank in range(WORLD):
        os.utime(f"runs/job7.{rank}.zprof", (1_000_000_000, 1_000_000_000))
    write_trace(Path("runs/job8.0.zprof"), sample_rows())
    older = [f"runs/job7.{rank}.zprof" for rank in range(WORLD)]
    assert "zprof timeline runs/job7.*.zprof" in next_of(zprof, *older), "the folder has a newer run"
    assert f"zprof timeline {' '.join(older[:5])}" in next_of(zprof, *older[:5])


def next_of(zprof: Zprof, *runs: str) -> list[str]:
    return [each["do"] for each in json.loads(zprof("report", *runs, "--json").stdout)["next"]]


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_page_of_many_ranks_has_the_figures_of_all_and_draws_a_few(zprof: Zprof) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'zhooks[pages]'")
    job(Path("runs"), WORLD)
    told = zprof("timeline", "runs", "-o", "page.html")
    assert told.exit_code == 0, told.stderr
    data = data_of(Path("page.html"))
    drawn = {int(rank): why for rank, why in data["ranks"]["drawn"].items()}
    assert drawn[LARGE] == "device peak +300%; highest device peak, 256 MiB" and "own work +46%" in drawn[SLOW]
    assert len(drawn) == 3 and "nearest to the median" in drawn.values()
    assert [run["rank"] for run in data["runs"]] == sorted(drawn)
    for rank, why in drawn.items():
        assert f"of {WORLD} ranks drawn: rank {rank}: {why}\n" in told.stdout
    ranks = json.loads(zprof("report", "runs", "--json").stdout)["ranks"]
    figures = {figure["name"]: figure for figure in data["ranks"]["figures"]}
    assert list(figures) == ["step", "own work", "waiting", "device peak"]
    assert column(figures["own work"]["values"]).tolist() == list(ranks["work_ms"].values())
    assert column(figures["device peak"]["values"]).tolist() == list(ranks["peak_bytes"]["device"].values())
    below = column(figures["waiting"]["apart"])
    assert below[SLOW] < -3.5 and ranks["deviations"]["waiting"][str(SLOW)] == pytest.approx(below[SLOW])
    assert column(data["ranks"]["farthest"]).tolist()[:2] == [LARGE, SLOW]
    assert set(data["ranks"]["odd"]) == {str(LARGE), str(SLOW)} and data["ranks"]["files"] == "runs"
    assert len(Path("page.html").read_bytes()) < 4 << 20
    body = json.loads(zprof("timeline", "runs", "-f", "-o", "page.html", "--json").stdout)
    assert body["ranks"] == WORLD and body["drawn"] == sorted(drawn)


def test_a_page_of_many_ranks_is_made_though_one_trace_cannot_be_read(zprof: Zprof) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'zhooks[pages]'")
    job(Path("runs"), WORLD)
    Path("runs/job7.3.zprof").write_bytes(b"torn")
    told = zprof("timeline", "runs", "-o", "page.html")
    assert told.exit_code == 1 and told.stderr.count("\n") == 1
    assert told.stderr.startswith("left out: runs/job7.3.zprof: expected a trace of zprof, found something else")
    assert data_of(Path("page.html"))["ranks"]["count"] == WORLD - 1


def test_ranks_that_are_chosen_are_drawn_and_no_other_trace_is_opened(zprof: Zprof) -> None:
    pytest.importorskip("plotly", reason="needs plotly: pip install 'zhooks[pages]'")
    job(Path("runs"), WORLD)
    for rank in set(range(WORLD)) - {3, 40}:
        Path(f"runs/job7.{rank}.zprof").write_bytes(b"torn")
    told = zprof("timeline", "runs", "--rank", "40", "--rank", "3", "-o", "page.html")
    assert told.exit_code == 0, told.stderr
    data = data_of(Path("page.html"))
    assert data["ranks"] is None and [run["rank"] for run in data["runs"]] == [3, 40]
    body = json.loads(zprof("report", "runs", "--rank", "3", "--rank", "40", "--json").stdout)
    assert [run["rank"] for run in body["runs"]] == [3, 40]


# --- exports ----------------------------------------------------------------------------------------------------------


def test_formats_that_hold_all_ranks_at_once_refuse_many_and_take_chosen_ones(zprof: Zprof) -> None:
    job(Path("runs"), WORLD)
    for kind in ("perfetto", "speedscope"):
        told = zprof("export", "runs", "--format", kind, "-o", "out")
        assert told.exit_code == 2 and not Path("out").exists()
        assert told.stderr == (
            f"--format {kind}: expected 16 ranks at most, found {WORLD}; choose some with --rank, repeated for each; "
            "zprof report shows which stand out\n"
        )
    assert zprof("export", "runs", "--format", "perfetto", "--rank", "7", "--rank", "8", "-o", "out").exit_code == 0
    events = json.loads(Path("out").read_bytes())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.partition(" (")[0] for name in names} == {"rank 7", "rank 8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["report", "runs", "--json"],
        ["timeline", "runs", "-o", "out", "--json"],
        ["export", "runs", "--format", "csv", "-o", "out"],
    ],
    ids=["report", "timeline", "csv"],
)
def test_a_thousand_ranks_are_read_with_few_open_files_and_in_little_memory(tmp_path: Path, words: list[str]) -> None:
    job(tmp_path / "runs", 1000, steps=20, units=20)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    # Not ru_maxrss: it begins as that of the process which started this one.
    code = f"import sys; from zprof.cli import main; main({words!r}, standalone_mode=False); "
    code += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, preexec_fn=bounded, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) << 10 < 300 << 20
    if words[0] == "report":
        body = json.loads(done.stdout)
        assert len(body["runs"]) == 1000 and [each["rank"] for each in body["ranks"]["outliers"]] == [LARGE, SLOW]
    elif words[0] == "timeline":
        body = json.loads(done.stdout)
        assert body["ranks"] == 1000 and {LARGE, SLOW} < set(body["drawn"]) and body["bytes"] < 5 << 20
