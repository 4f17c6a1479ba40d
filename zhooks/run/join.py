"""Ranks with uneven data: those that have run out of batches go on with their last one until all have, at no weight.

``attach.py`` hands it a loader; ``grad/reduce.py`` counts a rank's gradients as zero where it says so.  It never runs a forward
and never moves a batch between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from offload.errors import DivergenceError
from zhooks.comm import ControlPlane, Transport

__all__ = ["batches"]

Batch = TypeVar("Batch")


def batches(loader: Iterable[Batch], world: Transport, idle: Callable[[bool], None]) -> Iterator[Batch]:
    """The batches of ``loader``, then its last one again while another rank has more.  Collective at every batch.

    Args:
        idle: told before each batch whether it is such a repetition.
    Raises:
        DivergenceError: a rank has no batch at all, so nothing to repeat; on every rank.
    """
    source, axis, ranks = iter(loader), world.axis, ControlPlane(world, "join")
    last: list[Batch] = []
    try:
        while True:
            found = list(_next(source))
            # Some rank has a batch; and which have never had one.
            never = [rank == axis.rank and not (found or last) for rank in range(axis.world)]
            more, *without = ranks.any([bool(found), *never])
            if not more:
                return
            if any(without):
                empty = ", ".join(str(rank) for rank, none in zip(axis.ranks, without, strict=True) if none)
                raise DivergenceError(
                    f"join expected at least one batch on every rank, found none on rank {empty}. Divide the data so that "
                    "every rank has one."
                )
            last = found or last
            idle(not found)
            yield last[0]
    finally:
        idle(False)


def _next(source: Iterator[Batch]) -> Iterator[Batch]:
    for batch in source:
        yield batch
        return
