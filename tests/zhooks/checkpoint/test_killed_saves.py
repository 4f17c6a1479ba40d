"""Runs that are killed at any moment while they train and save: nothing that was said to be saved is lost.

pytest runs it; ``ZHOOKS_KILLED_SAVES=500`` kills so many runs a tier.  Each round starts two ranks, which load the newest
checkpoint, train and save beside training; SIGKILL ends one or both whenever the chance of the round says, threads and all.
The next round compares what it loads with what was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zhooks
from tests.support.ranks import forks
from tests.support.resharding import Resharded
from tests.support.shared_memory import in_shared_memory
from tests.support.waiting import soon

LIMIT_S = 120.0
#: How a rank ends that learns that the other is gone.
TOLD = 3


def live(rank: int, place: str, turn: int, tier: str) -> None:
    try:
        lived(rank, Path(place), turn, tier)
    except (zhooks.DivergenceError, RuntimeError) as error:
        # Gloo's own collectives, of which the digests are made, say it in a RuntimeError.
        if isinstance(error, zhooks.DivergenceError) or "peer" in str(error) or "onnection" in str(error):
            os._exit(TOLD)
        raise


def digest(run: Resharded) -> str:
    """Of everything, whole; of no rank but the first."""
    found = hashlib.blake2b(digest_size=12)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(run.full())
    return found.hexdigest()


def lived(rank: int, path: Path, turn: int, tier: str) -> None:
    """Load what there is, and train and save for ever."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(path / f"store-{turn}"), 2), rank=rank, world_size=2)
    run = Resharded(path / "scratch", stage=3, tier=tier, seed=turn, more={"comm": {"timeout_s": 30}})
    step, newest, chance = 0, zhooks.latest(path / "runs"), random.Random(turn)
    if newest is not None:
        step = run.attachment.load(newest, run.optimizer)["step"]

    def say(what: str, step: int) -> None:
        """One line, whole or not at all."""
        about = [what, step, digest(run) if what != "committed" else ""]
        if rank == 0:
            with (path / f"said-{turn}").open("ab", buffering=0) as file:
                file.write(json.dumps(about).encode() + b"\n")

    say("resumed", step)
    saving, of = None, 0
    while True:
        run.train(step, 1)
        step += 1
        if turn % 2 and chance.random() < 0.5:
            continue
        if saving is not None:
            saving.wait()
            say("committed", of)
        say("trained", step)
        saving = run.attachment.save(path / "runs" / f"step-{step}", run.optimizer, extra={"step": step}, wait=False, keep=2)
        of = step


def said(path: Path, turn: int) -> Iterator[tuple[str, int, str]]:
    file = path / f"said-{turn}"
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
        if line.endswith(b"\n"):
            what, step, told = json.loads(line)
            yield what, step, told


def killed_at_any_moment(path: Path, turn: int, tier: str) -> int:
    """One round; how many of its two ranks were killed while they lived."""
    chance = random.Random(-turn)
    both: list[BaseProcess] = [forks().Process(target=live, args=(rank, str(path), turn, tier)) for rank in range(2)]
    for process in both:
        process.start()
    lines = chance.choice([1, 3, 5, 8])
    assert soon(lambda: len(list(said(path, turn))) >= lines or not all(each.is_alive() for each in both), LIMIT_S), turn
    # Somewhere in what follows this line: the ranks end by nothing else, so that this waits the time out.
    both[0].join(chance.random() * chance.choice([0.02, 0.2, 0.5]))
    doomed = chance.choice([both, both[::-1], both[:1], both[1:]])
    for process in doomed:
        process.kill()
    if len(doomed) == 1:
        both[both[0] is doomed[0]].join(chance.random() * 0.5)
    for process in both:
        process.kill()
    for process in both:
        process.join(LIMIT_S)
    ended = [process.exitcode for process in both]
    assert set(ended) <= {-signal.SIGKILL, TOLD}, (turn, ended)
    return ended.count(-signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_runs_killed_while_they_train_and_save_lose_nothing_and_leave_nothing(tmp_path: Path, tier: str) -> None:
    wanted = int(os.environ.get("ZHOOKS_KILLED_SAVES", "20"))
    known = in_shared_memory()
    digests, committed, killed, turn, resumed = dict[int, str](), 0, 0, 0, set[int]()
    while killed < wanted:
        killed += killed_at_any_moment(tmp_path, turn, tier)
        lines = list(said(tmp_path, turn))
        assert lines and lines[0][0] == "resumed", (turn, lines)
        for what, step, told in lines:
            if what == "committed":
                committed = max(committed, step)
            elif what == "trained":
                assert digests.setdefault(step, told) == told, (turn, step, "another result of the same step")
            else:
                assert step >= committed, (turn, step, committed, "what was committed is gone")
                assert not step or digests[step] == told, (turn, step, "something else was loaded")
                resumed.add(step)
        turn += 1
    assert len(resumed) > 2, "they got on"
    # The next save removes what the killed ones left.
    pair = [forks().Process(target=ends, args=(rank, str(tmp_path), tier)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(LIMIT_S)
    assert [process.exitcode for process in pair] == [0, 0]
    left = sorted(entry.name for entry in (tmp_path / "runs").iterdir())
    assert len(left) <= 2 and all(name.startswith("step-") and "." not in name for name in left), left
    assert not (tmp_path / "scratch").exists() or list((tmp_path / "scratch").iterdir()) == []
    assert in_shared_memory() <= known


def ends(rank: int, place: str, tier: str) -> None:
    """Load, train, save, end."""
    path = Path(place)
    dist.init_process_group("gloo", store=dist.FileStore(str(path / "store-last"), 2), rank=rank, world_size=2)
    run = Resharded(path / "scratch", stage=3, tier=tier)
    newest = zhooks.latest(path / "runs")
    assert newest is not None
    step = run.attachment.load(newest, run.optimizer)["step"]
    run.train(step, 1)
    run.attachment.save(path / "runs" / f"step-{step + 1}", run.optimizer, extra={"step": step + 1}, keep=2)
    run.attachment.detach()
    dist.destroy_process_group()
