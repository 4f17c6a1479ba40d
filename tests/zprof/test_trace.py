"""What a trace file keeps: rows, names and notes as they were given, few bytes an event, also while it is written."""

from __future__ import annotations

import dataclasses
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.zprof_traces import HEADER, rows_of, sample_rows, write_trace
from zprof.analysis.coverage import coverage
from zprof.rows import PLACES, Row, RowKind, TraceError, placed, placement
from zprof.trace import columns
from zprof.trace.framefile import FrameFile
from zprof.trace.frames import MOST_ROWS
from zprof.trace.header import Header
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROWS = st.builds(
    Row,
    st.sampled_from(RowKind).map(int),
    NAMES,
    NAMES,
    st.integers(1 - (1 << 56), (1 << 56) - 1) | st.integers(0, 300),
    st.integers(0, (1 << 62) - 1) | st.integers(10**9, 10**9 + 1000),
    st.integers(0, (1 << 31) - 1) | st.integers(0, 3),
    st.integers(0, (1 << 62) - 1) | st.integers(0, 3),
)


@given(st.lists(st.lists(ROWS, max_size=20), max_size=6))
def test_rows_come_back_as_they_were_given(tmp_path_factory: pytest.TempPathFactory, parts: list[list[Row]]) -> None:
    writer = Writer(tmp_path_factory.mktemp("given") / "run.zprof", HEADER)
    for part in parts:
        writer.rows(part)
        writer.flush()
    writer.close()
    trace = Trace.open(writer.path)
    assert list(rows_of(trace)) == [row for part in parts for row in part]
    assert trace.count == sum(map(len, parts)) and trace.damage is None


@pytest.mark.parametrize("count", [0, 1, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS])
def test_chunks_hold_no_more_rows_than_the_format_says(tmp_path: Path, count: int) -> None:
    rows = [Row(RowKind.INSTANT, "release", f"unit.{n % 7}", n, n) for n in range(count)]
    trace = Trace.open(write_trace(tmp_path / "run.zprof", rows))
    sizes = [len(chunk) for chunk in trace.chunks()]
    assert sum(sizes) == trace.count == count
    assert all(size == MOST_ROWS for size in sizes[:-1]) and len(sizes) == -(-count // MOST_ROWS)
    assert list(rows_of(trace)) == rows


def test_rows_that_say_what_is_held_come_with_the_number_of_its_place(tmp_path: Path) -> None:
    whats = [*(placed(*place) for place in PLACES), "rss", "parameter on", "gather"]
    random.Random(3).shuffle(whats)
    # A few new names a chunk, and spans and points that are called as places are.
    rows = [Row(kind, what, what, 1, 10) for what in whats for kind in RowKind]
    writer = Writer(tmp_path / "run.zprof", HEADER)
    for first in range(0, len(rows), 7):
        writer.rows(rows[first : first + 7])
        writer.flush()
    writer.close()
    trace = Trace.open(writer.path)
    assert len(trace) > len(whats) // 2
    held = {RowKind.COUNTER, RowKind.ALLOC, RowKind.FREE}
    expected = [PLACES.index(place) if row.kind in held and (place := placement(row.what)) else -1 for row in rows]
    assert [place for chunk in trace.chunks() for place in chunk.place.tolist()] == expected
    assert {-1, *range(len(PLACES))} == set(expected)


def test_chunks_may_be_read_in_any_order_and_again(tmp_path: Path) -> None:
    rows = list(sample_rows(steps=40))
    trace = Trace.open(write_trace(tmp_path / "run.zprof", rows))
    assert len(trace) >= 2
    last = trace.chunk(len(trace) - 1)
    assert list(rows_of(trace)) == rows == list(rows_of(trace))
    again = trace.chunk(len(trace) - 1)
    assert last.time_ns.tolist() == again.time_ns.tolist() and last.key.tolist() == again.key.tolist()


@pytest.mark.parametrize(("level", "units"), [("events", 8), ("events", 100), ("alloc", 8), ("alloc", 300)])
def test_an_event_takes_at_most_twenty_bytes(tmp_path: Path, level: str, units: int) -> None:
    # Sizes, times and storages as random as they get: zip has nothing to find in them.
    chance = random.Random(7)
    rows, drift = [], 0
    for row in sample_rows(steps=max(2, 500 // units), units=units, level=level):
        drift += chance.randrange(100_000)
        nbytes = row.nbytes + chance.randrange(1 << 20) if row.nbytes else 0
        rows.append(row._replace(time_ns=row.time_ns + drift, nbytes=nbytes, ident=row.ident and row.ident + (1 << 33)))
    path = write_trace(tmp_path / "run.zprof", rows, level=level)
    assert path.stat().st_size <= 20 * len(rows)


def test_the_header_comes_back_whole(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rank": 3, "world": 4, "level": "stack", "device": "cuda:1", "argv": ("a b", "ü")}
    trace = Trace.open(write_trace(tmp_path / "run.zprof", [], **changes))
    assert trace.header == dataclasses.replace(HEADER, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 4, "world": 4}, "rank: expected less than 4 ranks, found 4"),
        ({"level": "all"}, "level: expected events or alloc or stack, found 'all'"),
        ({"pid": -1}, "pid: expected a number from 0 to"),
    ],
)
def test_a_header_nobody_could_read_is_refused_before_a_file_is_made(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(TraceError, match=said) as refused:
        Writer(tmp_path / "run.zprof", dataclasses.replace(HEADER, **changes))
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_over_long_arguments_are_cut_not_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"argv": ("x" * 100_000,) * 3000, "versions": {str(n): "v" for n in range(3000)}}
    trace = Trace.open(write_trace(tmp_path / "run.zprof", [], **changes))
    assert len(trace.header.argv) == 1000 == len(trace.header.versions) and set(map(len, trace.header.argv)) == {4096}


def test_notes_come_back_in_order_and_by_name(tmp_path: Path) -> None:
    notes: dict[str, dict[str, Any]] = {
        "policy": {"text": "stage = 3\n"},
        "units": {"units": [{"name": "model.layers.0", "nbytes": 1 << 40, "number": 0}]},
        "nvml": {"state": "absent", "source": None, "blob": b"\x00\xff", "ratio": 0.5, "yes": True},
    }
    trace = Trace.open(write_trace(tmp_path / "run.zprof", sample_rows(), notes=notes))
    assert [(note.name, note.body) for note in trace.notes()][:3] == list(notes.items())
    assert trace.notes("end") == [("end", {"exit": 0, "reason": "", "dropped_rows": 0})]
    assert trace.notes("absent") == []


def test_a_note_follows_the_rows_that_were_given_before_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)
    writer.rows([Row(RowKind.INSTANT, "oom", "device", 7, 1)])
    writer.note("oom", {"nbytes": 7})
    trace = Trace.open(writer.path)
    assert trace.count == 1 and trace.notes("oom")[0].body == {"nbytes": 7}
    writer.close()


