"""What ``torch.distributed.checkpoint`` sees of a sharded tensor: the boxes that this rank's range is, and tensors for them.

``range_tensor.py`` and ``stored.py`` answer its ``_Checkpointable`` protocol with these.  It never communicates, and keeps no
values: whoever reads or writes a chunk opens the range for as long as that takes.

Note: [Boxes]
    A range of a tensor with N dims is, in row-major order, the end of a row, whole rows and the beginning of a row, where a
    row is a range of N - 1 dims again: at most 2N - 1 boxes, disjoint, each contiguous in memory.  All ranks' boxes cover the
    tensor once.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from zhooks.layout import PP, TP
from zhooks.tensor.written import written_values

if TYPE_CHECKING:
    from zhooks.tensor.range_tensor import ParamShard

__all__ = [
    "ChunkTensor",
    "boxes",
    "check_together",
    "chunk_at",
    "chunk_list",
    "chunks_of",
    "whole_chunk",
    "write_items",
    "written_by",
]

#: Torch may write with several threads, and a store serves one.
_OPENING = threading.RLock()


class Values(Protocol):
    """What a chunk's elements lie in."""

    def opened(self) -> Tensor:
        """In memory: writes reach it, but it may be short-lived."""

    def changed(self) -> None:
        """Elements were written."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its elements lie: ``start`` elements into the range, with ``strides``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that are elements ``[start, stop)`` in row-major order, in that order.

    >>> list(boxes((4, 5), 3, 17))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        # Within one row.
        for offsets, sizes in boxes(rest, start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes(rest, start - (first - 1) * row, row) if start % row else ():
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    for offsets, sizes in boxes(rest, 0, stop - last * row):
        yield (last, *offsets), (1, *sizes)


def _contiguous(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def whole_chunk(shape: Sequence[int], strides: Sequence[int]) -> Chunk:
    """All of a tensor."""
    return Chunk((0,) * len(shape), tuple(shape), 0, tuple(strides))


def chunks_of(spec: ParamShard) -> list[Chunk]:
    """This rank's boxes of a parameter, or of what has its shape."""
    if not spec.numel:
        # Alike on every rank, so that a checkpoint knows of it.
        return [whole_chunk(spec.shape, spec.stride)]
    shape, found = spec.part_shape, []
    # Dims from the one that memory goes through last to the one it goes through first.
    order = sorted(range(len(shape)), key=lambda dim: -spec.part_stride[dim])
    place_of = {dim: place for place, dim in enumerate(order)}
    for piece in spec.pieces:
        start = piece.local - spec.pieces[0].local
        for offsets, sizes in boxes([shape[dim] for dim in order], piece.start, piece.start + piece.numel):
            strides = _contiguous(sizes)
            places = [place_of[dim] for dim in range(len(shape))]
            at = [offsets[place] for place in places]
            if spec.place is not None:
                dim, index, _ = spec.place
                at[dim] += index * shape[dim]
            found.append(Chunk(tuple(at), tuple(sizes[p] for p in places), start, tuple(strides[p] for p in places)))
            start += math.prod(sizes)
    return found


def chunk_list(chunks: Iterable[Chunk]) -> list[Any]:
    """The same as torch's ``ChunkStorageMetadata``."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(one.offsets), sizes=torch.Size(one.sizes)) for one in chunks]


def write_items(fqn: str, shape: torch.Size, dtype: torch.dtype, chunks: Iterable[Chunk]) -> list[Any]:
    """One ``WriteItem`` a chunk; those that several ranks have alike torch writes once."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(MetadataIndex(fqn, one.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(one, properties, shape))
        for one in chunk_list(chunks)
    ]


def written_by(spec: ParamShard, fqn: str) -> list[Chunk]:
    """The chunks that this rank writes.

    Raises:
        ShardedOpError: a checkpoint by names cannot hold it right.
    """
    if spec.group.spans(PP):
        raise ShardedOpError(
            f"torch.distributed.checkpoint.save of {fqn} ({spec.name}) expected ranks that share one model, found several "
            "pipeline stages or groups of experts, which may use one name for different parameters, so that one would "
            "overwrite the other. Call attachment.save(folder) on every rank."
        )
    chunks = chunks_of(spec) if spec.place is not None or spec.group.first(TP) else []
    under_way = _save_under_way(sys._getframe())
    if under_way is None or not (spec.group.sharded or spec.place is not None or len(chunks) > 1):
        return chunks
    hugging = sys.modules.get("torch.distributed.checkpoint.hf_storage")
    if hugging is not None and isinstance(under_way["storage_writer"], hugging.HuggingFaceStorageWriter):
        raise ShardedOpError(
            f"torch.distributed.checkpoint.save of {fqn} ({spec.name}) expected a storage that takes several chunks of a "
            "tensor from one rank, found HuggingFaceStorageWriter, which would keep one of them. Save without it, or call "
            "attachment.save_full(file) on every rank."
        )
    if not _together(under_way) and (spec.group.sharded or spec.place is not None):
        # Torch compares the chunks of several ranks with the tensor's size, and those of one rank with nothing.
        raise _by_itself(f"{fqn} ({spec.name})", "each holds a range of it")
    return chunks


