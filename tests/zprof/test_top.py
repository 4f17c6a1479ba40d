"""``zprof top`` shows devices, host memory and the runs that record: once or live, in a terminal, a pipe or as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.fake_nvml import MIB, Slots, build, environment
from tests.support.zprof_traces import HEADER, SHARD, sample_rows, write_trace
from zprof.analysis.following import RunFollower
from zprof.cli import main
from zprof.clock import now_ns, wall_ns
from zprof.rows import Row, RowKind, placed
from zprof.trace.writer import Writer

SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def no_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose libnvidia-ml.so.1 is no library, so that a machine with a driver is without one too."""
    folder = tmp_path_factory.mktemp("none")
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    return folder


def command(folder: Path, library: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "zprof", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env=environment(library, library.parent / "slots", **more),
    )


def recording(folder: Path, name: str = "run.0.zprof", **header: Any) -> Writer:
    """A trace of this process that is not closed."""
    now: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "wall_ns": wall_ns()}
    writer = Writer(folder / name, dataclasses.replace(HEADER, **{**now, **header}))
    # A model is under zhooks.
    writer.note("policy", {})
    return writer


# --- once -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_so_and_the_host_is_still_shown(tmp_path: Path, no_library: Path) -> None:
    done = command(tmp_path, no_library, "-1")
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("no GPU: NVML is absent (no NVML: ") and not lines[1]
    assert re.fullmatch(r"host memory \(\S+ [GT]iB in all\)", lines[2])
    assert any(line.startswith("available memory (MemAvailable)") for line in lines)
    assert lines[-1] == "no run records in this folder; start one with: zprof run train.py"


