"""``zprof oom``: what recorded bytes suggest and what the planner finds, each tried in the simulator before it is offered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import python
from tests.support.ranks import Pool
from tests.support.torches import on_a_device_in_python
from tests.support.zprof_command import WRITE_RESULTS
from tests.support.zprof_traces import MIB, write_trace
from zprof.rows import Row, RowKind, placed

WIDTH, LAYERS = 256, 4
#: Of a real run on this machine: a MiB of parameters and as many of gradients fit, states of Adam do not.
TRAIN = f"""
import json, sys, torch, zhooks
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
policy = {{"budget": {{"device": "3 MiB"}}, "units": {{"min_numel": 0}}, **json.loads(sys.argv[1])}}
attachment = zhooks.attach(model, policy=policy)
optimizer = torch.optim.Adam(model.parameters())
for step in range(2):
    model(torch.ones(4, {WIDTH})).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
JOB = f"""
import torch
from torch import nn

def job(rows=1):
    def build():
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})))
        return model, torch.optim.Adam(model.parameters())

    def step(model, optimizer, *, micro_batch=4, accumulation=1):
        for _ in range(accumulation):
            model(torch.empty(rows * micro_batch, {WIDTH}, device="virtual")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return build, step

def large():
    return job(1 << 13)

def fixed():
    build, step = large()
    return build, lambda model, optimizer: step(model, optimizer)
"""
#: Words after ``zprof oom``, by the name under which their results are kept.
COMMANDS = {
    "less": "cuda.zprof --job job.py:fixed --hardware h100 --device 1MiB --host 1MiB --disk 1MiB",
    "other": "cuda.zprof --job job.py:job --hardware h100 --device 1GiB",
    "fine": "fine.zprof",
    "alone": "real.zprof --job job.py:job",
    "unused": "real.zprof --host 3GiB",
    "more": "cuda.zprof --job job.py:job --hardware h100 --device 1TiB",
    "near": "cuda.zprof --job job.py:job --hardware h10",
}
#: Those that try many changes, for the slow tests.
TRIALS = {
    "untried": "real.zprof",
    "real": "real.zprof --job job.py:job --hardware h100 --json",
    "cuda": "cuda.zprof --job job.py:large --hardware h100 --json",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, virtual_ranks: Pool) -> Path:
    """The folder with the results of all `COMMANDS`."""
    folder = tmp_path_factory.mktemp("oom")
    (folder / "job.py").write_text(JOB)
    (folder / "train.py").write_text(TRAIN)
    failed = python("-m", "zprof", "run", "-o", "real.zprof", "train.py", "{}", at=folder)
    assert failed.returncode == 1 and "[budget] device is too small" in failed.stderr, failed.stderr
    policy = {"text": json.dumps({"stage": 3, "units": {"min_numel": 0}})}
    # What the job's large batch takes is more than this GPU had.
    words = "CUDA out of memory. Tried to allocate 32.00 MiB."
    note = {"kind": "cuda", "tier": "device", "message": words, "nbytes": 32 * MIB, "short": 4 * MIB, "limit": 144 * MIB}
    rows = [
        Row(RowKind.ALLOC, placed("activation", "device"), f"{number}", 32 * MIB, 0, 0, number + 1) for number in range(LAYERS)
    ]
    write_trace(folder / "cuda.zprof", rows, notes={"policy": policy, "oom": {**note, "exact": False}})
    write_trace(folder / "fine.zprof", rows)
    virtual_ranks.run(WRITE_RESULTS, folder=str(folder), command="oom", words=COMMANDS)
    return folder


@pytest.fixture(scope="module")
def tried(made: Path, virtual_ranks: Pool) -> Path:
    """The same folder, with the results of `TRIALS`."""
    virtual_ranks.run(WRITE_RESULTS, folder=str(made), command="oom", words=TRIALS)
    return made


def result(made: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / f"{name}.result").read_text())
    assert "Traceback" not in found["err"] and found["raised"].startswith(("None", "SystemExit(")), found
    return found


def body(made: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result(made, name)["out"])
    return found


@pytest.mark.slow
def test_without_a_job_what_is_offered_says_that_it_was_not_tried(tried: Path) -> None:
    found = result(tried, "untried")
    assert found["code"] == 0 and found["out"].startswith("out of memory: [budget] device refused ")
    assert '\n  [optimizer] tier = "host": saves ' in found["out"] and ": fits" not in found["out"]
    assert found["out"].rstrip().splitlines()[-1].startswith("not tried: zprof oom RUN --job module:function --hardware FILE")


