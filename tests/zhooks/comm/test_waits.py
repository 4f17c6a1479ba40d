"""Waits for a collective of the backend, in slices: what comes to its end just after a slice has.

pytest runs it, on one rank, with works that end where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

import zhooks
from zhooks.comm import CONTROL, Call
from zhooks.comm.agreed_failure import AgreedFailure
from zhooks.comm.lost_rank import BackendWork, Waits
from zhooks.comm.processes import Process
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


def failure() -> AgreedFailure:
    return AgreedFailure(dist.HashStore(), "here", 0, {rank: Process.here() for rank in range(2)}, 1.0)


def wait_for(work: Any, failure: AgreedFailure) -> None:
    BackendWork(CALL, [cast(dist.Work, work)], [], Waits(Axis("shard", (0, 1), 0), 20.0, failure)).wait()


def test_a_call_that_ends_just_after_a_slice_of_its_wait_has_not_failed() -> None:
    known = failure()
    wait_for(EndsBetween(lambda: None), known)
    assert known.verdict is None


def test_a_call_that_fails_just_after_a_slice_of_its_wait_says_why_itself() -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]")

    with pytest.raises(zhooks.DivergenceError, match="Connection closed by peer"):
        wait_for(EndsBetween(fails), failure())