def test_odd_names_are_written_so_that_they_read(tmp_path: Path) -> None:
    long = "x" * 5000
    rows = [Row(RowKind.INSTANT, "a\x00b\n", os.fsdecode(b"\xff.py"), 0, 1), Row(RowKind.INSTANT, long + "a", long + "b", 0, 2)]
    found = list(rows_of(Trace.open(write_trace(tmp_path / "run.zprof", rows))))
    assert (found[0].what, found[0].key) == ("a\x00b\n", "\\udcff.py")
    assert len(found[1].what) == 1000 and found[1].what != found[1].key


def test_chunks_of_enormous_names_are_split(tmp_path: Path) -> None:
    rows = [Row(RowKind.INSTANT, f"{n}" + "ü" * 990, f"{n}" + "€" * 990, 0, n) for n in range(3000)]
    assert list(rows_of(Trace.open(write_trace(tmp_path / "run.zprof", rows)))) == rows


def test_rows_that_are_none_are_dropped_with_one_warning_and_the_others_written(tmp_path: Path) -> None:
    right = Row(RowKind.COUNTER, "rss", "", 1, 1)
    anything: Any = right
    wrong: list[Any] = [
        right._replace(nbytes=1 << 70), right._replace(time_ns=-1), right._replace(kind=9), anything._replace(key=None),
        anything._replace(nbytes=1.5), right._replace(ident=-4), right._replace(thread=1 << 40),
    ]  # fmt: skip
    writer = Writer(tmp_path / "run.zprof", HEADER)
    with pytest.warns(RuntimeWarning, match="dropped [0-9,]+ rows? as invalid") as said:
        for row in wrong:
            writer.rows([right, row, right])
            writer.flush()
        writer.close()
    trace = Trace.open(writer.path)
    assert len(said) == 1 and list(rows_of(trace)) == [right] * 2 * len(wrong)
    assert trace.dropped == writer.dropped_rows == len(wrong)


