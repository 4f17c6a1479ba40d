"""The schedules of the asynchronous accelerator (tests/accelerator), for jobs that run on it.

A schedule says in which order queued work of its streams runs: `eager` at once, `lazy` only what somebody waits for, `random`
by priorities that the seed draws. It never says in which order a stream's own work runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.device import streams

SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3))


def native() -> Any:
    return torch.accel.native  # type: ignore[attr-defined]


def at(*shape: int) -> Tensor:
    return torch.ones(*shape, device="accel")


@contextmanager
def schedule(mode: str, seed: int = 0) -> Iterator[None]:
    _begin(mode, seed)
    try:
        yield
    finally:
        _begin("lazy", 0)


def _begin(mode: str, seed: int) -> None:
    native().set_schedule(mode, seed)
    # The numbers of streams begin again, so that a seed repeats its order: a stream of before would be one with a new one.
    streams._calls_to.cache_clear()
