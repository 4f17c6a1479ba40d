"""Tensors whose values lie elsewhere and are opened for each operation, and what ``torch.distributed.checkpoint`` sees of them.

Note: [Views stay stored]
    A view of one is another one on the same values, so that a write through it is a write to them, whatever became of the
    memory that they were open in meanwhile.

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
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from offload.store import Block
from zhooks.layout import PP, TP

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from zhooks.tensor.shard import ParamShard
    from zhooks.tensor.sharded import RangeTensor

#: An overload of an operation of ATen, and the arguments and keywords of a call.
Overload: TypeAlias = "OpOverload[..., Any]"
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
#: Their names do not end in "_", as those of other operations that write do.
_RECEIVES = ("irecv", "batch_p2p_ops")


def is_collective(func: Overload) -> bool:
    """An operation of torch.distributed."""
    return str(func.namespace) in _COLLECTIVES


@cache
def written_names(func: Overload) -> frozenset[str]:
    """The names of the arguments that the overload ``func`` writes."""
    schema = func._schema
    marked = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    name = schema.name.split("::")[1]
    if is_collective(func) and not marked and (name.endswith("_") or name in _RECEIVES):
        # Schemas of torch.distributed do not mark what is written: all but inputs.
        marked = {one.name for one in schema.arguments if not one.name.startswith("input")}
    return frozenset(marked)


def written_values(func: Overload, args: Args, kwargs: Kwargs) -> Iterator[Any]:
    """What a call writes, those in lists one by one."""
    names = written_names(func)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in names:
            yield from tree_leaves(value)
    for name in names & kwargs.keys():
        yield from tree_leaves(kwargs[name])


#: Torch may write with several threads, and a store serves one.
_OPENING = threading.RLock()


class OpenedTensor(torch.Tensor):
    """A plain tensor outside, whose values are opened for each operation on it, so that what is written reaches them."""

    def opened(self) -> Tensor:
        """The values, in its shape, where they lie: a plain tensor that may be short-lived."""
        raise NotImplementedError

    def changed(self) -> None:
        """The values were written."""
        raise NotImplementedError

    def wrote(self, values: Tensor) -> None:
        """An operation has written ``values``, which are what `opened` gave, in its shape or in another."""
        if values.shape != self.shape:
            raise ShardedOpError(f"Cannot resize a stored tensor. Expected {list(self.shape)}, found {list(values.shape)}.")
        self.changed()

    def view_at(self, view: Tensor) -> OpenedTensor:
        """The view of it that lies as ``view`` does in a tensor of its shape that has no memory."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """A copy of the values."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Overload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if not func.is_view:
            with _OPENING:
                return cls.on_values(func, args, kwargs or {})
        of = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, OpenedTensor))

        def bare(tensor: OpenedTensor) -> Tensor:
            return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")

        plain, named = tree_map_only(OpenedTensor, bare, (args, kwargs or {}))
        return tree_map_only(Tensor, of.view_at, func(*plain, **named))

    @classmethod
    def on_values(cls, func: Overload, args: Args, kwargs: Kwargs) -> Any:
        """Carry out ``func`` on the values of all such tensors; a result that is one's values is that tensor."""
        opened: dict[int, tuple[OpenedTensor, Tensor, Tensor]] = {}

        def used(tensor: OpenedTensor) -> Tensor:
            if id(tensor) not in opened:
                values = tensor.opened()
                opened[id(tensor)] = (tensor, values, values.to(tensor.device))
            return opened[id(tensor)][2]

        plain, named = tree_map_only(OpenedTensor, used, (args, kwargs))
        result = func(*plain, **named)
        for written in tree_leaves((args, kwargs)) if func.is_view else written_values(func, args, kwargs):
            if isinstance(written, OpenedTensor):
                tensor, values, there = opened[id(written)]
                if there is not values and there.shape == values.shape:
                    values.copy_(there)
                tensor.wrote(there)
        same = {id(there): tensor for tensor, _, there in opened.values()}
        return tree_map_only(Tensor, lambda value: same.get(id(value), value), result)


def tensor_at(values: Tensor, start: int, like: Tensor) -> Tensor:
    """A plain tensor as ``like`` lies, ``start`` bytes into ``values`` [uint8, 1-D]: the same memory."""
    offset, rest = divmod(int(values.storage_offset()) + start, like.dtype.itemsize)
    assert not rest, f"{like.dtype} {start} bytes into memory at {values.storage_offset()}"
    with torch.no_grad(), torch.inference_mode(False):
        empty = torch.empty(0, dtype=like.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), offset, tuple(like.shape), like.stride())


