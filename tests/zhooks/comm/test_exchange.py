"""Ranks that send each other runs of any length at once: bytes arrive where they belong, over each transport.

pytest runs it, on one, two and four ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zhooks
from offload.policy import Policy
from tests.support.on_ranks import on_ranks, place
from zhooks.comm import CONTROL, GATHER, REDUCE, Call, Comm, open_comm
from zhooks.layout import resolve


def opened(transport: str, timeout_s: float = 60) -> Comm:
    policy = Policy.of({"comm": {"transport": transport, "timeout_s": timeout_s}})
    return open_comm(resolve(None), policy, torch.device("cpu"))


def run(writer: int, reader: int, numel: int) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) + 1000 * writer + 100 * reader


def apart(values: Tensor, number: int) -> list[Tensor]:
    """As one range of memory, as a few of uneven lengths with an empty one among them, or, if short, as many tiny ones."""
    numel = values.numel()
    lengths = [[numel], [numel // 7, numel - numel // 7 - numel // 3, 0, numel // 3]][number % 2]
    if number % 4 == 3 and numel < 1000:
        lengths = [1] * numel or [0]
    ranges = [torch.empty(length + 2)[1:-1] for length in lengths]
    for target, source in zip(ranges, values.split(lengths), strict=True):
        target.copy_(source)
    return ranges


def exchanged(comm: Comm, numels: list[list[int]], channel: int = GATHER) -> list[Tensor]:
    """What every rank sent to this one."""
    rank, world = place()
    sends = [apart(run(rank, reader, numels[rank][reader]), rank + reader) for reader in range(world)]
    receives = [apart(torch.full((numels[writer][rank],), -1.0), writer + rank) for writer in range(world)]
    nbytes = [[4 * numel for numel in row] for row in numels]
    comm.shard.exchange(Call(channel, "exchange", "matrices", 3), sends, receives, nbytes).wait()
    return [torch.cat(ranges) for ranges in receives]


def check(comm: Comm, numels: list[list[int]], channel: int = GATHER) -> None:
    rank, _ = place()
    for writer, got in enumerate(exchanged(comm, numels, channel)):
        torch.testing.assert_close(got, run(writer, rank, numels[writer][rank]), rtol=0, atol=0)


@on_ranks(1, 2, 4, transport=("auto", "p2p", "stock"))
def test_every_rank_gets_its_own_run_of_every_other_ranks_values(transport: str) -> None:
    _, world = place()
    comm = opened(transport)
    uneven = [[(7 * writer + 3 * reader) % 5 for reader in range(world)] for writer in range(world)]
    first = [[10 * (writer + 1) if reader == 0 else 0 for reader in range(world)] for writer in range(world)]
    nothing = [[0] * world for _ in range(world)]
    for numels in (uneven, first, nothing, uneven):
        check(comm, numels)
    comm.close()


@on_ranks(2, 4)
def test_runs_longer_than_a_ring_of_shared_memory_pass_and_other_collectives_go_on() -> None:
    rank, world = place()
    comm = opened("shm")
    numels = [[50_000 * ((writer + reader) % 3) for reader in range(world)] for writer in range(world)]
    for channel in (GATHER, CONTROL, REDUCE):
        check(comm, numels, channel)
        total = torch.tensor([float(rank)])
        comm.shard.all_reduce(Call(CONTROL, "sum", "ranks"), total, "sum")
        assert total.item() == sum(range(world))
    comm.close()


@on_ranks(2)
def test_ranks_that_exchange_other_amounts_are_named() -> None:
    rank, world = place()
    comm = opened("shm", timeout_s=5)
    with pytest.raises(zhooks.DivergenceError, match=r"rank [01] in exchange matrices"):
        exchanged(comm, [[4 + rank] * world] * world)
    dist.barrier()
    comm.close()
