"""Fixtures every test may ask for: the pools of ranks, one per world size, for the whole session.

pytest calls it; the pools start at their first job, so a run that needs no ranks starts no process.
It never imports torch itself before a test that asks for ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.ranks import Pool

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("zhooks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zhooks")

#: Modules whose tests run over a product of tiers, stages and ranks: by default a diagonal of it, the rest is slow.
THINNED = (
    "test_accumulate",
    "test_activation",
    "test_activation_recompute",
    "test_adversity",
    "test_adversity_autograd",
    "test_adversity_errors",
    "test_adversity_loop",
    "test_arena",
    "test_attach_state",
    "test_bad_input",
    "test_buffers",
    "test_held",
    "test_held_steps",
    "test_memory",
    "test_memory_residual",
    "test_order",
    "test_overlap",
    "test_partition",
    "test_pipeline",
    "test_precision_rules",
    "test_rounding",
    "test_save_faults",
    "test_save_load",
    "test_scaling",
    "test_scaling_graph",
    "test_sharded_state",
    "test_tensor_parallel",
    "test_tensor_parallel_state",
    "test_tiers",
    "test_tiers_faults",
    "test_tiers_kernels",
    "test_tiers_optim",
    "test_tiers_review",
    "test_zprof_run",
)
MANY, SOME = 8, 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but every fourth case of a large product slow, and all but every second of a middling one.

    The kept ones step through the product diagonally, so that every value of every factor stays among them.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.stem in THINNED:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        step = 4 if len(same) >= MANY else 2 if len(same) >= SOME else 1
        for number, item in enumerate(same):
            if (number + number // step) % step:
                item.add_marker(pytest.mark.slow)


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


@pytest.fixture
def alone() -> Iterator[None]:
    """What is alive already, of other tests, is out of the collector's sight: who looks for models finds this test's only."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
