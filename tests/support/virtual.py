"""Tests on the virtual device: ``@on_virtual()`` above a function runs it in a process of its own kind.

torch learns of the device once a process, and for the rest of it: no other test may run there.  ``flat`` is hardware on which
everything takes the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from offload.virtual import Machine, Operation
from tests.support.on_ranks import combinations
from tests.support.ranks import LIMIT_S, Pool


@dataclass(slots=True)
class Flat:
    """Costs of hardware that tests can count on: seconds by kind, whatever the size."""

    accelerated: bool = True
    issue: float = 0.25
    call: float = 0.0
    spare_cores: bool = True
    memory: tuple[int, int, int] = (1 << 40, 1 << 40, 1 << 40)
    kernel: float = 1.0
    transfer: float = 10.0
    drive: float = 100.0
    network: float = 5.0

    def operation(self, operation: Operation, index: int) -> float:
        return self.kernel

    def copy(self, source: int | None, out: int, nbytes: int) -> float:
        return self.transfer

    def disk(self, verb: str, nbytes: int) -> float:
        return self.drive

    def collective(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        return self.network


def on_virtual(*, limit_s: float = LIMIT_S, **choices: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Run the function in the session's process for the virtual device, for each combination of ``choices``, as `on_ranks`."""

    def decorate(job: Callable[..., Any]) -> Any:
        cases = [
            pytest.param(chosen, id="-".join(named) or "virtual", marks=marks)
            for chosen, named, marks in combinations(choices)
        ]

        @pytest.mark.parametrize("chosen", cases)
        def test(chosen: dict[str, Any], virtual_ranks: Pool) -> None:
            virtual_ranks.run(f"{job.__module__}:{job.__name__}.job", limit_s=limit_s, **chosen)

        test.__name__ = test.__qualname__ = job.__name__
        test.__module__, test.__doc__ = job.__module__, job.__doc__
        test.job = job
        return test

    return decorate


@contextmanager
def machine(world: int = 1, **costs: Any) -> Iterator[Machine]:
    """A machine that is on, of rank 0 of so many; every other rank is what it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world > 1:
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with Machine(Flat(**costs)).on() as made:
            yield made
    finally:
        if world > 1:
            dist.destroy_process_group()
