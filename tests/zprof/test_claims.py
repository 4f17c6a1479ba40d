"""Who samples a GPU, of processes that could."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LAUNCHED = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
FORKS = """
import os
from zprof.gpu.claims import Claims
first = Claims()
assert first.take("GPU-of-this-test")
forked, say = os.pipe()
wait, end = os.pipe()
child = os.fork()
if not child:
    os.close(end)
    os.write(say, b"!")
    os.read(wait, 1)
    os._exit(0)
os.read(forked, 1)
first.close()
print(Claims().take("GPU-of-this-test"))
os.close(end)
os.waitpid(child, 0)
"""
CLAIMS = 'from zprof.gpu.claims import Claims\nprint(Claims().take("GPU-of-this-test"))'


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def said_by(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_forked_worker_does_not_keep_what_its_rank_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(os.getpid()))
    assert said_by(FORKS) == "True"


def test_ranks_that_two_programs_spawn_are_two_jobs_and_those_of_one_are_one() -> None:
    waits = "\nimport sys; sys.stdout.flush(); sys.stdin.read()"
    keeps = CLAIMS.replace("Claims().take", "(held := Claims()).take") + waits
    with subprocess.Popen([sys.executable, "-c", keeps], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        assert said_by(CLAIMS) == "False", "of the same program"
        other = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CLAIMS!r}], check=True)"
        assert said_by(other) == "True", "of another program"
