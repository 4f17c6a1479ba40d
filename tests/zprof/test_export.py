"""What ``zprof export`` writes: by the rules of each format, and read by the format's own tools where they are here."""

from __future__ import annotations

import csv
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.zprof_exports import Export, exporting, promtool, refused, well
from tests.support.zprof_formats import check_exposition, check_speedscope, check_trace_events
from tests.support.zprof_traces import HEADER, MIB, sample_rows, write_trace
from zprof.analysis.ledger import Ledger
from zprof.analysis.measures import MEASURES
from zprof.rows import Row, RowKind, placed
from zprof.show.exports import exported
from zprof.show.exports.prometheus import exposition, gauges, named
from zprof.trace.reader import Trace

BEGIN, END, INSTANT, COUNTER, ALLOC, FREE, SPAN = RowKind
START = HEADER.mono_ns


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    return exporting(tmp_path, monkeypatch)


def span(what: str, key: str, begin: int, end: int, *, thread: int = 0, nbytes: int = 0) -> list[Row]:
    return [
        Row(BEGIN, what, key, nbytes, START + begin, thread),
        Row(END, what, key, nbytes, START + end, thread),
    ]


def in_time(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.time_ns)


def events_of(path: str | Path) -> list[dict[str, Any]]:
    return check_trace_events(Path(path).read_bytes())


def named_slices(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["ph"] == "X":
            found[tracks[event["tid"]]].append(event)
    return found


# --- Perfetto -----------------------------------------------------------------------------------------------------------


def test_every_span_is_a_slice_with_its_time_to_the_nanosecond(export: Export) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    told = well(export(path, "--format", "perfetto"))
    assert told.startswith("run.perfetto.json: ") and told.endswith(" spans; open it at https://ui.perfetto.dev\n")
    slices = [event for event in events_of("run.perfetto.json") if event["ph"] == "X"]
    pairing = exported.read(Trace.open(path))
    assert len(slices) == pairing.count == len(pairing.table)
    bounds = {(round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))) for event in slices}
    times = zip((pairing.table.begin_ns - START).tolist(), (pairing.table.end_ns - START).tolist(), strict=True)
    assert bounds == set(times)


def test_levels_have_every_category_at_every_point_and_keep_the_peak(export: Export) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    well(export(path, "--format", "perfetto", "-o", "out"))
    counters = [event for event in events_of("out") if event["ph"] == "C"]
    device = [event["args"] for event in counters if event["name"] == "device bytes"]
    assert max(sum(args.values()) for args in device) == Ledger.of(Trace.open(path)).peak("device").nbytes
    total = [event["args"]["bytes"] for event in counters if event["name"] == "device total"]
    assert total == [sum(args.values()) for args in device]
    assert {(event["name"], *event["args"]) for event in counters if "bytes" in event["args"]} >= {("rss", "bytes")}


def test_samples_say_their_unit(export: Export) -> None:
    units = {"power": "mW", "throttle": "mask", "pcie tx": "bytes", "sm clock": "MHz"}
    rows = [Row(COUNTER, f"nvml {name}", "gpu0", 5, START + 9) for name in units]
    well(export(write_trace(Path("run.zprof"), rows), "--format", "perfetto", "-o", "out"))
    found = {(event["name"], *event["args"]) for event in events_of("out") if event["ph"] == "C"}
    assert found == {(f"nvml {name} gpu0", unit) for name, unit in units.items()}


def test_what_nests_is_on_its_thread_and_what_crosses_is_not_on_the_same_track(export: Export) -> None:
    rows = [
        *span("forward", "model", 0, 1000),
        *span("compute", "a", 10, 500),
        *span("compute", "a.b", 20, 500),
        *span("wait gather", "a.b", 20, 20),
        *span("compute", "c", 400, 900),
        *span("compute", "other", 400, 1400, thread=1),
        *span("gather", "a", 5, 300, nbytes=8),
        *span("gather", "b", 100, 200, nbytes=8),
    ]
    well(export(write_trace(Path("run.zprof"), in_time(rows)), "--format", "perfetto", "-o", "out"))
    slices = {name: [event["name"] for event in mine] for name, mine in named_slices(events_of("out")).items()}
    assert slices == {
        "thread 0": ["forward model", "compute a", "compute a.b", "wait gather a.b"],
        "thread 0 (2)": ["compute c"],
        "thread 1": ["compute other"],
        "gather": ["gather a"],
        "gather (2)": ["gather b"],
    }


