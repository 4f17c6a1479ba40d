"""``zprof hang``: real jobs whose ranks wait for one that does not come, and jobs that go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.jobs import forks, interpreters, may_trace
from tests.support.waiting import soon
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import write_trace
from zprof.rows import Row, RowKind

#: Rank 1 does not come to the third step; what it is in is the word that follows.
UNDER_ZHOOKS = """
import os, sys, time
import torch
from torch import nn
import torch.distributed as dist
import zhooks

def load_batch(step):
    if step == 3 and os.environ["RANK"] == "1":
        time.sleep(3600)
    return torch.randn(8, 32)

def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    zhooks.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        model(load_batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""
PLAIN = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

rank = int(os.environ["RANK"])

def hold(name):
    while not os.access(name, os.F_OK): time.sleep(0.05)

class Words(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if rank == 1 and index == 4:
            hold("after-loader")
        return torch.randn(16)

def main():
    dist.init_process_group("gloo")
    other = dist.new_group()
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))

    def step(batch):
        model(batch).sum().backward()

    for number in range(4):
        if rank == 1 and number == 2:
            hold("after-sleep")
        step(torch.randn(4, 16))
    for batch in DataLoader(Words(), batch_size=2, num_workers=1):
        step(batch)
    while True:
        step(torch.randn(4, 16))
        done = torch.tensor(float(Path("after-moving").exists()))
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
        time.sleep(0.02)
        if done:
            break
    if rank == 1:
        dist.barrier(other)
    dist.all_reduce(torch.ones(1))

