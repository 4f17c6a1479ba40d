"""Waits for a collective of the backend, in slices: what comes to its end just after a slice has, and where no rank is late.

pytest runs it, on one rank, with works that end where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

import zhooks
from zhooks.comm import CONTROL, Call
from zhooks.comm.group_store import GroupStore
from zhooks.comm.lost_rank import AgreedFailure, BackendWork, Process
from zhooks.layout import Axis

CALL = Call(CONTROL, "agree", "all ranks")


class EndsBetween:
    """A work that is under way until a slice has run out, and has come to its end when it is asked then."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._over = wait, False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._over:
            self._over = True
            raise RuntimeError("Operation timed out!")
        self._wait()

    def is_completed(self) -> bool:
        return self._over


def failure(rank: int = 0, store: Any = None, timeout_s: float = 20.0) -> AgreedFailure:
    asked = GroupStore(store or dist.HashStore(), f"rank {rank}", 60.0)
    return AgreedFailure(asked, "here", rank, {each: Process.here() for each in range(2)}, timeout_s)


def wait_for(work: Any, failure: AgreedFailure) -> None:
    BackendWork(CALL, Axis("shard", (0, 1), 0), failure, [cast(dist.Work, work)], []).wait()


def test_a_call_that_ends_just_after_a_slice_of_its_wait_has_not_failed() -> None:
    known = failure()
    wait_for(EndsBetween(lambda: None), known)
    assert known.verdict is None


def test_a_call_that_fails_just_after_a_slice_of_its_wait_says_why_itself() -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]")

    with pytest.raises(zhooks.DivergenceError, match="Connection closed by peer"):
        wait_for(EndsBetween(fails), failure())


def test_ranks_that_all_wait_in_vain_are_told_that_all_are_alive() -> None:
    store = dist.HashStore()

    def waits(rank: int) -> str:
        return str(failure(rank, store).fail(CALL, Axis("shard", (0, 1), rank), "the backend said: Operation timed out!"))

    with ThreadPoolExecutor(2) as ranks:
        for rank, said in enumerate(ranks.map(waits, range(2))):
            assert said.startswith("All ranks are alive, but their calls did not finish. Expected every rank in agree, ")
            assert said.endswith(f"(Rank {rank}: agree all ranks, axis shard; the backend said: Operation timed out!.)")
