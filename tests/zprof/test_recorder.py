"""What a recording may rely on nobody for: every row is in the file, and nothing that happens to it reaches the run."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zprof
from offload.events import Bus
from tests.support.forked import python
from tests.support.held_levels import training
from tests.support.inside import is_heard
from tests.support.waiting import soon
from zprof.analysis.analysis import Analysis
from zprof.analysis.coverage import coverage
from zprof.analysis.measures import measures
from zprof.recording import queue
from zprof.recording import recorder as module
from zprof.recording.recorder import Recorder
from zprof.recording.sampler import Reading
from zprof.rows import RowKind, TraceError
from zprof.trace.reader import Trace
from zprof.trace.tail import tail_path

INSTANT = int(RowKind.INSTANT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.zprof"


def recorder_at(path: Path, **more: Any) -> Recorder:
    return Recorder(path, nvml="off", **more)


def rows_of(path: Path, what: str) -> list[tuple[str, int, int]]:
    """(key, nbytes, thread) of every row of ``what``, in the order of the file."""
    trace = Trace.open(path)
    assert trace.damage is None
    found = []
    for rows in trace.chunks():
        for at in range(len(rows)):
            if trace.strings[rows.what[at]] == what:
                found.append((trace.strings[rows.key[at]], int(rows.nbytes[at]), int(rows.thread[at])))
    return found


def ending(path: Path) -> dict[str, Any]:
    (end,) = Trace.open(path).notes("end")
    return dict(end.body)


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def printed(code: str) -> str:
    """What an interpreter that has imported torch and zhooks prints."""
    ran = python("-c", code, warn=("error", RuntimeWarning))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# Its life.


def test_a_block_is_recorded_without_torch(path: Path) -> None:
    out = fresh(f"import sys, zprof\nwith zprof.record({str(path)!r}): pass\nprint('torch' in sys.modules)")
    assert out.strip() == "False" and ending(path)["exit"] == 0


@pytest.mark.parametrize(
    ("raised", "exit"), [(ValueError("no"), 1), (SystemExit(3), 3), (SystemExit(), 0), (KeyboardInterrupt(), 1)]
)
def test_a_block_that_raises_is_recorded_to_its_end(path: Path, raised: BaseException, exit: int) -> None:
    with pytest.raises(type(raised)), zprof.record(path, nvml="off") as recorder:
        recorder.row(INSTANT, "last", "a", 1)
        raise raised
    assert ending(path) == {"exit": exit, "reason": type(raised).__name__, "dropped_rows": 0}
    assert rows_of(path, "last") == [("a", 1, 0)]


def test_what_is_open_when_the_program_ends_is_closed_then(path: Path) -> None:
    fresh(f"import zprof\nr = zprof.Recorder({str(path)!r}, nvml='off').start()\nr.row(2, 'last', 'a', 1)")
    assert ending(path)["reason"] == "" and rows_of(path, "last") == [("a", 1, 0)]


def test_a_program_that_ends_with_live_storages_and_threads_ends(path: Path) -> None:
    fresh(
        "import threading, torch, zprof\nfrom offload.events import Bus\n"
        f"r = zprof.Recorder({str(path)!r}, nvml='off').start()\n"
        "bus = Bus(); bus.attach(r); kept = torch.zeros(9)\nbus.hold('other on device', 'kept', kept.untyped_storage())\n"
        "def on():\n    while True: bus.instant('storm', 'a')\n"
        "threading.Thread(target=on, daemon=True).start()"
    )
    assert rows_of(path, "other on device") == [("kept", 36, 0)] and "reason" in ending(path)


def test_closing_again_from_anywhere_changes_nothing(path: Path) -> None:
    recorder = recorder_at(path).start()
    closers = [threading.Thread(target=recorder.close, args=(f"closer {number}",)) for number in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    recorder.close("late")
    assert str(ending(path)["reason"]).startswith("closer")
    with pytest.raises(TraceError, match="expected a new recorder, found one that was closed"):
        recorder.start()


def test_a_close_that_was_interrupted_goes_on_where_it_was(path: Path) -> None:
    class Interrupting:
        def __init__(self) -> None:
            self.left = 1

        def sample(self) -> Sequence[Reading]:
            if recorder._stopped.is_set() and self.left:
                self.left = 0
                raise KeyboardInterrupt
            return ()

        def close(self) -> None: ...

    recorder = recorder_at(path)
    recorder.add_sampler(Interrupting())
    recorder.start().row(INSTANT, "last", "a", 1)
    with pytest.raises(KeyboardInterrupt):
        recorder.close()
    recorder.close()
    assert rows_of(path, "last") == [("a", 1, 0)] and ending(path)["exit"] == 0


def test_a_recorder_handed_over_unstarted_begins_with_the_first_event(path: Path) -> None:
    bus, recorder = Bus(), recorder_at(path)
    bus.attach(recorder)
    threads = [threading.Thread(target=bus.instant, args=("first", "a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(rows_of(path, "first")) == 4 and not bus.active


def test_two_recorders_hear_the_same(tmp_path: Path) -> None:
    one, two = recorder_at(tmp_path / "1"), recorder_at(tmp_path / "2")
    attachment, optimizer = training({"stage": 3})
    with one.listen(), attachment.observe(two):
        attachment.model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    for what in ("compute", "forward", "step", "ready", "gradient on device", "optimizer on device"):
        assert rows_of(one.path, what) == rows_of(two.path, what) != [], what
    attachment.detach()


def test_the_rank_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with zprof.record(tmp_path / "run.{rank}.zprof", nvml="off") as recorder:
        assert recorder.path.name == "run.1.zprof"
    assert Trace.open(recorder.path).header.rank == 1


@pytest.mark.parametrize("wrong", ["taken", "no folder", "a folder", "no permission"])
def test_a_file_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / ("missing/run.zprof" if wrong == "no folder" else "run.zprof")
    if wrong == "taken":
        path.write_text("mine")
    elif wrong == "a folder":
        path.mkdir()
    elif wrong == "no permission":
        if os.geteuid() == 0:
            path = Path("/proc/run.zprof")
        else:
            tmp_path.chmod(0o500)
    threads, before = set(threading.enumerate()), open_files()
    sampler = Closed()
    recorder = recorder_at(path)
    recorder.add_sampler(sampler)
    with pytest.raises(TraceError, match=path.name):
        recorder.listen()
    assert (recorder.open, sampler.closed) == (False, False)
    assert set(threading.enumerate()) <= threads and soon(lambda: open_files() <= before)
    assert not Bus().active
    if wrong == "taken":
        assert path.read_text() == "mine"
        path.unlink()
        recorder.start().close()
        assert sampler.closed and ending(path)["exit"] == 0


class Closed:
    """A sampler that only knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def sample(self) -> Sequence[Reading]:
        return ()

    def close(self) -> None:
        self.closed = True