def test_spans_that_no_track_takes_are_asynchronous_with_ids_of_their_own(export: Export) -> None:
    rows = [row for number in range(40) for row in span("gather", f"u{number}", number, 1000 + number, nbytes=4)]
    told = well(export(write_trace(Path("run.zprof"), in_time(rows)), "--format", "perfetto", "-o", "out"))
    events = events_of("out")
    aside = [event for event in events if event["ph"] == "b"]
    assert told.startswith("out: 40 spans;")
    assert len(aside) == 40 - 16 and {event["name"] for event in aside} == {"gather"}
    assert {event["args"]["key"] for event in aside} <= {f"u{number}" for number in range(40)}


def test_what_had_not_ended_is_drawn_to_the_end_and_marked(export: Export) -> None:
    rows = [Row(BEGIN, "step", "AdamW", 0, START + 7), *span("update", "a", 9, 20), Row(INSTANT, "oom", "a", MIB, START + 50)]
    well(export(write_trace(Path("run.zprof"), rows), "--format", "perfetto", "-o", "out"))
    events = events_of("out")
    (step,) = [event for event in events if event["name"] == "step AdamW"]
    assert step["args"] == {"unfinished": True} and step["dur"] == 0.043
    (failure,) = [event for event in events if event["ph"] == "i"]
    assert (failure["name"], failure["args"]) == ("out of memory", {"bytes": MIB, "key": "a"})


def test_ranks_are_processes_on_one_clock(export: Export) -> None:
    rows = span("gather", "a", 1000, 2000)
    write_trace(Path("0.zprof"), rows, world=3)
    write_trace(Path("1.zprof"), rows, world=3, rank=1)
    later = [row._replace(time_ns=row.time_ns - 700) for row in rows]
    clock = (HEADER.wall_ns + 500, START - 700)
    write_trace(Path("2.zprof"), later, world=3, rank=2, boot="other", host="far", wall_ns=clock[0], mono_ns=clock[1])
    well(export(".", "--format", "perfetto", "-o", "out"))
    events = events_of("out")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0 (node, cpu)", 2: "rank 1 (node, cpu)", 3: "rank 2 (far, cpu)"}
    assert {event["pid"]: event["ts"] for event in events if event["ph"] == "X"} == {1: 1.0, 2: 1.0, 3: 1.5}
    assert len({event["tid"] for event in events if event["name"] == "thread_name"}) == 3


@pytest.mark.slow
def test_a_file_stays_below_40_megabytes_and_says_what_it_left_out(export: Export) -> None:
    def rows() -> Iterator[Row]:
        for number in range(120_000):
            at = START + 100 * number
            name = "\x01" * 900 + str(number % 5000)
            yield Row(BEGIN, "gather" if number % 3 else "compute", name, 8, at, number % 7)
            yield Row(END, "gather" if number % 3 else "compute", name, 8, at + 50 + number % 13, number % 7)
            if number % 10 == 0:
                yield Row(COUNTER, f"quantity {number // 1000}", name, number, at)
        yield Row(COUNTER, placed("parameter", "device"), "m", MIB, START + 5)
        yield from span("wait gather", "kept", 5000, 5001)

    told = well(export(write_trace(Path("run.zprof"), rows()), "--format", "perfetto", "-o", "out"))
    assert Path("out").stat().st_size < 40_000_000
    assert " more, of at most 62 ns each, left out); open it" in told
    events = events_of("out")
    count = sum(event["ph"] in "Xb" for event in events)
    assert told.startswith(f"out: {count:,} spans ({120_001 - count:,} more, ")
    # A kind with few and short spans is not crowded out.
    assert [event["dur"] for event in events if event["name"] == "wait gather kept"] == [0.001]
    assert any(event["name"] == "device total" for event in events)


# --- speedscope ---------------------------------------------------------------------------------------------------------


def test_speedscope_has_the_peak_the_time_and_each_threads_order(export: Export) -> None:
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    told = well(export(path, "--format", "speedscope"))
    assert told.startswith("run.speedscope.json: 5 profiles, ") and told.endswith("; open it at https://www.speedscope.app\n")
    whole = check_speedscope(Path("run.speedscope.json").read_bytes())
    profiles = {profile["name"]: profile for profile in whole["profiles"]}
    kinds = ["device bytes at the peak", "host bytes at the peak", "time by verb and unit"]
    assert list(profiles) == [f"rank 0: {kind}" for kind in (*kinds, "thread 0, in order", "thread 1, in order")]
    assert profiles["rank 0: device bytes at the peak"]["endValue"] == Ledger.of(Trace.open(path)).peak("device").nbytes
    spent = exported.read(Trace.open(path)).spent_ns
    assert profiles["rank 0: time by verb and unit"]["endValue"] == sum(spent.values())
    names = [frame["name"] for frame in whole["shared"]["frames"]]
    stacks = [[names[frame] for frame in stack] for stack in profiles["rank 0: device bytes at the peak"]["samples"]]
    assert ["model", "model.layers", "model.layers.0", "model.layers.0.attn", "activation"] in stacks
    events = profiles["rank 0: thread 0, in order"]["events"]
    assert [names[event["frame"]] for event in events[:2]] == ["forward model train", "wait gather model.layers.0"]


