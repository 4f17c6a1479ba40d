"""``zprof run --hang-after`` and ``--stacks-on``: a script that hangs leaves its stacks, and one that does not, nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.waiting import soon
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import begun
from zprof.living import stacks
from zprof.recording.recorder import Recorder
from zprof.running.silence import Silence
from zprof.trace.reader import Trace

HANGS = """
import os, signal, sys, time
import torch
parameter = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([parameter], lr=0.1)

def load_batch(seconds):
    time.sleep(seconds)

for step in range(3):
    parameter.sum().backward()
    optimizer.step()
load_batch(float(sys.argv[1]))
optimizer.step()
if len(sys.argv) > 2:
    load_batch(3600)
"""


def run(tmp_path: Path, *words: str) -> forked.Running:
    (tmp_path / "train.py").write_text(HANGS)
    return forked.start("-m", "zprof", "run", "--level", "events", *words, at=tmp_path)


def hangs_noted(path: Path) -> list[dict[str, object]]:
    trace = begun(path)
    return [] if trace is None else [note.body for note in trace.notes("hang")]


def test_a_silence_leaves_every_stack_in_the_trace_and_on_stderr_once(tmp_path: Path, zprof: Zprof) -> None:
    ended = run(tmp_path, "--hang-after", "1s", "train.py", "2.5").wait()
    assert ended.returncode == 0
    last = [line for line in ended.stderr.splitlines() if line.startswith("zprof:   ") and "load_batch" in line]
    assert last == [f"zprof:   {tmp_path}/train.py:8 load_batch"]
    assert "zprof: nothing has been recorded for " in ended.stderr
    assert "zprof: noted in run.0.zprof; zprof hang " in ended.stderr
    (note,) = [each for each in hangs_noted(tmp_path / "run.0.zprof") if "load_batch" in str(each)]
    assert isinstance(note["silent_ns"], int) and note["silent_ns"] >= 10**9
    # It went on, and ended well: where it stood is no answer any more.
    said = zprof("hang", "run.0.zprof")
    assert said.exit_code == 0 and "own note" not in said.stdout


@pytest.mark.slow
def test_a_script_that_was_killed_in_its_hang_is_told_by_what_it_noted(tmp_path: Path, zprof: Zprof) -> None:
    running = run(tmp_path, "--hang-after", "1s", "train.py", "0", "forever")
    assert soon(lambda: any("load_batch" in str(each) for each in hangs_noted(tmp_path / "run.0.zprof")), 300)
    header = Trace.growing(tmp_path / "run.0.zprof").header
    os.kill(header.pid, signal.SIGKILL)
    ended = running.wait()
    assert ended.returncode == -signal.SIGKILL
    said = zprof("hang", "run.0.zprof")
    assert said.exit_code == 3
    answer = said.stdout.splitlines()[-1]
    assert answer.startswith("hang: no rank runs any more: rank 0 is gone (killed by signal 9 (SIGKILL)); by its own note ")
    assert answer.endswith("rank 0 was in train.py:8 load_batch") and "4 steps done" in said.stdout


def test_where_nothing_may_look_into_a_process_its_own_note_says_where_it_is(
    tmp_path: Path, zprof: Zprof, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    running = run(tmp_path, "--hang-after", "1s", "train.py", "0", "forever")
    try:
        assert soon(lambda: any("load_batch" in str(each) for each in hangs_noted(tmp_path / "run.0.zprof")), 300)
        said = [zprof("hang", "--interval", "300ms", "run.0.zprof")]
        # Whatever else it is busy with when it has just noted so.
        soon(lambda: said.append(zprof("hang", "--interval", "300ms", "run.0.zprof")) or said[-1].exit_code == 3)
    finally:
        os.kill(Trace.growing(tmp_path / "run.0.zprof").header.pid, signal.SIGKILL)
        running.wait()
    assert said[-1].exit_code == 3, said[-1].output
    assert "its own note of " in said[-1].stdout and " ago says where it is:" in said[-1].stdout
    assert said[-1].stdout.splitlines()[-1] == "hang: rank 0 is stuck in train.py:8 load_batch; no rank is in a collective"


def test_a_script_without_silences_leaves_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, "--hang-after", "10min", "train.py", "0").wait()
    assert ended.returncode == 0 and "nothing has been recorded" not in ended.stderr
    assert not hangs_noted(tmp_path / "run.0.zprof")


def test_while_others_do_its_work_a_script_is_not_silent(tmp_path: Path) -> None:
    asked: list[bool] = []
    elsewhere = [True]
    said: list[str] = []

    def works_elsewhere() -> bool:
        asked.append(elsewhere[0])
        return elsewhere[0]

    with Recorder(tmp_path / "run.zprof", nvml="off", children="off") as recorder:
        silence = Silence(recorder, 0.1, said.append, works_elsewhere)
        silence.start()
        assert soon(lambda: len(asked) >= 3)
        assert not said and not hangs_noted(tmp_path / "run.zprof")
        elsewhere[0] = False
        assert soon(lambda: bool(said))
        silence.close()
    assert len(hangs_noted(tmp_path / "run.zprof")) == 1


@pytest.mark.slow
def test_a_signal_that_was_asked_for_prints_the_stacks_and_the_script_goes_on(tmp_path: Path) -> None:
    # In a process of its own: a fork of the tests' server has other handlers.
    (tmp_path / "train.py").write_text(HANGS.replace("load_batch(float", "print(os.getpid(), flush=True)\nload_batch(float"))
    words = [sys.executable, "-m", "zprof", "run", "--level", "events", "--stacks-on", "USR1", "train.py", "5"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        os.kill(int(one.stdout.readline()), signal.SIGUSR1)
        _, err = one.communicate(timeout=600)
    assert one.returncode == 0
    assert "in load_batch" in err and "most recent call first" in err


def test_times_that_cannot_be_are_refused(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text("")
    for time in ("1", "soon", "1us", "25h"):
        said = zprof("run", "--hang-after", time, "train.py")
        assert said.exit_code == 2 and "expected a time from 100ms to 24h, such as 90s or 10min" in said.stderr