main()
"""
needs_py_spy = pytest.mark.skipif(bool(WHY := may_trace()), reason=WHY)


def until(zprof: Zprof, code: int, *words: object, holding: str = "") -> Result:
    """What ``zprof hang`` says once it ends with ``code``: jobs need their time to come where they are to be looked at."""
    last: list[Result] = []

    def there() -> bool:
        last[:] = [zprof("hang", "--interval", "500ms", *words)]
        assert not isinstance(last[0].exception, (AssertionError, TypeError, ValueError, KeyError)), last[0].exception
        return last[0].exit_code == code and holding in last[0].stdout

    assert soon(there, 300), f"{last[0].exit_code}: {last[0].output}"
    return last[0]


@needs_py_spy
def test_ranks_that_wait_for_one_that_sleeps_are_told_with_unit_time_and_its_line(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(UNDER_ZHOOKS)
    with forks(2, "-m", "zprof", "run", "--level", "events", "train.py", at=tmp_path):
        assert soon(lambda: len(list(tmp_path.glob("run.*.zprof"))) == 2, 300)
        said = until(zprof, 3, "run.0.zprof", "run.1.zprof", holding="is not there")
        answer = said.stdout.splitlines()[-1]
        assert answer.startswith("hang: rank 0 waits in gather Sequential for "), said.output
        assert answer.endswith("; rank 1 is not there: it is in train.py:10 load_batch")
        assert "3 steps done" in said.stdout and "train.py:10 load_batch: time.sleep(3600)" in said.stdout
        whole = json.loads(zprof("hang", "--interval", "300ms", "--json", tmp_path).stdout)
    ranks = {rank["rank"]: rank for rank in whole["ranks"]}
    assert whole["hang"] and whole["finding"] == "missing" and whole["world"] == 2
    assert ranks[0]["waits"]["what"] == "wait gather" and ranks[0]["waits"]["for_s"] > 0.3 and ranks[0]["steps"] == 3
    assert ranks[0]["place"]["kind"] == "collective" and ranks[1]["waits"] is None and ranks[1]["motion"] == "stuck"
    # Both were killed now, and what they waited for is in what they left.
    after = zprof("hang", tmp_path)
    assert after.exit_code == 3
    assert "when they ended, rank 0 waited in gather Sequential for " in after.stdout.splitlines()[-1]
    assert "are gone (killed" in after.stdout.splitlines()[-1]


@needs_py_spy
@pytest.mark.slow
def test_a_job_that_nobody_records_is_seen_in_each_way_that_it_can_hang(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    with interpreters(2, "train.py", at=tmp_path) as ranks:
        pid = str(ranks[0].pid)
        asleep = until(zprof, 3, "--pid", pid, holding="is not there")
        assert "rank 0 waits in all_reduce of DDP's gradients for at least" in asleep.stdout.splitlines()[-1], asleep.output
        assert asleep.stdout.splitlines()[-1].endswith("rank 1 is not there: it is in train.py:12 hold")
        (tmp_path / "after-sleep").touch()

        loading = until(zprof, 3, "--pid", pid, holding="waiting for a loader")
        answer = loading.stdout.splitlines()[-1]
        assert "whose worker is in train.py:12 hold" in answer and "rank 1 is not there" in answer, loading.output
        (tmp_path / "after-loader").touch()

        moving = until(zprof, 0, "--pid", pid)
        assert "no hang seen: " in moving.stdout.splitlines()[-1]
        (tmp_path / "after-moving").touch()

        apart = until(zprof, 3, "--pid", pid, holding="different collectives")
        assert "rank 0 waits in all_reduce" in apart.stdout.splitlines()[-1]
        assert "rank 1 waits in barrier" in apart.stdout.splitlines()[-1]

        os.kill(ranks[1].pid, signal.SIGSTOP)
        stopped = zprof("hang", "--interval", "300ms", "--pid", pid)
        assert "stopped by a signal" in stopped.stdout and stopped.exit_code == 3
        # Gloo notices a rank that is killed, and ends the others: nobody hangs then.
        os.kill(ranks[1].pid, signal.SIGKILL)
        words = ("hang", "--interval", "300ms", "--pid", pid)
        assert soon(lambda: "is gone (ended with exit code 1)" in zprof(*words).stdout, 300)


@needs_py_spy
@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False])
def test_the_four_ranks_of_a_torchrun_are_found_below_it(tmp_path: Path, zprof: Zprof, recorded: bool) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    words = ["-m", "zprof", "run", "train.py"] if recorded else ["train.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4"]
    launcher = subprocess.Popen([*torchrun, *words], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        said = until(zprof, 3, "--pid", launcher.pid, holding="is not there")
        answer = said.stdout.splitlines()[-1]
        assert "ranks 0, 2 and 3 wait in all_reduce" in answer, said.output
        assert answer.endswith("rank 1 is not there: it is in train.py:12 hold")
        assert "4 ranks, looked at twice" in said.stdout
        if recorded:
            # Since it began to wait, not since we look.
            assert "at least" not in answer and "steps done" in said.stdout
    finally:
        launcher.terminate()
        launcher.wait()


@needs_py_spy
def test_ranks_are_known_by_the_environment_that_their_launcher_gave_them(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text("import time\n\ndef load_batch():\n    time.sleep(3600)\n\nload_batch()\n")
    with interpreters(3, "train.py", at=tmp_path) as ranks:
        for pid in (ranks[1].pid, os.getpid()):
            # This test's process started them, as torchrun would have.
            said = until(zprof, 3, "--pid", pid, holding="3 ranks, looked at twice")
            assert "ranks 0-2 (pid " in said.stdout
            last = said.stdout.splitlines()[-1]
            assert last == "hang: ranks 0-2 are stuck in train.py:4 load_batch; no rank is in a collective"
        with interpreters(1, "train.py", at=tmp_path):
            several = zprof("hang")
            assert several.exit_code == 2
            assert re.match(r"--pid: expected one of the \d+ jobs that run here, found none named: --pid \d+ ", several.stderr)
        ranks[2].kill()
        ended = until(zprof, 3, "--pid", ranks[0].pid, holding="is gone")
        assert ended.stdout.splitlines()[-1].endswith("; rank 2 is gone (killed by signal 9 (SIGKILL))")


def test_a_run_that_goes_on_is_no_hang(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(UNDER_ZHOOKS.replace("step == 3", "step < 0").replace("range(1000)", "range(10**9)"))
    with forks(1, "-m", "zprof", "run", "--level", "events", "train.py", at=tmp_path):
        assert soon(lambda: (tmp_path / "run.0.zprof").exists(), 300)
        said = until(zprof, 0, "run.0.zprof", holding="moved between two looks")
        assert said.stdout.splitlines()[-1].startswith("no hang seen: rank 0 moved between two looks, ")


def test_a_run_that_ended_well_is_no_hang(tmp_path: Path, zprof: Zprof) -> None:
    import zprof as package

    with package.record(tmp_path / "run.0.zprof"):
        time.sleep(0.01)
    said = zprof("hang", "run.0.zprof")
    assert said.exit_code == 0
    assert said.stdout.splitlines()[-1] == "answer: no rank runs any more: rank 0 ended with exit code 0"


def test_what_is_no_job_is_refused_in_a_line(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "notes.zprof").write_text("no trace")
    for words, code, expected in (
        (["--pid", "4194303"], 1, "pid 4194303: expected a running process, found none\n"),
        (["notes.zprof"], 1, "notes.zprof: expected a trace of zprof"),
        (["missing.zprof"], 1, "missing.zprof: cannot be read"),
        (["notes.zprof", "--pid", "1"], 2, "RUN: expected traces or --pid, found both\n"),
        (["--interval", "never"], 2, "expected 100ms to 3600s"),
    ):
        said = zprof("hang", *words)
        assert said.exit_code == code and expected in said.stderr, said.output
        assert len(said.stderr.splitlines()) <= 4 and not said.stdout


@pytest.mark.parametrize(
    "noted",
    [
        {"time_ns": 2**60, "threads": [{"name": "\x1b[31m", "number": 1, "frames": [["/\x1b]0;x\x07.py", "f\nhang: no", 3]]}]},
        {"time_ns": 2**60, "threads": "none"},
        {"time_ns": "now", "threads": []},
        {"time_ns": 2**60, "threads": [{"name": None, "number": None, "frames": None}]},
        {"time_ns": 2**60, "threads": [{"name": "", "number": 1, "frames": [[1, 2]]}]},
        {},
    ],
)
def test_what_a_forged_trace_says_reaches_the_terminal_as_plain_text(tmp_path: Path, zprof: Zprof, noted: Any) -> None:
    rows = [Row(RowKind.BEGIN, "wait gather", "\x1b[2Jlayers.0\n", 0, 10**9)]
    write_trace(tmp_path / "run.0.zprof", rows, notes={"hang": noted}, host="there\x1b[0m")
    said = zprof("hang", "--interval", "100ms", "run.0.zprof")
    assert said.exit_code in (0, 1, 3) and not isinstance(said.exception, (TypeError, ValueError, KeyError, AttributeError))
    assert all(letter.isprintable() or letter == "\n" for letter in said.output), said.output
    assert "\nhang: no" not in said.stdout


def test_two_traces_of_one_rank_are_refused(tmp_path: Path, zprof: Zprof) -> None:
    import zprof as package

    for name in ("a.zprof", "b.zprof"):
        with package.record(tmp_path / name):
            pass
    said = zprof("hang", "a.zprof", "b.zprof")
    assert said.exit_code == 1
    assert said.stderr == "b.zprof: expected traces of one run, found rank 0 in a.zprof, too; name those of one run\n"
