"""Spans, steps, exposed time, bandwidths and the remedy: each against a plain reference that loops."""

from __future__ import annotations

import dataclasses
import inspect
import json
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from offload.policy import Policy
from tests.support.zprof_traces import HEADER, MIB, sample_rows, spans_of, write_trace
from zprof.analysis import spans as spans_module
from zprof.analysis.analysis import Analysis
from zprof.analysis.bandwidth import Rate, rates
from zprof.analysis.coverage import Unseen
from zprof.analysis.measures import MEASURES, measures, numbers
from zprof.analysis.prefetch import Advice
from zprof.analysis.spans import Pairing, SpanTable
from zprof.analysis.stalls import SETTINGS, stalls
from zprof.analysis.steps import Steps, steps_of
from zprof.bench.store import Figure, bench_path, keep, stored
from zprof.rows import Row, RowKind, TraceError
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

MS = 1_000_000
START = 1_000_000_000
Span = tuple[str, str, float, float]
_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
REPEATED = settings(deadline=None, max_examples=150, suppress_health_check=_FIXTURES)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stored figures of the machine the tests run on are none of theirs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def spanned(*told: Span | tuple[str, str, float, float, int], points: Iterable[tuple[str, str, float]] = ()) -> list[Row]:
    """Rows of spans (what, key, begin in ms, end in ms, bytes) and points (what, key, ms), in the order of time."""
    rows = []
    for what, key, begin, end, *rest in told:
        nbytes = rest[0] if rest else 0
        rows.append(Row(RowKind.BEGIN, what, key, nbytes, START + round(begin * MS)))
        rows.append(Row(RowKind.END, what, key, nbytes, START + round(end * MS)))
    rows += [Row(RowKind.INSTANT, what, key, 0, START + round(at * MS)) for what, key, at in points]
    # An end goes before a begin of the same time, and both stay within the span that holds them.
    return sorted(rows, key=lambda row: (row.time_ns, row.kind != RowKind.END))


_FILES = iter(range(1 << 30))


def traced(folder: Path, rows: Sequence[Row], **changes: Any) -> Trace:
    return Trace.open(write_trace(folder / f"{next(_FILES)}.zprof", rows, **changes))


def listed(table: SpanTable) -> list[tuple[str, str, int, int, int, int]]:
    numbers = (table.begin_ns, table.end_ns, table.nbytes, table.thread)
    names = ([table.strings[code] for code in column] for column in (table.what, table.key))
    return list(zip(*names, *(column.tolist() for column in numbers), strict=True))


# Spans.


def paired(rows: Sequence[Row]) -> tuple[list[tuple[str, str, int, int, int, int]], list[tuple[str, str, int]], int]:
    """What `spans` should say: (spans, open spans, ends without a begin)."""
    opened: dict[tuple[str, str], list[Row]] = defaultdict(list)
    closed, lost = [], 0
    for row in sorted(rows, key=lambda row: row.time_ns):
        if row.kind == RowKind.BEGIN:
            opened[row.what, row.key].append(row)
        elif row.kind == RowKind.END and opened[row.what, row.key]:
            begin = opened[row.what, row.key].pop()
            nbytes = max(begin.nbytes, row.nbytes)
            closed.append((row.what, row.key, begin.time_ns, row.time_ns, nbytes, begin.thread))
        elif row.kind == RowKind.END:
            lost += 1
    left = [(row.what, row.key, row.time_ns) for rows in opened.values() for row in rows]
    return sorted(closed), sorted(left), lost


@st.composite
def jumbled(draw: st.DrawFn) -> list[Row]:
    """Rows of few names, so that spans nest, begin nowhere and end nowhere, each at most a few places from its time's."""
    shape = st.tuples(
        st.sampled_from([RowKind.BEGIN, RowKind.END, RowKind.END, RowKind.BEGIN, RowKind.INSTANT, RowKind.COUNTER]),
        st.sampled_from(["gather", "wait gather", "compute"]),
        st.sampled_from(["a", "b", "gather"]),
        st.integers(0, 9),
        st.integers(0, 30),
        st.integers(0, 3),
    )
    drawn = draw(st.lists(shape, max_size=120))
    return [
        Row(kind, what, key, nbytes, START + 10 * place + late, thread)
        for place, (kind, what, key, nbytes, late, thread) in enumerate(drawn)
    ]


