"""Jobs of several ranks that stay, for tests that look at them while they run: forks, or interpreters of their own.

A fork has no environment of its own in /proc, so that it is found by its trace alone; an interpreter costs the seconds that it
takes to import torch.  All of it is ended at the end of the block.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support import forked

__all__ = ["forks", "interpreters", "may_trace"]


@contextmanager
def forks(world: int, *words: str, at: Path) -> Iterator[list[forked.Running]]:
    """``python *words`` as `torchrun --nproc_per_node world` runs it, in forks."""
    with _meeting(world) as told:
        ranks = [forked.start(*words, at=at, environment=told | _of(rank)) for rank in range(world)]
        try:
            yield ranks
        finally:
            _end([rank.pid for rank in ranks])
            for rank in ranks:
                rank.kill()


@contextmanager
def interpreters(world: int, *words: str, at: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same by interpreters, whose environments launchers and `zprof hang` can read."""
    with _meeting(world) as told:
        ranks = [
            subprocess.Popen([sys.executable, *words], cwd=at, env=told | _of(rank), stderr=subprocess.DEVNULL)
            for rank in range(world)
        ]
        try:
            yield ranks
        finally:
            _end([rank.pid for rank in ranks])
            for rank in ranks:
                rank.wait()


def may_trace() -> str:
    """Why no process may be looked into on this machine, by py-spy's own word; "" where one may."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return "py-spy is not installed"
    sleeps = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE) as one:
        try:
            assert one.stdout is not None
            one.stdout.readline()
            done = subprocess.run([program, "dump", "--pid", str(one.pid)], capture_output=True, text=True, timeout=600)
        finally:
            one.kill()
    return "" if done.returncode == 0 else f"py-spy may not look into processes here: {done.stderr.splitlines()[0]}"


@contextmanager
def _meeting(world: int) -> Iterator[dict[str, str]]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield dict(os.environ) | job | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    del store


def _of(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _end(pids: list[int]) -> None:
    """What these started first: a script under ``zprof run``, a loader's workers."""
    for pid in pids:
        with suppress(psutil.Error):
            for below in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    below.send_signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
