"""Full values on their way: from every rank's ranges to plain tensors and back, through buffers of bounded size.

``build/``, ``checkpoint/full_state.py`` and ``checkpoint/whole_folder.py`` call it for attach, detach and state dicts.
What they ask for may be as large as a parameter; what it passes through never is larger than the policy's bound.  It never
decides what a state consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zhooks.comm import CONTROL, Call, chunks_of, in_order, own_ranges, read
from zhooks.tensor import ShardedTensor
from zhooks.unit.flat import Flat

#: A shard-sized tensor, or the sharded tensors of one kind (gradients, a moment), one a parameter.
Ranges = Tensor | Sequence[Any]


@torch.no_grad()
def full_copies(
    flat: Flat, ranges: Ranges, *, wanted: Collection[int] | None = None, device: torch.device | None = None
) -> list[Tensor | None]:
    """New plain tensors of the parts, one a parameter, in their strides; None for those not ``wanted``.  Collective.

    Args:
        wanted: indices of parameters, all when None; they may differ from rank to rank.
        device: where the copies are made; the compute device when None.
    """
    dtype, places = _dtype(ranges), zip(flat.layout.starts, flat.layout.numels, strict=True)
    made: list[Tensor | None] = [
        torch.empty_strided(spec.part_shape, spec.part_stride, dtype=dtype, device=device or flat.kind.device)
        if wanted is None or index in wanted
        else None
        for index, spec in enumerate(flat.specs)
    ]
    if not flat.sharded:
        for index, copy in enumerate(made):
            if copy is not None:
                _line(copy).copy_(_own(flat, ranges, index, dtype))
        return made
    lines = [(start, numel, _line(copy)) for (start, numel), copy in zip(places, made, strict=True) if copy is not None]
    for at, values in passing(flat, ranges):
        for start, numel, line in lines:
            low, high = max(start, at), min(start + numel, at + values.numel())
            if low < high:
                line[low - start : high - start].copy_(values[low - at : high - at])
    return made


def all_copies(flat: Flat, ranges: Ranges) -> list[Tensor]:
    """``full_copies`` of every parameter on the compute device.  Collective."""
    return [copy for copy in full_copies(flat, ranges) if copy is not None]


@torch.no_grad()
def passing(flat: Flat, ranges: Ranges) -> Iterator[tuple[int, Tensor]]:
    """Full values in runs of the flat buffer: (start, values), each valid until the next is asked for.  Collective."""
    layout, axis, dtype = flat.layout, flat.transport.axis, _dtype(ranges)
    call = Call(CONTROL, "gather values", flat.name, flat.number)
    if not flat.sharded:
        yield 0, _shard(flat, ranges, dtype)
        return
    if layout.padded * dtype.itemsize <= flat.pool.bound:
        full = torch.empty(layout.padded, dtype=dtype, device=flat.kind.device)
        shard = _shard(flat, ranges, dtype)
        flat.transport.all_gather(call, shard.clone() if shard is ranges else shard, full, layout).wait()
        yield 0, full
        return
    # The range of a single parameter is the beginning of the shard: what the padding holds is nobody's.
    mine = _own(flat, ranges, 0, dtype) if len(flat.specs) == 1 else _shard(flat, ranges, dtype)
    buffer = torch.empty(flat.pool.bound // dtype.itemsize, dtype=dtype, device=flat.kind.device)
    for chunk in chunks_of(layout, buffer.numel(), layout.align):
        full = buffer[: chunk.layout.padded]
        runs = full.split(chunk.numel)
        own, known = runs[axis.rank], mine[chunk.local : chunk.local + chunk.numel]
        own[: known.numel()].copy_(known)
        own[known.numel() :].zero_()
        flat.transport.all_gather(call, own, full, chunk.layout).wait()
        yield from zip(chunk.starts, runs, strict=True)


@torch.no_grad()
def spread(
    flat: Flat, tensors: Sequence[Any] | None, out: Tensor, broadcast: Callable[[Call, Tensor], None] | None
) -> None:
    """This rank's ranges of full tensors land in ``out`` [shard_numel].  Collective where there is a ``broadcast``.

    Args:
        tensors: one a parameter, None for zeros; None in all on a rank that only receives.
        broadcast: overwrites a run of values with the first rank's.
    """
    layout, places = flat.layout, list(zip(flat.specs, flat.layout.starts, flat.layout.numels, strict=True))
    buffer = torch.empty(min(layout.padded, flat.pool.bound // out.element_size()), dtype=out.dtype, device=flat.kind.device)
    call = Call(CONTROL, "load", flat.name, flat.number)
    for start in range(0, layout.padded, max(1, buffer.numel())):
        run = buffer[: min(buffer.numel(), layout.padded - start)]
        stop = start + run.numel()
        if tensors is not None:
            run.zero_()
            for (spec, place, numel), tensor in zip(places, tensors, strict=True):
                low, high = max(place, start), min(place + numel, stop)
                if tensor is not None and low < high:
                    read(in_order(tensor, spec.part_stride), low - place, run[low - start : high - start])
        if broadcast is not None:
            broadcast(call, run)
        for low, high, local in own_ranges(flat.group.layout, flat.group.rank, start, stop):
            out[local : local + high - low].copy_(run[low - start : high - start])


def _line(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order they lie in memory, 1-D."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _dtype(ranges: Ranges) -> torch.dtype:
    if isinstance(ranges, Tensor):
        return ranges.dtype
    known: torch.dtype = next(tensor for tensor in ranges if tensor is not None).dtype
    return known


def _own(flat: Flat, ranges: Ranges, index: int, dtype: torch.dtype) -> Tensor:
    """One parameter's range on this rank, 1-D; zeros where it has none."""
    if isinstance(ranges, Tensor):
        return flat.local(index, ranges)
    if isinstance(ranges[index], ShardedTensor):
        local: Tensor = ranges[index].local_shard.values
        return local
    return torch.zeros((), dtype=dtype, device=flat.kind.device).expand(flat.span(index)[1])


def _shard(flat: Flat, ranges: Ranges, dtype: torch.dtype) -> Tensor:
    """All ranges of this rank as one shard-sized tensor on the compute device."""
    if isinstance(ranges, Tensor):
        return ranges.to(flat.kind.device)
    shard = torch.zeros(flat.shard_numel, dtype=dtype, device=flat.kind.device)
    for index, tensor in enumerate(ranges):
        if isinstance(tensor, ShardedTensor):
            flat.local(index, shard).copy_(tensor.local_shard.values)
    return shard
