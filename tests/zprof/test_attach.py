"""``zprof attach``: what a running process does and holds, and in one line why it may not be looked into."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_nvml import MIB, Slots, build, environment
from tests.support.jobs import forks, may_trace
from tests.support.waiting import soon
from tests.support.zprof_command import Zprof
from zprof.living import stacks

needs_py_spy = pytest.mark.skipif(bool(WHY := may_trace()), reason=WHY)

SLEEPS = "import time\n\ndef hold(seconds):\n    print(flush=True)\n    time.sleep(seconds)\n\nhold(3600)\n"
TRAINS = """
import time
import torch
from torch import nn
import zhooks

def hold():
    time.sleep(3600)

model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
zhooks.attach(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step(), optimizer.zero_grad()
hold()
"""
#: A shell's words that take away the right to look into others' processes.
WITHOUT_RIGHT = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")


@contextmanager
def started(*words: str, at: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has printed its first line."""
    with subprocess.Popen(words, cwd=at, stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            one.stdout.readline()
            yield one
        finally:
            one.kill()


def by_command(
    *words: str, under: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-m", "zprof", "attach", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **(environ or {})})


@needs_py_spy
def test_the_stacks_and_the_memory_of_a_plain_process_are_shown(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(sys.executable, "train.py", at=tmp_path) as one:
        # It says that it is there just before it sleeps.
        assert soon(lambda: ", sleeping, " in zprof("attach", one.pid).stdout, 300)
        said = zprof("attach", one.pid)
        whole = json.loads(zprof("attach", one.pid, "--json").stdout)
        native = zprof("attach", one.pid, "--native").stdout
        resident = int(Path(f"/proc/{one.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert lines[0].startswith(f"pid {one.pid}, sleeping, running for ") and lines[0].endswith(f"{sys.executable} train.py")
    assert lines[1] == "not recorded by zprof"
    assert f"  {tmp_path}/train.py:5 hold: time.sleep(seconds)" in lines
    assert [frame["line"] for frame in whole["stacks"]["threads"][0]["frames"]] == [5, 7]
    assert whole["memory"]["rss_nbytes"] == pytest.approx(resident, rel=0.2) and whole["recording"] is None
    assert 0 < whole["memory"]["pss_nbytes"] <= whole["memory"]["rss_nbytes"]
    assert "nanosleep (libc" in native and "train.py:5 hold" in native


@needs_py_spy
def test_of_a_recorded_process_steps_and_bytes_now_are_shown(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    with forks(1, "-m", "zprof", "run", "--level", "alloc", "train.py", at=tmp_path) as (rank,):
        assert soon(lambda: "train.py:8 hold" in zprof("attach", _script(rank.pid)).stdout, 300)
        said = zprof("attach", _script(rank.pid))
        whole = json.loads(zprof("attach", _script(rank.pid), "--json").stdout)
        traced = zprof("attach", _script(rank.pid), "--record", "1s")
    recording = whole["recording"]
    parameters = 2 * (256 * 256 + 256) * 4
    assert recording["steps"] == 5 and recording["level"] == "alloc" and not recording["waits"]
    # Adam's two moments, and its count of steps for each of four parameters.
    states = pytest.approx(2 * parameters, abs=64)
    assert recording["held_nbytes"]["device"] == {"parameter": parameters, "optimizer": states}
    assert f"recorded into {tmp_path}/run.0.zprof at level alloc: 5 steps done" in said.stdout
    assert traced.exit_code == 1 and "is already being recorded, into " in traced.stderr


def _script(watcher: int) -> int:
    """The process that the watching one started to be recorded, once it has."""
    import psutil

    names = {each.pid: each for each in psutil.Process(watcher).children()}
    recording = [pid for pid in names if any(link.suffix == ".zprof" for link in _open_files(pid))]
    return recording[0] if recording else watcher


def _open_files(pid: int) -> Iterator[Path]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield Path(os.readlink(link))
        except OSError:
            continue


def test_what_is_no_running_python_process_is_named(tmp_path: Path, zprof: Zprof) -> None:
    with started("sh", "-c", "echo; sleep 3600") as shell:
        said = zprof("attach", shell.pid)
        assert said.exit_code == 1
        assert said.stderr.startswith(f"pid {shell.pid}: expected a Python process, found sh -c echo; sleep 3600")
        # Its memory is shown all the same.
        assert "resident " in said.stdout
        shell.kill()
        assert soon(lambda: "is gone" in zprof("attach", shell.pid).stderr)
        gone = zprof("attach", shell.pid)
        expected = "expected a running process, found one that is gone (killed by signal 9 (SIGKILL))"
        assert gone.stderr == f"pid {shell.pid}: {expected}\n" and gone.exit_code == 1
    never = zprof("attach", shell.pid)
    assert never.stderr == f"pid {shell.pid}: expected a running process, found none\n" and never.exit_code == 1


@needs_py_spy
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give the right up")
def test_a_process_that_may_not_be_looked_into_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(sys.executable, "train.py", at=tmp_path) as one:
        said = by_command(str(one.pid), under=WITHOUT_RIGHT)
    assert said.returncode == 4, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith(f"pid {one.pid} (")
    assert line.endswith("run zprof with sudo, or start the container with --cap-add SYS_PTRACE")
    # What needs no right is shown.
    assert "resident " in said.stdout


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there the process itself can be asked")
def test_without_py_spy_the_package_is_named_and_memory_is_shown(
    tmp_path: Path, zprof: Zprof, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    with started(sys.executable, "train.py", at=tmp_path) as one:
        said = zprof("attach", one.pid)
        recorded = zprof("attach", one.pid, "--record", "1s")
        leveled = zprof("attach", one.pid, "--record", "1s", "--level", "alloc")
    assert said.exit_code == recorded.exit_code == leveled.exit_code == 4
    version = ".".join(map(str, sys.version_info[:2]))
    assert said.stderr == (
        f"pid {one.pid}: expected py-spy to read its stacks, found none, and it runs Python {version}, and sys.remote_exec "
        "needs 3.14; pip install 'zhooks[attach]'\n"
    )
    assert "resident " in said.stdout and "expected py-spy to sample it, found none" in recorded.stderr
    assert leveled.stderr.startswith("--level alloc: expected a process that can begin to record itself: it runs Python")


@needs_py_spy
def test_record_samples_python_where_nothing_can_be_put_into_the_process(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(SLEEPS.replace("time.sleep(seconds)", "while True: sum(range(1000))"))
    with started(sys.executable, "train.py", at=tmp_path) as one:
        said = zprof("attach", one.pid, "--record", "1s", "-o", "sampled.json")
        again = zprof("attach", one.pid, "--record", "1s", "-o", "sampled.json")
    assert said.exit_code == 0, said.output
    assert "py-spy samples its Python stacks instead, without bytes and steps, " in said.stderr
    whole = json.loads((tmp_path / "sampled.json").read_text())
    assert whole["$schema"].endswith("speedscope.app/file-format-schema.json")
    assert "hold" in {frame["name"] for frame in whole["shared"]["frames"]} and whole["profiles"][0]["samples"]
    assert again.exit_code == 1 and "exists already" in again.stderr


@needs_py_spy
def test_a_stopped_process_is_read_as_it_stands(tmp_path: Path, zprof: Zprof) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(sys.executable, "train.py", at=tmp_path) as one:
        os.kill(one.pid, signal.SIGSTOP)
        assert soon(lambda: "stopped by a signal" in zprof("attach", one.pid).stdout)
        said = zprof("attach", one.pid)
    assert said.exit_code == 0 and " hold: " in said.stdout


def test_gpu_memory_is_what_nvml_says_of_the_process(tmp_path: Path) -> None:
    library = build(tmp_path / "nvml")
    (tmp_path / "train.py").write_text(SLEEPS)
    with started(sys.executable, "train.py", at=tmp_path) as one:
        slots = Slots(tmp_path / "slots", {"count": 2, "process": one.pid, "process_memory": 300 * MIB})
        environ = environment(library, slots.path)
        mine = by_command(str(one.pid), "--json", environ=environ)
        slots.set({"process": 1})
        other = by_command(str(one.pid), environ=environ)
    found = json.loads(mine.stdout)["memory"]["gpus"]
    assert [(gpu["key"], gpu["nbytes"]) for gpu in found] == [("gpu0", 300 * MIB), ("gpu1", 300 * MIB)]
    assert "GPU memory: not seen: NVML names 1 other process, and not this one (in a container it never does)" in other.stdout


def test_options_of_record_without_it_are_refused(zprof: Zprof) -> None:
    for words in (["-o", "x"], ["-f"], ["--level", "alloc"]):
        said = zprof("attach", os.getpid(), *words)
        assert said.exit_code == 2 and said.stderr.startswith("-o, -f and --level: expected --record with them, found none")
    assert "expected 500ms to 1h" in zprof("attach", os.getpid(), "--record", "1ms").stderr