def open_files() -> int:
    """Open for long: a sampler may have one open at the moment."""
    return min(len(os.listdir("/proc/self/fd")) for _ in range(20))


def test_a_start_that_fails_half_way_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_at(path)
    threads, hooks = set(threading.enumerate()), len(_step_hooks())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: exec("raise RuntimeError('no threads left')"))
        with pytest.raises(RuntimeError, match="no threads left"):
            recorder.start()
    assert not path.exists() and not recorder.open
    assert set(threading.enumerate()) <= threads and len(_step_hooks()) <= hooks
    recorder.start().close()
    assert ending(path)["exit"] == 0


def _step_hooks() -> Any:
    return sys.modules["torch.optim.optimizer"].__dict__["_global_optimizer_pre_hooks"]


# Children.


def test_a_forked_child_records_nothing_and_ends(path: Path) -> None:
    out = printed(
        "import os, sys, torch, zprof, zhooks\nfrom torch import nn\n"
        "model = nn.Linear(4, 4); zhooks.attach(model)\n"
        f"with zprof.record({str(path)!r}, nvml='off') as r:\n"
        "    r.row(2, 'parent', 'a', 1)\n"
        "    for child in range(3):\n"
        "        pid = os.fork()\n"
        "        if not pid:\n"
        "            r.row(2, 'child', 'a', 1); model(torch.ones(2, 4)).sum().backward(); r.note('child', {}); r.flush()\n"
        "            [r.close, lambda: os._exit(0), lambda: None][child]()\n"
        "            sys.exit(0)\n"
        "        assert os.waitpid(pid, 0)[1] == 0\n"
        "    r.row(2, 'parent', 'b', 1)\n"
    )
    assert out == "" and [key for key, *_ in rows_of(path, "parent")] == ["a", "b"]
    assert rows_of(path, "child") == [] and not Trace.open(path).notes("child") and ending(path)["exit"] == 0


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_loader_record_nothing(path: Path, method: str) -> None:
    with zprof.record(path, nvml="off") as recorder:
        # A range: what is spawned imports nothing of ours to have it.
        numbers: Any = range(8)
        loader = torch.utils.data.DataLoader(numbers, num_workers=1, multiprocessing_context=method)
        assert sorted(int(one) for one in loader) == list(range(8))
        recorder.row(INSTANT, "last", "a", 1)
    assert rows_of(path, "last") == [("a", 1, 0)] and ending(path)["dropped_rows"] == 0