@REPEATED
@given(rows=jumbled(), parts=st.integers(1, 9), block=st.integers(1, 40))
def test_spans_are_those_of_a_stack_for_each_name_however_the_rows_are_cut(
    tmp_path: Path, rows: list[Row], parts: int, block: int
) -> None:
    path = tmp_path / f"{next(_FILES)}.zprof"
    writer = Writer(path, HEADER)
    for part in range(0, len(rows), max(1, len(rows) // parts)):
        writer.rows(rows[part : part + max(1, len(rows) // parts)])
        writer.flush()
    writer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_module, "_BLOCK", block)
        patch.setattr(spans_module, "_LATE", 8)
        table = spans_of(Trace.open(path))
    closed, left, lost = paired(rows)
    assert (sorted(listed(table)), table.lost_ends) == (closed, lost)
    assert sorted((what, key, begin) for what, key, begin, *_ in (listed(table.open) if table.open else [])) == left
    assert table.begin_ns.tolist() == sorted(table.begin_ns.tolist())


def test_only_the_spans_asked_for_are_kept_by_name_or_beginning(tmp_path: Path) -> None:
    told = [("gather", "a", 0, 4), ("wait gather", "a", 1, 4), ("wait", "a", 2, 3), ("waits", "a", 2, 3)]
    told.append(("nvml[0]", "a", 4, 5))
    trace = traced(tmp_path, spanned(*told))
    assert len(spans_of(trace).of("nvml[0]")) == 1, "brackets of a name are no pattern"
    assert {row[0] for row in listed(spans_of(trace, ["wait *", "gather"]))} == {"gather", "wait gather"}
    assert {row[0] for row in listed(spans_of(trace).of("wait*"))} == {"wait gather", "wait", "waits"}


def test_open_spans_reach_to_the_last_row_of_the_recording(tmp_path: Path) -> None:
    rows = [Row(RowKind.BEGIN, "gather", "a", 5, START), Row(RowKind.COUNTER, "rss", "", 9, START + 70)]
    table = spans_of(traced(tmp_path, rows))
    assert len(table) == 0
    assert table.open is not None
    assert listed(table.open) == [("gather", "a", START, START + 70, 5, 0)]


def test_more_begins_than_can_be_open_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "_MOST_OPEN", 10)
    monkeypatch.setattr(spans_module, "_BLOCK", 20)
    monkeypatch.setattr(spans_module, "_LATE", 0)
    rows = [Row(RowKind.BEGIN, "gather", str(number % 7), 0, START + number) for number in range(5000)]
    trace = traced(tmp_path, rows)
    pairing = Pairing(trace)
    for chunk in trace.chunks():
        pairing.feed(chunk)
        assert pairing._carried is None or len(pairing._carried.what) <= 10
    table = pairing.table()
    assert table.open is not None and len(table.open) == 5000


def test_times_no_clock_gives_and_sizes_no_span_moves_are_errors_of_one_line(tmp_path: Path) -> None:
    trace = traced(tmp_path, [Row(RowKind.BEGIN, "gather", "a", 5, START)])
    (rows,) = trace.chunks()
    changes = ({"time_ns": 1 << 62}, {"time_ns": -1}, {"nbytes": 1 << 60}, {"nbytes": -1})
    for change in changes:
        wrong: dict[str, Any] = {name: np.array([value], np.int64) for name, value in change.items()}
        with pytest.raises(TraceError, match=r"\.zprof: .*record the run again") as caught:
            Pairing(trace).feed(dataclasses.replace(rows, **wrong))
        assert "\n" not in str(caught.value)


# Intervals.


def columns(pairs: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    return np.array([begin for begin, _ in pairs], np.int64), np.array([end for _, end in pairs], np.int64)


# Steps.


def bounds_ms(found: Any) -> list[tuple[float, float]]:
    return [((begin - START) / MS, (end - START) / MS) for begin, end in found.tolist()]


def test_a_step_reaches_from_the_end_of_one_optimizer_step_to_the_next(tmp_path: Path) -> None:
    rows = spanned(("forward", "m", 5, 7), ("step", "SGD", 8, 10), ("forward", "m", 14, 16), ("step", "SGD", 18, 20))
    assert bounds_ms(Analysis.of(traced(tmp_path, rows)).steps.bounds) == [(5, 10), (10, 20)]


def test_a_step_ends_also_where_the_next_forward_begins_at_that_very_time(tmp_path: Path) -> None:
    rows = spanned(*(part for at in (0, 10, 20) for part in (("forward", "f", at, at + 4), ("step", "AdamW", at + 6, at + 10))))
    found = steps_of(spans_of(Trace.open(write_trace(tmp_path / "run.zprof", sorted(rows, key=lambda row: row.time_ns)))))
    assert (found.bounds - START).tolist() == [[0, 10 * MS], [10 * MS, 20 * MS], [20 * MS, 30 * MS]]


def test_a_plain_script_has_steps_without_forwards(tmp_path: Path) -> None:
    rows = spanned(("step", "SGD", 8, 10), ("step", "SGD", 18, 20))
    assert bounds_ms(Analysis.of(traced(tmp_path, rows)).steps.bounds) == [(8, 10), (10, 20)]


def test_without_steps_the_last_update_before_the_next_forward_ends_one(tmp_path: Path) -> None:
    rows = spanned(
        *[("forward", "m", 0, 1), ("forward", "m", 2, 3), ("update", "a", 4, 5), ("update", "b", 5, 6)],
        *[("forward", "m", 7, 8), ("update", "a", 9, 10), ("update", "b", 10, 12)],
    )
    assert bounds_ms(Analysis.of(traced(tmp_path, rows)).steps.bounds) == [(0, 6), (6, 12)]


def test_optimizers_that_step_one_after_the_other_or_inside_another_share_a_step(tmp_path: Path) -> None:
    one = [("step", "SGD", 1, 2), ("step", "Adam", 3, 4), ("step", "SGD", 11, 12), ("step", "Adam", 13, 14)]
    assert bounds_ms(Analysis.of(traced(tmp_path, spanned(*one))).steps.bounds) == [(1, 4), (4, 14)]
    inside = [("step", "Lookahead", 1, 5), ("step", "SGD", 2, 3), ("step", "Lookahead", 11, 15), ("step", "SGD", 12, 13)]
    assert bounds_ms(Analysis.of(traced(tmp_path, spanned(*inside))).steps.bounds) == [(1, 5), (5, 15)]
    alike = [("forward", "m", 0, 1), ("step", "SGD", 1, 2), ("step", "SGD", 3, 4)]
    alike += [("forward", "m", 5, 6), ("step", "SGD", 7, 8)]
    assert bounds_ms(Analysis.of(traced(tmp_path, spanned(*alike))).steps.bounds) == [(0, 4), (4, 8)]


def test_where_no_optimizer_was_seen_there_is_no_step_but_the_recording(tmp_path: Path) -> None:
    trace = traced(tmp_path, spanned(("forward", "m", 0, 1), ("forward", "m", 2, 3)))
    found = Analysis.of(trace).steps
    assert (bounds_ms(found.bounds), found.count) == ([(0, 3)], 0)
    empty = traced(tmp_path, [])
    assert len(Analysis.of(empty).steps.bounds) == 0


# Stalls.


@REPEATED
@given(
    waits=st.lists(
        st.tuples(
            st.sampled_from(["wait gather", "wait fetch"]), st.sampled_from("abc"), st.integers(0, 80), st.integers(1, 15)
        ),
        max_size=20,
    ),
    cuts=st.lists(st.integers(0, 95), unique=True, min_size=2, max_size=7),
)
def test_every_moment_of_waiting_is_counted_once_in_its_step(waits: list[tuple[str, str, int, int]], cuts: list[int]) -> None:
    # Spans of one name do not cross, so those of a name that overlap are left out.
    kept: list[tuple[str, str, int, int]] = []
    for what, key, begin, length in waits:
        if all(other[:2] != (what, key) or begin >= other[3] or begin + length <= other[2] for other in kept):
            kept.append((what, key, begin, begin + length))
    strings = ["a", "b", "c", "wait gather", "wait fetch"]
    kept.sort(key=lambda span: span[2])
    whats, keys = (np.array([strings.index(str(span[place])) for span in kept], np.int32) for place in (0, 1))
    begin, end = columns([span[2:] for span in kept])
    zeros = np.zeros(len(kept), np.int64)
    table = SpanTable(strings, whats, keys, begin, end, zeros, zeros.astype(np.int32))
    cuts.sort()
    bounds = np.array(list(pairwise(cuts)), np.int64)
    found = stalls(table, Steps(bounds, "step"))

    painted: dict[int, tuple[str, str]] = {}
    for name, unit_name, first, last in sorted(kept, key=lambda span: (span[2], -span[3])):
        for tick in range(first, last):
            painted.setdefault(tick, (name.removeprefix("wait "), unit_name))
    per_step = [sum(low <= tick < high for tick in painted) for low, high in bounds.tolist()]
    assert found.per_step_ns.tolist() == per_step
    for unit in found.units:
        mine = [sum(painted.get(tick) == (unit.what, unit.key) for tick in range(low, high)) for low, high in bounds.tolist()]
        assert (unit.exposed_ns, unit.longest_ns) == (sum(mine), max(mine))
        assert mine[unit.longest_step] == unit.longest_ns
        assert unit.inner_ns <= unit.exposed_ns
    assert found.exposed_ns == sum(unit.exposed_ns for unit in found.units) == sum(per_step)


def test_a_wait_inside_another_is_the_outer_ones_and_named_as_its_cause(tmp_path: Path) -> None:
    rows = spanned(("wait gather", "a", 0, 10), ("wait fetch", "param/a", 1, 8), ("step", "SGD", 0, 20))
    table = spans_of(traced(tmp_path, rows))
    found = stalls(table, steps_of(table))
    assert [(unit.what, unit.key, unit.exposed_ns, unit.inner, unit.inner_ns) for unit in found.units] == [
        ("gather", "a", 10 * MS, "fetch", 7 * MS)
    ]
    assert found.share == 0.5


def test_what_is_fetched_for_an_optimizer_names_the_tier_of_its_states(tmp_path: Path) -> None:
    rows = spanned(("wait fetch", "optimizer/exp_avg/a", 0, 8), ("wait fetch", "param/a", 8, 10), ("step", "SGD", 0, 20))
    table = spans_of(traced(tmp_path, rows))
    first, second = stalls(table, steps_of(table)).units
    assert first.settings[0] == "[optimizer] tier" and "[parameter] tier" not in first.settings
    assert "[parameter] tier" in second.settings


def test_the_keys_a_stall_names_are_keys_of_a_policy_or_arguments_of_a_loader() -> None:
    policy, loader = Policy(), inspect.signature(DataLoader).parameters
    for what, names in SETTINGS.items():
        for named in names:
            table, _, key = named.removeprefix("[").rpartition("] ")
            known = loader if what == "data" else type(getattr(policy, table)).model_fields
            assert key in known, named


# Bandwidth.


def rated(folder: Path, *told: Any, **options: Any) -> dict[str, Rate]:
    return {rate.verb: rate for rate in rates(spans_of(traced(folder, spanned(*told))), **options)}


def test_bandwidth_is_bytes_over_the_time_in_which_anything_moved(tmp_path: Path) -> None:
    found = rated(tmp_path, ("disk read", "a", 0, 10, 100), ("disk read", "b", 5, 15, 50), ("disk read", "c", 30, 35, 300))
    rate = found["disk read"]
    assert (rate.count, rate.nbytes, rate.busy_ns) == (3, 450, 20 * MS)
    assert rate.bytes_per_s == pytest.approx(450 / 0.020)
    assert rate.median_bytes_per_s == pytest.approx(100 / 0.010)
    assert rate.waited_bytes_per_s is None


def test_inputs_that_are_gathered_again_are_counted_like_units(tmp_path: Path) -> None:
    told: list[Any] = [
        ("step", "SGD", 0, 5),
        ("gather activation", "blocks.0", 10, 20, 1000),
        ("wait gather activation", "blocks.0", 16, 20),
        ("step", "SGD", 30, 40),
    ]
    trace = traced(tmp_path, spanned(*told))
    found = Analysis.of(trace)
    values = measures(found)
    assert values["gather_activation.bytes_per_s"] == pytest.approx(100_000)
    (stall,) = found.stalls.units
    assert stall.what == "gather activation" and SETTINGS[stall.what][1] == "[activation] partition"


def test_a_gather_that_ended_unnoticed_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    told = [("gather", "a", 0, 100, 1000), ("gather", "b", 100, 110, 1000), ("wait gather", "b", 105, 110)]
    rate = rated(tmp_path, *told)["gather"]
    assert rate.waited_bytes_per_s == pytest.approx(1000 / 0.010)
    assert rate.reached_bytes_per_s == rate.waited_bytes_per_s


def test_a_rate_stands_beside_the_latest_figure_of_its_kind_of_device(tmp_path: Path) -> None:
    figures = [
        Figure("memcpy", 10_000.0, "2026-01-01"),
        Figure("memcpy", 20_000.0, "2026-02-01"),
        Figure("h2d", 40_000.0, "2026-01-01", "NVIDIA H200"),
    ]
    told = ("copy h2d", "a", 0, 100, 1000)
    assert rated(tmp_path, told, device="cpu", figures=figures)["copy h2d"].share_of_bench == pytest.approx(0.5)
    assert rated(tmp_path, told, device="cuda:0", figures=figures)["copy h2d"].share_of_bench == pytest.approx(0.25)
    assert rated(tmp_path, told)["copy h2d"].share_of_bench is None


# The remedy.


def pipelined(prefetch: int, costs: Sequence[tuple[float, float]], *, count: int = 4) -> list[Row]:
    """A run simulated as the runtime schedules it, for units of (compute, transfer) in ms, on one wire."""
    units = len(costs)
    told: list[Any] = []
    points: list[tuple[str, str, float]] = []
    now = wire = 0.0
    for _ in range(count):
        began = now
        for direction in ("forward", "backward"):
            first, launched = now, 0
            order = range(units) if direction == "forward" else range(units - 1, -1, -1)
            ends: dict[int, float] = {}
            began_at: dict[int, float] = {}
            for place, unit in enumerate(order):
                for ahead in list(order)[launched : place + 1 + prefetch]:
                    began_at[ahead], wire = now, max(now, wire) + costs[ahead][1]
                    ends[ahead] = wire
                launched = max(launched, min(units, place + 1 + prefetch))
                ready = max(now, ends[unit])
                if ready > now:
                    told.append(("wait gather", f"u{unit}", now, ready))
                told.append(("gather", f"u{unit}", began_at[unit], max(ready, now + 1e-3), round(costs[unit][1] * MIB)))
                now = ready + 1e-3
                spent = costs[unit][0] * (1 if direction == "forward" else 2)
                if direction == "forward":
                    told.append(("compute", f"u{unit}", now, now + spent))
                else:
                    points.append(("ready", f"u{unit}", now + spent))
                now += spent + 1e-3
            told.append((direction, "m", first, now))
        told.append(("step", "SGD", now, now + 1))
        now += 1.001
        assert now > began
    return spanned(*told, points=points)


def advised(folder: Path, rows: list[Row], policy: str | None = None) -> tuple[Advice, Analysis]:
    notes = {"policy": {"text": policy}} if policy is not None else None
    found = Analysis.of(traced(folder, rows, notes=notes))
    return found.advice, found


def compared(folder: Path, prefetch: int, costs: Sequence[tuple[float, float]]) -> tuple[Advice, float, float]:
    """What is advised, and the nanoseconds a step that are exposed and that one more unit really hides."""
    told, before = advised(folder, pipelined(prefetch, costs), json.dumps({"schedule": {"prefetch": prefetch}}))
    _, after = advised(folder, pipelined(prefetch + 1, costs))
    return told, before.stalls.ns_per_step, before.stalls.ns_per_step - after.stalls.ns_per_step


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("cost", [(2.0, 1.5), (1.0, 2.0), (3.0, 5.0), (1.0, 0.9)])
def test_for_units_alike_the_remedy_promises_what_one_more_unit_hides(
    tmp_path: Path, prefetch: int, cost: tuple[float, float]
) -> None:
    told, _, hidden = compared(tmp_path, prefetch, [cost] * 8)
    assert told.hides_ns_per_step == pytest.approx(hidden, abs=0.02 * MS) or (told.busy or 0) >= 0.9
    assert bool(told.remedies) == (prefetch == 0)
    if told.remedies:
        assert f"([schedule] prefetch = {prefetch + 1}) hides up to" in told.lines[0]


@settings(REPEATED, max_examples=60)
@given(
    costs=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=2, max_size=8), prefetch=st.integers(0, 3)
)
def test_the_remedy_never_promises_more_than_was_waited_for(
    tmp_path: Path, costs: list[tuple[float, float]], prefetch: int
) -> None:
    told, exposed, hidden = compared(tmp_path, prefetch, costs)
    assert 0 <= told.hides_ns_per_step <= exposed + 1
    if told.remedies or (told.busy or 0) < 0.9:
        assert hidden <= told.hides_ns_per_step + 0.05 * exposed + 0.05 * MS


def test_a_wire_that_is_busy_all_the_time_is_not_offered_more_prefetch(tmp_path: Path) -> None:
    rows = pipelined(1, [(0.1, 5.0)] * 8)
    told, _ = advised(tmp_path, rows, '{"schedule": {"prefetch": 1}, "parameter": {"tier": "disk"}}')
    assert told.busy is not None and told.busy > 0.9
    assert told.remedies == ()
    (line,) = told.lines
    for words in ("more prefetch cannot help", '[precision] param = "bf16"', "reshard_after_forward = false", 'tier = "host"'):
        assert words in line


def test_gathers_that_nobody_waits_for_need_no_remedy(tmp_path: Path) -> None:
    told, _ = advised(tmp_path, pipelined(2, [(5.0, 0.001)] * 8))
    assert (told.remedies, told.lines) == ((), ())


def test_gathers_that_send_nothing_are_as_long_as_the_buffers_they_fill(tmp_path: Path) -> None:
    rows = pipelined(0, [(2.0, 1.5), (2.0, 3.0)] * 4)
    told, _ = advised(tmp_path, rows)
    sizes = {row.key: row.nbytes for row in rows if row.what == "gather"}
    quiet = [row._replace(nbytes=0) for row in rows]
    ends = [row for row in rows if row.kind == RowKind.END and row.what == "compute"]
    quiet += [Row(RowKind.INSTANT, "release", row.key, sizes[row.key], row.time_ns) for row in ends]
    assert advised(tmp_path, quiet)[0] == told
    assert told.remedies


def test_the_most_a_policy_may_prefetch_is_not_exceeded(tmp_path: Path) -> None:
    told, _ = advised(tmp_path, pipelined(0, [(2.0, 1.5)] * 8), '{"schedule": {"prefetch": 16}}')
    assert told.remedies == ()


def test_a_policy_that_cannot_be_read_leaves_the_number_open(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"schedule": {"prefetch": "1"}}', "[" * 100_000, None):
        told, _ = advised(tmp_path, pipelined(0, [(2.0, 1.5)] * 8), text)
        assert "[schedule] prefetch = one more than it is" in told.lines[0]


# Measures.


def test_measures_are_all_documented_and_match_the_rows(tmp_path: Path) -> None:
    trace = traced(tmp_path, list(sample_rows(level="alloc")))
    found = Analysis.of(trace)
    values: dict[str, Any] = dict(measures(found))
    assert values.keys() <= MEASURES.keys()
    assert values["step.count"] == 5
    assert values["device.peak"] == found.ledger.peak("device").nbytes > 0
    assert values["rss.growth"] == values["rss.peak"] - HEADER.rss_nbytes
    inside = values["forward.ms_per_step"] + values["backward.ms_per_step"] + values["update.ms_per_step"]
    assert inside + values["outside.ms_per_step"] == pytest.approx(float(found.steps.warm.duration_ns.mean()) / 1e6)
    parts = sum(value for name, value in numbers(values).items() if name.startswith("exposed.") and name.count(".") == 2)
    assert parts == pytest.approx(values["exposed.ms_per_step"])


def test_what_a_recording_does_not_say_is_left_out_and_not_zero(tmp_path: Path) -> None:
    trace = traced(tmp_path, spanned(("gather", "a", 0, 1, 8)))
    values = measures(Analysis.of(trace))
    for name in ("rss.peak", "step.median_ms", "exposed.ms_per_step", "energy.joules_per_step", "disk_read.bytes_per_s"):
        assert isinstance(values[name], Unseen)
    assert values["device.peak"] == 0


def test_energy_is_the_rise_of_the_counters_over_the_steps(tmp_path: Path) -> None:
    rows = spanned(*[("step", "SGD", 10 * n + 9, 10 * n + 10) for n in range(4)])
    rows += [
        Row(RowKind.COUNTER, "nvml energy", gpu, 1_000_000 + 5 * at, START + at * MS)
        for at in range(0, 51, 5)
        for gpu in ("gpu0", "gpu1")
    ]
    trace = traced(tmp_path, sorted(rows, key=lambda row: row.time_ns))
    # 5 mJ a millisecond and GPU, 10 ms per step, two GPUs.
    assert measures(Analysis.of(trace))["energy.joules_per_step"] == pytest.approx(0.1)


def test_out_of_memory_is_counted(tmp_path: Path) -> None:
    trace = traced(tmp_path, spanned(points=[("oom", "device", 1), ("oom", "device", 2)]))
    assert measures(Analysis.of(trace))["oom.count"] == 2


def test_a_run_of_the_runtime_is_read_as_it_was_scheduled(tmp_path: Path) -> None:
    import torch

    import zhooks
    from zprof import Recorder

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    policy = {
        "parameter": {"tier": "disk"},
        "disk": {"path": str(tmp_path / "scratch")},
        "schedule": {"prefetch": 0},
        "units": {"min_numel": 1000},
    }
    attachment = zhooks.attach(model, policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "run.zprof", nvml="off")
    with attachment.observe(recorder):
        for _ in range(3):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
    recorder.close()
    attachment.detach()
    trace = Trace.open(tmp_path / "run.zprof")
    found = Analysis.of(trace)
    values: dict[str, Any] = dict(measures(found))
    assert (values["step.count"], found.steps.source) == (3, "step")
    # What attach writes to the disk, four flat buffers, may end only when somebody listens.
    assert found.table.lost_ends <= len(model)
    # The last step's writes may still be on their way when nobody listens any more.
    assert found.table.open is None or {found.table.strings[code] for code in found.table.open.what.tolist()} == {"disk write"}
    assert found.advice.prefetch == 0
    whats = {found.table.strings[code] for code in found.table.what.tolist()}
    assert {"forward", "backward", "gather", "compute", "step", "disk read"} <= whats
    assert 0 <= values["exposed.ms_per_step"] <= values["step.max_ms"]
    # Every unit is read for forward, all but the last, which stays, again for backward, and some for the update.
    assert values["disk_read.bytes_per_step"] >= (4 + 3) * 4 * (64 * 64 + 64)


# Stored figures.


def test_figures_are_kept_by_host_name_device_and_path(home: Path) -> None:
    first = [Figure("memcpy", 1e10, "2026-01-01"), Figure("disk read", 2e9, "2026-01-01", path="/scratch")]
    keep("node", first)
    keep("other", [Figure("memcpy", 3e10, "2026-01-01")])
    keep("node", [Figure("memcpy", 2e10, "2026-02-01"), Figure("disk read", 1e9, "2026-01-01", path="/tmp")])
    assert [(figure.bytes_per_s, figure.path) for figure in stored("node")] == [(2e10, ""), (2e9, "/scratch"), (1e9, "/tmp")]
    assert [figure.bytes_per_s for figure in stored("other")] == [3e10]
    assert stored("unknown") == []
    assert stat.S_IMODE(bench_path().stat().st_mode) == 0o600
    assert home in bench_path().parents


def test_figures_of_several_writers_are_all_kept() -> None:
    writers = [
        threading.Thread(target=keep, args=(f"host{number}", [Figure("memcpy", 1e9 + number, "2026")])) for number in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [stored(f"host{number}")[0].bytes_per_s for number in range(8)] == [1e9 + number for number in range(8)]


BROKEN: list[bytes] = [
    b"",
    b"[]",
    b"{",
    b'{"version": 2, "hosts": {}}',
    b'{"version": 1, "hosts": []}',
    b'{"version": 1, "hosts": {"node": [{"name": "memcpy"}]}}',
    b'{"version": 1, "hosts": {"node": [{"name": "memcpy", "bytes_per_s": NaN, "date": ""}]}}',
    b'{"version": 1, "hosts": {"node": [{"name": "warp", "bytes_per_s": 1, "date": ""}]}}',
    b"[" * 100_000,
    b" " * (2 << 20),
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
def test_a_store_that_is_broken_is_named_and_keeps_no_report_back(tmp_path: Path, body: bytes) -> None:
    bench_path().parent.mkdir(parents=True)
    bench_path().write_bytes(body)
    with pytest.raises(TraceError, match="run zprof bench again") as caught:
        stored("node")
    assert "\n" not in str(caught.value)
    assert Analysis.of(traced(tmp_path, [])).bench_problem == str(caught.value)


def test_the_store_is_json_that_people_can_read() -> None:
    path = keep("node", [Figure("memcpy", 1e10, "2026-01-01", "cpu")])
    told = json.loads(path.read_text())
    expected = {"name": "memcpy", "bytes_per_s": 1e10, "date": "2026-01-01", "device": "cpu", "path": ""}
    assert told["hosts"]["node"] == [expected]