@pytest.mark.parametrize("lacking", [MemoryError, ImportError])
def test_rows_wait_while_there_is_no_memory_and_notes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: type[Exception]
) -> None:
    rows = list(sample_rows(steps=120))
    assert len(rows) > 2 * MOST_ROWS
    writer = Writer(tmp_path / "run.zprof", HEADER)

    def refused(rows: object) -> bytes:
        raise lacking("no room")

    with monkeypatch.context() as scarce:
        scarce.setattr("zprof.trace.columns.encoded", refused)
        writer.rows(rows[:-5])
        writer.note("oom", {"kind": "memory"})
    assert [note.name for note in Trace.open(writer.path).notes()] == ["oom"]
    writer.rows(rows[-5:])
    writer.flush()
    assert list(rows_of(Trace.open(writer.path))) == rows
    assert not Trace.open(writer.path).damage
    said = rf"dropped 5 rows for lack of memory \({lacking.__name__}\)"
    with monkeypatch.context() as scarce, pytest.warns(RuntimeWarning, match=said):
        scarce.setattr("zprof.trace.columns.encoded", refused)
        writer.rows(rows[:5])
        writer.close("MemoryError", 1)
    [end] = Trace.open(writer.path).notes("end")
    assert end.body == {"exit": 1, "reason": "MemoryError", "dropped_rows": 5}


def test_a_chunk_that_is_split_is_written_once_where_memory_lacks_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "\u4e2d" * 980
    rows = [Row(int(RowKind.INSTANT), "a", f"{number}{long}", 0, HEADER.mono_ns + number, 0, 0) for number in range(MOST_ROWS)]
    writer, whole, calls = Writer(tmp_path / "run.zprof", HEADER), columns.encoded, iter(range(1000))

    def scarce(rows: Sequence[Row]) -> bytes:
        if next(calls) == 3:  # The whole, a half, its first quarter; then none is left.
            raise MemoryError
        return whole(rows)

    monkeypatch.setattr(columns, "encoded", scarce)
    writer.rows(rows)
    writer.flush()
    writer.close()
    trace = Trace.open(writer.path)
    assert next(calls) > 4 and len(trace) > 1
    assert list(rows_of(trace)) == rows and (trace.damage, writer.dropped_rows) == (None, 0)


def test_a_file_over_its_bound_ends_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rows, writer = list(sample_rows(steps=400)), Writer(tmp_path / "run.zprof", HEADER, limit=1 << 16)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refused)
        writer.rows(rows)
        writer.flush()
        writer.close()
    assert writer.nbytes > 1 << 16
    assert list(rows_of(Trace.open(writer.path))) == rows


def test_what_a_note_cannot_say_is_dropped_with_a_warning(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)
    with pytest.warns(RuntimeWarning, match="not a map of plain values"):
        writer.note("snapshot", {"x": object()})
    with pytest.warns(RuntimeWarning, match=r"note blob of .* is over 16 MiB"):
        writer.note("blob", {"x": b"\x01" * (17 << 20)})
    writer.close()
    assert [note.name for note in Trace.open(writer.path).notes()] == ["end"]


