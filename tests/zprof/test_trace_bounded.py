"""What a trace file keeps when it is made smaller to stay within its bound."""

from __future__ import annotations

import random
import re
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.slow import slow
from tests.support.zprof_traces import HEADER, MIB, rows_of, sample_rows
from zprof.rows import TIERS, Row, RowKind, placement
from zprof.trace.bounding import Rewriting
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

LIMIT = 1 << 16


class Truth:
    """The level of every series row by row, in plain Python: what a ledger must find."""

    def __init__(self) -> None:
        self.counter: dict[tuple[str, str], int] = {}
        self.stored: dict[tuple[str, str], int] = {}
        self.peaks = {tier: (0, {}) for tier in TIERS}  # type: dict[str, tuple[int, dict[tuple[str, str], int]]]
        self.place_peaks: dict[str, int] = {}
        self.totals = dict.fromkeys(TIERS, 0)
        self.by_place: dict[str, int] = {}

    def take(self, row: Row) -> None:
        place = placement(row.what)
        if place is None or row.kind < RowKind.COUNTER:
            return
        series = (row.what, row.key)
        if row.kind == RowKind.COUNTER:
            change = row.nbytes - self.counter.get(series, 0)
            self.counter[series] = row.nbytes
        else:
            change = row.nbytes if row.kind == RowKind.ALLOC else -row.nbytes
            self.stored[series] = self.stored.get(series, 0) + change
        tier = place[1]
        self.totals[tier] += change
        self.by_place[row.what] = self.by_place.get(row.what, 0) + change
        self.place_peaks[row.what] = max(self.place_peaks.get(row.what, 0), self.by_place[row.what])
        if self.totals[tier] > self.peaks[tier][0]:
            self.peaks[tier] = (self.totals[tier], self.levels())

    def levels(self) -> dict[tuple[str, str], int]:
        found = {}
        for series in self.counter.keys() | self.stored.keys():
            level = self.counter.get(series, 0) + self.stored.get(series, 0)
            if level:
                found[series] = level
        return found


def jittered(rows: Iterator[Row], seed: int) -> Iterator[Row]:
    """The rows with sizes and times that do not repeat, as real ones do not."""
    chance, drift, sizes = random.Random(seed), 0, dict[int, int]()
    for row in rows:
        drift += chance.randrange(5000)
        nbytes = row.nbytes
        if row.ident:
            nbytes = sizes.pop(row.ident, 0) or sizes.setdefault(row.ident, nbytes + chance.randrange(1 << 20))
        elif row.kind == RowKind.COUNTER and nbytes and row.what.startswith("gradient"):
            nbytes += chance.randrange(1 << 16)
        yield row._replace(time_ns=row.time_ns + drift, nbytes=nbytes)


