"""Ranks of one host share memory, all of them or none, and none of it stays behind.

pytest runs it, on two ranks.
"""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.small_net import net, steps
from zhooks.cpu_transport import shared_memory


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_fails_while_transports_open_is_named_by_the_other_in_time() -> None:
    rank, _ = place()
    model = net()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(shared_memory, "_open_at", stopped)
        late = zhooks.DivergenceError, r"^Rank 1 did not come to attach in time\. Expected every rank in attach within 5.0 s"
        error, said = (RuntimeError, "stopped here") if rank else late
        with pytest.raises(error, match=said):
            zhooks.attach(model, policy={"comm": {"timeout_s": 5}})
    assert all(type(param) is nn.Parameter for param in model.parameters())
    dist.barrier()
    zhooks.attach(model, policy={"comm": {"timeout_s": 300}}).detach()


def stopped(place: str, nbytes: int) -> Any:
    raise RuntimeError("stopped here")


def no_space(*_: int) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@on_ranks(2, where=("posix_fallocate", "_open_at"))
def test_memory_that_one_rank_cannot_have_is_shared_by_none(where: str) -> None:
    rank, _ = place()
    with pytest.MonkeyPatch.context() as patched:
        if where == "_open_at" and rank == 1:
            patched.setattr(shared_memory, where, no_space)
        if where == "posix_fallocate":
            patched.setattr(os, where, no_space)
        model = net()
        attachment = zhooks.attach(model, policy={"comm": {"timeout_s": 300}})
        assert "transport p2p" in attachment.describe()
        steps(model)
        attachment.detach()
        loser = rank_of(where)
        with pytest.raises(zhooks.CapabilityError, match=rf"\"shm\" .* that rank {loser} cannot share \d+ B .*No space left"):
            zhooks.attach(model, policy={"comm": {"transport": "shm", "timeout_s": 300}})
    assert all(type(param) is nn.Parameter for param in model.parameters())


def rank_of(where: str) -> int:
    """Only the first rank reserves."""
    return 0 if where == "posix_fallocate" else 1


@on_ranks(2)
def test_shared_memory_has_no_name_and_no_page_that_is_still_to_be_found() -> None:
    before = shared_maps()
    attachment = zhooks.attach(net(), policy={"comm": {"transport": "shm", "timeout_s": 300}})
    (line,) = shared_maps() - before
    assert "/dev/shm" not in line and "memfd:zhooks (deleted)" in line, line
    start, _, end = line.split()[0].partition("-")
    about = os.stat(f"/proc/self/map_files/{start}-{end}") if os.geteuid() == 0 else None
    assert about is None or about.st_blocks * 512 >= int(end, 16) - int(start, 16), "every page is taken"
    attachment.detach()
    gc.collect()
    assert shared_maps() == before, "and given back"


def shared_maps() -> set[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if "zhooks" in line and " rw-s " in line}
