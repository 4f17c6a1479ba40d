"""From the ranges that ranks have of a flat buffer's parameters to those that they shall have in another layout.

``relayout.py`` asks it for one kind of values at a time.  Ranks that share the buffer hold all of it, so each finds what it
lacks among those, and what it has it copies: nothing is ever whole, and an exchange is at most as large as any buffer may be.
It never decides a layout, and frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zhooks.comm import GATHER, Call
from zhooks.layout import Axis, Layout, UnitPlan
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat, Ranges

__all__ = ["Target", "laid_down", "moved", "targets_of"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where one parameter lies in a layout: ``layout`` divides its flat buffer over the ranks of ``axis``, or over none."""

    layout: Layout
    index: int
    axis: Axis

    def runs(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """What a rank of the mesh has of it, run by run: start in the parameter, start in the rank's range, numel."""
        pieces = self.layout.pieces(self.index, 0 if self.layout.world == 1 else self.axis.place(rank))
        for piece in pieces:
            yield piece.start, piece.local - pieces[0].local, piece.numel

    def numel(self, rank: int) -> int:
        """Elements of that."""
        return sum(numel for _, _, numel in self.runs(rank))


def targets_of(plan: UnitPlan, axis: Axis) -> dict[int, Target]:
    """Where each parameter of a unit shall lie, by identity; ``axis``: the ranks that share its flats."""
    return {
        id(param): Target(flat.shared, index, axis)
        for flat in plan.flats
        for index, param in enumerate(plan.params(flat))
    }


@torch.no_grad()
def moved(flat: Flat, ranges: Ranges, targets: Mapping[int, Target]) -> list[Tensor | None]:
    """This rank's ranges in the new layout as new tensors, one a parameter; None for those that have none of this kind.

    Collective over the ranks that share the buffer, which have the same kinds of the same parameters.
    """
    layout, transport = flat.group.layout, flat.group.transport
    axis = transport.axis
    aims, own, made = [targets[id(param)] for param in flat.params], [], []
    for index, aim in enumerate(aims):
        mine = _own(flat, ranges, index)
        own.append(mine)
        made.append(None if mine is None else mine.new_empty(aim.numel(axis.ranks[axis.rank])))
    widest = max((mine.itemsize for mine in own if mine is not None), default=1)
    call = Call(GATHER, "move ranges", flat.name, flat.number)
    most = max(1, flat.pool.bound // widest)
    for low in range(0, layout.padded, most):
        sends: list[list[Tensor]] = [[] for _ in axis.ranks]
        receives: list[list[Tensor]] = [[] for _ in axis.ranks]
        nbytes = [[0] * axis.world for _ in axis.ranks]
        for index, aim in enumerate(aims):
            mine, new = own[index], made[index]
            if mine is None or new is None:
                continue
            for reader, rank in enumerate(axis.ranks):
                for writer, begin, at, numel in _sources(layout, index, aim.runs(rank), low, low + most):
                    nbytes[writer][reader] += numel * mine.itemsize
                    if writer == axis.rank:
                        start = begin - flat.span(index)[0]
                        sends[reader].append(mine[start : start + numel])
                    if reader == axis.rank:
                        receives[writer].append(new[at : at + numel])
        if any(map(any, nbytes)):
            transport.exchange(call, sends, receives, nbytes).wait()
    return made


def _own(flat: Flat, ranges: Ranges, index: int) -> Tensor | None:
    """This rank's range of one parameter on the device, 1-D; None where it has none of this kind."""
    if isinstance(ranges, Tensor):
        return flat.local(index, ranges).to(flat.kind.device)
    tensor = ranges[index]
    return tensor.local_shard.values.to(flat.kind.device) if isinstance(tensor, ShardedTensor) else None


def _sources(
    layout: Layout, index: int, runs: Iterator[tuple[int, int, int]], low: int, high: int
) -> Iterator[tuple[int, int, int, int]]:
    """Who has these runs of a parameter, as far as they lie in ``[low, high)`` of the flat buffer: whose, place in that shard,
    place in the new range, numel."""
    first = layout.starts[index]
    for start, local, numel in runs:
        begin, end = max(first + start, low), min(first + start + numel, high)
        at = local + begin - first - start
        for writer, place, count in layout.holders(begin, end) if begin < end else ():
            yield writer, place, at, count
            at += count


def laid_down(flat: Flat, values: Sequence[Tensor]) -> None:
    """Fill a flat buffer that is new with this rank's ranges, one a parameter."""
    if flat.storage.in_full:
        flat.adopt(torch.zeros(flat.layout.padded, dtype=flat.kind.master, device=flat.kind.device))
    shard = flat.storage.overwritten()
    if sum(value.numel() for value in values) < shard.numel():
        shard.zero_()
    for index, value in enumerate(values):
        flat.local(index, shard).copy_(value)
    del shard
    flat.written()
    flat.holds = True
