"""What a recording says of its run while it runs: rows of the trace and of the ring beside it, each once."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from pathlib import Path

import pytest

import zprof
from tests.support import forked
from tests.support.zprof_traces import HEADER, sample_rows
from zprof.living.recorded import Doing, Following
from zprof.rows import Row, RowKind, placed
from zprof.trace.header import here
from zprof.trace.tail import Tail
from zprof.trace.writer import Writer

SECOND = 10**9


class Recording:
    """A trace of this process, with its ring, as a recorder keeps them: all rows in the ring, some in the file."""

    def __init__(self, path: Path) -> None:
        host, boot = here()
        header = dataclasses.replace(HEADER, host=host, boot=boot, pid=os.getpid())
        self.writer, self.tail = Writer(path, header), Tail(path, header)
        self.writer.note("policy", {})
        self.put = self.written = 0

    def take(self, rows: list[Row], write: bool) -> None:
        for each in rows:
            self.put = self.tail.put(*each[:4], each.time_ns, each.thread, each.ident)
        if write:
            self.writer.rows(rows)
            self.writer.flush()
            self.tail.written(self.put)

    def close(self) -> None:
        self.writer.close()
        self.tail.close()


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "run.0.zprof")


def now(recording: Recording) -> Doing:
    return Following(recording.writer.path).look()


def span(kind: RowKind, what: str, key: str, time_ns: int) -> Row:
    return Row(kind, what, key, 0, time_ns)


def test_the_open_wait_is_seen_though_its_row_is_in_the_ring_alone(recording: Recording) -> None:
    rows = [
        span(RowKind.BEGIN, "step", "SGD", 1 * SECOND),
        span(RowKind.END, "step", "SGD", 2 * SECOND),
        span(RowKind.BEGIN, "forward", "model train", 3 * SECOND),
        span(RowKind.BEGIN, "compute", "layers.3", 4 * SECOND),
        Row(RowKind.ALLOC, placed("gradient", "device"), "layers.3", 1024, 4 * SECOND, 0, 7),
    ]
    recording.take(rows, write=True)
    waits = [span(RowKind.BEGIN, what, "layers.4", at * SECOND) for what, at in (("gather", 5), ("wait gather", 6))]
    recording.take(waits, write=False)
    doing = now(recording)
    assert (doing.steps, doing.unit, doing.phase, doing.rows) == (1, "layers.3", "forward", 7)
    assert doing.waits_for is not None and doing.waits_for.name == "gather layers.4"
    assert doing.waits_for.begin_ns == 6 * SECOND and [each.name for each in doing.under_way] == ["gather layers.4"]
    assert doing.held == {("gradient", "device"): 1024}
    recording.close()


def test_wherever_the_file_ends_and_the_ring_begins_the_answer_is_the_same(tmp_path: Path) -> None:
    rows = list(sample_rows(steps=3, units=3, level="alloc"))
    chance = random.Random(5)
    whole: list[Doing] = []
    for cut in [0, len(rows), *(chance.randrange(len(rows)) for _ in range(6))]:
        path = tmp_path / f"{len(whole)}.zprof"
        recording = Recording(path)
        following = Following(path)
        for at in range(0, cut, 97):
            recording.take(rows[at : min(at + 97, cut)], write=True)
            if chance.random() < 0.3:
                following.look()
        recording.take(rows[cut:], write=False)
        whole.append(following.look())
        # Asked again nothing is counted twice, nor when the rows have come into the file.
        assert following.look() == whole[-1]
        recording.writer.rows(rows[cut:])
        recording.writer.flush()
        assert following.look() == whole[-1]
        recording.close()
    assert all(each == whole[0] for each in whole)
    assert whole[0].steps == 3 and whole[0].rows == sum(row.kind != RowKind.COUNTER or " on " in row.what for row in rows)


def test_samples_alone_do_not_move_a_run(recording: Recording) -> None:
    recording.take([span(RowKind.BEGIN, "wait reduce", "layers.0", SECOND)], write=True)
    before = now(recording)
    recording.take([Row(RowKind.COUNTER, "rss", "", 5 << 20, 9 * SECOND)], write=True)
    after = now(recording)
    assert (before.rows, before.last_ns) == (after.rows, after.last_ns) == (1, SECOND)
    assert after.newest_ns == 9 * SECOND and after.samples == {"rss": 5 << 20} and after.waits == before.waits
    recording.close()


def test_collectives_are_counted_by_name(recording: Recording) -> None:
    for number in range(3):
        both = (RowKind.BEGIN, RowKind.END)
        recording.take([span(kind, "collective", "all_reduce", SECOND + number) for kind in both], write=True)
    assert now(recording).begun == {"all_reduce": 3}
    recording.close()


FOUND = """
import os
from pathlib import Path
import zprof
from zprof.living.processes import found
from zprof.living.recorded import recording_of

mine = found(os.getpid())
assert mine is not None and recording_of(mine) == (None, "")
with zprof.record("any.name") as recorder, open("other.zprof", "ab"):
    path = Path.cwd() / "any.name"
    assert recording_of(mine) == (path, ""), recording_of(mine)
    with zprof.open(recorder.path):
        assert recording_of(mine) == (path, "")
    child, answered = os.pipe()
    forked = os.fork()
    if forked == 0:
        # It has the file open, and does not record into it.
        os.read(child, 1)
        os._exit(0)
    try:
        of_child = found(forked)
        assert of_child is not None
        path, why = recording_of(of_child)
        assert path is None and why.startswith(f"it is a child of pid {os.getpid()}, which records into any.name"), why
    finally:
        os.close(answered)
        os.close(child)
        os.kill(forked, 9)
        os.waitpid(forked, 0)
assert recording_of(mine) == (None, "")
print("found")
"""


def test_a_process_is_found_with_the_trace_that_it_records_into(tmp_path: Path) -> None:
    # In a process of its own: this one may have traces open that other tests have left as a kill leaves them.
    done = forked.python("-c", FOUND, at=tmp_path)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_a_live_recording_is_followed_to_its_last_row(tmp_path: Path) -> None:
    with zprof.record(tmp_path / "run.0.zprof") as recorder:
        following = Following(recorder.path)
        recorder.row(RowKind.BEGIN, "wait gather", "layers.1", 8)
        # Not written yet: it is in the ring.
        doing = following.look()
        assert doing.waits_for is not None and doing.waits_for.key == "layers.1"
        done = threading.Thread(target=lambda: recorder.row(RowKind.END, "wait gather", "layers.1", 8))
        done.start()
        done.join()
        assert following.look().waits == ()
