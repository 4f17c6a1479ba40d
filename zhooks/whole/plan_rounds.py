"""Which matrices travel together: integers in, integers out.

``update_rounds.py`` calls it with the same figures on every rank, so that all come to the same.  It never touches a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zhooks.optim import cost_of

__all__ = ["Matrix", "rounds", "rounds_by_flat"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter to be updated whole.

    Attributes:
        kind: what it has in common with those it may travel with (a dtype).
        owner: the rank that updates it.
        flat, flat_numel: the buffer that its values are fetched with, and what a rank has of that.
    """

    shape: tuple[int, ...]
    kind: Hashable
    owner: int
    flat: int = 0
    flat_numel: int = 0

    @property
    def numel(self) -> int:
        numel = 1
        for length in self.shape:
            numel *= length
        return numel


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


def rounds_by_flat(matrices: Sequence[Matrix], most: int) -> list[list[int]]:
    """As ``rounds``, where flats are fetched from a tier: in their order, so that each is fetched about once.

    In each round a rank has at most ``most`` elements of flats, too, or as many as the largest matrix has: every owner may have
    one of those.
    """
    most_fetched = max([most, *(matrix.numel for matrix in matrices)])
    out: list[list[int]] = []
    load, flats = dict[int, int](), dict[int, int]()
    kinds = list(dict.fromkeys(matrix.kind for matrix in matrices))
    order = sorted(range(len(matrices)), key=lambda index: (kinds.index(matrices[index].kind), matrices[index].flat, index))
    for index in order:
        one = matrices[index]
        fetched = sum(flats.values()) + (0 if one.flat in flats else one.flat_numel)
        full = (flats and fetched > most_fetched) or (one.owner in load and load[one.owner] + one.numel > most)
        if not out or full or matrices[out[-1][0]].kind != one.kind:
            out.append([])
            load, flats = {}, {}
        out[-1].append(index)
        load[one.owner] = load.get(one.owner, 0) + one.numel
        flats[one.flat] = one.flat_numel
    return out
