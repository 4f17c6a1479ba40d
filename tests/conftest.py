"""Fixtures every test may ask for: the pools of ranks, one per world size, for the whole session.

pytest calls it; the pools start at their first job, so a run that needs no ranks starts no process.
It never imports torch itself before a test that asks for ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(world)`` is the session's pool of that world size; a world of one has no process group."""
    import torch

    # The oracle runs in this process, and must do the arithmetic of a worker's single thread.
    torch.set_num_threads(1)
    pools: dict[int, Pool] = {}

    def pool(world: int) -> Pool:
        if world not in pools:
            pools[world] = Pool(world)
        return pools[world]

    yield pool
    for opened in pools.values():
        opened.close()


@pytest.fixture(scope="session")
def ranks1(ranks: Callable[[int], Pool]) -> Pool:
    return ranks(1)


@pytest.fixture(scope="session")
def ranks2(ranks: Callable[[int], Pool]) -> Pool:
    return ranks(2)


@pytest.fixture(scope="session")
def ranks4(ranks: Callable[[int], Pool]) -> Pool:
    return ranks(4)
