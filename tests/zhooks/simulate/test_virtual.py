"""Collectives on paper: beside compute, on a stream a channel, over ranks that all are what this one is."""

from __future__ import annotations

import torch

from offload.virtual import Races
from tests.support.virtual import machine, on_virtual
from zhooks.comm import CONTROL, GATHER, REDUCE, Call, even
from zhooks.layout import Axis
from zhooks.simulate.virtual_group import VirtualTransport


def transport(world: int) -> VirtualTransport:
    return VirtualTransport(Axis("shard", tuple(range(world)), 0))


@on_virtual()
def test_a_gather_and_a_reduction_run_beside_each_other_and_compute() -> None:
    with machine(issue=0.0) as made:
        races = Races()
        made.listeners.append(races)
        over, layout = transport(4), even(32, 4)
        shard, full, summed = (torch.empty(n, device="virtual") for n in (8, 32, 8))
        partial = torch.empty(32, device="virtual")
        gather = over.all_gather(Call(GATHER, "gather", "a"), shard, full, layout)
        reduction = over.reduce_scatter(Call(REDUCE, "reduce", "b"), partial, summed, layout)
        assert made.current.ready == 0.0
        gather.wait()
        full.add_(1)
        assert made.current.ready == 6.0, "five seconds of the network, one of a kernel"
        reduction.wait()
        summed.add_(1)
        assert made.current.ready == 7.0, "the reduction had ended beside it"
        assert races.checked and not races.found


@on_virtual()
def test_a_gather_that_is_used_unwaited_is_a_race() -> None:
    with machine() as made:
        races = Races()
        made.listeners.append(races)
        full = torch.empty(32, device="virtual")
        work = transport(4).all_gather(Call(GATHER, "gather", "a"), torch.empty(8, device="virtual"), full, even(32, 4))
        full.sum()
        work.wait()
        assert [race.kind for race in races.found] == ["read after write"]
        assert "gather a writes it on stream gather over shard" in str(races.found[0])


@on_virtual()
def test_facts_of_the_host_are_combined_as_if_all_ranks_had_said_the_same() -> None:
    with machine():
        over = transport(8)
        facts = {}
        for op in ("sum", "max", "min"):
            facts[op] = torch.tensor([0, 3], dtype=torch.int64)
            over.all_reduce(Call(CONTROL, "agree", "all"), facts[op], op)
        assert {op: fact.tolist() for op, fact in facts.items()} == {"sum": [0, 24], "max": [0, 3], "min": [0, 3]}
        over.broadcast(Call(CONTROL, "share", "all"), facts["sum"])
        assert facts["sum"].tolist() == [0, 24]