def check_together(name: str) -> None:
    """Refuse the states of a parameter that one rank alone has, where this rank saves by itself; quick where nobody saves.

    Raises:
        ShardedOpError: torch's plan of such a save asks for them.
    """
    under_way = _save_under_way(sys._getframe())
    if under_way is not None and not _together(under_way):
        raise _by_itself(f"the optimizer state of {name}", "only the parameter's owner holds it")


def _together(under_way: dict[str, Any]) -> bool:
    ranks = under_way["distW"]
    return bool(under_way.get("use_collectives", True) and ranks.use_dist and dist.get_world_size(ranks.group) > 1)


def _by_itself(what: str, why: str) -> ShardedOpError:
    return ShardedOpError(
        f"torch.distributed.checkpoint.save of {what} expected all ranks to save together, because {why}, found only this "
        "rank (no_dist=True, use_collectives=False or a process group of one). Leave that out, or call "
        "attachment.save(folder) on every rank."
    )


def _save_under_way(caller: FrameType | None) -> dict[str, Any] | None:
    """The variables of the torch function that plans and writes: whom with, and where to."""
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")
    code = None if module is None else inspect.unwrap(module._save_state_dict).__code__
    while caller is not None and caller.f_code is not code:
        caller = caller.f_back
    return None if caller is None else caller.f_locals


def chunk_at(chunks: Iterable[Chunk], index: Any, name: str) -> Chunk:
    """The chunk that torch's ``MetadataIndex`` means."""
    for one in chunks:
        if index.offset is None or one.offsets == tuple(index.offset):
            return one
    raise ShardedOpError(
        f"Cannot read chunk of {index.fqn} ({name}) at {tuple(index.offset)}. Expected one that this rank has, found none: the "
        "layout of the model has changed since torch planned. Save or load between steps."
    )


class ChunkTensor(torch.Tensor):
    """A plain tensor outside, whose values are opened for each operation on it, so that a copy into it reaches their tier.

    Args:
        values: what its elements lie in.
        start: the first of them there.
        like: has the shape, strides and dtype; on any device.
        device: where the tensor says it is.
    """

    _source: Values
    _start: int

    @staticmethod
    def __new__(cls, values: Values, start: int, like: Tensor, device: torch.device) -> ChunkTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made._source, made._start = values, start
        chunk: ChunkTensor = made
        return chunk

    @classmethod
    def of(cls, values: Values, chunk: Chunk, dtype: torch.dtype, device: torch.device) -> ChunkTensor:
        return cls(values, chunk.start, torch.empty_strided(chunk.sizes, chunk.strides, dtype=dtype, device="meta"), device)

    def _within(self, opened: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return opened.as_strided(tuple(self.shape), self.stride(), int(opened.storage_offset()) + self._start)

    def plain(self) -> Tensor:
        """A copy of the values."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _OPENING:
            return self._within(self._source.opened()).clone(memory_format=torch.contiguous_format)

    def _write(self, source: Tensor) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _OPENING:
            self._within(self._source.opened()).copy_(source)
            self._source.changed()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.cpu, torch.Tensor.untyped_storage):
                args = (args[0].plain(), *args[1:])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return _viewed(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], ChunkTensor):
            args[0]._write(args[1].plain() if isinstance(args[1], ChunkTensor) else args[1])
            return args[0]
        if any(isinstance(value, ChunkTensor) for value in written_values(func, args, kwargs)):
            raise ShardedOpError(
                f"{func} cannot write into a chunk of a sharded tensor. Expected copy_(). Compute elsewhere, then copy."
            )
        plain_args, plain_kwargs = tree_map_only(ChunkTensor, ChunkTensor.plain, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ChunkTensor({self.plain()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view is another chunk of the same values."""
    of = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, ChunkTensor))

    def bare(chunk: ChunkTensor) -> Tensor:
        return torch.empty_strided(tuple(chunk.shape), chunk.stride(), dtype=chunk.dtype, device="meta")

    def back(view: Tensor) -> ChunkTensor:
        return ChunkTensor(of._source, of._start + int(view.storage_offset()), view, of.device)

    bare_args, bare_kwargs = tree_map_only(ChunkTensor, bare, (args, kwargs))
    return tree_map_only(Tensor, back, func(*bare_args, **bare_kwargs))
