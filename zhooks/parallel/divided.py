"""One activation cut over ranks: its bytes in a row, this rank's range of them, and the tensor made of the whole again.

``partition.py`` cuts what it is handed and asks for views of what it gathered.  It knows strides and bytes; it never
communicates and never decides what is cut.

Note: [What is cut]
    A dense tensor, whatever the order of its dims, is the bytes it lies in; dims that were expanded are stored once.  One with
    gaps is its values without them, and is laid out with the gaps again, so that kernels find the strides they found.  A
    tensor that overlaps itself otherwise is left alone.

Note: [Headers]
    A gather carries one more segment, of 16 bytes a rank: the number of what is sent, or 0 where a rank has it no longer.
    Transports without labels would hand over another tensor's bytes without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from zhooks.layout import ALIGN_BYTES, Layout, Segment

__all__ = ["HEADER", "Cut", "Form", "Slot", "Values", "cut_layout", "form_of", "local_of", "values_of"]

#: Bytes a rank adds to what it sends, see Note [Headers].
HEADER = ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor's geometry over the bytes that are kept of it.

    Attributes:
        numel: elements that are kept.
        core: (size, stride) of the dims that are stored, strides falling, where there are gaps between them; None where the
            bytes kept are the extent the tensor lies in.
        spec: the DTensor's (mesh, placements, shape, stride), None for a plain tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    core: tuple[tuple[int, int], ...] | None = None
    spec: tuple[Any, ...] | None = None

    def view(self, full: Tensor) -> Tensor:
        """The tensor, from ``full``: uint8, 1-D, its bytes first."""
        with torch.inference_mode(False), torch.no_grad():
            storage = full.untyped_storage()
            empty = torch.empty(0, dtype=self.dtype, device=full.device)
            if self.core is None:
                made = empty.set_(storage, 0, self.shape, self.stride)
            else:
                sizes, strides = zip(*self.core, strict=True)
                extent = torch.empty(_extent(self.core), dtype=self.dtype, device=full.device)
                extent.as_strided(sizes, strides).copy_(empty.set_(storage, 0, sizes, _packed(sizes)))
                made = extent.as_strided(self.shape, self.stride)
            if self.spec is None:
                return made
            mesh, placements, shape, stride = self.spec
            return DTensor.from_local(made, mesh, placements, run_check=False, shape=shape, stride=stride)


def form_of(tensor: Tensor, spec: tuple[Any, ...] | None) -> Form | None:
    """How a strided tensor is kept; None where it cannot be, or has no values.  See Note [What is cut]."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and step]
    core = tuple(sorted(dims, key=lambda dim: dim[1], reverse=True))
    inner = 1
    for size, step in reversed(core):
        if step < inner:
            return None
        inner = (size - 1) * step + inner
    numel = torch.Size([n for n, _ in core]).numel()
    return Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), numel, None if inner == numel else core, spec)


def _packed(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(torch.Size(sizes[dim + 1 :]).numel() for dim in range(len(sizes)))


def _extent(core: Sequence[tuple[int, int]]) -> int:
    """Elements from the first to the last of a strided tensor."""
    return 1 + sum((size - 1) * step for size, step in core)


def local_of(tensor: Tensor, ranks: tuple[int, ...]) -> tuple[Tensor, tuple[Any, ...] | None] | None:
    """The plain tensor that every one of ``ranks`` should hold alike, and how to wrap it again; None where none is."""
    if type(tensor) is Tensor:
        return tensor, None
    if type(tensor) is not DTensor:
        waited = getattr(tensor, "trigger_wait", None)
        return (waited(), None) if waited is not None else None
    mesh, placements = tensor.device_mesh, tensor.placements
    for dim, placement in enumerate(placements):
        divided = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        if not placement.is_replicate() and any(len(set(row) & set(ranks)) > 1 for row in divided):
            return None
    local = tensor._local_tensor
    waited = getattr(local, "trigger_wait", None)
    return (local if waited is None else waited()), (mesh, placements, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The bytes of one tensor in a row.

    Attributes:
        flat: uint8, 1-D; a view of the tensor's memory where it is dense.
        place: the same for two views that keep the same bytes of one storage, as long as that is not written to.
    """

    flat: Tensor
    place: tuple[object, ...]


def values_of(tensor: Tensor, form: Form) -> Values:
    """The bytes that are kept of a plain ``tensor``."""
    tensor = tensor.detach()
    first, address = tensor.storage_offset(), torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    if form.core is not None:
        sizes, strides = zip(*form.core, strict=True)
        flat = tensor.as_strided(sizes, strides, first).contiguous().view(-1).view(torch.uint8)
        return Values(flat, (address, tensor._version, first * tensor.element_size(), flat.numel(), form.core))
    flat = tensor.as_strided((form.numel,), (1,), first).view(torch.uint8)
    return Values(flat, (address, tensor._version, first * tensor.element_size(), flat.numel(), None))


def cut_layout(nbytes: int, world: int) -> Layout:
    """``nbytes`` over ``world`` ranks, and a header from each."""
    row = world * ALIGN_BYTES
    data = -(-nbytes // row) * row
    return Layout((nbytes,), (0,), (Segment(0, data), Segment(data, world * HEADER)), world)


class Cut:
    """This rank's range of one activation, with its header: uint8 [layout.shard_numel], or where the stash has put it.

    ``counted`` is the word of whoever counts what is kept; it goes when this does.
    """

    __slots__ = ("__weakref__", "away", "counted", "key", "shard")

    def __init__(self, values: Tensor, slot: Slot, rank: int) -> None:
        start, stop = slot.layout.ranges(rank)[0]
        mine, shard = values[start:stop], torch.empty(slot.layout.shard_numel, dtype=torch.uint8, device=values.device)
        shard[: mine.numel()].copy_(mine)
        shard[mine.numel() : stop - start].zero_()
        shard[stop - start :].view(torch.int64).fill_(slot.number)
        self.key, self.shard, self.away = slot.key, cast("Tensor | None", shard), cast(Any, None)
        self.counted: object = None


class Slot:
    """One activation of a pass, as all ranks know it: what decides about collectives, whether or not a rank still has it.

    Attributes:
        storage: keeps the address of the original from being used again, but not its memory.
        saves, reads: how often it was saved in forward, and asked for since it was last gathered.
        under_way: the gather that was started for it, None once everybody has read it.
    """

    __slots__ = ("cut", "device", "key", "layout", "number", "reads", "saves", "storage", "under_way")

    def __init__(self, key: str, number: int, layout: Layout, original: Tensor) -> None:
        self.key, self.number, self.layout, self.device = key, number, layout, original.device
        self.storage = StorageWeakRef(original.untyped_storage())
        self.saves = self.reads = 0
        self.cut: Any = None
        self.under_way: Any = None
