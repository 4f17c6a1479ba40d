"""Jobs under torchrun's elastic agent that lose ranks and hosts, and get more, go on from the memory of peers.

pytest runs it, slowly but for one; each agent's folder on a tmpfs stands for its host. Workers block until they are ended
wherever a test waits for the agent to do so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.forked import python
from tests.support.paths import ROOT
from tests.support.waiting import soon

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="no tmpfs")
STEPS = 6

WORKER = '''
import faulthandler, json, os, pathlib, signal, sys, threading
faulthandler.dump_traceback_later(120, exit=True)
import torch
import torch.distributed as dist
from torch import nn
import zhooks

out, host, plan = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
world, round_ = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
if world > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if world > 1 else 0
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
policy = {"stage": 3, "units": {"min_numel": 0}, "comm": {"timeout_s": 120}}
if host:
    policy["resilience"] = {"memory": host}
attachment = zhooks.attach(model, policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = (attachment.resume(out / "folder", optimizer) or {"step": 0})["step"] if host else 0
begun = step
while step < plan["steps"]:
    data = torch.Generator().manual_seed(step)
    batch = torch.randn(12, 16, generator=data).chunk(world)[rank]
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    step += 1
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        with open(out / "losses.jsonl", "a") as file:
            file.write(json.dumps([world, begun, step, float(total) / world]) + "\\n")
    if host:
        attachment.save_to_peers(optimizer, extra={"step": step})
    at = plan.get(f"{world} {step}")
    if at == "wait":
        (out / "waiting").touch()
        threading.Event().wait(300)
    if at == "kill" and rank == world - 1 and not (out / "killed").exists():
        (out / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if at == "raise" and not (out / "killed").exists():
        if rank == 0:
            (out / "killed").touch()
        raise SystemExit(3)
    if at == "host" and rank == world - 1:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
attachment.detach()
if world > 1:
    dist.destroy_process_group()
'''


@pytest.fixture
def memory() -> Iterator[Path]:
    path = SHM / f"zhooks-test-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(at: Path, memory: Path, host: int, plan: dict[str, object], *options: str) -> subprocess.Popen[str]:
    """An agent whose host has a memory of its own."""
    place = memory / f"host{host}"
    place.mkdir()
    (at / "worker.py").write_text(WORKER)
    words = [sys.executable, "-m", "torch.distributed.run", *options, str(at / "worker.py")]
    arguments = [str(at), str(place), json.dumps({"steps": STEPS, **plan})]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
    # Else ranks find addresses of those before in the agent's store, and Gloo cannot connect.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (at / f"agent{host}.log").open("w") as log:
        return subprocess.Popen(
            [*words, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def ended(agent: subprocess.Popen[str]) -> int:
    try:
        return agent.wait(400)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)


def losses(at: Path) -> list[list[float]]:
    return [json.loads(line) for line in (at / "losses.jsonl").read_text().splitlines()]


def undisturbed(at: Path) -> dict[int, float]:
    """Of one rank, by step."""
    at.mkdir()
    (at / "worker.py").write_text(WORKER)
    words = [str(at / "worker.py"), str(at), "", json.dumps({"steps": STEPS})]
    done = python(*words, at=at)
    assert done.returncode == 0, done.stderr
    return {int(step): loss for _, _, step, loss in losses(at)}


def files_in(memory: Path) -> list[Path]:
    return [path for path in memory.rglob("*") if path.is_file()]


def close(found: Sequence[Sequence[float]], expected: dict[int, float]) -> bool:
    return all(abs(loss - expected[int(step)]) <= 2e-6 for _, _, step, loss in found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_ranks_that_are_lost_are_started_again_from_memory(how: str, memory: Path, tmp_path: Path) -> None:
    options = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", f"--rdzv-endpoint=localhost:{port()}"]
    agent = launch(tmp_path, memory, 0, {"2 3": how}, *options, "--rdzv-backend=c10d", f"--rdzv-id={tmp_path.name}")
    assert ended(agent) == 0, (tmp_path / "agent0.log").read_text()[-4000:]
    found = losses(tmp_path)
    assert [(world, begun, step) for world, begun, step, _ in found] == [
        (2, 0, 1), (2, 0, 2), (2, 0, 3), (2, 3, 4), (2, 3, 5), (2, 3, 6),
    ]  # fmt: skip
    assert close(found, undisturbed(tmp_path / "whole"))
    assert not files_in(memory)


@pytest.mark.slow
def test_a_job_grows_with_a_host_that_comes_and_shrinks_with_one_that_is_lost(memory: Path, tmp_path: Path) -> None:
    options = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-id={tmp_path.name}",
        f"--rdzv-endpoint=localhost:{port()}", "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--monitor-interval=0.2",
    ]  # fmt: skip
    plan: dict[str, object] = {"1 2": "wait", "2 4": "host"}
    first = launch(tmp_path, memory, 0, plan, *options)
    agents = [first]
    try:
        assert soon((tmp_path / "waiting").exists, within_s=300)
        agents.append(launch(tmp_path, memory, 1, plan, *options))
        assert first.wait(400) == 0, (tmp_path / "agent0.log").read_text()[-4000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    found = losses(tmp_path)
    assert [(world, begun, step) for world, begun, step, _ in found] == [
        (1, 0, 1), (1, 0, 2), (2, 2, 3), (2, 2, 4), (1, 4, 5), (1, 4, 6),
    ]  # fmt: skip
    assert close(found, undisturbed(tmp_path / "whole"))
    assert not files_in(memory / "host0")
