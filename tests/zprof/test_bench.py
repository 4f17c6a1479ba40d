"""``zprof bench``: real transfers of this machine, stored for the other commands."""

from __future__ import annotations

import cProfile
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.forked import launch
from tests.support.on_gpus import on_gpus
from zprof.bench.gather import PREFIX
from zprof.bench.store import bench_path, stored
from zprof.cli import main


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)

    return run


def test_what_was_measured_is_stored_for_this_host(bench: Any, tmp_path: Path) -> None:
    result = bench("memcpy", "disk", "--size", "2MiB", "--path", str(tmp_path), "--json")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert [figure["name"] for figure in body["figures"]] == ["memcpy", "disk write", "disk read"]
    assert all(figure["bytes_per_s"] > 1e6 for figure in body["figures"])
    assert body["stored"] == str(bench_path()) and bench_path().is_relative_to(tmp_path)
    kept = {figure.name: figure.bytes_per_s for figure in stored(socket.gethostname())}
    assert kept == {figure["name"]: figure["bytes_per_s"] for figure in body["figures"]}
    assert not list(tmp_path.glob("*zhooks*")), "the scratch file is gone"


def test_a_profile_is_not_measured_under_a_profiler(bench: Any, tmp_path: Path) -> None:
    with cProfile.Profile():
        result = bench("--profile", str(tmp_path / "here.toml"))
    assert (result.exit_code, result.stdout) == (2, "") and not (tmp_path / "here.toml").exists()
    assert result.stderr.startswith("--profile: expected no Python profiler in this process, because it slows down what")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU a rank needs one of its own")
def test_ranks_of_an_all_gather_meet_and_the_first_says_its_rate() -> None:
    first, second = launch(2, "-m", "zprof.bench.gather", str(1 << 20))
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr + second.stderr
    backend, rate = first.stdout.removeprefix(PREFIX).split()
    assert backend == "gloo" and float(rate) > 1e5


@pytest.mark.slow
def test_an_all_gather_is_measured_over_real_ranks_and_shown(bench: Any) -> None:
    result = bench("gather", "--size", "1MiB", "--ranks", "2", "--no-store")
    if torch.cuda.device_count() == 1:
        assert result.exit_code == 4
        return
    assert result.exit_code == 0
    assert "gather" in result.stdout and "GiB" in result.stdout and "stored" not in result.stdout
    assert not bench_path().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is missing")
def test_without_a_gpu_its_copies_are_refused_by_name_and_left_out_of_all(bench: Any, tmp_path: Path) -> None:
    result = bench("h2d")
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("h2d and d2h: expected a GPU that torch can use, found none")
    result = bench("h2d", "all", "--size", "1MiB", "--path", str(tmp_path))
    assert result.exit_code == 4


@on_gpus()
def test_copies_to_and_from_a_gpu_are_measured(device: str) -> None:
    asked = ["bench", "h2d", "d2h", "--size", "64MiB", "--json", "--no-store"]
    measured = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert torch.accelerator.current_accelerator() == torch.device(device)
    body = json.loads(measured.stdout)
    assert [figure["name"] for figure in body["figures"]] == ["h2d", "d2h"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["disk", "--path", "/nowhere"], "--path: /nowhere: expected a folder, found none"),
        (["--size", "8Mx"], "'8Mx': expected a number of bytes such as 256MiB"),
        (["--size", "1KiB"], "expected 1MiB to 64GiB"),
        (["--size", "9TiB"], "expected 1MiB to 64GiB"),
        (["tape"], "'tape' is not one of"),
        (["--ranks", "1"], "1 is not in the range"),
    ],
)
def test_wrong_usage_is_said_in_a_line(bench: Any, arguments: list[str], said: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
