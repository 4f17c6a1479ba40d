"""Live figures of ``zprof run --prometheus`` and ``--prometheus-file``: what they are called, and what is there when."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install 'zhooks[prometheus]'")

from tests.support.waiting import soon
from tests.support.zprof_command import NOT_LAUNCHED, Zprof
from tests.support.zprof_exports import promtool
from tests.support.zprof_formats import check_exposition
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.analysis.following import RunFollower, Seen
from zprof.rows import Row, RowKind
from zprof.show.exports.prometheus import exposition, labels
from zprof.show.exports.prometheus_live import families

#: Trains until it is told to end, and says when its first steps are over.
TRAINS = """
import signal, sys, time
from pathlib import Path
import torch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
Path("began").touch()
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters())
while not Path("end").exists():
    model(torch.randint(50, (4, 8))).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
    time.sleep(0.01)
"""

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


@contextmanager
def training(at: Path, *options: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A script that trains under ``zprof run`` until the block ends."""
    (at / "train.py").write_text(TRAINS)
    words = [sys.executable, "-m", "zprof", "run", *options, "train.py"]
    told = NOT_LAUNCHED | environment
    running = subprocess.Popen(words, cwd=at, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        (at / "end").touch()
        try:
            running.communicate(timeout=600)
        finally:
            running.kill()


def free_port() -> int:
    """Two that follow each other; nobody else here listens."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
        return port


def seen_of(path: Path) -> Seen:
    follower = RunFollower(path)
    try:
        return follower.look()
    finally:
        follower.close()


def shown(seen: Seen | None) -> Samples:
    body = exposition(list(families(seen, {"rank": "0", "host": "node", "run": "job7"})))
    promtool(body)
    return check_exposition(body)


# --- what there is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["events", "alloc"])
def test_figures_that_have_the_names_of_the_finished_export_have_its_values(zprof: Zprof, level: str) -> None:
    write_trace(Path("job7.0.zprof"), sample_rows(level=level), level=level, host="node")
    assert zprof("export", "job7.0.zprof", "--format", "prometheus", "-o", "out.prom").exit_code == 0
    finished = check_exposition(Path("out.prom").read_bytes())
    live = shown(dataclasses.replace(seen_of(Path("job7.0.zprof")), state="recording"))
    same = finished.keys() & live.keys()
    assert {"zprof_steps", "zprof_device_parameter_peak_bytes", "zprof_rss_peak_bytes"} <= same
    assert {name: live[name] for name in same} == {name: finished[name] for name in same}
    assert ("zprof_device_peak_bytes" in live) == ("zprof_device_peak_bytes" in finished), "absent where it was not seen"


def test_bytes_are_by_category_and_only_of_what_is_recorded(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", sample_rows(level="alloc"), level="alloc")
    seen = dataclasses.replace(seen_of(path), state="recording")
    held = shown(seen)["zprof_device_held_bytes"]
    assert {dict(key)["category"]: value for key, value in held.items() if value} == seen.categories["device"]
    few = shown(dataclasses.replace(seen, known={"device": ("parameter",)}))
    assert [dict(key)["category"] for key in few["zprof_device_held_bytes"]] == ["parameter"]
    assert "zprof_device_gradient_peak_bytes" not in few


def test_gpus_have_a_label_and_base_units(tmp_path: Path) -> None:
    rows = [
        Row(RowKind.COUNTER, "nvml power", "gpu1", 250_000, 1_000_000_005),
        Row(RowKind.COUNTER, "nvml memory used", "gpu1", 1 << 30, 1_000_000_006),
        Row(RowKind.COUNTER, "nvml utilisation", "gpu1", 87, 1_000_000_007),
        Row(RowKind.COUNTER, "nvml power", "gpu1", 300_000, 1_000_000_009),
        Row(RowKind.COUNTER, "amd power", "gpu2", 400_000, 1_000_000_009),
    ]
    found = shown(dataclasses.replace(seen_of(write_trace(tmp_path / "run.zprof", rows)), state="recording"))
    of_gpus = {name: of for name, of in found.items() if "_gpu_" in name}
    assert {name: {dict(key)["gpu"]: value for key, value in of.items()} for name, of in of_gpus.items()} == {
        "zprof_gpu_power_watts": {"gpu1": 300.0, "gpu2": 400.0},
        "zprof_gpu_memory_used_bytes": {"gpu1": 1 << 30},
        "zprof_gpu_utilisation_ratio": {"gpu1": 0.87},
    }


def test_a_rank_that_records_no_more_shows_nothing_of_now(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.zprof", sample_rows(level="alloc"), level="alloc")
    lives = shown(dataclasses.replace(seen_of(path), state="recording"))
    for state in ("ended", "killed", "silent"):
        found = shown(dataclasses.replace(seen_of(path), state=state))
        assert set(found["zprof_recording"].values()) == {0} and found["zprof_steps"] == lives["zprof_steps"]
        assert not any("recent" in name or "held" in name or name == "zprof_rss_bytes" for name in found)
    assert set(lives["zprof_recording"].values()) == {1} and "zprof_step_recent_seconds" in lives
    assert shown(None) == {"zprof_recording": {(("host", "node"), ("rank", "0"), ("run", "job7")): 0}}


def test_ranks_of_a_run_share_its_name() -> None:
    assert labels(Path("runs/job7.3.zprof"), 3, "node") == {"rank": "3", "host": "node", "run": "job7"}
    assert labels(Path("mine.zprof"), 0, "node")["run"] == "mine.zprof"


# --- while a script runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_has_the_figures_while_the_script_runs_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "train.prom"
    with training(tmp_path, "--prometheus-file", "train.prom") as running:
        found: Samples = {}

        def trains() -> bool:
            nonlocal found
            if path.exists():
                found = check_exposition(path.read_bytes())
            return "zprof_tokens_recent_per_second" in found

        assert soon(trains)
        (key,) = found["zprof_steps"]
        assert dict(key) == {"rank": "0", "host": socket.gethostname(), "run": "run"}
        assert found["zprof_steps"][key] > 0 and found["zprof_recording"][key] == 1
        assert found["zprof_step_recent_seconds"][key] > 0.01 and found["zprof_rss_bytes"][key] > 1 << 20
        tokens = found["zprof_tokens_recent_per_second"][key] * found["zprof_step_recent_seconds"][key]
        assert tokens == pytest.approx(32) and found["zprof_samples_recent_per_second"][key] > 0
        held = {dict(labels)["category"]: value for labels, value in found["zprof_device_held_bytes"].items()}
        weights = (50 * 16 + 16 * 16 + 16) * 4
        assert held["parameter"] == weights and held["optimizer"] >= 2 * weights
        assert path.stat().st_mode & 0o444 == 0o444 & ~umask()
        promtool(path.read_bytes())
        assert running.poll() is None
    assert running.returncode == 0 and not path.exists() and (tmp_path / "run.0.zprof").exists()
    assert [each.name for each in tmp_path.iterdir() if "prom" in each.name] == []


def test_an_endpoint_is_scraped_while_the_script_runs_and_passes_its_signals_on(tmp_path: Path) -> None:
    port = free_port()
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    with training(tmp_path, "--prometheus", str(port), "-o", "job7.{rank}.zprof", **told) as running:
        found: Samples = {}

        def trains() -> bool:
            nonlocal found
            try:
                # The second rank of its host.
                with urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=60) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=")
                    found = check_exposition(answer.read())
            except URLError:
                return False
            return "zprof_steps" in found

        assert soon(trains)
        (key,) = found["zprof_steps"]
        assert dict(key) == {"rank": "1", "host": socket.gethostname(), "run": "job7"}
        running.send_signal(signal.SIGTERM)
        assert running.wait(600) == 7
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port + 1}/metrics", timeout=60)


@pytest.mark.slow
def test_what_a_killed_wait_left_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "train.prom"
    with training(tmp_path, "--prometheus-file", "train.prom") as running:
        assert soon(path.exists)
        running.kill()
        running.wait(600)
    left = path.read_bytes()
    assert left.startswith(b"# HELP zprof_recording ")
    (tmp_path / "end").unlink()
    with training(tmp_path, "--prometheus-file", "train.prom"):
        assert soon(lambda: path.read_bytes() != left)
        (tmp_path / "theirs").write_bytes(b"theirs")
        (tmp_path / "theirs").rename(path)
    assert path.read_bytes() == b"theirs", "what somebody else put there is neither written over nor taken away"


def umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_what_cannot_be_served_or_written_is_one_line_before_the_script_starts(zprof: Zprof, tmp_path: Path) -> None:
    Path("script.py").write_text("open('ran', 'w')")
    Path("theirs.prom").write_text("node_load1 3\n")
    Path("link.prom").symlink_to("elsewhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            ("--prometheus", str(port)): f"--prometheus 127.0.0.1:{port}: expected to listen there: Address already in use",
            ("--prometheus-file", "none/a.prom"): "none/a.prom: cannot be written: No such file or directory",
            ("--prometheus-file", "a.txt"): "--prometheus-file a.txt: expected a name that ends in .prom",
            ("--prometheus-file", "theirs.prom"): "theirs.prom: expected no file, or one of zprof's, found another",
            ("--prometheus-file", "link.prom"): "link.prom: expected no file, or one of zprof's, found another",
        }
        for words, line in cases.items():
            told = zprof("run", *words, "script.py")
            assert (told.exit_code, told.stdout) == (1, "") and told.stderr.count("\n") == 1, told.output
            assert line in told.stderr
    for value in ("0", "65536", "a:b", "http://x:1", "::1:9"):
        told = zprof("run", "--prometheus", value, "script.py")
        assert told.exit_code == 2 and "expected a port from 1 to 65535" in " ".join(told.stderr.split())
    assert not Path("ran").exists() and Path("theirs.prom").read_text() == "node_load1 3\n"
    assert not list(tmp_path.glob("*.zprof"))


def test_several_ranks_need_a_name_each(zprof: Zprof, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("script.py").write_text("open('ran', 'w')")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = zprof("run", "--prometheus-file", "a.prom", "script.py")
    assert told.exit_code == 2 and "expected {rank} in the name" in told.stderr and not Path("ran").exists()


def test_without_prometheus_client_the_remedy_is_named_and_the_exit_code_is_4(
    zprof: Zprof, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("script.py").write_text("open('ran', 'w')")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for words in (["--prometheus", "9400"], ["--prometheus-file", "a.prom"]):
        told = zprof("run", *words, "script.py")
        assert told.exit_code == 4 and not Path("ran").exists()
        assert told.stderr == (
            "prometheus_client: needed for Prometheus' format, not installed; pip install 'zhooks[prometheus]'\n"
        )
