"""Parameters that are updated whole, by round: which travel together, their places on the ranks, and memory for them on owners.

``update.py`` moves and updates them.  It never communicates, nor decides who owns what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.device import computes_on_host
from zhooks.comm import Nbytes
from zhooks.optim import Whole
from zhooks.whole.plan_rounds import Matrix, rounds, rounds_by_flat

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

    @classmethod
    def of(cls, one: Whole, world: int) -> Member:
        layout = one.flat.layout
        pieces = sorted((piece.start, rank, piece.numel) for rank in range(world) for piece in layout.pieces(one.index, rank))
        return cls(one, tuple(rank for _, rank, _ in pieces), tuple(numel for _, _, numel in pieces))

    def numel_on(self, rank: int) -> int:
        return sum(self._of(rank))

    def local(self, held: Tensor, rank: int) -> tuple[Tensor, ...]:
        """The ranges that a rank has, of what it holds."""
        ranges: tuple[Tensor, ...] = held.split(self._of(rank))
        return ranges

    def add_ranges(self, full: Tensor, by_rank: Sequence[list[Tensor]]) -> None:
        """Every range of the whole, 1-D, to those of the rank that has it."""
        for rank, values in zip(self.ranks, full.split(self.numels), strict=True):
            by_rank[rank].append(values)

    def _of(self, rank: int) -> list[int]:
        return [numel for holder, numel in zip(self.ranks, self.numels, strict=True) if holder == rank]


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
    together = [[here[i] for i in some] for some in rounds(_matrices(here), most_nbytes // _nbytes_each(here))]
    return [
        *(_round(members, world, stored=False) for members in together),
        *(_round(members, world, stored=True) for members in by_flat(away, most_stored)),
    ]


def by_flat(stored: Sequence[Whole], most_nbytes: int) -> list[list[Whole]]:
    """Which travel together of those that are fetched from tiers."""
    return [[stored[i] for i in some] for some in rounds_by_flat(_matrices(stored), most_nbytes // _nbytes_each(stored))]


def _matrices(updates: Sequence[Whole]) -> list[Matrix]:
    return [
        Matrix(tuple(one.spec.shape), one.flat.kind.master, one.owner or 0, one.flat.number, one.flat.shard_numel)
        for one in updates
    ]


def _nbytes_each(updates: Sequence[Whole]) -> int:
    """What an element and its gradient take, at most."""
    return 2 * max((one.flat.kind.master.itemsize for one in updates), default=1)


def _round(updates: Sequence[Whole], world: int, *, stored: bool) -> Round:
    ranks, item = range(world), updates[0].flat.kind.master.itemsize
    members = tuple(Member.of(one, world) for one in updates)
    back = [
        [item * sum(member.numel_on(reader) for member in members if member.one.owner == owner) for reader in ranks]
        for owner in ranks
    ]
    # With their gradients values are twice as much.
    there = [[2 * back[owner][writer] for owner in ranks] for writer in ranks]
    return Round(members, there, back, stored)


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