def test_the_lines_that_made_a_storage_stand_below_its_module_the_outermost_first(export: Export) -> None:
    key = "blocks.0 <- lib/model.py:31:forward <- train.py:12:main"
    rows = [Row(ALLOC, placed("activation", "device"), key, MIB, START + 5, 0, 1)]
    well(export(write_trace(Path("run.zprof"), rows, level="stack"), "--format", "speedscope", "-o", "out"))
    whole = check_speedscope(Path("out").read_bytes())
    names = [frame["name"] for frame in whole["shared"]["frames"]]
    assert names == ["blocks", "blocks.0", "train.py:12:main", "lib/model.py:31:forward", "activation"]
    assert whole["profiles"][0]["samples"] == [[0, 1, 2, 3, 4]] and whole["profiles"][0]["weights"] == [MIB]


@pytest.mark.slow
def test_hundred_thousand_frames_and_paths_of_any_depth_stay_small(export: Export) -> None:
    what = placed("parameter", "device")
    rows = [Row(COUNTER, what, f"m.{number}.w{number}", number + 1, START + 5) for number in range(120_000)]
    rows.append(Row(COUNTER, what, "a." * 450, MIB, START + 5))
    well(export(write_trace(Path("run.zprof"), rows), "--format", "speedscope", "-o", "out"))
    whole = check_speedscope(Path("out").read_bytes())
    assert len(whole["shared"]["frames"]) > 200_000
    (profile,) = whole["profiles"]
    assert profile["endValue"] == sum(row.nbytes for row in rows) and len(profile["samples"]) == 100_001
    assert max(map(len, profile["samples"])) <= 33
    assert "(20,001 smaller)" in [frame["name"] for frame in whole["shared"]["frames"]]


# --- torch's snapshot ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchs_own_viewer_opens_the_snapshot(export: Export) -> None:
    _memory_viz = pytest.importorskip("torch.cuda._memory_viz")
    path = write_trace(Path("run.zprof"), sample_rows(level="alloc"), level="alloc")
    assert "addresses by a model of torch's CUDA allocator" in well(export(path, "--format", "torch-snapshot"))
    body = Path("run.pickle").read_bytes()
    assert body[:2] == b"\x80\x04"
    found = pickle.loads(body)
    for draw in (_memory_viz.segsum, _memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot):
        assert len(draw(found)) > 100
    for draw in (_memory_viz.segments, _memory_viz.memory):
        assert "model.layers" in draw(found, format_flamegraph=str) or draw is _memory_viz.segments


# --- CSV ----------------------------------------------------------------------------------------------------------------


def test_csv_gives_every_row_back(export: Export) -> None:
    rows = list(sample_rows(level="alloc"))
    write_trace(Path("0.zprof"), rows, world=2)
    write_trace(Path("1.zprof"), rows[:7], world=2, rank=1)
    assert well(export("0.zprof", "1.zprof", "--format", "csv", "-o", "out")).startswith(f"out: {len(rows) + 7:,} rows;")
    body = Path("out").read_bytes()
    heading, *lines = csv.reader(io.StringIO(body.decode(), newline=""))
    assert heading == ["rank", "kind", "what", "key", "nbytes", "time_ns", "thread", "ident"]
    expected = [(rank, RowKind(row.kind).name.lower(), *row[1:]) for rank, some in enumerate((rows, rows[:7])) for row in some]
    assert lines == [[str(cell) for cell in row] for row in expected]
    assert body.count(b"\r\n") == body.count(b"\n") == len(expected) + 1


def test_a_name_that_a_spreadsheet_would_run_as_a_formula_is_text(export: Export) -> None:
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "blocks.0"]
    write_trace(Path("0.zprof"), [Row(RowKind.INSTANT, name, name, 1, 1_000 + at, 0, 0) for at, name in enumerate(names)])
    well(export("0.zprof", "--format", "csv", "-o", "out"))
    _, *lines = csv.reader(io.StringIO(Path("out").read_bytes().decode(), newline=""))
    shown = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", "blocks.0"]
    assert [(line[2], line[3]) for line in lines] == list(zip(shown, shown, strict=True))


