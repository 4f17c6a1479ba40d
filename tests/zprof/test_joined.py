"""A recording that joins a running program and leaves it: what it sees, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import soon

#: Records itself when it is told to, in the middle of its steps, and goes on after the recording has ended.
TRAINS = """
import json, sys, threading, time
import torch
from torch import nn
from zprof.recording.joined import join, leave

level, seconds, most_steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def state():
    from torch.nn.modules import module
    from torch.optim import optimizer as stepping
    hooks = [module._global_forward_pre_hooks, module._global_forward_hooks, module._global_parameter_registration_hooks,
             stepping._global_optimizer_pre_hooks, stepping._global_optimizer_post_hooks]
    threads = sorted(each.name for each in threading.enumerate() if each.name.startswith("zprof"))
    return [torch._C._len_torch_dispatch_stack(), [len(each) for each in hooks], threads]

for _ in range(3):
    step()
before = state()
said = {}

class Joins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        # Where what is handed to a process may well be run: in a backward.
        said.update(join("joined.zprof", level=level, seconds=seconds, force=False))
        return grad

Joins.apply(model(torch.randn(8, 32))).sum().backward()
until = time.monotonic() + 300
number = 0
while time.monotonic() < until:
    step()
    number += 1
    if number == most_steps:
        leave(said["path"])
    try:
        if "end" in open("joined.zprof", "rb").read().decode("latin-1") and not state()[2]:
            break
    except FileNotFoundError:
        pass
    time.sleep(0.01)
for _ in range(3):
    step()
print(json.dumps([before, state(), said]))
"""


@pytest.mark.parametrize(("level", "seconds", "steps"), [("events", 0.5, 0), ("alloc", 0.5, 0), ("alloc", 300, 6)])
def test_a_recording_joins_in_a_backward_and_leaves_nothing_behind(
    tmp_path: Path, level: str, seconds: float, steps: int
) -> None:
    import zprof
    from tests.support import forked

    (tmp_path / "train.py").write_text(TRAINS)
    ended = forked.python("train.py", level, str(seconds), str(steps), at=tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, after, said = json.loads(ended.stdout)
    assert before == after and before[0] == 0
    assert said["waits"] is (level == "alloc") and said["level"] == level
    with zprof.open(tmp_path / "joined.zprof") as run:
        # How many there are in half a second is the machine's business.
        assert not steps or 1 <= len(run.steps) <= steps
        if level == "alloc":
            held = run.held(run.peak("device", "parameter"))
            assert held["parameter"] == 2 * (32 * 32 + 32) * 4


def _newer() -> str | None:
    """An interpreter of Python 3.14 that can import what zprof needs."""
    if sys.version_info >= (3, 14):
        return sys.executable
    program = os.environ.get("ZPROF_TEST_PYTHON314") or shutil.which("python3.14")
    if program is None:
        return None
    done = subprocess.run([program, "-c", "import msgpack, numpy, psutil, click, pydantic"], capture_output=True)
    return program if done.returncode == 0 else None


@pytest.mark.slow
@pytest.mark.skipif(_newer() is None, reason="no Python 3.14 with zprof's packages is on this machine")
def test_on_python_3_14_a_process_is_asked_for_its_stacks_and_records_itself(tmp_path: Path) -> None:
    program = _newer()
    assert program is not None
    (tmp_path / "train.py").write_text("import time\n\ndef spin():\n    while True: time.sleep(0.01)\n\nspin()\n")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tools'}"
    environ = {**os.environ, "PYTHONPATH": path, "PATH": "/usr/bin:/bin"}

    def zprof_there(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "-m", "zprof", *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
        )

    with subprocess.Popen([program, "train.py"], cwd=tmp_path, env=environ) as one:
        try:
            pid = str(_python(one.pid))
            assert soon(lambda: "train.py:4 spin" in zprof_there("attach", pid).stdout)
            whole = json.loads(zprof_there("attach", pid, "--json").stdout)
            recorded = zprof_there("attach", pid, "--record", "1s", "-o", "now.zprof")
            again = zprof_there("attach", pid)
        finally:
            one.kill()
    assert whole["stacks"]["by"] == "sys.remote_exec"
    assert recorded.returncode == 0, recorded.stderr
    assert f"zprof: in pid {pid}: a recorder at level events, imported modules (" in recorded.stderr
    assert "its hooks were removed; imported modules stay" in recorded.stderr and (tmp_path / "now.zprof").exists()
    assert "not recorded by zprof" in again.stdout


def _python(pid: int) -> int:
    """The interpreter itself, where a script of the shell's has started it and not become it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid
