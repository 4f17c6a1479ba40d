"""Runs that are killed while they move to another mesh: nothing is lost, and nothing is left behind.

pytest runs it. Each round starts two ranks, which load the newest checkpoint, train, save and move; one or both die by SIGKILL
at one of the calls that their move consists of. The next round compares what it loads with what was saved.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zhooks
from tests.support.moving import arranged
from tests.support.ranks import forks
from tests.support.resharding import Resharded, differences
from tests.support.shared_memory import in_shared_memory

#: A rank that waits for one that is gone says so within half a second; the rest is for a busy machine.
LIMIT_S = 120.0
TOLD = 3
OURS = f"{os.sep}zhooks{os.sep}"


@contextmanager
def dying_at(number: int | None) -> Iterator[list[int]]:
    """Inside, die by SIGKILL before the call of this number of a function of ours; yields how many there were."""
    count = [0]

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and OURS in frame.f_code.co_filename:
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(called)
    try:
        yield count
    finally:
        sys.setprofile(None)


def live(rank: int, place: str, turn: int, kind: str, number: int | None) -> None:
    """One rank of one round, which says by its exit code whether it was told that the other is gone."""
    try:
        lived(rank, place, turn, kind, number)
    except zhooks.DivergenceError:
        os._exit(TOLD)


def lived(rank: int, place: str, turn: int, kind: str, number: int | None) -> None:
    """Load what there is, train, save, move."""
    torch.set_num_threads(1)
    path = Path(place)
    dist.init_process_group("gloo", store=dist.FileStore(str(path / f"store-{turn}"), 2), rank=rank, world_size=2)
    (path / "scratch").mkdir(exist_ok=True)
    tier, replicate = ("device", "host", "disk")[turn % 3], 1 + turn // 3 % 2
    # A rank that waits for another in the store, while transports are opened, has the time alone to go by.
    more = {"comm": {"timeout_s": 30}}
    run = Resharded(path / "scratch", stage=3, tier=tier, kind=kind, replicate=replicate, seed=turn, more=more)
    newest = zhooks.latest(path / "runs")
    step = 0
    if newest is not None:
        step = run.attachment.load(newest, run.optimizer)["step"]
        whole = run.full()
        if rank == 0:
            differ = differences(whole, torch.load(path / f"{newest.name}.pt", weights_only=True))
            (path / f"loaded-{turn}").write_text("\n".join(differ))
    run.train(step, 1)
    whole = run.full()
    if rank == 0:
        torch.save(whole, path / f"step-{step + 1}.pt")
    dist.barrier()
    run.attachment.save(path / "runs" / f"step-{step + 1}", run.optimizer, extra={"step": step + 1}, wait=turn % 2 == 0, keep=2)
    with dying_at(number) as count:
        run.attachment.reshard(arranged(3 - replicate))
    run.train(step + 1, 1)
    (path / f"moved-{turn}-{rank}").write_text(str(count[0]))
    run.attachment.detach()


def round_of(path: Path, turn: int, kind: str, doomed: dict[int, int]) -> list[int | None]:
    """Two ranks of which the doomed die at the call of their number; how the two have ended."""
    both = [forks().Process(target=live, args=(rank, str(path), turn, kind, doomed.get(rank))) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(LIMIT_S)
    ended = [process.exitcode for process in both]
    for process in both:
        process.kill()
        process.join()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_hundred_runs_that_are_killed_while_they_move_lose_nothing_and_leave_nothing(tmp_path: Path, kind: str) -> None:
    turns = int(os.environ.get("ZHOOKS_KILLED_MOVES", "100"))
    known, calls = in_shared_memory(), dict[int, int]()
    for turn in range(6):
        assert round_of(tmp_path, turn, kind, {}) == [0, 0]
        calls[turn] = min(int((tmp_path / f"moved-{turn}-{rank}").read_text()) for rank in range(2))
    killed, turn = 0, 6
    while killed < turns:
        chance = random.Random(turn)
        ranks = chance.choice([(0,), (1,), (0, 1)])
        doomed = {rank: chance.randrange(1, calls[turn % 6]) for rank in ranks}
        ended = round_of(tmp_path, turn, kind, doomed)
        # A doomed rank may be told before its turn; how many calls a wait consists of differs a little, so a last one may live.
        assert set(ended) <= {-signal.SIGKILL, TOLD, 0} and (ended == [0, 0] or -signal.SIGKILL in ended), (turn, doomed, ended)
        assert (tmp_path / f"loaded-{turn}").read_text() == "", turn
        killed += -signal.SIGKILL in ended
        turn += 1
    # Who opens a scratch file removes what dead processes left.
    last = turn + (2 - turn) % 3
    assert round_of(tmp_path, last, kind, {}) == [0, 0]
    assert (tmp_path / f"loaded-{last}").read_text() == ""
    newest = zhooks.latest(tmp_path / "runs")
    assert newest is not None
    left = sorted(entry.name for entry in (tmp_path / "runs").iterdir())
    assert all(name.startswith("step-") and "." not in name for name in left) and len(left) <= 3, left
    assert list((tmp_path / "scratch").iterdir()) == []
    # The rings have no name, and go with the last process that maps them.
    assert in_shared_memory() <= known