# --- Prometheus ---------------------------------------------------------------------------------------------------------


def test_every_measure_has_a_name_of_its_own_that_prometheus_would_choose() -> None:
    body = exposition(list(gauges([({"rank": "0"}, dict.fromkeys(MEASURES, 1.5))])))
    assert len(check_exposition(body)) == len(MEASURES)
    names = {measure.name: named(measure) for measure in MEASURES.values()}
    assert names["device.peak"] == ("zprof_device_peak_bytes", 1.0)
    assert names["step.median_ms"] == ("zprof_step_median_seconds", 1e-3)
    assert names["exposed.gather.ms_per_step"] == ("zprof_exposed_gather_per_step_seconds", 1e-3)
    assert names["exposed.percent"] == ("zprof_exposed_ratio", 1e-2)
    assert names["h2d.bytes_per_s"] == ("zprof_h2d_bytes_per_second", 1.0)
    assert names["gather.bytes_per_step"] == ("zprof_gather_per_step_bytes", 1.0)
    assert names["energy.joules_per_step"] == ("zprof_energy_per_step_joules", 1.0)
    assert names["step.count"] == ("zprof_steps", 1.0)
    promtool(body)


def test_a_value_that_is_no_number_is_left_out() -> None:
    assert not list(gauges([({"rank": "0"}, {"device.peak": float("nan"), "host.peak": float("inf")})]))


def test_samples_are_the_measures_in_base_units_one_a_rank(export: Export) -> None:
    write_trace(Path("0.zprof"), sample_rows(), world=2)
    write_trace(Path("1.zprof"), sample_rows(steps=3), world=2, rank=1, host='h"\\\n\rost')
    well(export("0.zprof", "1.zprof", "--format", "prometheus", "-o", "out.prom"))
    body = Path("out.prom").read_bytes()
    found = check_exposition(body)
    first = (("host", "node"), ("rank", "0"), ("run", "0.zprof"))
    second = (("host", 'h"\\\n\rost'), ("rank", "1"), ("run", "1.zprof"))
    assert found["zprof_steps"] == {first: 5, second: 3}
    assert found["zprof_device_peak_bytes"][first] == Ledger.of(Trace.open("0.zprof")).peak("device").nbytes
    assert 0.01 < found["zprof_step_median_seconds"][first] < 0.2
    assert os.stat("out.prom").st_mode & 0o444 == 0o444 & ~_umask()
    promtool(body)


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


# --- TensorBoard --------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_every_scalar(export: Export) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path = write_trace(Path("run.zprof"), [*sample_rows(level="alloc")], level="alloc")
    told = well(export(path, "--format", "tensorboard", "-o", "a folder"))
    assert "; tensorboard --logdir 'a folder' --samples_per_plugin scalars=" in told
    accumulator = accumulators.EventAccumulator("a folder/rank0", size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    assert told.startswith(f"a folder: {sum(map(len, found.values())):,} scalars;")
    assert {"device/activation bytes", "device/total bytes", "samples/rss bytes", "time/step ms"} <= set(found)
    peak = Ledger.of(Trace.open(path)).peak("device").nbytes
    assert max(scalar.value for scalar in found["device/total bytes"]) == np.float32(peak)
    assert [scalar.step for scalar in found["time/step ms"]] == list(range(5))
    assert found["time/step ms"][0].wall_time == pytest.approx(HEADER.wall_ns / 1e9, abs=2)


def test_a_folder_is_replaced_only_where_it_is_an_earlier_export(export: Export) -> None:
    path = write_trace(Path("run.zprof"), sample_rows())
    well(export(path, "--format", "tensorboard", "-o", "logs"))
    assert "exists already" in refused(export(path, "--format", "tensorboard", "-o", "logs"))
    well(export(path, "--format", "tensorboard", "-o", "logs", "--force"))
    (Path("logs") / "rank0" / "mine.txt").write_text("kept")
    assert "found something else" in refused(export(path, "--format", "tensorboard", "-o", "logs", "--force"))
    assert (Path("logs") / "rank0" / "mine.txt").read_text() == "kept"
    Path("file").write_text("kept")
    assert "expected a folder" in refused(export(path, "--format", "tensorboard", "-o", "file", "--force"))
