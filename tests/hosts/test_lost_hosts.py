"""What the ranks that are left say when a host, a link or a rank of another host is lost: soon, and no more than they know."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.harness import Hosts, Running, unavailable, written
from tests.hosts.program import train
from tests.support.paths import SEARCH_PATH

TIMEOUT_S = 6.0
#: A busy machine may be late; what has no bound takes minutes.
LATE_S = 20.0
WORLD = 4
#: The other side's ranks, which this side names.
FAR = r"Ranks? (2 and 3|[23]) on host1 (is|are) late"
#: What a rank knows that does not reach the store.
CUT = r"The process group's store at (10\.77\.0\.1|host0):\d+ has not answered for \d"
#: Both of a host, or one and that the other is silent.
BOTH = r"(Ranks 2 and 3 on host1 are gone|Rank [23] on host1 is gone.*; nothing was heard of rank [23] on host1 either)"


@pytest.fixture
def two() -> Iterator[Hosts]:
    if unavailable():
        pytest.skip(unavailable())
    with Hosts(2) as hosts:
        yield hosts


def started(hosts: Hosts, folder: Path, transport: str = "auto", **how: Any) -> list[Running]:
    """Two ranks on each host, which have all made a step."""
    policy = {"comm": {"timeout_s": TIMEOUT_S, "transport": transport}}
    running = [
        hosts[rank // 2].fork(partial(train, **how), rank, WORLD, hosts[0].address, folder, policy)
        for rank in range(WORLD)
    ]
    trained(folder)
    return running


def trained(folder: Path) -> None:
    for rank in range(WORLD):
        written(folder / f"{rank}.step", 120)
        log = folder / f"{rank}.log"
        assert (folder / f"{rank}.step").exists(), log.read_text(encoding="utf-8") if log.exists() else "did not start"


def said(folder: Path, rank: int, what: str = "said", within_s: float = TIMEOUT_S + LATE_S) -> str:
    """What a rank was told, in time."""
    took, _, text = written(folder / f"{rank}.{what}", within_s).partition("\n")
    assert text, f"rank {rank} has been told nothing within {within_s} s"
    assert float(took) < within_s, text
    return text


def others_named(rank: int, text: str) -> set[int]:
    """Whom rank ``rank`` names, itself apart."""
    named = re.findall(r"[Rr]anks? (\d(?:(?:, \d)* and \d)?)", text)
    return {int(number) for numbers in named for number in re.findall(r"\d", numbers)} - {rank}


@dataclass(frozen=True)
class Loss:
    """What is lost, who is left, and what each of those says."""

    lose: Callable[[Hosts, Sequence[Running]], object]
    says: dict[int, str]


def power_loss(host: int) -> Callable[[Hosts, Sequence[Running]], object]:
    return lambda hosts, _: (hosts[host].link("down"), hosts[host].kill())


LOSSES = {
    "the link of a host": Loss(lambda hosts, _: hosts[1].link("down"), {0: FAR, 1: FAR, 2: CUT, 3: CUT}),
    "the store's host": Loss(power_loss(0), {2: CUT, 3: CUT}),
    "the other host": Loss(power_loss(1), {0: FAR, 1: FAR}),
    "one rank": Loss(
        lambda _, running: running[2].signal(signal.SIGKILL), dict.fromkeys((0, 1, 3), r"Rank 2 on host1 is gone")
    ),
    "both ranks of a host": Loss(
        lambda _, running: (running[2].signal(signal.SIGKILL), running[3].signal(signal.SIGKILL)), {0: BOTH, 1: BOTH}
    ),
    "a rank that is stopped": Loss(
        lambda _, running: running[3].signal(signal.SIGSTOP), dict.fromkeys((0, 1, 2), r"Rank 3 on host1 is late")
    ),
}


def check_said(loss: Loss, hosts: Hosts, running: Sequence[Running], folder: Path) -> None:
    loss.lose(hosts, running)
    for rank, expected in loss.says.items():
        text = said(folder, rank)
        assert re.search(expected, text), text
        # Nobody blames a rank that is alive beside it.
        assert others_named(rank, text).isdisjoint(set(loss.says) & {rank ^ 1}), text


def test_ranks_on_both_sides_of_a_cut_link_say_in_time_whom_they_do_not_reach(two: Hosts, tmp_path: Path) -> None:
    check_said(LOSSES["the link of a host"], two, started(two, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["p2p", "stock", "hybrid"])
@pytest.mark.parametrize("lost", LOSSES)
def test_what_is_lost_is_named_by_all_that_are_left(two: Hosts, tmp_path: Path, lost: str, how: str) -> None:
    running = started(two, tmp_path, replicas=2) if how == "hybrid" else started(two, tmp_path, how)
    check_said(LOSSES[lost], two, running, tmp_path)


@pytest.mark.slow
def test_ranks_that_cannot_recover_say_who_did_not_come_and_blame_no_rank_of_their_own_side(
    two: Hosts, tmp_path: Path
) -> None:
    started(two, tmp_path, recover=True)
    two[1].link("down")
    for rank in range(WORLD):
        text = said(tmp_path, rank, "recovered", 3 * TIMEOUT_S + 2 * LATE_S)
        assert "same number of models" not in text and others_named(rank, text).isdisjoint({rank ^ 1}), text
        if rank < 2:
            assert "to call recover() within 12.0 s, found that rank 2 and rank 3 did not" in text
        else:
            assert re.search(CUT.replace("found that the", "expected answers from the").replace(" has", ".* has"), text), text


@pytest.mark.slow
def test_a_run_goes_on_after_a_link_that_was_cut_is_back(two: Hosts, tmp_path: Path) -> None:
    started(two, tmp_path, recover=True)
    # Between steps of rank 0 the others can be in the next one, and no further.
    (tmp_path / "pause").touch()
    two[1].link("down")
    (tmp_path / "pause").unlink()
    texts = [said(tmp_path, rank) for rank in range(WORLD)]
    two[1].link("up")
    for rank in range(WORLD):
        assert "Recovery(" in said(tmp_path, rank, "recovered", 3 * TIMEOUT_S + 2 * LATE_S), texts
    trained(tmp_path)


@pytest.mark.slow
def test_ranks_of_torchrun_say_the_same_with_the_store_of_its_agent(two: Hosts, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    words += ["--rdzv-endpoint", "host0:29500", "-m", "tests.hosts.program", str(tmp_path), str(TIMEOUT_S)]
    for host in two.each:
        host.start([sys.executable, "-m", "torch.distributed.run", *words], tmp_path / f"{host.number}.log", environment)
    trained(tmp_path)
    two[1].link("down")
    for rank, expected in LOSSES["the link of a host"].says.items():
        text = said(tmp_path, rank)
        # One that has ended by this very error is not to blame.
        assert re.search(expected, text) and "gone" not in text, text