def peaked(seed: int, steps: int, level: str = "alloc") -> list[Row]:
    """A run whose peak is a burst of storages in one of its steps, early or late as ``seed`` says."""
    rows = list(jittered(sample_rows(steps=steps, units=8, level=level), seed))
    at = random.Random(seed).randrange(len(rows) // 10, len(rows) * 9 // 10)
    when = rows[at].time_ns
    burst = [Row(RowKind.ALLOC, "temporary on device", f"burst.{n}", 5 * MIB + n, when, 0, 10**9 + n) for n in range(40)]
    return rows[:at] + burst + [row._replace(kind=RowKind.FREE) for row in reversed(burst)] + rows[at:]


def recorded(path: Path, rows: list[Row], *, limit: int = LIMIT) -> tuple[Trace, Writer]:
    writer = Writer(path, HEADER, limit=limit)
    for at in range(0, len(rows), 1000):
        writer.rows(rows[at : at + 1000])
        writer.flush()
        assert writer.nbytes <= 2 * limit
    writer.close()
    return Trace.open(path), writer


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
def test_the_peak_of_every_tier_and_all_levels_then_and_now_survive(tmp_path: Path, seed: int) -> None:
    rows = peaked(seed, 120)
    trace, writer = recorded(tmp_path / "run.zprof", rows)
    before, after = Truth(), Truth()
    for row in rows:
        before.take(row)
    for row in rows_of(trace):
        after.take(row)
    assert trace.dropped > len(rows) // 2, "nothing was thinned out"
    assert trace.path.stat().st_size <= LIMIT * 5 // 4
    for tier in TIERS:
        assert after.peaks[tier] == before.peaks[tier]
    assert after.place_peaks == before.place_peaks
    assert after.levels() == before.levels()
    assert {key: level for key, level in after.counter.items() if level} == {
        key: level for key, level in before.counter.items() if level
    }, "a later counter would be added to storages it never counted"
    assert writer.dropped_rows == trace.dropped and trace.count + trace.dropped == len(rows)
    assert trace.damage is None


def test_storages_alive_at_the_peak_stay_storages_with_their_number(tmp_path: Path) -> None:
    rows = peaked(3, 120)
    trace, _ = recorded(tmp_path / "run.zprof", rows)
    found = {row.ident for row in rows_of(trace) if row.kind == RowKind.ALLOC}
    assert found >= {10**9 + n for n in range(40)}
    freed = [row.ident for row in rows_of(trace) if row.kind == RowKind.FREE and row.ident]
    assert len(freed) == len(set(freed))


def test_steps_stay_and_no_span_is_left_half(tmp_path: Path) -> None:
    rows = peaked(1, 120)
    trace, _ = recorded(tmp_path / "run.zprof", rows)
    kept = list(rows_of(trace))

    def steps(of: list[Row]) -> list[Row]:
        return [row for row in of if row.what in ("step", "forward", "backward")]

    assert steps(kept) == steps(rows)
    depth: dict[tuple[str, str], int] = {}
    for row in kept:
        if row.kind <= RowKind.END:
            series = (row.what, row.key)
            depth[series] = depth.get(series, 0) + (1 if row.kind == RowKind.BEGIN else -1)
            assert depth[series] >= 0, f"{series} ends and never began"
    assert not any(depth.values())


def test_samples_keep_first_last_lowest_and_highest(tmp_path: Path) -> None:
    rows = list(jittered(sample_rows(steps=200, units=6), 2))
    samples = [row for row in rows if row.what == "rss"]
    spike = samples[len(samples) // 3]
    rows[rows.index(spike)] = spike._replace(nbytes=10**12)
    trace, _ = recorded(tmp_path / "run.zprof", rows)
    values = [row.nbytes for row in rows_of(trace) if row.what == "rss"]
    assert max(values) == 10**12 and min(values) == min(row.nbytes for row in samples)
    assert values[0] == samples[0].nbytes and values[-1] == samples[-1].nbytes
    assert len(values) < len(samples)


def test_notes_and_failed_requests_stay(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=LIMIT)
    writer.note("policy", {"text": "stage = 3"})
    rows = list(jittered(sample_rows(steps=200, units=6), 4))
    rows.insert(100, Row(RowKind.INSTANT, "oom", "device", 7, rows[100].time_ns))
    for at in range(0, len(rows), 2000):
        writer.rows(rows[at : at + 2000])
        if at == 4000:
            writer.note("units", {"units": []})
    writer.close("done")
    trace = Trace.open(writer.path)
    assert trace.dropped
    assert [note.name for note in trace.notes() if note.name != "dropped"] == ["policy", "units", "end"]
    assert len(trace.notes("dropped")) == 1
    assert [row.nbytes for row in rows_of(trace) if row.what == "oom"] == [7]


def test_a_level_is_never_higher_than_it_was_at_any_moment(tmp_path: Path) -> None:
    # Two series that swap: were the rise of one written before the fall of the other, there would be a peak that never was.
    rows, time_ns = [], 1
    for turn in range(20_000):
        one, other = ("a", "b") if turn % 2 else ("b", "a")
        for key, level in ((one, 0), (other, 1000)):
            time_ns += random.Random(turn).randrange(1, 90_000)
            rows.append(Row(RowKind.COUNTER, "parameter on device", key, level, time_ns))
    trace, _ = recorded(tmp_path / "run.zprof", rows)
    truth = Truth()
    for row in rows_of(trace):
        truth.take(row)
    assert trace.dropped and truth.peaks["device"][0] == 1000


@pytest.mark.slow
def test_a_reader_that_follows_goes_on_after_the_file_was_made_smaller(tmp_path: Path) -> None:
    rows = peaked(5, 120)
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=LIMIT)
    trace = Trace.open(writer.path)
    truth, seen, files = Truth(), 0, {id(trace.file): trace.file}
    for at in range(0, len(rows), 1000):
        writer.rows(rows[at : at + 1000])
        writer.flush()
        for chunk in trace.more():
            seen += len(chunk)
            files[id(trace.file)] = trace.file
            what, key = (np.array(trace.strings, object)[column] for column in (chunk.what, chunk.key))
            columns = (chunk.kind, what, key, chunk.nbytes, chunk.time_ns, chunk.thread, chunk.ident)
            for row in map(Row, *(column.tolist() for column in columns)):
                truth.take(row)
    writer.close()
    seen += sum(map(len, trace.more()))
    expected = Truth()
    for row in rows:
        expected.take(row)
    assert len(files) > 1, "the file was never replaced"
    assert seen <= len(rows)
    assert truth.levels() == expected.levels()


def test_a_file_full_of_what_still_lives_ends_the_recording_with_one_warning(tmp_path: Path) -> None:
    chance = random.Random(1)
    rows = [Row(RowKind.COUNTER, "other on host", f"{chance.getrandbits(128):x}", 1 + n, n) for n in range(20_000)]
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=LIMIT)
    with pytest.warns(RuntimeWarning, match="recording stopped after .*still held") as said:
        for at in range(0, len(rows), 500):
            writer.rows(rows[at : at + 500])
            writer.flush()
        writer.close()
    trace = Trace.open(writer.path)
    assert len(said) == 1
    assert trace.path.stat().st_size <= 4 * LIMIT
    assert sum(map(len, trace.chunks())) + writer.dropped_rows == len(rows)


