"""Fixtures every test may ask for: the pools of ranks, one per world size, for the whole session.

pytest calls it; the pools start at their first job, so a run that needs no ranks starts no process.
It never imports torch itself before a test that asks for ranks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.balance import longest_first
from tests.selection import COLLECTED, FOUR_RANKS, case_of, covering, file_of, starts_ranks
from tests.support.collector import collect_all
from tests.support.paths import SEARCH_PATH
from tests.support.ranks import Pool

# Torch's threads spin while they wait for each other: beside other work on the cores, one step takes seconds. The processes
# that tests start are told too. Before torch is imported, or it is too late.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They import from this checkout, whatever is installed and whatever folder they start in, as this process does (setup.cfg).
os.environ["PYTHONPATH"] = SEARCH_PATH

# At Python's own threshold collections took 11 to 18 % of this process's time, most of them full ones.
gc.set_threshold(10_000, 10, 10)

# A shell starts what runs in its background with SIGINT ignored, and so would be every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and nothing of what is tested.
settings.register_profile("whole", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# They are other examples in every run.
settings.register_profile("default", settings.get_profile("whole"), max_examples=50)


def pytest_configure(config: pytest.Config) -> None:
    """Half as many examples in a default run, where a test does not say how many it needs."""
    settings.load_profile("default" if config.getoption("markexpr") == "not slow" else "whole")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: what is imported and collected stays, and it would walk through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark slow what a default run can do without, of the tests whose every case starts ranks; sort what is left for xdist."""
    config.stash[COLLECTED] = list(items)
    if "torch" in sys.modules:
        from tests.support.torches import OWN_WARNINGS

        for message in OWN_WARNINGS:
            config.addinivalue_line("filterwarnings", f"ignore:{message}")
    files: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and starts_ranks(item) and item.get_closest_marker("slow") is None:
            files.setdefault(file_of(item.nodeid), []).append(item)
    for beside in files.values():
        kept = set(covering([case_of(item) for item in beside]))
        for place, item in enumerate(beside):
            if place not in kept:
                item.add_marker(pytest.mark.slow)
    yield
    if hasattr(config, "workerinput"):
        items[:] = [items[place] for place in longest_first([_group_of(item.nodeid) for item in items])]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip what fails because the product refuses, by name, what this torch lacks; a torch that has it skips nothing."""
    report = yield
    if report.failed:
        from tests.support.torches import refusal

        refused = refusal(str(report.longrepr))
        if refused is not None:
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, refused)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` a worker is given a file at a time, and all tests of four ranks as if they were one file.

    So one worker alone has a pool of four, and its ranks share the cores with one other worker's at most.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileAndRanks(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    # The workers have sorted their tests: it would sort the groups again, by their number of tests.
    config.option.loadscopereorder = False
    return ByFileAndRanks(config, log)


def _group_of(nodeid: str) -> str:
    """What is given to one worker as a whole: a file by its path below this folder, or the tests of four ranks."""
    path, _, test = nodeid.partition("::")
    return FOUR_RANKS if FOUR_RANKS in test.partition("[")[2] else path.removeprefix("tests/")


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
def accelerators() -> Iterator[Callable[[int], Pool]]:
    """``accelerators(world)`` is the session's pool of ranks that have the asynchronous accelerator (tests/accelerator)."""
    from tests.accelerator.build import CannotBuild, built

    try:
        built()
    except CannotBuild as error:
        pytest.skip(str(error))
    pools: dict[int, Pool] = {}

    def pool(world: int) -> Pool:
        if world not in pools:
            pools[world] = Pool(world, accelerator=True)
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


@pytest.fixture(scope="session", params=[4], ids=[FOUR_RANKS])
def ranks4(ranks: Callable[[int], Pool]) -> Pool:
    return ranks(4)


@pytest.fixture(scope="session")
def virtual_ranks() -> Iterator[Pool]:
    """A process of its own for tests on the virtual device, which torch then knows of for good."""
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_out_of_sight() -> None:
    """What earlier modules left alive is out of the collector's sight, or every collection would walk through it.

    A whole run has collected thousands of tests and imported every library, so that one collection takes a second, and one
    look through all objects (zhooks takes one at each attach and detach) not much less.
    """
    _put_out_of_sight()


@pytest.fixture
def alone() -> None:
    """What is alive already, of other tests, is out of sight: who looks for models or attachments finds this test's only.

    An attachment whose backward left a part of a unit out lives until the next one is made, and states what it holds.
    """
    from tests.support.inside import hush_earlier

    _put_out_of_sight()
    hush_earlier()


def _put_out_of_sight() -> None:
    collect_all()
    gc.freeze()
