"""What ``zprof report`` prints, for people and for programs, and how it says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.zprof_traces import HEADER, MIB, SHARD, WHOLE, sample_rows, write_trace
from zprof.analysis.ledger import Ledger
from zprof.bench import store as bench_store
from zprof.cli import main
from zprof.rows import Row, RowKind, placed
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

Report = Callable[..., Result]
COUNTER = RowKind.COUNTER


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_store, "bench_path", lambda: tmp_path / "bench.json")
    return lambda *arguments: CliRunner().invoke(main, ["report", *map(str, arguments)], prog_name="zprof")


def values(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert isinstance(told, dict)
    return told


def words(text: str) -> set[str]:
    return set(text.split())


def test_the_text_says_what_ran_who_held_what_what_is_left_and_what_was_waited_for(report: Report) -> None:
    policy = {"policy": {"text": json.dumps({"budget": {"host": 1 << 30}})}}
    write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc", notes=policy)
    result = report("run.zprof")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "train.py --steps 5"
    assert lines[1] == "rank 0 of 1, node, cpu; level alloc; 400 ms, 5 steps; 1,496 rows; run.zprof"
    headings = ["in short", "held at the peak, by category", "most held by", "reconciliation", "time", "bandwidth", "next"]
    assert [line for line in lines if line in headings] == headings
    held = lines[lines.index(headings[1]) + 3]
    assert held.split() == ["activation", "116", "MiB", "-", "71%", "█" * 17]
    assert [line for line in lines if line.startswith("in all")] == ["in all       164 MiB   72 MiB"]
    assert "device: 164 MiB at 0.021 s, in step 0" in lines
    assert "host: 72 MiB at 0.000 s; budget 1 GiB" in lines
    assert any(line.startswith("rss since start 96 MiB - ledger, device + host 96 MiB = unexplained") for line in lines)
    assert any(line.startswith("remedy: gather model.layers.") and "[schedule] prefetch" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("GiB/s       -       -")] == ["gather", "reduce", "disk"]
    assert "zprof flamegraph run.zprof" in lines


def test_the_values_are_those_of_the_ledger(report: Report) -> None:
    policy = {"policy": {"text": json.dumps({"budget": {"host": 1 << 30, "device": "50%"}})}}
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc", notes=policy)
    (run,) = values(report("run.zprof", "--json"))["runs"]
    ledger = Ledger.of(Trace.open(path))
    for tier in ("device", "host"):
        peak, told = ledger.peak(tier), run["tiers"][tier]
        assert told["bytes"] == told["peak_bytes"] == peak.nbytes == sum(told["groups"].values())
        assert told["groups"] == told["categories"] == ledger.table(peak, "category", tier)
        assert sum(holder["bytes"] for holder in told["holders"]) == peak.nbytes
        assert told["at_s"] == (peak.time_ns - HEADER.mono_ns) / 1e9
    assert run["measures"]["device.peak"] == ledger.peak("device").nbytes
    assert (run["tiers"]["host"]["budget_bytes"], run["tiers"]["device"]["budget_bytes"]) == (1 << 30, None)
    for line in run["reconciliation"]:
        assert line["bytes"] == line["said_bytes"] - line["against_bytes"]


def test_the_keys_of_version_1_stay(report: Report) -> None:
    for rank in (0, 1):
        rows = sample_rows(start_ns=HEADER.mono_ns + rank * 1000)
        write_trace(Path(f"run.{rank}.zprof"), rows, rank=rank, world=2)
    told = values(report("run.0.zprof", "run.1.zprof", "--json"))
    assert told["version"] == 1
    assert set(told) == {"version", "by", "at", "runs", "unreadable", "ranks", "summary", "next"}
    assert set(told["runs"][0]) == words(
        "file rank world simulated host device level level_chosen argv versions duration_s rows dropped_rows damage below_zero "
        "bench_problem end steps tiers residual reconciliation growth compute operators rss children recorded_children "
        "measures unseen not_recorded waits remedies data rates large_batch oom"
    )
    assert set(told["runs"][0]["tiers"]["device"]) == words(
        "bytes at_s step peak_bytes budget_bytes memory_bytes groups categories not_recorded holders"
    )
    assert set(told["runs"][0]["reconciliation"][0]) == words("name bytes said said_bytes against against_bytes likely at_s")
    assert set(told["runs"][0]["waits"][0]) == words("what unit ms_per_step waits longest_ms settings")
    assert set(told["runs"][0]["rates"][0]) == words(
        "verb count bytes busy_s bytes_per_s reached_bytes_per_s bench_bytes_per_s share_of_bench why"
    )
    assert set(told["ranks"]) == words(
        "world missing clocks skew skew_every stragglers peak_bytes work_ms step_ms wait_ms scores deviations outliers others"
    )
    assert set(told["ranks"]["skew"][0]) == words("what key rank late_ns times count total_ns")
    assert set(told["next"][0]) == {"do", "why"}


def test_every_key_is_in_the_help(report: Report) -> None:
    write_trace(Path("run.zprof"), sample_rows())
    told = values(report("run.zprof", "--json"))
    text = report("--help").stdout
    run = told["runs"][0]
    nested = (run["residual"], run["residual"]["rows"][0], run["tiers"]["device"])
    for keys in (told, run, *nested, run["reconciliation"][0], run["waits"][0], run["rates"][0]):
        for key in keys:
            assert key in text, key
    assert "zprof report run.*.zprof --by module" in text


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("category", ["gradient", "parameter"]),
        ("module", [f"model.layers.{unit}" for unit in range(3)]),
        ("unit", [f"model.layers.{unit}" for unit in range(3)]),
        ("tier", ["device"]),
        ("rank", ["rank 0"]),
    ],
)
def test_bytes_are_grouped_by_what_is_asked(report: Report, by: str, names: list[str]) -> None:
    write_trace(Path("run.zprof"), sample_rows(units=3))
    held = values(report("run.zprof", "--by", by, "--json"))["runs"][0]["tiers"]["device"]
    assert sorted(held["groups"]) == names
    # The backward that begins: everything as stored, one unit whole, its gradients whole.
    assert sum(held["groups"].values()) == held["bytes"] >= 3 * SHARD + 2 * WHOLE
    assert report("run.zprof", "--by", by).exit_code == 0


def test_a_steps_peak_is_the_highest_within_it(report: Report) -> None:
    grown = [
        row
        for step in range(4)
        for row in (
            Row(RowKind.BEGIN, "forward", "m", 0, HEADER.mono_ns + step * 1000 + 50),
            Row(RowKind.END, "forward", "m", 0, HEADER.mono_ns + step * 1000 + 60),
            Row(COUNTER, placed("activation", "device"), "u", (step + 1) * 100, HEADER.mono_ns + step * 1000 + 100),
            Row(COUNTER, placed("activation", "device"), "u", 10, HEADER.mono_ns + step * 1000 + 500),
            Row(RowKind.BEGIN, "step", "SGD", 0, HEADER.mono_ns + step * 1000 + 600),
            Row(RowKind.END, "step", "SGD", 0, HEADER.mono_ns + step * 1000 + 900),
        )
    ]
    write_trace(Path("run.zprof"), grown)
    for step in range(4):
        held = values(report("run.zprof", "--at", f"step:{step}", "--json"))["runs"][0]["tiers"]["device"]
        assert (held["bytes"], held["peak_bytes"], held["step"]) == ((step + 1) * 100, 400, step)
    assert "device: 100 B at 0.000 s, in step 0; the run's peak is 400 B" in report("run.zprof", "--at", "step:0").stdout


def test_ranks_are_told_together_with_who_is_late_and_who_is_missing(report: Report) -> None:
    Path("runs").mkdir()
    for rank in (0, 1, 3):
        rows = sample_rows(units=3 + (rank == 1), start_ns=HEADER.mono_ns + (rank == 3) * 40_000)
        write_trace(Path(f"runs/run.{rank}.zprof"), rows, rank=rank, world=4, boot="far" if rank == 3 else HEADER.boot)
    told = values(report("runs", "--by", "rank", "--json"))
    assert [run["rank"] for run in told["runs"]] == [0, 1, 3]
    peaks = told["ranks"]["peak_bytes"]["device"]
    # One more unit: its stored parameters, and its gradients.
    assert peaks["1"] - peaks["0"] == 2 * SHARD and peaks["0"] == peaks["3"]
    assert told["ranks"]["missing"] == [2]
    text = report("runs", "--by", "rank").stdout
    assert "3 ranks; shown in full is rank 1, whose device holds most" in text
    assert "device: rank 1 peaks 6 MiB above rank 0" in text
    assert "rank 3: aligned with the first by wall clock, so skews may be clock error" in text
    assert "not in this report, of 4 ranks: 2" in text
    assert "late to" in text


def test_tables_are_as_long_as_asked(report: Report, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "long.zprof", sample_rows(units=30, level="alloc"), level="alloc")

    def modules(text: str) -> int:
        part = text.partition("most held by")[2].partition("residual states")[0]
        return sum("model.layers" in line for line in part.splitlines())

    assert modules(report(str(path)).stdout) == 8
    assert modules(report(str(path), "--top", "3").stdout) == 3
    assert modules(report(str(path), "--top", "25").stdout) == 25, "the tiers' longest together"
    assert "28 more" in report(str(path), "--by", "module", "--top", "2").stdout
    for top, listed in ([], 20), (["--top", "30"], 30):
        told = values(report(str(path), "--json", *top))
        assert len(told["runs"][0]["tiers"]["device"]["holders"]) == listed
    assert report(str(path), "--top", "0").exit_code == 2


def test_bandwidths_are_held_against_what_the_machine_can_do(report: Report, tmp_path: Path) -> None:
    write_trace(Path("run.zprof"), sample_rows())
    assert "zprof bench" in report("run.zprof").stdout
    (before,) = [rate for rate in values(report("run.zprof", "--json"))["runs"][0]["rates"] if rate["verb"] == "gather"]
    figure = bench_store.Figure("gather", 2 * before["reached_bytes_per_s"], "2026-01-01T00:00:00")
    bench_store.keep(HEADER.host, [figure], tmp_path / "bench.json")
    (after,) = [rate for rate in values(report("run.zprof", "--json"))["runs"][0]["rates"] if rate["verb"] == "gather"]
    assert after["share_of_bench"] == pytest.approx(0.5)
    assert any(line.rstrip().endswith(" 50%") for line in report("run.zprof").stdout.splitlines() if line.startswith("gather"))


def test_out_of_memory_is_told_with_who_held_what(report: Report) -> None:
    note = {"kind": "budget", "tier": "host", "message": "host tier cannot admit optim/x", "nbytes": 5 * MIB, "free": MIB}
    write_trace(Path("run.zprof"), sample_rows(steps=1), notes={"oom": note | {"odd": float("nan")}})
    told = values(report("run.zprof", "--json"))["runs"][0]["oom"]
    assert told["nbytes"] == 5 * MIB and "odd" not in told
    assert any("5 MiB" in line for line in told["lines"])
    text = report("run.zprof").stdout
    assert "\nout of memory\n" in text and told["lines"][0] in text


def test_a_killed_run_and_lost_rows_are_said(report: Report) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(steps=30))
    path.write_bytes(path.read_bytes()[:-700])
    text = report("run.zprof").stdout
    assert "run.zprof: ends inside a chunk at byte" in text
    assert "run.zprof: has no end: the run was killed, or is still running" in text
    writer = Writer("end.zprof", HEADER)
    writer.rows(list(sample_rows(steps=1)))
    writer.close(reason="SIGTERM", exit=143)
    assert "end.zprof: the run ended with exit code 143 (SIGTERM)" in report("end.zprof").stdout


def test_frees_without_their_allocations_are_said(report: Report) -> None:
    rows = [Row(RowKind.FREE, placed("other", "device"), key, 8, HEADER.mono_ns + 5, 0, 1) for key in ("u", "v")]
    write_trace(Path("run.zprof"), rows)
    assert "run.zprof: 2 series end below zero: frees were recorded whose allocations were not" in report("run.zprof").stdout


def test_a_share_is_of_the_whole_only_and_what_is_known_beyond_it_is_said_in_words(report: Report) -> None:
    grown = ((300, 10), (310, 30))
    rows = [Row(COUNTER, "rss", "", HEADER.rss_nbytes + mib * MIB, HEADER.mono_ns + at) for mib, at in grown]
    rows.insert(1, Row(RowKind.ALLOC, placed("activation", "device"), "u", 40 * MIB, HEADER.mono_ns + 20, 0, 1))
    write_trace(Path("run.zprof"), rows, level="alloc")
    text = report("run.zprof").stdout
    assert "= unexplained in the process: none; what is known adds up to 30 MiB (300%) more than there is, at " in text
    assert "\nloaded before 300 MiB: python, torch" in text


def test_a_run_that_placed_nothing_is_told_what_would_show_more(report: Report) -> None:
    grown = [Row(COUNTER, "rss", "", HEADER.rss_nbytes + 64 * MIB, HEADER.mono_ns + 10)]
    write_trace(Path("run.zprof"), grown, level="events", zhooks=False)
    text = report("run.zprof").stdout
    assert "nothing was held that the recording saw" in text
    assert "unexplained in the process 64 MiB (100%)" in text
    assert "zprof run -o alloc.{rank}.zprof --level alloc train.py --steps 5" in text


@pytest.mark.parametrize(
    ("hosts", "found"), [("aa", "torchrun --nproc_per_node 2 -m"), ("ab", "torchrun ... -m"), ("a", "torchrun ... -m")]
)
def test_what_ran_on_several_ranks_is_recorded_again_on_as_many(report: Report, hosts: str, found: str) -> None:
    grown = [Row(COUNTER, "rss", "", HEADER.rss_nbytes + 64 * MIB, HEADER.mono_ns + 10)]
    for rank, host in enumerate(hosts):
        write_trace(Path(f"{rank}.zprof"), grown, rank=rank, world=2, level="events", host=host, argv=("-m", "my.train", "a b"))
    told = values(report(*(f"{rank}.zprof" for rank in range(len(hosts))), "--json"))
    assert f"{found} zprof run -o alloc.{{rank}}.zprof --level alloc -m my.train 'a b'" in [each["do"] for each in told["next"]]


# --- names are data, errors are one line ------------------------------------------------------------------------------

HOSTILE = ["[red]x[/red]", "\x1b[31mred\x1b[0m", "a\nb\r\tc", "\u202eevil", "[/]", "\ud800", "x" * 900, "名前.0.重み"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_no_name_of_a_trace_can_steer_the_terminal(report: Report, name: str) -> None:
    rows = [row._replace(key=name) for row in sample_rows(units=1, steps=2)]
    write_trace(Path("run.zprof"), rows, argv=(name,), host=name[:60])
    for by in ("unit", "category"):
        result = report("run.zprof", "--by", by)
        assert result.exit_code == 0, result.output
        letters = set(result.stdout) - {"\n"}
        assert all(letter.isprintable() for letter in letters), sorted(letters)
    if name.startswith("["):
        assert name in report("run.zprof", "--by", "unit").stdout
    assert values(report("run.zprof", "--json"))["runs"]


def test_bad_input_is_one_line_with_the_remedy(report: Report) -> None:
    Path("text.zprof").write_text("hello")
    Path("nothing.zprof").write_bytes(b"")
    Path("folder").mkdir()
    write_trace(Path("header.zprof"), [])
    write_trace(Path("plain.zprof"), [Row(RowKind.INSTANT, "ready", "u", 0, HEADER.mono_ns)])
    write_trace(Path("steps.zprof"), sample_rows(steps=3))
    write_trace(Path("again.zprof"), sample_rows(steps=3))
    for arguments, said in (
        (["none.zprof"], "none.zprof: cannot be read: No such file or directory; record one with zprof run -o none.zprof"),
        (["text.zprof"], "text.zprof: expected a trace of zprof, found something else; record one with zprof run"),
        (["nothing.zprof"], "nothing.zprof: expected a trace of zprof, found something else; record one with zprof run"),
        (["folder"], "folder: no *.zprof in this folder, expected the traces of a run; record with `zprof run -o`"),
        (["header.zprof"], "header.zprof: holds a header and no rows, expected a recorded run; record it again with "),
        (["steps.zprof", "--at", "step:3"], "steps.zprof: --at step:3: the recording has steps 0 to 2; --at step:2 is "),
        (["plain.zprof", "--at", "step:0"], "plain.zprof: --at step:0: the recording has no optimizer step; use --at peak"),
        (["steps.zprof", "again.zprof"], "again.zprof: rank 0 is in steps.zprof already; expected one trace per rank"),
    ):
        result = report(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(said) and result.stderr.count("\n") == 1, result.stderr


WRONG = [[], ["run.zprof", "--at", "step:x"], ["run.zprof", "--at", "end"], ["run.zprof", "--by", "x"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_wrong_usage(report: Report, arguments: list[str]) -> None:
    assert report(*arguments).exit_code == 2
