"""Parameters that are updated whole, by round: which travel together, their places on the ranks, and memory for them on owners.

Every rank plans with the same figures, so that all come to the same rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import computes_on_host
from zhooks.comm import Nbytes
from zhooks.optim import Whole, cost_of

__all__ = ["Member", "Round", "by_flat", "by_rank", "memory_for", "planned"]

#: Whole parameters start on multiples of this many bytes, as torch's own memory does.
ALIGN_NBYTES = 64
#: A round's whole parameters and gradients on the host.  A larger block than 32 MiB glibc hands back to the system when it is
#: freed, and of smaller ones what lies free above 64 MiB: two of these are on their way at once.  Fresh pages cost more than
#: all copies of an exchange.
HOST_ROUND_NBYTES = 24 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a round, and its ranges in the order of its memory: which rank has each, and its elements."""

    one: Whole
    ranks: tuple[int, ...]
    numels: tuple[int, ...]

    def numels_on(self, rank: int) -> list[int]:
        return [numel for holder, numel in zip(self.ranks, self.numels, strict=True) if holder == rank]

    def local(self, held: Tensor, rank: int) -> tuple[Tensor, ...]:
        """The ranges that a rank has, of what it holds."""
        ranges: tuple[Tensor, ...] = held.split(self.numels_on(rank))
        return ranges

    def add_ranges(self, full: Tensor, by_rank: Sequence[list[Tensor]]) -> None:
        """Every range of the whole, 1-D, to those of the rank that has it."""
        for rank, values in zip(self.ranks, full.split(self.numels), strict=True):
            by_rank[rank].append(values)


@dataclass(frozen=True, slots=True)
class Round:
    """Parameters that travel together, and the bytes that each rank has for each owner, and each owner for each rank.

    Attributes:
        stored: something of them is fetched from a tier.
    """

    members: tuple[Member, ...]
    there: Nbytes
    back: Nbytes
    stored: bool

    @property
    def updates(self) -> list[Whole]:
        return [member.one for member in self.members]

    def of(self, owner: int) -> list[Member]:
        return [member for member in self.members if member.one.owner == owner]


def planned(
    updates: Sequence[Whole], world: int, most_nbytes: int, stored: Callable[[Whole], bool], most_stored: int
) -> list[Round]:
    """The rounds of a step, the same on every rank: in each at most so much of values and gradients on an owner.

    One parameter alone may be larger.

    Args:
        stored: something of a parameter is fetched from a tier; of those at most ``most_stored`` bytes travel together.
    """
    here, away = [one for one in updates if not stored(one)], [one for one in updates if stored(one)]
    if here and computes_on_host(here[0].flat.kind.device):
        most_nbytes = min(most_nbytes, HOST_ROUND_NBYTES)
    return [
        *(_round(together, world, stored=False) for together in _by_shape(here, most_nbytes)),
        *(_round(together, world, stored=True) for together in by_flat(away, most_stored)),
    ]


def _by_shape(updates: Sequence[Whole], most_nbytes: int) -> list[list[Whole]]:
    """In each round at most so many bytes for every owner, but at least one parameter.

    All of a round are of one dtype; those of one shape go one after the other, so that owners have alike to do.
    """
    most, out = _most_numel(updates, most_nbytes), list[list[Whole]]()
    for dtype in dict.fromkeys(one.flat.kind.master for one in updates):
        mine = [index for index, one in enumerate(updates) if one.flat.kind.master is dtype]
        mine.sort(key=lambda index: (-cost_of(updates[index].spec.shape), tuple(updates[index].spec.shape), index))
        waiting: dict[int, deque[int]] = {}
        for index in mine:
            waiting.setdefault(updates[index].owner or 0, deque()).append(index)
        while any(waiting.values()):
            together: list[int] = []
            for queue in waiting.values():
                numel = 0
                while queue and (numel == 0 or numel + updates[queue[0]].spec.numel <= most):
                    numel += max(1, updates[queue[0]].spec.numel)
                    together.append(queue.popleft())
            out.append([updates[index] for index in sorted(together)])
    return out


def by_flat(stored: Sequence[Whole], most_nbytes: int) -> list[list[Whole]]:
    """Which travel together of those that are fetched from tiers: in the order of their flats, so that each is fetched about
    once.

    In each round a rank has at most so many bytes of flats, too, or as many as the largest parameter has: every owner may have
    one of those.
    """
    most = _most_numel(stored, most_nbytes)
    most_fetched = max([most, *(one.spec.numel for one in stored)])
    out, load, flats = list[list[Whole]](), dict[int, int](), dict[int, int]()
    dtypes = list(dict.fromkeys(one.flat.kind.master for one in stored))
    for one in sorted(stored, key=lambda one: (dtypes.index(one.flat.kind.master), one.flat.number)):
        flat, owner, numel = one.flat, one.owner or 0, one.spec.numel
        fetched = sum(flats.values()) + (0 if flat.number in flats else flat.shard_numel)
        full = (flats and fetched > most_fetched) or (owner in load and load[owner] + numel > most)
        if not out or full or out[-1][0].flat.kind.master is not flat.kind.master:
            out.append([])
            load, flats = {}, {}
        out[-1].append(one)
        load[owner] = load.get(owner, 0) + numel
        flats[flat.number] = flat.shard_numel
    return out


def _most_numel(updates: Sequence[Whole], most_nbytes: int) -> int:
    """Elements, each with its gradient, that take so many bytes at most."""
    return most_nbytes // (2 * max((one.flat.kind.master.itemsize for one in updates), default=1))


def _round(updates: Sequence[Whole], world: int, *, stored: bool) -> Round:
    ranks, item, members = range(world), updates[0].flat.kind.master.itemsize, list[Member]()
    for one in updates:
        layout = one.flat.layout
        ranges = sorted((piece.start, rank, piece.numel) for rank in ranks for piece in layout.pieces(one.index, rank))
        members.append(Member(one, tuple(rank for _, rank, _ in ranges), tuple(numel for _, _, numel in ranges)))
    back = [
        [item * sum(sum(member.numels_on(reader)) for member in members if member.one.owner == owner) for reader in ranks]
        for owner in ranks
    ]
    # With their gradients values are twice as much.
    there = [[2 * back[owner][writer] for owner in ranks] for writer in ranks]
    return Round(tuple(members), there, back, stored)


def by_rank(world: int) -> list[list[Tensor]]:
    """Nothing yet for any rank, or from any."""
    return [[] for _ in range(world)]


def memory_for(mine: Sequence[Member]) -> list[tuple[Member, Tensor, Tensor]]:
    """Memory for values and gradients of an owner's parameters: all at once, so that the allocator has it again next time."""
    if not mine:
        return []
    kind = mine[0].one.flat.kind
    row = max(1, ALIGN_NBYTES // kind.master.itemsize)
    lengths = [-(-member.one.spec.numel // row) * row for member in mine]
    memory = torch.empty(2 * sum(lengths), dtype=kind.master, device=kind.device).split([n for n in lengths for _ in "vg"])
    numels = [member.one.spec.numel for member in mine]
    return [
        (member, value[:numel], grad[:numel])
        for member, numel, value, grad in zip(mine, numels, memory[::2], memory[1::2], strict=True)
    ]