def test_a_kill_while_the_file_is_made_smaller_leaves_a_whole_file(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import sys
        from tests.support.zprof_traces import HEADER, sample_rows
        from zprof.trace.writer import Writer
        rows = list(sample_rows(steps=30, units=8, level="alloc"))
        writer = Writer(sys.argv[1], HEADER, limit=1 << 16, force=True)
        sys.stdout.write("go\\n"); sys.stdout.flush()
        while True:
            writer.rows(rows); writer.flush()
        """
    )
    path = tmp_path / "run.zprof"
    for wait in (0.0, 0.05, 0.15, 0.3):
        process = subprocess.Popen([sys.executable, "-c", child, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(wait)
        process.kill()
        process.wait()
        process.stdout.close()
        trace = Trace.open(path)
        assert sum(map(len, trace.chunks())) == trace.count
        assert not trace.file.damages, trace.damage
        beside = {each.name for each in tmp_path.iterdir()} - {path.name}
        assert all(re.fullmatch(r"run\.zprof\.[0-9a-f]{8}\.part", name) for name in beside)


def test_a_full_disk_stops_the_recording_with_one_warning_and_nothing_raised(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import resource, signal, sys, warnings
        from tests.support.zprof_traces import HEADER, sample_rows
        from zprof.trace.writer import Writer
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        rows = list(sample_rows(steps=30, units=8, level="alloc"))
        writer = Writer(sys.argv[1], HEADER)
        resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(10):
                writer.rows(rows); writer.flush(); writer.note("more", {"text": "x" * 1000})
            writer.close("done")
        print(len(said), len(rows) * 10, writer.dropped_rows)
        print(said[0].message)
        """
    )
    command = [sys.executable, "-c", child, str(tmp_path / "run.zprof")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    numbers, warning = done.stdout.splitlines()
    count, rows, dropped = map(int, numbers.split())
    trace = Trace.open(tmp_path / "run.zprof")
    assert count == 1 and "recording stopped after" in warning and "training goes on: File too large" in warning
    assert sum(map(len, trace.chunks())) == rows - dropped > 0
    assert trace.damage is None and done.stderr == ""


def test_no_space_for_the_smaller_file_stops_the_recording_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.zprof.00.part").mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "00")
    rows = peaked(0, 100)
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=LIMIT)
    with pytest.warns(RuntimeWarning, match="recording stopped.*goes on: the file cannot be made smaller") as said:
        writer.rows(rows)
        writer.rows(rows)
        writer.close()
    trace = Trace.open(writer.path)
    assert len(said) == 1
    assert sum(map(len, trace.chunks())) + writer.dropped_rows == 2 * len(rows)


def test_what_others_put_beside_the_file_or_in_its_place_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.zprof.part").write_text("theirs")
    rows = peaked(0, 100)
    writer = Writer(tmp_path / "run.zprof", HEADER, limit=LIMIT)
    real = Rewriting.run

    def replaced(work: Rewriting) -> None:
        real(work)
        (tmp_path / "other.zprof").write_text("another recording")
        (tmp_path / "other.zprof").rename(writer.path)
        (beside,) = (each for each in tmp_path.iterdir() if each.suffix == ".part" and each.name != "run.zprof.part")
        beside.rename(tmp_path / "moved")
        beside.write_text("mine")

    monkeypatch.setattr(Rewriting, "run", replaced)
    with pytest.warns(RuntimeWarning, match="recording stopped.*run.zprof was replaced or removed during the recording"):
        writer.rows(rows)
        writer.rows(rows)
        writer.close()
    left = sorted(each.read_text() for each in tmp_path.iterdir() if each.name != "moved")
    assert left == ["another recording", "mine", "theirs"]


def test_making_it_smaller_takes_memory_of_a_few_chunks_only(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import resource, sys
        from tests.support.zprof_traces import HEADER, sample_rows
        from zprof.trace.writer import Writer
        rows = list(sample_rows(steps=30, units=8, level="alloc"))
        writer = Writer(sys.argv[1], HEADER, limit=1 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(80):
            writer.rows(rows)
        writer.close()
        print(len(rows) * 80, writer.dropped_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    command = [sys.executable, "-c", child, str(tmp_path / "run.zprof")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, dropped, grown_kib = map(int, done.stdout.split())
    assert dropped > rows // 2
    assert grown_kib < 64 << 10
