"""zhooks.integrations.torchft with two ranks a replica: kills of one rank or of all, at random moments and inside a transfer.

What is left goes on or ends by one named error, and what goes on is plain training at its end. `replica_job.py` is what the
processes run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torchft", reason="pip install '.[torchft]'")

from tests.zhooks.integrations.two_replicas import Two

POLICY: dict[str, Any] = {"stage": 3, "optimizer": {"tier": "host"}}
#: How the last line of a process begins that ended by an error of the project's own.
NAMED = re.compile(r"^(offload\.errors|zhooks[\w.]*)\.\w+Error: ")


def last_words(replicas: Two, group: int, rank: int) -> str:
    """The last error that a rank ended by."""
    errors = (replicas.folder / f"err{group}{rank}").read_text()
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in errors.splitlines()]
    return [line for line in lines if re.match(r"^[\w.]+(Error|Exception): ", line)][-1]


def survivors_named_it(replicas: Two, group: int, killed: int) -> None:
    """The other rank of a replica, of which one was killed, has ended by itself, and said why."""
    codes = replicas.ended(replicas.latest[group])
    assert codes[killed] == -signal.SIGKILL, replicas.said()
    assert codes[1 - killed] == 1, replicas.said()
    assert NAMED.match(last_words(replicas, group, 1 - killed)), replicas.said()


def ended_as_by_torchrun(replicas: Two, group: int, killed: int) -> None:
    """The same for a kill at any moment: where torchft's Manager waits a minute for the rank that is gone, which holds up the
    other replica as well, the survivor is stopped as torchrun stops it."""
    other = replicas.latest[group][1 - killed]
    with suppress(subprocess.TimeoutExpired):
        other.wait(5)
    other.terminate()
    if replicas.ended(replicas.latest[group])[1 - killed] != -signal.SIGTERM:
        survivors_named_it(replicas, group, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "rank"), [(1, 0), (2, 1), (4, 1), (4, 0)])
def test_a_receiver_that_is_killed_inside_a_transfer_ends_its_replica_and_the_next_one_takes_the_whole_state(
    tmp_path: Path, chunk: int, rank: int
) -> None:
    replicas = Two(tmp_path, 2, POLICY, together=4, alone=True)
    try:
        first, second = replicas.start(0), replicas.start(1, (2, "backward"))
        assert replicas.ended(second) == [-signal.SIGKILL] * 2, replicas.said()
        replicas.armed.touch()
        replicas.start(1, transfer=("receiver", chunk, rank))
        survivors_named_it(replicas, 1, rank)
        assert all(each.poll() is None for each in first), replicas.said()
        assert replicas.ended(first + replicas.start(1)) == [0] * 4, replicas.said()
        assert sum(len(each) == 1 for each in replicas.check())
    finally:
        replicas.close()


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "rank"), [(1, 1), (6, 0), (4, 1)])
def test_a_sender_that_is_killed_inside_a_transfer_leaves_nobody_with_a_part_of_its_state(
    tmp_path: Path, chunk: int, rank: int
) -> None:
    replicas = Two(tmp_path, 2, POLICY, together=4, alone=True)
    try:
        replicas.start(0, transfer=("sender", chunk, rank))
        assert replicas.ended(replicas.start(1, (2, "backward"))) == [-signal.SIGKILL] * 2, replicas.said()
        replicas.armed.touch()
        torn = replicas.start(1)
        survivors_named_it(replicas, 0, rank)
        # What it has is a part of a state that nobody has any more.
        assert replicas.ended(torn) == [1, 1], replicas.said()
        for each in (0, 1):
            assert "Restart this replica" in last_words(replicas, 1, each), replicas.said()
    finally:
        replicas.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_replicas_of_two_ranks_that_lose_one_or_all_at_random_moments_never_differ(tmp_path: Path, seed: int) -> None:
    random, replicas = Random(seed), Two(tmp_path, 2, POLICY, together=10**9, alone=True)
    living = [replicas.start(0), replicas.start(1)]
    try:
        for _ in range(5):
            at = replicas.steps_together(living)
            victim, rank = random.randrange(2), random.choice((None, 0, 1))
            replicas.steps_together(living, at)
            # When it is killed is not what is waited for.
            time.sleep(random.random() * 0.2)
            if rank is None:
                os.killpg(living[victim][0].pid, signal.SIGKILL)
                replicas.ended(living[victim])
            else:
                living[victim][rank].send_signal(signal.SIGKILL)
                ended_as_by_torchrun(replicas, victim, rank)
            living[victim] = replicas.start(victim)
        last = replicas.steps_together(living, replicas.steps_together(living))
        replicas.stop_at(last + 300)
        assert replicas.ended(living[0] + living[1]) == [0] * 4, replicas.said()
        assert {len(each) for each in replicas.check()} == {1, 2}
    finally:
        replicas.close()
