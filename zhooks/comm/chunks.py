"""Buffers of bounded size: a parameter larger than the policy's bound passes through in chunks of every rank's range.

``unit/storage.py`` gathers with it, ``unit/full_values.py`` and ``grad/grad_buffer.py`` walk along it.  It knows integers and
plain tensors, and neither flats nor parameters.

Note: [Chunks]
    A chunk is the same stretch of every rank's range at once: ``numel`` elements at ``local`` of each shard, which lie at
    ``starts[r]`` of the flat buffer.  So a chunk is reduced, gathered or cast like a small flat buffer, whatever the bound
    the ranges stay what they are, and each element meets the same additions in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.work import Work, all_of
from zhooks.comm.transport import Call, Transport
from zhooks.layout import Layout, Segment


@dataclass(frozen=True, slots=True)
class Chunk:
    """``numel`` elements at ``local`` of every rank's shard.

    Attributes:
        starts: where they lie in the flat buffer, rank after rank.
        layout: that of the chunk of all ranks, one after the other.
    """

    local: int
    numel: int
    starts: tuple[int, ...]
    layout: Layout

    def of(self, shard: Tensor) -> Tensor:
        """This chunk's run of a shard; the very tensor where that is all of it."""
        return shard if shard.numel() == self.numel else shard[self.local : self.local + self.numel]


def even(numel: int, world: int) -> Layout:
    """One run of ``numel`` elements, split evenly."""
    return Layout((numel,), (0,), (Segment(0, numel),), world)


def chunks_of(layout: Layout, numel: int, align: int, *, world: int | None = None) -> Iterator[Chunk]:
    """Divide every rank's range into chunks of at most ``numel`` elements over all ranks, at multiples of ``align`` elements.

    Args:
        numel: at least ``world * align``.
        world: ranks that a chunk is divided over, when they are others than those of ``layout``.
    """
    size = numel // layout.world // align * align
    assert size > 0, f"chunks of {numel} elements needs at least one aligned row"
    local = 0
    for segment in layout.segments:
        step = segment.numel // layout.world
        for start in range(0, step, size):
            mine = min(size, step - start)
            starts = tuple(segment.start + rank * step + start for rank in range(layout.world))
            yield Chunk(local + start, mine, starts, even(mine * layout.world, world or layout.world))
        local += step


def gather(transport: Transport, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
    """Start filling ``full`` from every rank's ``shard``; a cast goes straight into this rank's own ranges of it."""
    if shard.dtype == full.dtype:
        return transport.all_gather(call, shard, full, layout)
    works, step = [], 0
    for segment, (start, stop) in zip(layout.segments, layout.ranges(transport.axis.rank), strict=True):
        own = full[start:stop]
        own.copy_(shard[step : step + stop - start])
        step += stop - start
        whole = full[segment.start : segment.start + segment.numel]
        works.append(transport.all_gather(call, own, whole, even(segment.numel, layout.world)))
    return all_of(works)


def in_order(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """A view of ``tensor`` whose elements in row-major order are those of a parameter with these strides in memory."""
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: (-stride[dim], dim)))


def read(source: Tensor, start: int, out: Tensor, *, add: bool = False) -> None:
    """Copy, or add, elements ``start`` to ``start + out.numel()`` of ``source`` in row-major order into ``out`` [1-D], cast.

    Never makes a contiguous copy of the source.
    """
    count = out.numel()
    if count == 0:
        return
    if source.is_contiguous():
        values = source.view(-1)[start : start + count]
        out.add_(values) if add else out.copy_(values)
        return
    inner = source[0].numel()
    row, skip = divmod(start, inner)
    if skip:
        head = min(inner - skip, count)
        read(source[row], skip, out[:head], add=add)
        read(source, start + head, out[head:], add=add)
        return
    rows = count // inner
    if rows:
        block, target = source[row : row + rows], out[: rows * inner].view(rows, *source.shape[1:])
        target.add_(block) if add else target.copy_(block)
    if count > rows * inner:
        read(source[row + rows], 0, out[rows * inner :], add=add)


def own_ranges(layout: Layout, rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What ``rank`` owns of the flat buffer between ``start`` and ``stop``: (from, to, place in its shard)."""
    local = 0
    for low, high in layout.ranges(rank):
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield first, last, local + first - low
        local += high - low


def norms_of_runs(values: Tensor, ord: float, nbytes: int) -> list[Tensor]:
    """The fp32 norms of consecutive runs of 16-bit ``values`` [1-D], none of which takes more than ``nbytes`` as fp32."""
    step = max(1, nbytes // 4)
    return [torch.linalg.vector_norm(run.to(torch.float32), ord) for run in values.split(step)]