def test_nothing_is_raised_even_where_warnings_are_errors(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.rows([Row(99, "a", "b", 0, 0)])
        writer.close()
    assert writer.dropped_rows == 1


def test_a_note_is_read_once_and_a_large_one_only_for_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large: dict[str, object] = {"segments": [os.urandom(1 << 10) for _ in range(64)]}
    notes: dict[str, dict[str, object]] = {"policy": {"text": "{}"}, "snapshot": large, "clock": {"mono_ns": 1}}
    trace = Trace.open(write_trace(tmp_path / "run.zprof", [], zhooks=False, notes=notes))
    read: list[int] = []
    before = FrameFile.read
    monkeypatch.setattr(FrameFile, "read", lambda file, at, nbytes=None: read.append(at) or before(file, at, nbytes))
    assert trace.notes("absent") == [] and len(read) == 4
    assert trace.notes("policy")[0].body == {"text": "{}"} and trace.dropped == 0 and trace.device == "cpu" and len(read) == 4
    assert trace.notes("snapshot")[0].body == large == trace.notes("snapshot")[0].body and len(read) == 6
    assert [note.name for note in trace.notes()] == [*notes, "end"] and len(read) == 7


def test_a_policy_of_any_length_says_that_a_model_was_under_zhooks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", sample_rows(), zhooks=False, notes={"policy": {"text": "x" * 100_000}})
    assert coverage(Trace.open(path)).zhooks


def test_an_existing_file_is_refused_and_replaced_by_force(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    path.write_text("mine")
    with pytest.raises(TraceError, match=r"expected no such file, found one of 4 B.*-f") as refused:
        Writer(path, HEADER)
    assert "\n" not in str(refused.value) and path.read_text() == "mine"
    old = path.open()
    Writer(path, HEADER, force=True).close()
    assert Trace.open(path).count == 0
    with old:
        assert old.read() == "mine", "whoever has the old file open keeps it"


@pytest.mark.parametrize("force", [False, True])
def test_a_link_is_refused_and_what_it_points_to_stays(tmp_path: Path, force: bool) -> None:
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    (tmp_path / "run.zprof").symlink_to(target)
    with pytest.raises(TraceError):
        Writer(tmp_path / "run.zprof", HEADER, force=force)
    assert target.read_text() == "mine" and (tmp_path / "run.zprof").is_symlink()


@pytest.mark.parametrize("name", ["absent/run.zprof", "nul\x00", "x" * 300, "."])
def test_a_place_where_no_file_can_be_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    for force in (False, True):
        with pytest.raises(TraceError) as refused:
            Writer(f"{tmp_path}/{name}", HEADER, force=force)
        assert "\n" not in str(refused.value)


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write_trace(tmp_path / "run.zprof", sample_rows())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_two_threads_lose_no_row_and_keep_each_ones_order(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)

    def write(thread: int) -> None:
        for at in range(0, 30_000, 77):
            writer.rows([Row(RowKind.INSTANT, "release", "u", n, n, thread) for n in range(at, min(at + 77, 30_000))])
            if at % 5 == thread:
                writer.note("more", {"thread": thread})

    threads = [threading.Thread(target=write, args=(thread,)) for thread in (0, 1)]
    for started in threads:
        started.start()
    for started in threads:
        started.join()
    writer.close()
    rows = list(rows_of(Trace.open(writer.path)))
    for thread in (0, 1):
        assert [row.nbytes for row in rows if row.thread == thread] == list(range(30_000))


def test_rows_after_the_end_are_counted_and_closing_twice_is_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)
    writer.close("done", 3)
    writer.rows([Row(RowKind.INSTANT, "release", "u", 0, 1)])
    writer.close("again", 4)
    assert writer.dropped_rows == 1
    assert [note.body for note in Trace.open(writer.path).notes()] == [{"exit": 3, "reason": "done", "dropped_rows": 0}]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import os, sys
        from tests.support.zprof_traces import HEADER
        from zprof.rows import Row
        from zprof.trace.writer import Writer
        writer = Writer(sys.argv[1], HEADER)
        writer.rows([Row(2, "release", "parent", 0, 1)])
        pid = os.fork()
        if pid == 0:
            writer.rows([Row(2, "release", "child", 0, 1)] * 9000)
            writer.note("child", {})
            writer.close()
            os._exit(0)
        os.waitpid(pid, 0)
        writer.close()
        """
    )
    subprocess.run([sys.executable, "-c", child, str(tmp_path / "run.zprof")], check=True)
    trace = Trace.open(tmp_path / "run.zprof")
    assert [row.key for row in rows_of(trace)] == ["parent"] and [note.name for note in trace.notes()] == ["end"]


def test_a_growing_file_is_followed_without_reading_anything_twice(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run.zprof", HEADER)
    trace = Trace.open(writer.path)
    assert list(trace.more()) == [] and trace.count == 0
    rows = list(sample_rows())
    seen = 0
    for at in range(0, len(rows), 100):
        writer.rows(rows[at : at + 100])
        writer.flush()
        assert sum(map(len, trace.more())) == len(rows[at : at + 100])
        assert list(trace.more()) == []
        seen += 100
    writer.close()
    assert list(trace.more()) == [] and list(rows_of(trace)) == rows and trace.notes("end")


def test_a_frame_that_is_half_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.zprof", sample_rows(steps=40)).read_bytes()
    path = tmp_path / "run.zprof"
    path.write_bytes(whole[:400])
    trace = Trace.open(path)
    count = 0
    with path.open("ab", buffering=0) as file:
        for at in range(400, len(whole), 997):
            file.write(whole[at : at + 997])
            count += sum(map(len, trace.more()))
    assert count == trace.count == len(list(sample_rows(steps=40))) and trace.damage is None


def test_following_says_so_when_another_run_took_the_place(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", sample_rows())
    trace = Trace.open(path)
    Writer(path, dataclasses.replace(HEADER, pid=99), force=True).close()
    with pytest.raises(TraceError, match="expected the run that was watched, found another"):
        list(trace.more())
    path.unlink()
    assert trace.count and list(trace.chunks()), "the file that was opened can still be read"


def test_a_header_of_an_older_writer_is_of_no_simulation(tmp_path: Path) -> None:
    older = {name: value for name, value in HEADER.packed().items() if name != "simulated"}
    assert Header.unpacked(older, "run.zprof") == HEADER and HEADER.simulated == ""


def test_a_header_of_a_newer_writer_with_more_keys_is_read(tmp_path: Path) -> None:
    assert Header.unpacked(HEADER.packed() | {"mood": "good"}, "run.zprof") == HEADER
