"""What the ledger says of who held what and when: exact at every row, and nothing is ever lost between its series."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.zprof_traces import HEADER, MIB, sample_rows, write_trace
from zprof.analysis import tally
from zprof.analysis.curves import BYS, Curves, module_of
from zprof.analysis.ledger import Ledger, Moment, Series
from zprof.analysis.remainder import fullest_sample
from zprof.analysis.samples import Samples
from zprof.rows import CATEGORIES, TIERS, Row, RowKind, TraceError, placed, placement
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

COUNTER, ALLOC, FREE, INSTANT = (int(kind) for kind in (RowKind.COUNTER, RowKind.ALLOC, RowKind.FREE, RowKind.INSTANT))
BEGIN_NS = HEADER.mono_ns
Levels = dict[tuple[str, str], int]


def row(kind: int, what: str, key: str, nbytes: int, at_ns: int, ident: int = 0) -> Row:
    return Row(kind, what, key, nbytes, BEGIN_NS + at_ns, 0, ident)


def ledger_of(path: Path, rows: Iterable[Row], **header: Any) -> Ledger:
    return Ledger.of(Trace.open(write_trace(path, rows, **header)))


# --- against a plain reference ----------------------------------------------------------------------------------------


class State(NamedTuple):
    """After one row: the time by then, and the level of each series."""

    time_ns: int
    levels: Levels

    def on(self, tier: str, category: str | None = None) -> int:
        wanted = [placed(each, tier) for each in CATEGORIES if category in (None, each)]
        return sum(nbytes for (what, _), nbytes in self.levels.items() if what in wanted)


def reference(rows: Sequence[Row]) -> list[State]:
    """The definition, row by row: last counter, plus what was allocated, less what was freed."""
    counted: Levels = {}
    stored: Levels = {}
    now, states = BEGIN_NS, []
    for each in rows:
        now = max(now, each.time_ns)
        name = (each.what, each.key)
        if placement(each.what) is not None:
            if each.kind == COUNTER:
                counted[name] = each.nbytes
            elif each.kind in (ALLOC, FREE):
                stored[name] = stored.get(name, 0) + (each.nbytes if each.kind == ALLOC else -each.nbytes)
        both = counted.keys() | stored.keys()
        states.append(State(now, {name: counted.get(name, 0) + stored.get(name, 0) for name in both}))
    return states


def told(ledger: Ledger, when: int | Moment) -> Levels:
    levels = ledger.at(when).tolist()
    return {(placed(each.category, each.tier), each.key): n for each, n in zip(ledger.series, levels, strict=True) if n}


def some(levels: Levels) -> Levels:
    return {name: nbytes for name, nbytes in levels.items() if nbytes}


WHATS = ["parameter on host", "activation on device", "gradient on device", "optimizer on disk", "rss", "gather"]
ROWS = st.builds(
    row,
    st.integers(0, 5),
    st.sampled_from(WHATS),
    st.sampled_from(["model.0.a", "model.0.b", "model.1", "head", ""]),
    st.integers(0, 100),
    st.integers(0, 50),
)


@given(
    rows=st.lists(ROWS, max_size=60),
    chunks=st.lists(st.integers(1, 9), max_size=12),
    batch=st.sampled_from([1, 5, 1 << 15]),
    points=st.sampled_from([1, 5, 2000]),
    window=st.tuples(st.integers(0, 51), st.integers(0, 51)),
)
def test_every_level_and_peak_is_that_of_a_plain_count(
    rows: list[Row], chunks: list[int], batch: int, points: int, window: tuple[int, int]
) -> None:
    states = reference(rows)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tally, "BATCH_ROWS", batch)
        ledger = Ledger.of(Trace.open(_in_chunks(Path(folder) / "t.zprof", rows, chunks)), points=points)
        assert ledger.count == len(rows)
        for count in range(len(rows) + 1):
            when = Moment(0, 0, count)
            assert told(ledger, when) == some(states[count - 1].levels if count else {}), f"after {count} rows"
        for at_ns in range(BEGIN_NS - 1, BEGIN_NS + 52):
            before = [state.levels for state in states if state.time_ns <= at_ns]
            assert told(ledger, at_ns) == some(before[-1] if before else {}), f"at {at_ns}"
        for tier in TIERS:
            _check_peaks(ledger, states, tier, min(window) + BEGIN_NS, max(window) + BEGIN_NS)
            _check_curves(ledger, tier)


def _in_chunks(path: Path, rows: Sequence[Row], chunks: Iterable[int]) -> Path:
    writer = Writer(path, HEADER)
    done = 0
    for count in chunks:
        writer.rows(rows[done : done + count])
        writer.flush()
        done += count
    writer.rows(rows[done:])
    writer.close()
    return path


def _check_peaks(ledger: Ledger, states: list[State], tier: str, begin_ns: int, end_ns: int) -> None:
    totals = [state.on(tier) for state in states]
    peak, best = ledger.peak(tier), max([0, *totals])
    assert peak.nbytes == best == ledger.total(peak, tier)
    if best:
        at, place = totals.index(best), totals.index(best)
        # Pairs that follow at once, a free and an allocation of as much, belong to it; rows that change nothing may be between.
        changes = [row for row in range(at + 1, len(totals)) if totals[row] != totals[row - 1]]
        for up in changes[1::2]:
            if totals[up] != best:
                break
            place = up
        assert (peak.time_ns, peak.rows) == (states[place].time_ns, place + 1)
    for category in CATEGORIES:
        assert ledger.peak(tier, category).nbytes == max([0, *(state.on(tier, category) for state in states)])
    before = [total for state, total in zip(states, totals, strict=True) if state.time_ns < begin_ns]
    inside = [total for state, total in zip(states, totals, strict=True) if begin_ns <= state.time_ns <= end_ns]
    within = ledger.peak_between(tier, begin_ns, end_ns)
    assert within.nbytes == max([before[-1] if before else 0, *inside]) == ledger.total(within, tier)


def _check_curves(ledger: Ledger, tier: str) -> None:
    whole = ledger.curves("tier", tier)
    for by in BYS:
        curves = ledger.curves(by, tier)
        assert np.array_equal(curves.time_ns, whole.time_ns)
        assert np.array_equal(_sum(curves), _sum(whole))
    if ledger.peak(tier).nbytes:
        assert int(whole.levels[tier].max()) == ledger.peak(tier).nbytes


def _sum(curves: Curves) -> NDArray[np.int64]:
    return sum(curves.levels.values(), np.zeros(len(curves.time_ns), np.int64))


def test_storages_that_change_category_at_the_peak_are_named_as_what_they_became_whatever_the_batches(tmp_path: Path) -> None:
    place = "temporary on device", "gradient on device"
    rows = [row(ALLOC, "parameter on device", "w", 8, 0, 1)]
    for number in (2, 3):
        rows.append(row(ALLOC, place[0], "w", 4, number, number))
        rows += [row(FREE, place[0], "w", 4, number, number), row(ALLOC, place[1], "w", 4, number, number)]
    rows.append(row(FREE, place[1], "w", 4, 9, 2))
    for batch in range(1, len(rows) + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tally, "BATCH_ROWS", 1)
            ledger = Ledger.of(Trace.open(_in_chunks(tmp_path / f"{batch}.zprof", rows, [batch] * len(rows))))
        for peak in (ledger.peak("device"), ledger.peak_between("device", BEGIN_NS + 1, BEGIN_NS + 9)):
            assert peak == Moment(BEGIN_NS + 3, 16, 7), batch
            assert ledger.table(peak, "category", "device") == {"gradient": 8, "parameter": 8}


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    rows = sample_rows(steps=40, units=6, level="alloc")
    return ledger_of(tmp_path_factory.mktemp("ledger") / "run.zprof", rows, level="alloc")


def test_curves_are_thinned_to_what_was_asked_and_keep_each_tiers_peak(run: Ledger) -> None:
    assert run.count > 5000
    for points in (10, 100, 1000):
        curves = run.curves("category", "device", points=points)
        assert 0 < len(curves.time_ns) <= points
        assert bool((np.diff(curves.time_ns) >= 0).all())
        assert int(_sum(curves).max()) == run.peak("device").nbytes
    both = run.curves("tier", points=50)
    assert {tier: int(levels.max()) for tier, levels in both.levels.items()} == {
        tier: run.peak(tier).nbytes for tier in ("device", "host")
    }


def test_a_curve_at_its_points_is_the_ledger_at_that_time(run: Ledger) -> None:
    curves = run.curves("category", "device", points=40)
    for at, time_ns in enumerate(curves.time_ns.tolist()):
        assert sum(int(levels[at]) for levels in curves.levels.values()) == run.total(time_ns, "device")


def test_a_table_groups_by_what_is_asked_and_sums_to_the_peak(run: Ledger) -> None:
    peak = run.peak("device")
    for by in BYS:
        assert sum(run.table(peak, by, "device").values()) == peak.nbytes
    assert set(run.table(peak, "module", "device")) == {f"model.layers.{unit}" for unit in range(6)}
    assert {"model.layers.5", "model.layers.5.mlp"} <= set(run.table(peak, "unit", "device"))
    assert run.table(peak, "rank") == {"rank 0": run.total(peak)}


@pytest.mark.parametrize(
    ("key", "module"),
    [
        ("model.layers.3.attn.q_proj", "model.layers.3"),
        ("optim/model.layers.11", "model.layers.11"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("head", "head"),
        ("0.weight", "0"),
        ("", ""),
    ],
)
def test_a_module_is_the_path_up_to_its_first_number(key: str, module: str) -> None:
    assert module_of(key) == module


def test_the_stack_of_a_storage_is_no_part_of_its_module(tmp_path: Path) -> None:
    what = placed("activation", "device")
    rows = [row(ALLOC, what, f"h.0.mlp <- a.py:{line} <- b.py:1", 8, line, line) for line in (1, 2)]
    ledger = ledger_of(tmp_path / "t.zprof", rows, level="stack")
    assert ledger.series == [Series("activation", "device", f"h.0.mlp <- a.py:{line} <- b.py:1") for line in (1, 2)]
    assert ledger.table(ledger.end_ns, "unit") == {"h.0.mlp": 16}


def test_an_empty_ledger_answers_everything_with_nothing(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "t.zprof", [row(INSTANT, "ready", "u", 0, 5)])
    assert (ledger.series, ledger.tiers, ledger.categories, ledger.sampled()) == ([], (), (), [])
    assert ledger.peak("device") == Moment(BEGIN_NS, 0, 0)
    assert ledger.peak_between("host", BEGIN_NS, BEGIN_NS + 9).nbytes == 0
    assert ledger.curves("unit").levels == {}
    assert ledger.at(BEGIN_NS + 9).tolist() == []
    assert ledger.remainder(BEGIN_NS) == []


def test_a_damaged_chunk_is_left_out_and_said(tmp_path: Path) -> None:
    what = placed("parameter", "device")
    rows = [row(COUNTER, what, f"u{number % 7}", number, number) for number in range(60)]
    path = _in_chunks(tmp_path / "t.zprof", rows, [20, 20, 20])
    raw = bytearray(path.read_bytes())
    starts = [at for at in range(len(raw)) if raw[at : at + 4] == b"\xf5zp\xfa"]
    raw[starts[2] + 30] ^= 0xFF
    path.write_bytes(raw)
    ledger = Ledger.of(Trace.open(path))
    assert ledger.count == 40
    assert ledger.damage is not None and "damaged" in ledger.damage and "\n" not in ledger.damage
    states = reference([*rows[:20], *rows[40:]])
    for count in (0, 1, 20, 33, 40):
        assert told(ledger, Moment(0, 0, count)) == some(states[count - 1].levels if count else {})


@pytest.mark.parametrize("nbytes", [-1, 1 << 50])
def test_a_size_no_machine_has_is_one_line(tmp_path: Path, nbytes: int) -> None:
    path = write_trace(tmp_path / "t.zprof", [row(ALLOC, placed("other", "host"), "u", nbytes, 1, 1)])
    with pytest.raises(TraceError, match=r"^t.zprof: a row holds -?\d+ bytes, expected .*; record the run again$"):
        Ledger.of(Trace.open(path))


# --- samples and the remainder ----------------------------------------------------------------------------------------


def test_samples_keep_their_keys_and_their_highest_however_many_there_are(tmp_path: Path) -> None:
    rows = [row(COUNTER, "nvml power", f"gpu{number % 2}", (number * 37) % 1009, number) for number in range(4000)]
    ledger = ledger_of(tmp_path / "t.zprof", rows)
    assert ledger.sampled() == ["nvml power"]
    assert ledger.samples("rss") == {}
    for points in (10, 100, 10_000):
        found = ledger.samples("nvml power", points=points)
        assert list(found) == ["gpu0", "gpu1"]
        for key, (time_ns, value) in found.items():
            mine = [each for each in rows if each.key == key]
            assert len(time_ns) == len(value) <= min(points, 2000)
            assert bool((np.diff(time_ns) > 0).all())
            assert int(value.max()) == max(each.nbytes for each in mine)


def test_samples_are_bounded_and_the_highest_outlives_every_thinning() -> None:
    samples = Samples(most=64)
    for batch in range(50):
        time_ns = np.arange(batch * 10, batch * 10 + 10, dtype=np.int64)
        value = np.where(time_ns == 137, 999, time_ns % 100)
        samples.take(np.zeros(10, np.int32), np.ones(10, np.int32), value, time_ns)
    time_ns, value = samples.of(0, ["rss", "key"])["key"]
    assert len(value) <= 74
    assert (int(value.max()), int(time_ns[value.argmax()]), int(time_ns[-1])) == (999, 137, 499)


def test_on_a_cpu_the_remainder_is_what_rss_grew_by_beyond_device_and_host(tmp_path: Path) -> None:
    rows = [
        row(ALLOC, placed("activation", "device"), "u", 30 * MIB, 1, 1),
        row(COUNTER, placed("optimizer", "host"), "u", 10 * MIB, 2),
        row(COUNTER, placed("optimizer", "disk"), "u", 500 * MIB, 3),
        row(COUNTER, "rss", "", HEADER.rss_nbytes + 45 * MIB, 10),
        row(FREE, placed("activation", "device"), "u", 30 * MIB, 20, 1),
        row(COUNTER, "rss", "", HEADER.rss_nbytes + 9 * MIB, 100),
    ]
    ledger = ledger_of(tmp_path / "t.zprof", rows, level="events")
    (line,) = ledger.remainder(BEGIN_NS + 15)
    assert (line.nbytes, line.said_nbytes, line.ledger_nbytes, line.time_ns) == (5 * MIB, 45 * MIB, 40 * MIB, BEGIN_NS + 10)
    assert "--level alloc" in line.explanation
    (line,) = ledger.remainder(BEGIN_NS + 99)
    assert line.nbytes == -MIB and "not touched" in line.explanation


def test_libraries_loaded_before_the_first_storages_are_a_line_of_their_own(tmp_path: Path) -> None:
    rows = [
        row(COUNTER, "rss", "", HEADER.rss_nbytes + 100 * MIB, 5),
        row(ALLOC, placed("other", "device"), "u", MIB // 4, 6, 2),
        row(COUNTER, "rss", "", HEADER.rss_nbytes + 300 * MIB, 10),
        row(ALLOC, placed("activation", "device"), "u", 50 * MIB, 11, 1),
        row(COUNTER, "rss", "", HEADER.rss_nbytes + 355 * MIB, 20),
    ]
    ledger = ledger_of(tmp_path / "t.zprof", rows, level="alloc")
    unexplained, loaded = ledger.remainder(BEGIN_NS + 20)
    assert (unexplained.nbytes, unexplained.said_nbytes, unexplained.time_ns) == (5 * MIB, 55 * MIB, BEGIN_NS + 20)
    assert (loaded.nbytes, loaded.said_nbytes, loaded.time_ns) == (300 * MIB - MIB // 4, 300 * MIB, BEGIN_NS + 10)
    # The lines together are all that grew beyond the ledger: nothing falls between them.
    assert unexplained.nbytes + loaded.nbytes == 355 * MIB - ledger.total(BEGIN_NS + 20)
    assert len(ledger.remainder(BEGIN_NS + 7)) == 1


def test_what_else_a_process_is_made_of_has_lines_and_together_they_are_all_of_it(tmp_path: Path) -> None:
    names = ("resident files", "library data", "python objects", "malloc kept", "malloc used", "resident shared")
    start = dict(zip(names, (10, 1, 20, 2, 5, 0), strict=True))
    grown = dict(zip(names, (50, 2, 30, 7, 64, 8), strict=True))
    rows = [row(COUNTER, what, "", nbytes * MIB, 1) for what, nbytes in start.items()]
    rows += [row(COUNTER, "rss", "", HEADER.rss_nbytes, 1)]
    rows += [row(ALLOC, placed("activation", "device"), "u", 40 * MIB, 2, 1)]
    rows += [row(COUNTER, placed("communication", "host"), "rings", 8 * MIB, 3)]
    rows += [row(COUNTER, what, "", (start[what] + nbytes) * MIB, 9) for what, nbytes in grown.items()]
    rows += [row(COUNTER, "rss", "", HEADER.rss_nbytes + 170 * MIB, 10)]
    ledger = ledger_of(tmp_path / "t.zprof", rows, level="alloc")
    lines = {line.name: line.nbytes // MIB for line in ledger.remainder(BEGIN_NS + 10)}
    assert lines == {
        "unexplained in the process": 170 - 48 - 50 - 2 - 30 - 7 - 24,
        "files mapped": 50,
        "data of libraries": 2,
        "python's objects": 30,
        "kept by malloc": 7,
        "allocated by libraries": 64 - 40,
    }
    assert sum(lines.values()) == 170 - 48


def test_on_cuda_allocator_and_nvml_are_each_held_against_the_next(tmp_path: Path) -> None:
    rows = [
        row(ALLOC, placed("parameter", "device"), "u", 30 * MIB, 1, 1),
        row(COUNTER, "cuda allocated", "cuda:1", 32 * MIB, 10),
        row(COUNTER, "cuda reserved", "cuda:1", 40 * MIB, 11),
        row(COUNTER, "nvml memory used", "gpu0", 900 * MIB, 12),
        row(COUNTER, "nvml memory used", "gpu1", 440 * MIB, 13),
    ]
    ledger = ledger_of(tmp_path / "t.zprof", rows, device="cuda:1")
    assert [line.nbytes // MIB for line in ledger.remainder(BEGIN_NS + 12)] == [2, 8, 400]
    assert [line.said for line in ledger.remainder(BEGIN_NS)] == ["cuda allocated", "cuda reserved", "nvml memory used"]


def test_a_ledger_that_holds_nothing_is_reconciled_at_the_highest_sample(tmp_path: Path) -> None:
    begin = HEADER.mono_ns
    rows = [Row(RowKind.COUNTER, "rss", "", value * MIB, begin + at) for at, value in ((1, 200), (2, 500), (3, 400))]
    ledger = Ledger.of(Trace.open(write_trace(tmp_path / "run.zprof", rows)))
    assert fullest_sample(ledger, begin, begin + 3) == begin + 2
    assert fullest_sample(ledger, begin + 3, begin + 3) == begin + 3
    held = Row(RowKind.COUNTER, placed("parameter", "device"), "layers.0", MIB, begin + 1)
    rows = [held, *rows, held._replace(nbytes=0, time_ns=begin + 2)]
    ledger = Ledger.of(Trace.open(write_trace(tmp_path / "held.zprof", rows)))
    assert fullest_sample(ledger, begin, begin + 3) == begin + 1
