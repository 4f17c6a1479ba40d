"""Runs, recordings and traces that something disturbs: files that are no files, CUDA asked too early, odd traces."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zhooks
import zprof
from tests.support.forked import python
from tests.support.inside import flats_of
from tests.support.waiting import soon
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.analysis.following import RunFollower
from zprof.cli import main
from zprof.recording.recorder import Recorder
from zprof.rows import Row, RowKind
from zprof.trace.reader import Trace


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize(
    "command",
    [
        ["run", "-f", "-o", "OUT", "script.py"],
        ["timeline", "-f", "-o", "OUT", "run.zprof"],
        ["check", "--junit", "OUT", "run.zprof"],
        ["export", "--format", "csv", "--force", "-o", "OUT", "run.zprof"],
    ],
    ids=lambda command: command[0],
)
def test_what_is_no_plain_file_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(Path("run.zprof"), sample_rows(steps=1))
    Path("script.py").write_text("pass\n")
    Path("target").write_text("kept")
    if kind == "pipe":
        os.mkfifo("OUT")
    else:
        Path("OUT").symlink_to("target")
    if command[0] == "run":
        # What records the script refuses it, in a process of its own.
        done = python("-m", "zprof", *command)
        code, said = done.returncode, done.stderr
    else:
        result = CliRunner().invoke(main, command)
        code, said = result.exit_code, result.stderr
    assert code == 1 and "OUT" in said and "Traceback" not in said
    assert Path("OUT").is_fifo() if kind == "pipe" else Path("OUT").is_symlink()
    assert Path("target").read_text() == "kept"


READERS = [
    ["report"], ["report", "--json"], ["check", "--max", "device.peak=1GiB"], ["diff", "run.zprof"], ["timeline"],
    ["flamegraph"], ["export", "--format", "csv", "-o", "out"], ["frag"], ["top", "-1"], ["policy", "check"],
    ["policy", "show"],
    ["policy", "convert"],
]  # fmt: skip


def test_what_is_no_file_is_named_in_one_line_by_every_command_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    write_trace(Path("run.zprof"), sample_rows(steps=1))
    for command in READERS:
        for name in ("pipe", "/dev/zero", "folder"):
            result = CliRunner().invoke(main, [*command, name])
            assert result.exit_code in (1, 2) and result.stderr.count("\n") == 1, (command, name, result.stderr)
            assert result.stderr.startswith(f"{name}: "), (command, name, result.stderr)


def test_a_model_made_before_the_recording_can_still_be_attached_and_runs_as_it_would(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with zprof.record(tmp_path / "run.zprof", level="alloc"):
        attachment = zhooks.attach(model)
        model(torch.ones(2, 4)).sum().backward()
        hooks = [spec.post_hooks for flat in flats_of(attachment) for spec in flat.specs]
        assert not any(hooks), "no hook of the profiler's passes for the user's"
    attachment.detach()


def test_recording_never_asks_whether_there_is_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append("asked")))
    with zprof.record(tmp_path / "run.zprof", level="alloc"):
        torch.zeros(4)
    assert asked == []


def test_a_device_that_failed_costs_nothing_of_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    recorder = Recorder(tmp_path / "run.zprof").start()
    with monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "is_initialized", lambda: True)
        broken.setattr(torch.cuda, "current_device", failed)
        broken.setattr(torch.cuda, "device_count", failed)
        recorder.close()
    assert {"clock", "end"} <= {note.name for note in Trace.open(tmp_path / "run.zprof").notes()}


ODD = ['{"stage": -1}', '{"schedule": {"prefetch": "x"}}', '{"a":' * 100_000, "[schedule]\nprefetch=1e400"]


@pytest.mark.parametrize("text", ODD, ids=["stage", "prefetch", "deep", "infinite"])
def test_an_odd_policy_in_a_trace_is_no_policy(tmp_path: Path, text: str) -> None:
    oom = {"kind": "budget", "tier": "host", "nbytes": 1 << 20, "key": "optimizer/a", "message": "host tier cannot admit"}
    path = write_trace(tmp_path / "run.zprof", sample_rows(steps=1), notes={"policy": {"text": text}, "oom": oom})
    result = CliRunner().invoke(main, ["report", str(path)])
    assert result.exit_code == 0, result.output


def test_the_live_view_adds_what_counters_state_to_what_storages_hold(tmp_path: Path) -> None:
    rows = [
        Row(RowKind.ALLOC, "parameter on host", "a", 100, 1, 0, 1),
        Row(RowKind.COUNTER, "parameter on host", "a", 50, 2),
        Row(RowKind.FREE, "parameter on host", "a", 100, 3, 0, 1),
    ]
    seen = RunFollower(write_trace(tmp_path / "run.zprof", rows)).look()
    assert (seen.tiers["host"], seen.peaks["host"], seen.categories) == (50, 150, {"host": {"parameter": 50}})


def test_arguments_that_are_no_text_leave_a_trace_that_reads(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", sample_rows(steps=1), argv=("t", os.fsdecode(b"\xff" * 4000)))
    assert Trace.open(path).header.argv[0] == "t"


def test_a_script_ends_when_the_process_that_watches_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(120)\n")
    command = [sys.executable, "-m", "zprof", "run", "-o", str(tmp_path / "run.zprof"), str(script)]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    pid = int(watcher.stdout.readline())
    watcher.kill()
    watcher.wait()
    assert soon(lambda: ended(pid)), "the script lives on"
    watcher.stdout.close()


def ended(pid: int) -> bool:
    """There is no such process, or only what is left until its parent has asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_descriptor_that_the_script_closed_is_not_written_to(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.zprof").start()
    writer = recorder._queue.writer
    assert writer is not None and writer._fd is not None
    number = writer._fd
    os.close(number)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == number, "the lowest free number"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recorder.row(int(RowKind.INSTANT), "x", "", 0)
        recorder.close()
    assert "descriptor was closed by the script" in str(said[0].message)
    assert (tmp_path / "theirs").read_bytes() == b""
    os.close(theirs)
