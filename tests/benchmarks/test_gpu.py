"""The GPU benchmark on a CPU: every trial runs through the code a GPU will run, and what it says can be read.

pytest calls it; the numbers mean nothing here and none is compared with a target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.forked import python
from tests.support.paths import ROOT

PEERS = ("deepspeed-3-offload", "deepspeed-2-offload")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it, one thread, and no CUDA device in sight; the trials it starts are processes anew."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return python(str(ROOT / "benchmarks" / "gpu.py"), *arguments, environment=environment)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All trials in one process at the smallest size, written as JSON."""
    written = tmp_path_factory.mktemp("gpu") / "out.json"
    done = run("--device=cpu", "--size=nano", "--here", "--steps=1", "--rounds=1", f"--json={written}")
    assert done.returncode in (0, 1), done.stderr
    assert "step ms" in done.stdout and "target" in done.stdout
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def test_without_cuda_the_command_ends_with_four_and_one_line() -> None:
    done = run("--only=copies")
    assert done.returncode == 4
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "CUDA" in done.stderr


@pytest.mark.slow
def test_every_trial_that_is_installed_leaves_a_record(document: dict[str, Any]) -> None:
    errors = {one["name"]: one["error"] for one in document["trials"] if one["error"] is not None}
    assert set(errors) <= set(PEERS), errors
    assert {one["section"] for one in document["trials"]} == {"copies", "equal", "stage3", "activations"}


@pytest.mark.slow
def test_steps_say_their_time_losses_memory_and_waits(document: dict[str, Any]) -> None:
    records = {one["name"]: one["record"] for one in document["trials"] if one["record"] is not None}
    for name, record in records.items():
        if name in ("copies", "equal"):
            continue
        assert record["step_s"] > 0 and len(record["losses"]) == 1 and record["host_nbytes"] > 0, name
        assert ("stalled_s" in record) is (name.startswith("zhooks-host") or name.endswith(("-host", "-wide"))), name
    assert records["saved-host-wide"]["losses"] == records["saved-device"]["losses"]
    assert records["zhooks-host-device-torch"]["losses"] == records["zhooks-device"]["losses"]


@pytest.mark.slow
def test_every_target_of_the_issue_has_a_verdict(document: dict[str, Any]) -> None:
    said = {verdict["what"]: verdict for verdict in document["verdicts"]}
    for part in ("h2d, seam", "d2h, seam", "h2d, store", "d2h, store", "fsdp2-offload", "deepspeed-3-offload", "differ"):
        assert any(part in what for what in said), part
    for pair in ("saved-host / saved-device", "unit-host / unit-device", "unit-device / torch-checkpoint"):
        assert said[f"step, {pair}"]["value"] is not None
    assert document["exposed"]["unit-host"]["over_s"] is not None


@pytest.mark.slow
def test_host_and_disk_have_the_bits_of_the_device(document: dict[str, Any]) -> None:
    (record,) = [one["record"] for one in document["trials"] if one["name"] == "equal"]
    assert record["differ"] == [] and record["compared"] == 30


@pytest.mark.slow
def test_a_trial_runs_in_a_process_of_its_own_and_one_that_fails_is_shown() -> None:
    done = run("--device=cpu", "--size=nano", "--only=copies", "--rounds=1", "--json=-")
    assert done.returncode in (0, 1), done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["error"] is None and trial["record"]["nbytes"] > 0
    late = run("--device=cpu", "--size=nano", "--only=copies", "--minutes=0", "--json=-")
    (trial,) = json.loads(late.stdout)["trials"]
    assert late.returncode == 1 and trial["record"] is None and "minutes were over" in trial["error"]


def test_sizes_of_a_gpu_have_the_sequence_that_is_asked_for() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from gpu_trials import SIZES
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert all(SIZES[name].saved.length == 2048 for name in ("h200", "small"))
