"""Ranks that are started again at another number, and find in their launcher's store what those before them left."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zhooks.comm import Meeting


def start(world: int, store: dist.Store, patched: pytest.MonkeyPatch) -> list[str]:
    """What each rank hears of the others."""
    meetings = []
    patched.setattr(distributed_c10d, "_get_default_store", lambda: store)
    patched.setattr(dist, "get_world_size", lambda: world)
    for rank in range(world):
        patched.setattr(dist, "get_rank", lambda rank=rank: rank)
        meetings.append(Meeting("attach", 60))
    heard: list[str] = []
    threads = [threading.Thread(target=lambda each=each: heard.append(each.agree("start"))) for each in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_ranks_started_again_at_another_number_meet_in_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for world in (2, 3, 2):
        assert start(world, store, monkeypatch) == [""] * world
