"""Which rank updates which matrix, and which of them travel together: integers in, integers out.

``owners.py`` and ``whole_update.py`` call it with the same figures on every rank, so that all come to the same.  It never
touches a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["Matrix", "assign", "cost_of", "rounds"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter to be updated whole.

    Attributes:
        kind: what it has in common with those it may travel with (a dtype).
        owner: the rank that updates it.
    """

    shape: tuple[int, ...]
    kind: Hashable
    owner: int

    @property
    def numel(self) -> int:
        numel = 1
        for length in self.shape:
            numel *= length
        return numel


def cost_of(shape: Sequence[int]) -> int:
    """The work of an update: of a matrix, elements times the smaller of its sides, as a product with its transpose has."""
    numel = 1
    for length in shape:
        numel *= length
    if len(shape) < 2:
        return numel
    rows = shape[0]
    return numel * max(1, min(rows, numel // max(rows, 1)))


def assign(shapes: Sequence[Sequence[int]], world: int, taken: Sequence[tuple[int, int]] = ()) -> list[int]:
    """An owner for each: the costliest first, each to the rank that has the least to do by then.

    Args:
        taken: (owner, cost) of what has owners already.
    """
    load, count = [0] * world, [0] * world
    for owner, cost in taken:
        load[owner] += cost
        count[owner] += 1
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-cost_of(shapes[index]), index)):
        owner = min(range(world), key=lambda rank: (load[rank], count[rank], rank))
        owners[index] = owner
        load[owner] += cost_of(shapes[index])
        count[owner] += 1
    return owners


def rounds(matrices: Sequence[Matrix], most: int) -> list[list[int]]:
    """Which travel together: in each round at most ``most`` elements for every owner, but at least one matrix.

    All of a round are of one kind; matrices of one shape go one after the other, so that owners have alike to do.
    """
    out: list[list[int]] = []
    for kind in dict.fromkeys(matrix.kind for matrix in matrices):
        mine = [index for index, matrix in enumerate(matrices) if matrix.kind == kind]
        mine.sort(key=lambda index: (-cost_of(matrices[index].shape), matrices[index].shape, index))
        waiting: dict[int, deque[int]] = {}
        for index in mine:
            waiting.setdefault(matrices[index].owner, deque()).append(index)
        while any(waiting.values()):
            together: list[int] = []
            for queue in waiting.values():
                numel = 0
                while queue and (numel == 0 or numel + matrices[queue[0]].numel <= most):
                    numel += max(1, matrices[queue[0]].numel)
                    together.append(queue.popleft())
            out.append(sorted(together))
    return out