@pytest.mark.slow
def test_what_the_simulator_says_of_a_real_run_s_remedies_is_so(tried: Path) -> None:
    found = body(tried, "real")
    assert result(tried, "real")["code"] == 0 and found["failure"]["bound"] == "[budget] device"
    assert found["as_it_ran"]["tried"] and not found["as_it_ran"]["fits"] and "[budget] device is" in found["as_it_ran"]["why"]
    changes = {each["what"]: each for each in found["changes"] if each["tried"]}
    chosen = changes['[optimizer] tier = "host"']
    assert chosen["fits"] and chosen["step_s"] > 0 and chosen["host_bytes"] >= 2 * MIB and chosen["device_bytes"] < 4 * MIB
    for what, trial in changes.items():
        policy = {key: value for key, value in trial["policy"].items() if key not in ("disk", "rule", "budget")}
        really = python("train.py", json.dumps(policy), at=tried)
        assert (really.returncode == 0) == trial["fits"], (what, really.stderr)
    assert found["planned"] and all(each["fits"] and each["step_s"] > 0 for each in found["planned"])
    quickest = found["planned"][0]["policy"]
    policy = {key: value for key, value in quickest.items() if key not in ("disk", "rule", "budget")}
    assert python("train.py", json.dumps(policy), at=tried).returncode == 0


@pytest.mark.slow
@on_a_device_in_python
def test_what_a_gpu_lacked_is_held_to_what_it_had(tried: Path) -> None:
    found = body(tried, "cuda")
    assert found["device_bytes"] == 144 * MIB and not found["as_it_ran"]["fits"]
    assert found["as_it_ran"]["device_bytes"] > 144 * MIB and found["as_it_ran"]["why"] == "a device has 144 MiB"
    changes = {each["what"]: each for each in found["changes"]}
    half = changes["half the batch"]
    assert half["tried"] and half["fits"] == (half["device_bytes"] <= 144 * MIB)
    assert half["device_bytes"] < found["as_it_ran"]["device_bytes"]
    away = changes['[activation] tier = "host"']
    assert away["tried"] and away["device_bytes"] < found["as_it_ran"]["device_bytes"] and away["host_bytes"] > 0
    fits = [each for each in (*found["changes"], *found["planned"]) if each["fits"]]
    assert fits and all(each["device_bytes"] <= 144 * MIB for each in fits)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("fine", 1, "fine.zprof: expected a run that ran out of memory, found none"),
        ("alone", 2, "--job, --hardware: expected both or neither"),
        ("unused", 2, "--host: expected --job and --hardware too"),
        ("more", 2, "--device: expected at most the 80 GiB that h100 has, found 1 TiB"),
        ("near", 1, "did you mean h100?"),
    ],
)
def test_what_cannot_be_tried_is_said_in_a_line(made: Path, name: str, code: int, said: str) -> None:
    found = result(made, name)
    assert found["code"] == code and said in found["err"].strip().splitlines()[-1] and found["out"] == ""


@on_a_device_in_python
def test_where_nothing_fits_that_is_the_answer(made: Path) -> None:
    found = result(made, "less")
    lines = found["out"].splitlines()
    assert found["code"] == 3 and ": fits" not in found["out"]
    assert any(line.startswith("simulated on h100 x 1, 1 MiB per device (predicted") for line in lines)
    [offered] = [line for line in lines if line.startswith('  [activation] tier = "host": does not fit: ')]
    assert " of device, " in offered and " of host at the peak, " in offered and " ms per step: a device has 1 MiB" in offered
    [half] = [line for line in lines if line.startswith("  half the batch: ")]
    assert "not tried: the job's step has no micro_batch and accumulation with defaults that can be halved" in half
    assert "the planner finds nothing: find_policy: does not fit on 1 rank of h100, by simulation: needs " in found["out"]
    said = found["err"].splitlines()
    assert said[0].startswith("zprof: simulating ") and any(line.startswith("planned: stage 3") for line in said)
    assert any(line.startswith('[activation] tier = "host": does not fit: ') for line in said)


@on_a_device_in_python
def test_a_failure_that_the_simulator_has_not_proves_nothing(made: Path) -> None:
    found = result(made, "other")
    assert found["code"] == 1 and "  as it ran: fits: " in found["out"]
    offered = found["out"].partition("what recorded bytes suggest:")[2]
    assert ": fits" not in offered
    assert "not tried: the simulator does not run out of memory where the run did" in offered