def test_devices_are_shown_with_their_levels_and_rates(tmp_path: Path, library: Path) -> None:
    Slots(library.parent / "slots", {"count": 2, "pcie_step": 8 * MIB, "reasons": 0x4})
    done = command(tmp_path, library, "-1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["nvml"]["state"] == "ok" and "devices" not in told["nvml"]
    first, second = told["devices"]
    assert (first["key"], second["key"]) == ("gpu0", "gpu1")
    assert first["memory_used_nbytes"] == 1000 * MIB and second["memory_used_nbytes"] == 1001 * MIB
    assert first["utilisation_percent"] == 37 and first["power_mw"] == 251_000 and first["throttles"] == ["power cap"]
    # Two steps a look between two looks some 0.2 s apart; slower where the machine is busy, never faster.
    assert 0 < first["pcie_tx_bytes_per_s"] <= 4 * 8 * MIB / 0.2
    text = command(tmp_path, library, "-1").stdout
    assert re.search(r"^0 +Fake H200 +37 % +1000 MiB / 138 GiB +251 W +41 C +1980 MHz .*power cap$", text, re.MULTILINE)


def test_a_run_that_records_is_found_and_one_that_ended_is_not(tmp_path: Path, no_library: Path) -> None:
    writer = recording(tmp_path, rank=1, world=2)
    writer.rows(list(sample_rows(steps=5, units=4)))
    writer.flush()
    old = write_trace(tmp_path / "old.zprof", sample_rows(steps=1), notes={"end": {"exit": 0}})
    os.utime(old, ns=(0, 0))
    (tmp_path / "junk.zprof").write_bytes(b"something else")
    told = json.loads(command(tmp_path, no_library, "-1", "--json").stdout)
    (run,) = told["runs"]
    assert run["path"] == "run.0.zprof" and run["state"] == "recording" and (run["rank"], run["world"]) == (1, 2)
    assert run["steps"] == 5 and 10 < run["step_ms"] < 1000 and run["exposed_ms"] > 0
    assert run["tiers"]["device"] == 4 * SHARD and run["tiers"]["host"] == 12 * SHARD
    assert set(run["bandwidth"]) >= {"gather", "reduce"} and all(rate > 0 for rate in run["bandwidth"].values())
    assert run["holding"][0]["nbytes"] == SHARD and run["waiting"][0]["wait_ms"] > 0
    assert ["junk.zprof" in problem for problem in told["problems"]] == [True]
    text = command(tmp_path, no_library, "-1").stdout
    assert "run.0.zprof  1/2   recording  12 MiB" in text and "junk.zprof: expected a trace of zprof" in text
    writer.close()


def test_runs_that_are_named_are_shown_whatever_became_of_them(tmp_path: Path, no_library: Path) -> None:
    ended = write_trace(tmp_path / "ended.zprof", sample_rows(steps=2), notes={"end": {"exit": 0}}, pid=2**22 + 1)
    os.utime(ended, ns=(0, 0))
    killed = recording(tmp_path, "killed.zprof", pid=2**22 + 1)
    killed.rows(list(sample_rows(steps=1)))
    killed.flush()
    names = [str(ended), str(tmp_path / "killed.zprof")]
    told = json.loads(command(tmp_path, no_library, "-1", "--json", *names).stdout)
    assert [run["state"] for run in told["runs"]] == ["ended", "killed"]
    missing = command(tmp_path, no_library, "-1", "nothing.zprof")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1 and "nothing.zprof: cannot be read" in missing.stderr
    killed.close()


def test_names_from_a_trace_are_shown_as_text_on_one_line(tmp_path: Path) -> None:
    bad = "[red]\x1b[31m\nlayer\u202e"
    rows = [Row(int(RowKind.ALLOC), placed("parameter", "device"), bad, 4096, now_ns(), 0, 1)]
    writer = recording(tmp_path)
    writer.rows(rows)
    writer.flush()
    done = CliRunner().invoke(main, ["top", "-1", str(tmp_path / "run.0.zprof")])
    assert done.exit_code == 0 and "\x1b" not in done.output and "\u202e" not in done.output
    assert "0     [red] [31m layer  4 KiB" in done.output
    writer.close()


def test_a_bad_interval_is_wrong_usage() -> None:
    for value in ("0", "soon", "1ms", "1e9", "-1"):
        done = CliRunner().invoke(main, ["top", "-1", f"--interval={value}"])
        assert done.exit_code == 2 and "expected 50ms to 3600s" in done.output


def test_once_without_a_run_loads_neither_torch_nor_numpy_nor_rich_tables(tmp_path: Path, no_library: Path) -> None:
    code = (
        "import sys; from zprof.cli import main; main(['top', '-1'], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'numba', 'pynvml', 'pydantic', 'rich.table', 'rich.live'} & set(sys.modules)))"
    )
    env = environment(no_library, tmp_path / "slots")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


# --- following --------------------------------------------------------------------------------------------------------


def test_a_growing_run_is_followed_from_where_it_was(tmp_path: Path) -> None:
    writer, rows = recording(tmp_path), list(sample_rows(steps=6, units=3))
    followed, seen = RunFollower(tmp_path / "run.0.zprof"), []
    for start in range(0, len(rows), 37):
        writer.rows(rows[start : start + 37])
        writer.flush()
        seen.append(followed.look())
    writer.close()
    whole = RunFollower(tmp_path / "run.0.zprof").look()
    assert [look.steps for look in seen] == sorted(look.steps for look in seen) and seen[0].steps == 0
    last = seen[-1]
    assert (last.steps, last.step_ms, last.tiers) == (whole.steps, whole.step_ms, whole.tiers) == (6, whole.step_ms, last.tiers)
    assert last.exposed_ms is not None and last.waiting and last.bandwidth
    assert last.bandwidth == whole.bandwidth and last.waiting == whole.waiting and last.holding == whole.holding
    assert last.exposed_ms == whole.exposed_ms
    followed.close()


def test_waits_are_paired_over_chunks_and_rates_are_of_the_last_seconds(tmp_path: Path) -> None:
    writer, begin = recording(tmp_path, mono_ns=SECOND), 100 * SECOND
    path = tmp_path / "run.0.zprof"

    def add(kind: RowKind, what: str, key: str, time_ns: int, nbytes: int = 0) -> None:
        writer.rows([Row(int(kind), what, key, nbytes, time_ns, 0, 0)])
        writer.flush()

    followed = RunFollower(path)
    # Long ago: not in the window of what is shown.
    add(RowKind.END, "gather", "a", SECOND, 1 << 40)
    add(RowKind.BEGIN, "wait gather", "a", begin)
    add(RowKind.BEGIN, "wait gather", "b", begin + 1_000_000)
    assert followed.look().waiting == []
    add(RowKind.END, "wait gather", "b", begin + 3_000_000)
    add(RowKind.END, "wait gather", "a", begin + 10_000_000)
    add(RowKind.END, "gather", "a", begin + 10_000_000, 50 * MIB)
    add(RowKind.END, "step", "AdamW", begin + 20_000_000)
    seen = followed.look()
    assert [(unit.name, unit.wait_ms, unit.what) for unit in seen.waiting] == [
        ("a", 10.0, "wait gather"),
        ("b", 2.0, "wait gather"),
    ]
    assert seen.exposed_ms == 12.0 and seen.step_ms is None
    assert seen.bandwidth == {"gather": 5 * MIB}
    writer.close()


# --- live -------------------------------------------------------------------------------------------------------------


def _interruptible() -> None:
    """As in a terminal: a shell's background jobs start with interrupts ignored, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_pipe_gets_one_json_object_a_look_until_it_is_interrupted(tmp_path: Path, no_library: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "zprof", "top", "--json", "--interval", "50ms"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(no_library, tmp_path / "slots", PYTHONUNBUFFERED="1"),
        preexec_fn=_interruptible,
    )
    assert process.stdout is not None
    looks = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0 and not errors
    assert [look["nvml"]["state"] for look in looks] == ["absent"] * 3
    assert looks[0]["wall_ns"] < looks[1]["wall_ns"] < looks[2]["wall_ns"]


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_a_terminal_is_drawn_on_as_far_as_it_can_be_and_control_c_ends_with_0(
    tmp_path: Path, library: Path, kind: str
) -> None:
    Slots(library.parent / "slots").reset()
    writer = recording(tmp_path)
    writer.rows(list(sample_rows(steps=2, units=2)))
    writer.flush()
    control, terminal = pty.openpty()
    env = environment(library, library.parent / "slots", TERM=kind, COLUMNS="200", LINES="60")
    process = subprocess.Popen(
        [sys.executable, "-m", "zprof", "top", "--interval", "100ms"], stdin=terminal, stdout=terminal, stderr=terminal,
        cwd=tmp_path, env=env, start_new_session=True, preexec_fn=_interruptible,
    )  # fmt: skip
    os.close(terminal)
    text = "".join(_read_until(control, lambda text: text.count("recording") >= 3))
    process.send_signal(signal.SIGINT)
    drain = threading.Thread(target=lambda: list(_read_until(control, lambda text: False)))
    drain.start()
    assert process.wait(120) == 0
    drain.join(120)
    os.close(control)
    writer.close()
    assert "Fake H200" in text and "Traceback" not in text
    # A terminal that can is drawn over in place; one that cannot gets plain blocks.
    assert ("\x1b[" in text) == (kind != "dumb")


def _read_until(handle: int, enough: Callable[[str], bool]) -> Iterator[str]:
    """What a terminal shows until it is enough, it was closed, or minutes have gone."""
    told, end = "", time.monotonic() + 180
    while not enough(told) and time.monotonic() < end:
        ready, _, _ = select.select([handle], [], [], 1)
        if not ready:
            continue
        try:
            part = os.read(handle, 65536).decode(errors="replace")
        except OSError:
            return
        told += part
        yield part
