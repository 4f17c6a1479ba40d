"""The tail of a recording: what a killed process did last is in its trace, once each, and damage is never read as rows."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import python
from tests.support.zprof_traces import HEADER
from zprof.rows import Row, RowKind, placed
from zprof.trace.header import here
from zprof.trace.reader import Trace
from zprof.trace.tail import NBYTES, SLOTS, Tail, rows_of, tail_path
from zprof.trace.writer import Writer

KILLED = """
import os, signal, sys
import torch
parameter = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(int(sys.argv[1])):
    parameter.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
big = torch.empty(100 << 20, dtype=torch.uint8)
os.kill(os.getpid(), signal.Signals[sys.argv[2]])
"""


def rows_in(trace: Trace) -> list[Row]:
    return [
        Row(kind, trace.strings[what], trace.strings[key], *numbers)
        for rows in trace.chunks()
        for kind, what, key, *numbers in zip(
            *(getattr(rows, name).tolist() for name in ("kind", "what", "key", "nbytes", "time_ns", "thread", "ident")),
            strict=True,
        )
    ]


@pytest.mark.parametrize("number", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_the_last_step_and_the_last_storage_before_a_signal_are_in_the_trace(number: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    ended = python("-m", "zprof", "run", "--level", "alloc", "train.py", "57", number, at=tmp_path)
    assert ended.returncode == -signal.Signals[number]
    rows = rows_in(Trace.open(tmp_path / "run.0.zprof"))
    assert sum(row.kind == RowKind.END and row.what == "step" for row in rows) == 57
    assert [row.nbytes for row in rows if row.kind == RowKind.ALLOC and row.nbytes >= 100 << 20] == [100 << 20]
    assert [path.name for path in tmp_path.iterdir() if ".tail" in path.name] == []
    assert "peak device 100 MiB" in ended.stderr


def row(number: int) -> Row:
    numbers = (512 * number, 10**9 + number, number % 3, number)
    return Row(RowKind.ALLOC, placed("other", "device"), f"module.{number % 7}", *numbers)


def left_behind(path: Path, *, written: int, put: int, first: int = 1, pid: int | None = None) -> list[Row]:
    """A trace with its tail as a kill leaves them: ``written`` rows in the file, all of ``put`` in the tail."""
    host, boot = here()
    header = dataclasses.replace(HEADER, host=host, boot=boot, pid=pid if pid is not None else gone())
    writer, tail = Writer(path, header), Tail(path, header)
    rows = [row(number) for number in range(first, first + put)]
    for each in rows:
        tail.put(*each[:4], each.time_ns, each.thread, each.ident)
    writer.rows(rows[:written])
    writer.flush()
    kept = path.with_name("kept")
    shutil.copy(tail_path(path), kept)
    tail.close()
    kept.rename(tail_path(path))
    return rows


def gone() -> int:
    """The id of a process that was there."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.mark.parametrize("written", [0, 1, 600, 900])
def test_rows_that_were_not_written_are_brought_once_and_only_once(written: int, tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    rows = left_behind(path, written=written, put=900)
    trace = Trace.open(path)
    assert rows_in(trace) == rows
    assert [note.body for note in trace.notes("recovered")] == [{"rows": 900 - written, "torn": 0}]
    assert not tail_path(path).exists() and trace.damage is None
    assert rows_in(Trace.open(path)) == rows


def test_the_frame_that_was_being_written_gives_way_to_the_rows_it_held(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    rows = left_behind(path, written=500, put=900)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    trace = Trace.open(path)
    assert rows_in(trace) == rows and trace.damage is None


def test_a_tail_that_went_round_has_its_newest_rows_and_counts_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    rows = left_behind(path, written=0, put=SLOTS + 100)
    trace = Trace.open(path)
    assert rows_in(trace) == rows[100:]
    assert [note.body for note in trace.notes("recovered")] == [{"rows": SLOTS, "torn": 100}]


def test_the_tail_of_a_process_that_lives_or_of_another_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    left_behind(path, written=2, put=9, pid=os.getpid())
    assert len(rows_in(Trace.open(path))) == 2 and tail_path(path).exists()
    other = tmp_path / "other.zprof"
    left_behind(other, written=3, put=9)
    shutil.copy(tail_path(path), tail_path(other))
    assert len(rows_in(Trace.open(other))) == 3


def test_no_damage_of_a_tail_is_ever_read_as_a_row(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    rows = left_behind(path, written=0, put=300)
    block = tail_path(path).read_bytes()
    used = [at for at in range(NBYTES) if block[at]]
    chance = random.Random(5)
    lost = 0
    for _ in range(12):
        damaged = bytearray(block)
        for _ in range(chance.randrange(1, 40)):
            damaged[chance.choice(used)] ^= 1 << chance.randrange(8)
        found, torn = rows_of(bytes(damaged))
        # The header says how many were written: where that is damaged, all are looked at again.
        assert set(found) <= set(rows) and len(found) == len(set(found))
        assert len(found) + torn >= len(rows) or found == rows[: len(found)] or torn
        lost += len(rows) - len(found)
    assert lost > 0


def test_a_tail_is_private_bounded_and_gone_after_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.zprof"
    tail = Tail(path, HEADER)
    found = tail_path(path).stat()
    assert found.st_mode & 0o777 == 0o600 and found.st_size == NBYTES < 5 << 20
    for number in range(3 * SLOTS):
        tail.put(*row(number)[:4], 5, 0, number)
    tail.put(RowKind.ALLOC, placed("other", "device"), "x" * (2 << 20), 1, 1, 0, 0)
    tail.put(RowKind.ALLOC, placed("other", "device"), "key", 1 << 70, 1, 0, 0)
    assert tail_path(path).stat().st_size == NBYTES
    tail.close()
    assert not tail_path(path).exists()
    tail.put(*row(1)[:4], 5, 0, 1)
