"""Makes a test of a function that shall run on the asynchronous accelerator, everywhere, and on CUDA, where there is a GPU.

The function gets the type of device: on "accel" it runs in a rank that has the accelerator, on "cuda" in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.on_ranks import Job, as_test, cases_of
from tests.support.ranks import LIMIT_S, Pool

#: What only CUDA has: the reason of a skip, and the mark of what runs on it.
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; the accelerator's case holds the same"),
]
#: For a parameter of a test.
TYPES = ("accel", pytest.param("cuda", marks=ON_CUDA))


def on_gpus(**choices: tuple[Any, ...]) -> Callable[[Job], Any]:
    """Run ``job(device, **choice)`` on both types of device, for each combination of ``choices``."""

    def decorate(job: Job) -> Any:
        @pytest.mark.parametrize(("device", "chosen"), cases_of("device", TYPES, choices))
        def test(device: str, chosen: dict[str, Any], request: pytest.FixtureRequest) -> None:
            if device == "cuda":
                job(device, **chosen)
                return
            ranks: Callable[[int], Pool] = request.getfixturevalue("accelerators")
            ranks(1).run(f"{job.__module__}:{job.__qualname__}.job", limit_s=LIMIT_S, device=device, **chosen)

        return as_test(test, job)

    return decorate


def module(device: str) -> Any:
    """`torch.cuda`, or what the accelerator has of it."""
    return torch.get_device_module(device)


def allocator_snapshot(device: str) -> dict[str, Any]:
    """The segments of the device's allocator, and its history where one is recorded."""
    found: dict[str, Any] = module(device).memory._snapshot()
    return found


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """A process group of one rank over the device's own backend."""
    dist.init_process_group("nccl" if device == "cuda" else device, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def keep_busy(device: str, *, cycles: int) -> None:
    """Queue work that lasts. The accelerator does nothing of its current stream's before somebody waits for it."""
    if device == "cuda":
        torch.cuda._sleep(cycles)
    else:
        torch.ones(16, device=device).mul_(2)
