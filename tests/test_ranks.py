"""The pool of ranks itself: what a job returns, and what a test is told when a rank raises, dies, hangs or warns.

pytest runs it; the jobs at its end are what it hands to the workers.
It never needs zhooks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

import psutil
import pytest

from tests.support.ranks import End, Pool, RanksFailed
from tests.support.waiting import soon


@pytest.fixture
def pair() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def test_a_job_runs_on_every_rank_and_returns_in_rank_order(ranks2: Pool) -> None:
    assert ranks2.run("tests.test_ranks:add_ranks", start=10) == [(0, 11), (1, 11)]


def test_workers_are_kept_from_one_job_to_the_next_but_the_group_is_not(ranks2: Pool) -> None:
    first = ranks2.run("tests.test_ranks:process_and_visits")
    second = ranks2.run("tests.test_ranks:process_and_visits")
    assert [process for process, _ in first] == [process for process, _ in second]
    assert [visits for _, visits in first] == [visits for _, visits in second] == [2, 2]


def test_what_a_job_wrote_into_the_environment_or_accelerates_state_is_gone_for_the_next(ranks1: Pool) -> None:
    pytest.importorskip("accelerate")
    assert ranks1.run("tests.test_ranks:leave_traces", precision="no", name="ZHOOKS_TEST_TRACE") == [True]
    assert ranks1.run("tests.test_ranks:leave_traces", precision="bf16", name="ZHOOKS_TEST_TRACE") == [True]


def test_four_ranks_meet(ranks4: Pool) -> None:
    assert ranks4.run("tests.test_ranks:add_ranks", start=0) == [(rank, 6) for rank in range(4)]


def test_a_world_of_one_has_no_process_group(ranks1: Pool) -> None:
    assert ranks1.run("tests.test_ranks:has_group") == [False]


def test_a_raise_on_one_rank_names_the_rank_and_the_job_and_frees_the_other(pair: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"tests\.test_ranks:raise_on_one.*rank 0 silent, rank 1 raised") as caught:
        pair.run("tests.test_ranks:raise_on_one")
    assert "ValueError: one is ill" in str(caught.value)
    assert "raise_on_one" in caught.value.outcomes[0].text, "the waiting rank's stack is shown"
    assert pair.run("tests.test_ranks:add_ranks", start=0) == [(0, 1), (1, 1)], "the next job has a new pool"


def test_a_rank_that_dies_is_reported_with_its_exit_code_and_its_last_words(pair: Pool) -> None:
    outcomes = pair.attempt("tests.test_ranks:die_on_one")
    assert outcomes[1].end is End.DIED
    assert "exit code 3" in outcomes[1].text
    assert "last words" in outcomes[1].text


def test_a_job_that_passes_its_limit_is_killed(pair: Pool) -> None:
    began_s = time.monotonic()
    outcomes = pair.attempt("tests.test_ranks:hang", limit_s=1.0)
    assert [outcome.end for outcome in outcomes] == [End.SILENT, End.SILENT]
    assert time.monotonic() - began_s < 300.0, "of the hour it would have taken"


def test_a_job_that_ranks_skip_skips_the_test_and_keeps_the_pool(pair: Pool) -> None:
    first = pair.run("tests.test_ranks:process_and_visits")
    with pytest.raises(pytest.skip.Exception, match="could not import 'nobody_has_this'"):
        pair.run("tests.test_ranks:lack_a_library")
    assert [process for process, _ in pair.run("tests.test_ranks:process_and_visits")] == [process for process, _ in first]


def test_a_warning_on_a_rank_is_an_error(pair: Pool) -> None:
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        pair.run("tests.test_ranks:warn")


#: Starts a rank, which hangs, and a program, which sleeps, and is killed before either has ended.
KILLED = """
import threading
from tests.support import forked, ranks
ranks.PRELOADED.clear()
program = forked.start("-c", "import time; time.sleep(3600)")
threading.Thread(target=ranks.Pool(1).run, args=("tests.test_ranks:hang",), daemon=True).start()
program.wait(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_process_of_the_tests_is_killed_its_fork_server_ranks_and_programs_end(how: signal.Signals) -> None:
    # Not of the fork server of this run: what is started as under the tests alone imports no library.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_WORKER"}
    with subprocess.Popen([sys.executable, "-c", KILLED], env=environment) as tests:
        found: list[psutil.Process] = []

        def started() -> bool:
            found[:] = psutil.Process(tests.pid).children(recursive=True)
            # What keeps track of resources, the fork server, the rank and the program.
            return len(found) >= 4

        try:
            assert soon(started, within_s=120.0), found
        finally:
            tests.send_signal(how)
    soon(lambda: not any(map(lives, found)), within_s=120.0)
    left = list(filter(lives, found))
    for process in left:
        process.kill()
    assert not left


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- jobs


def add_ranks(start: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), start + int(total)


def process_and_visits() -> tuple[int, int]:
    import torch.distributed as dist

    # The default group's store: a key of an earlier job would still be counted if the group had been kept.
    store = dist.distributed_c10d._get_default_store()
    store.add("visits", 1)
    dist.barrier()
    return os.getpid(), store.add("visits", 0)


def leave_traces(precision: str, name: str) -> bool:
    """Whether accelerate's state and the environment are as in a new process; they are not afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    clean = name not in os.environ and not AcceleratorState._shared_state
    os.environ[name] = "left"
    Accelerator(cpu=True, mixed_precision=precision)
    return clean


def has_group() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def raise_on_one() -> None:
    import torch.distributed as dist

    # Both are here before one raises: the other's stack is inside this function, however slow the machine.
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("one is ill")
    dist.barrier()


def die_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        print("last words", flush=True)
        os._exit(3)


def hang() -> None:
    time.sleep(3600.0)


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


def lack_a_library() -> None:
    pytest.importorskip("nobody_has_this")
