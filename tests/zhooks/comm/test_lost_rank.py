"""A rank that leaves alone, by an error of its own or killed: the others get an error that names it, and wait for nobody.

pytest runs it, on ranks that are processes of their own: the pools of ``ranks.py`` end a job when one rank has failed.
"""

from __future__ import annotations

import io
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zhooks
from tests.support.ranks import LIMIT_S, forks
from tests.support.slow import slow
from tests.support.waiting import soon


def leave(rank: int, folder: str, transport: str, how: str, late_s: float) -> None:
    """One rank's program: both train a step, then the first one is gone, and the other goes on, some time later."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    # Too long for the test to wait: what ends the wait is the other rank's end.
    policy = {"units": {"min_numel": 0}, "comm": {"transport": transport, "timeout_s": 4 * LIMIT_S}}
    zhooks.attach(model, policy=policy)
    model(torch.ones(2, 8)).sum().backward()
    if rank == 0:
        # The other one waits for this rank by now, or soon.
        assert soon((place / "waits").exists, within_s=LIMIT_S)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save(model.state_dict(), io.BytesIO())
    (place / "waits").touch()
    time.sleep(late_s)
    try:
        model(torch.ones(2, 8)).sum().backward()
        model[0].weight.grad.full_tensor()  # type: ignore[operator]
        said = "no error"
    except zhooks.DivergenceError as error:
        said = str(error)
    (place / "said.tmp").write_text(said)
    (place / "said.tmp").rename(place / "said")


def check_named(folder: Path, transport: str, how: str, late_s: float) -> None:
    children = [forks().Process(target=leave, args=(rank, str(folder), transport, how, late_s)) for rank in range(2)]
    for child in children:
        child.start()
    try:
        assert soon((folder / "said").exists, within_s=LIMIT_S), "the rank that is left waits"
        said = (folder / "said").read_text()
        assert re.match(r"Rank 0 is gone: killed, stopped by an error of its own, .* found rank 1 waiting", said), said
    finally:
        for child in children:
            child.kill()
            child.join()


@pytest.mark.parametrize(
    "leaves",
    [
        *(("shm", "killed"), ("p2p", "refused"), ("stock", "killed")),
        *slow(("shm", "refused"), ("p2p", "killed"), ("stock", "refused")),
    ],
    ids="-".join,
)
def test_a_rank_that_is_gone_is_named_by_the_others_at_once(tmp_path: Path, leaves: tuple[str, str]) -> None:
    check_named(tmp_path, *leaves, late_s=0)


@pytest.mark.parametrize("transport", ["shm", *slow("p2p", "stock")])
def test_a_rank_that_was_gone_before_the_call_is_named_too(tmp_path: Path, transport: str) -> None:
    check_named(tmp_path, transport, "killed", late_s=1)
