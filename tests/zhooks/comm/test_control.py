"""Steps that all ranks take together: what one says reaches whom it should, and what one cannot do nobody does.

pytest runs it, on one, two and four ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import zhooks
from offload.policy import Policy
from tests.support.on_ranks import on_ranks, place
from zhooks.comm import ControlPlane, open_comm
from zhooks.comm.control import COLLECT_NBYTES
from zhooks.layout import resolve


@contextmanager
def every_rank() -> Iterator[ControlPlane]:
    comm = open_comm(resolve(None), Policy(), torch.device("cpu"))
    try:
        yield ControlPlane(comm.stage, "try", "this")
    finally:
        comm.close()


def said_by(rank: int) -> str:
    """Of different lengths, none at rank 2, longer than two slices on the last."""
    generator = torch.Generator().manual_seed(rank)
    length = (3, COLLECT_NBYTES // 3, 0, 2 * COLLECT_NBYTES + 5)[rank]
    return "".join(map(chr, torch.randint(32, 1024, (length,), generator=generator).tolist()))


@on_ranks(1, 2, 4)
def test_the_first_rank_collects_what_each_says_and_no_other_holds_it() -> None:
    rank, world = place()
    with every_rank() as ranks:
        assert ranks.texts(said_by(rank), first_only=True) == ([said_by(each) for each in range(world)] if rank == 0 else [])
        assert ranks.texts("", first_only=True) == ([""] * world if rank == 0 else [])


@on_ranks(1, 2, 4)
def test_every_rank_has_what_each_says_and_whether_all_say_the_same() -> None:
    rank, world = place()
    with every_rank() as ranks:
        assert ranks.texts(said_by(rank)) == [said_by(each) for each in range(world)]
        assert ranks.agree("one") and ranks.agree(str(rank)) == (world == 1)
        assert ranks.any([each == rank for each in range(4)]) == [int(each < world) for each in range(4)]
        assert ranks.least(rank + 3) == 3 and ranks.least(None if rank == 0 else 7) == (None if world == 1 else 7)
        other = {"policy": {"stage": "2" if rank == 1 else "3"}}
        said = ranks.differ(other)
        assert said == "" if world == 1 else said.startswith("Ranks differ in policy. Expected the same on every rank, found "
        "stage = 3 on rank 0 and stage = 2 on rank 1")


@on_ranks(1, 2, 4)
def test_the_first_ranks_value_is_shared_as_json_keeps_it() -> None:
    rank, _ = place()
    with every_rank() as ranks:
        value = {"pairs": [(1, "a"), (2, "\u00e9")], "none": None}
        assert ranks.on_first(lambda: value if rank == 0 else object()) == {"pairs": [[1, "a"], [2, "\u00e9"]], "none": None}
        with pytest.raises(zhooks.CheckpointError, match="not JSON serializable"):
            ranks.on_first(lambda: object() if rank == 0 else None)
        assert ranks.on_first(lambda: rank) == 0


@on_ranks(2, 4)
def test_a_step_that_one_rank_cannot_take_fails_on_all_with_its_reason() -> None:
    rank, world = place()

    def step() -> int:
        if rank == world - 1:
            raise OSError(28, "No space left on device", "/somewhere")
        return rank

    said = rf"rank {world - 1}: Cannot try this\. .*No space left on device at /somewhere"
    with every_rank() as ranks:
        with pytest.raises(zhooks.CheckpointError, match=said):
            ranks.run(step)
        assert ranks.run(lambda: rank) == rank, "and the ranks can go on"
