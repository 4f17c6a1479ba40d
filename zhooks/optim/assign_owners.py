"""Which rank updates which matrix: integers in, integers out.

``owners.py`` and ``checkpoint/`` call it with the same figures on every rank, so that all come to the same.  It never touches a
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assign", "cost_of"]


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
