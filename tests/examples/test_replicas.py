"""The example of torchft: two replicas of two ranks, started by its own lines, come to one end.

pytest runs it slowly, where torchft is installed. What a kill does is tested with the integration.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT, SEARCH_PATH

pytest.importorskip("torchft", reason="pip install '.[torchft]'")

from torchft.coordination import LighthouseServer

LIMIT_S = 600


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_two_replicas_of_the_example_learn_until_both_are_at_the_last_step(tmp_path: Path) -> None:
    house = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=20)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH, "TORCHFT_LIGHTHOUSE": house.address()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    program = [str(ROOT / "examples" / "replicas.py"), "--steps", "20"]
    started = []
    try:
        for replica in ("0", "1"):
            with (tmp_path / replica).open("wb") as said:
                command = [*torchrun, f"--master-port={free_port()}", *program, "--replica", replica]
                started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said))
        for number, each in enumerate(started):
            printed = f"{each.wait(LIMIT_S)}\n{(tmp_path / str(number)).read_text()}"
            assert each.returncode == 0, printed[-4000:]
            losses = [float(found) for found in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
            assert len(losses) == 3 and losses[-1] < losses[0], printed[-4000:]
    finally:
        for each in started:
            each.kill()
        house.shutdown()