# Threads, storms and callbacks.


def test_no_row_is_lost_of_many_threads_and_each_keeps_its_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MOST_WAITING", 5000)
    monkeypatch.setattr(queue, "LONGEST_WAIT_S", 600)
    # No samples meanwhile: the thread that writes never waits for itself, so what it samples comes on top of the bound.
    recorder, waiting = recorder_at(path, interval_s=3600).start(), [0]
    # All at once: the system gives the number of a thread that has ended to the next.
    together = threading.Barrier(6)

    def storm(name: str) -> None:
        together.wait()
        for number in range(20_000):
            recorder.row(INSTANT, "storm", name, number)
        together.wait()

    threads = [threading.Thread(target=storm, args=(f"thread {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        waiting.append(len(recorder._queue))
    recorder.close()
    by_key: dict[str, list[int]] = {}
    numbers: dict[str, set[int]] = {}
    for key, at, number in rows_of(path, "storm"):
        by_key.setdefault(key, []).append(at)
        numbers.setdefault(key, set()).add(number)
    assert len(by_key) == 6 and all(found == list(range(20_000)) for found in by_key.values())
    assert len(set.union(*numbers.values())) == 6 and max(waiting) <= 5000 + len(threads)


@pytest.fixture
def hanging(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, threading.Event]]:
    """A recorder whose own thread hangs in a write, as on a dead network file system, until the event is set."""
    # Processes that the tests' own have would be noted at the end.
    recorder = recorder_at(path, interval_s=3600, children="off").start()
    go_on, hangs = threading.Event(), threading.Event()
    writer = recorder._queue.writer
    assert writer is not None
    write = writer.rows

    def rows(rows: Sequence[Any]) -> None:
        hangs.set()
        assert go_on.wait(600)
        write(rows)

    monkeypatch.setattr(writer, "rows", rows)
    monkeypatch.setattr(queue, "MOST_WAITING", 100)
    monkeypatch.setattr(queue, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(module, "CHUNK", 10)
    for _ in range(10):
        recorder.row(INSTANT, "first", "", 0)
    recorder._queue.wake.set()
    assert hangs.wait(600)
    yield recorder, go_on
    go_on.set()
    recorder.close()


def test_rows_are_dropped_and_counted_where_a_write_hangs(path: Path, hanging: tuple[Recorder, threading.Event]) -> None:
    recorder, go_on = hanging
    for number in range(1000):
        recorder.row(INSTANT, "many", "", number)
    with pytest.warns(RuntimeWarning, match="dropped .* rows?, because writing the trace took too long; training went on"):
        go_on.set()
        recorder.flush()
        while recorder._queue.late or len(recorder._queue):
            recorder.flush()
        # It takes rows again.
        recorder.row(INSTANT, "again", "", 1)
        recorder.close()
    trace = Trace.open(path)
    there = rows_of(path, "many")
    assert 0 < len(there) < 1000 and len(there) + trace.dropped == 1000
    assert [number for _, number, _ in there] == list(range(len(there)))
    assert len(rows_of(path, "again")) == 1
    assert measures(Analysis.of(trace))["rows.dropped"] == trace.dropped == trace.notes("lost")[-1].body["rows"]
    assert str(coverage(trace).place("parameter", "device")) == f"{trace.dropped:,} recorded rows are not in the file"


def test_a_recording_whose_write_hangs_at_its_end_lets_the_program_end(hanging: tuple[Recorder, threading.Event]) -> None:
    recorder, _ = hanging
    recorder.row(INSTANT, "last", "", 1)
    with pytest.warns(RuntimeWarning, match=r"writing takes too long; the trace has no end and lacks at least \d+ rows"):
        recorder.close()
    # The newest rows are still beside the trace.
    assert tail_path(recorder.path).exists()


def test_a_storage_that_dies_while_rows_are_written_is_recorded_and_blocks_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in the middle of a write, on the thread that writes, with more rows waiting than may."""
    recorder, bus = recorder_at(path, interval_s=100).start(), Bus()
    bus.attach(recorder)
    tensors = [torch.zeros(4) for _ in range(3)]
    for tensor in tensors:
        bus.hold("other on device", "a", tensor.untyped_storage())
    del tensor
    assert recorder._queue.writer is not None
    write = recorder._queue.writer.rows

    def rows(rows: Sequence[Any]) -> None:
        if tensors:
            tensors.clear()
            for number in range(5):
                bus.instant("inside", str(number))
                recorder.flush()
            recorder.note("inside", {})
        write(rows)

    monkeypatch.setattr(queue, "MOST_WAITING", 3)
    monkeypatch.setattr(recorder._queue.writer, "rows", rows)
    recorder.flush()
    recorder.close()
    assert len(rows_of(path, "other on device")) == 6 and len(rows_of(path, "inside")) == 5


def test_want_of_memory_for_a_moment_loses_no_row_and_ends_no_recording(
    path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The script handles its lack of memory; the recorder's own thread met it as well."""
    monkeypatch.setattr(module, "FLUSH_NS", 1_000_000)
    recorder, bus = recorder_at(path, interval_s=0.001).start(), Bus()
    bus.attach(recorder)
    assert recorder._queue.writer is not None
    write, refused = recorder._queue.writer.rows, threading.Event()

    def rows(rows: Sequence[Any]) -> None:
        if not refused.is_set() and any(row[1] == "kept" for row in rows):
            refused.set()
            raise MemoryError
        write(rows)

    monkeypatch.setattr(recorder._queue.writer, "rows", rows)
    bus.instant("kept", "a")
    assert refused.wait(60)
    bus.instant("kept", "b")
    recorder.close()
    assert [row[0] for row in rows_of(path, "kept")] == ["a", "b"]
    assert not recwarn.list


def test_the_collector_may_run_at_any_allocation(path: Path) -> None:
    recorder, bus = recorder_at(path, interval_s=0.001).start(), Bus()
    bus.attach(recorder)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(300):
            knot: list[Any] = [torch.zeros(number + 1)]
            knot.append(knot)
            bus.hold("other on device", f"key {number}", knot[0].untyped_storage())
            bus.counter("other on host", "a", number)
            del knot
    finally:
        gc.set_threshold(*before)
    for _ in range(1000):
        # It does nothing while the recorder's thread collects.
        gc.collect()
        if not len(recorder.storages):
            break
    assert len(recorder.storages) == 0
    recorder.close()
    assert len(rows_of(path, "other on device")) == 600


def test_a_change_of_what_a_storage_is_held_for_is_one_moment(path: Path) -> None:
    recorder, bus = recorder_at(path).start(), Bus()
    bus.attach(recorder)
    tensor = torch.zeros(4)
    bus.hold("parameter on device", "a", tensor.untyped_storage())
    bus.hold("communication on device", "idle", tensor.untyped_storage())
    recorder.close()
    trace = Trace.open(path)
    found = [
        (int(rows.kind[at]), int(rows.ident[at]), int(rows.time_ns[at]))
        for rows in trace.chunks() for at in range(len(rows)) if rows.ident[at]
    ]  # fmt: skip
    assert [kind for kind, *_ in found] == [RowKind.ALLOC, RowKind.FREE, RowKind.ALLOC]
    assert found[1][1:] == found[2][1:] and found[0][1] == found[1][1]


# What goes wrong.


def test_a_full_disk_ends_the_recording_with_one_warning_and_the_run_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment, optimizer = training({"stage": 3})
    recorder = recorder_at(path)
    attachment.observe(recorder)
    write = os.write

    def full(fd: int, data: Any) -> int:
        if recorder._queue.writer is not None and fd == recorder._queue.writer._fd:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(os, "write", full)
        for _ in range(3):
            attachment.model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            recorder.flush()
        recorder.close()
    assert [str(one.message) for one in said if "training goes on: No space left" in str(one.message)] == [
        str(one.message) for one in said
    ] and len(said) == 1  # fmt: skip
    assert Trace.open(path).count > 0
    attachment.detach()


def test_a_sampler_that_raises_is_asked_no_more(path: Path) -> None:
    class Faulty(Closed):
        def sample(self) -> Sequence[Reading]:
            raise ZeroDivisionError("no samples")

    recorder, faulty = recorder_at(path, interval_s=0.001), Faulty()
    recorder.add_sampler(faulty)
    with pytest.warns(RuntimeWarning, match="Faulty raised ZeroDivisionError: no samples; it is not sampled again") as said:
        recorder.start()
    recorder.row(INSTANT, "last", "a", 1)
    recorder.close()
    assert len(said) == 1 and faulty.closed and rows_of(path, "last") == [("a", 1, 0)]


def test_an_interrupt_inside_an_event_reaches_the_user_and_the_recording_goes_on(path: Path) -> None:
    class Interrupting:
        left = 1

        def on_event(self, event: Any) -> None:
            if self.left:
                self.left = 0
                raise KeyboardInterrupt

    attachment, optimizer = training({"stage": 3})
    with recorder_at(path).listen():
        observer = Interrupting()
        with pytest.raises(KeyboardInterrupt):
            attachment.observe(observer)
        attachment.model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert len(rows_of(path, "step")) == 2 and not is_heard(attachment)
    attachment.detach()


def test_rows_reach_the_file_within_a_second_however_rarely_is_sampled(path: Path) -> None:
    recorder = recorder_at(path, interval_s=3600).start()
    recorder.row(INSTANT, "soon", "a", 1)
    assert soon(lambda: rows_of(path, "soon") != [])
    assert rows_of(path, "soon") == [("a", 1, 0)]
    recorder.close()


# What it keeps.


@pytest.mark.slow
def test_a_long_recording_keeps_nothing(path: Path) -> None:
    attachment, optimizer = training({"stage": 3})
    marks: list[tuple[int, int]] = []
    with zprof.record(path, nvml="off") as recorder:
        files: list[int] = []
        threads = set(threading.enumerate())
        for number in range(1200):
            attachment.model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 400 == 399:
                gc.collect()
                marks.append((len(recorder.storages), recorder._queue.threads))
                files.append(open_files())
        assert soon(lambda: open_files() <= files[0]), "but for what is just being sampled"
        assert set(threading.enumerate()) <= threads
    assert marks[0] == marks[1] == marks[2]
    attachment.detach()


def test_neither_model_nor_run_is_kept_alive(path: Path) -> None:
    with zprof.record(path, nvml="off"):
        attachment, optimizer = training({"stage": 3, "parameter": {"tier": "host"}})
        attachment.model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        attachment.detach()
        dead: list[weakref.ref[Any]] = [weakref.ref(attachment), weakref.ref(attachment.model), weakref.ref(optimizer)]
        dead += [weakref.ref(param) for param in attachment.model.parameters()]
        del attachment, optimizer
        gc.collect()
        assert [one() for one in dead] == [None] * len(dead)