def spanned(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last, wherever those lie."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize if tensor.numel() else 0


class StoredTensor(OpenedTensor):
    """A whole plain tensor whose values a store keeps, in a block: an optimizer's state between steps.

    Args:
        block: of bytes.
        start: where the first element lies in it.
        like: has the shape, strides and dtype.
    """

    block: Block
    start: int

    @staticmethod
    def __new__(cls, block: Block, start: int, like: Tensor) -> StoredTensor:
        stored: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=block.device
        )
        stored.block, stored.start = block, start
        return stored

    def placed_in(self, values: Tensor) -> Tensor:
        """It, as a plain tensor in the open values of its block."""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor_at(values, self.start, self)

    def opened(self) -> Tensor:
        return self.placed_in(self.block.tensor())

    def changed(self) -> None:
        self.block.touch()

    def view_at(self, view: Tensor) -> StoredTensor:
        return StoredTensor(self.block, self.start + int(view.storage_offset()) * view.dtype.itemsize, view)

    def plain(self) -> Tensor:
        """Its values as a new plain tensor on the device, laid out alike."""
        with torch.no_grad(), torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            there = self.block.tensor()[self.start : self.start + spanned(self)]
            return tensor_at(there.to(self.block.device, copy=True), 0, self)

    # What torch.distributed.checkpoint asks for: all of it, on the rank that has it.

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        return write_items(fqn, self.shape, self.dtype, [whole_chunk(self.shape, self.stride())])

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list([whole_chunk(self.shape, self.stride())])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return ChunkTensor.of(self, whole_chunk(self.shape, self.stride()), self.dtype, self.device)

    def copied(self, memo: dict[int, Any]) -> Tensor:
        """The same, of a copy of the block that ``memo`` keeps: what shares memory goes on sharing it."""
        block = self.block
        if id(block) not in memo:
            with torch.no_grad(), torch.inference_mode(False):
                memo[id(block)] = block.tensor().to(block.device, copy=True)
        return self.placed_in(memo[id(block)])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
            raise ShardedOpError(
                f"Cannot compute {func.__name__} of an optimizer state of shape {list(args[0].shape)}. Expected memory, found "
                f"a state that is on the {args[0].block.tier.value} tier between steps. Take a clone() of it first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
                args = (args[0].plain(), *args[1:])
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{self.plain()!r} (on the {self.block.tier.value} tier)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """In memory, and plain; copies of what shares memory share it, as torch's do."""
        if id(self) not in memo:
            memo[id(self)] = self.copied(memo)
        copied: Tensor = memo[id(self)]
        return copied


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its elements lie: ``start`` elements into the range, with ``strides``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class ChunkTensor(OpenedTensor):
    """A box of a sharded or a stored tensor, as ``torch.distributed.checkpoint`` reads and writes it.

    Args:
        source: what its elements lie in.
        start: the first of them there.
        like: has the shape, strides and dtype; on any device.
        device: where the tensor says it is.
    """

    _source: RangeTensor | StoredTensor
    _start: int

    @staticmethod
    def __new__(cls, source: RangeTensor | StoredTensor, start: int, like: Tensor, device: torch.device) -> ChunkTensor:
        chunk: ChunkTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        chunk._source, chunk._start = source, start
        return chunk

    @classmethod
    def of(cls, source: RangeTensor | StoredTensor, chunk: Chunk, dtype: torch.dtype, device: torch.device) -> ChunkTensor:
        like = torch.empty_strided(chunk.sizes, chunk.strides, dtype=dtype, device="meta")
        return cls(source, chunk.start, like, device)

    def opened(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            values = self._source.opened()
            return values.as_strided(tuple(self.shape), self.stride(), int(values.storage_offset()) + self._start)

    def changed(self) -> None:
        self._source.changed()

    def view_at(self, view: Tensor) -> ChunkTensor:
        return ChunkTensor(self._source, self._start + int(view.storage_offset()), view, self.device)

    @classmethod
    def on_values(cls, func: Overload, args: Args, kwargs: Kwargs) -> Any:
        # Values on the host go to the host, and come from there, without a copy on the device.
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], OpenedTensor):
            args[0].opened().copy_(args[1])
            args[0].changed()
            return args[0]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            return func(args[0].opened(), **kwargs)
        return super().on_values(func, args, kwargs)

    def plain(self) -> Tensor:
        """A copy of the values, where they lie."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _OPENING:
            return self.opened().clone(memory_format=torch.contiguous_format)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (torch.Tensor.cpu, torch.Tensor.untyped_storage):
                args = (args[0].plain(), *args[1:])
            return func(*args, **(kwargs or {}))


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


def whole_chunk(shape: Sequence[int], strides: Sequence[int]) -> Chunk:
    """All of a tensor."""
    return Chunk((0,) * len(shape), tuple(shape), 0, tuple(strides))


def chunks_of(spec: ParamShard) -> list[Chunk]:
    """This rank's boxes of a parameter, or of what has its shape."""
    if not spec.numel:
        # Alike on every rank, so that a checkpoint knows of it.
        return [whole_chunk(spec.shape, spec.stride)]
    shape, found = spec.part_shape, []
    # Dims from the one that memory goes through last to the one it goes through first, and where each dim is among them.
    order = sorted(range(len(shape)), key=lambda dim: -spec.part_stride[dim])
    places = [order.index(dim) for dim in range(len(shape))]
    for piece in spec.pieces:
        start = piece.local - spec.pieces[0].local
        for offsets, sizes in boxes([shape[dim] for dim in order], piece.start, piece.start + piece.numel):
            strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
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
