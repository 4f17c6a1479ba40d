"""A whole plain tensor whose values a store keeps: shape, dtype and device as if it were in memory, the values in a block.

``whole/stored_states.py`` puts them in place of an optimizer's states between steps.  Any operation on one opens the block as
long as it runs.  It never decides what is stored, nor where.

Note: [Views stay stored]
    A view of one is another one on the same block, so that a write through it is a write to the block, whatever became of the
    memory that the block was open in meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from offload.errors import ShardedOpError
from offload.store import Block
from zhooks.tensor.checkpoint_chunks import ChunkTensor, chunk_list, whole_chunk, write_items
from zhooks.tensor.written import written_values

__all__ = ["StoredTensor", "spanned", "tensor_at"]


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


class StoredTensor(torch.Tensor):
    """See the module.

    Args:
        block: of bytes.
        start: where the first element lies in it.
        like: has the shape, strides and dtype.
    """

    _block: Block
    _start: int

    @staticmethod
    def __new__(cls, block: Block, start: int, like: Tensor) -> StoredTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=block.device
        )
        made._block, made._start = block, start
        stored: StoredTensor = made
        return stored

    def placed_in(self, values: Tensor) -> Tensor:
        """It, as a plain tensor in the open values of its block."""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor_at(values, self._start, self)

    def plain(self) -> Tensor:
        """Its values as a new plain tensor on the device, laid out alike."""
        with torch.no_grad(), torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            there = self._block.tensor()[self._start : self._start + spanned(self)]
            return tensor_at(there.to(self._block.device, copy=True), 0, self)

    # What torch.distributed.checkpoint asks for, see ``checkpoint_chunks.py``: all of it, on the rank that has it.

    def opened(self) -> Tensor:
        return self.placed_in(self._block.tensor())

    def changed(self) -> None:
        self._block.touch()

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        return write_items(fqn, self.shape, self.dtype, [whole_chunk(self.shape, self.stride())])

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list([whole_chunk(self.shape, self.stride())])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return ChunkTensor.of(self, whole_chunk(self.shape, self.stride()), self.dtype, self.device)

    def copied(self, memo: dict[int, Any]) -> Tensor:
        """The same, of a copy of the block that ``memo`` keeps: what shares memory goes on sharing it."""
        block = self._block
        if id(block) not in memo:
            with torch.no_grad(), torch.inference_mode(False):
                memo[id(block)] = block.tensor().to(block.device, copy=True)
        return self.placed_in(memo[id(block)])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_MEMORY:
            raise ShardedOpError(
                f"Cannot compute {func.__name__} of an optimizer state of shape {list(args[0].shape)}. Expected memory, found "
                f"a state that is on the {args[0]._block.tier.value} tier between steps. Take a clone() of it first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_VALUES:
                args = (args[0].plain(), *args[1:])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return _viewed(func, args, kwargs)
        opened: dict[int, tuple[StoredTensor, Tensor, Tensor]] = {}

        def local(stored: StoredTensor) -> Tensor:
            if id(stored) not in opened:
                values = stored.placed_in(stored._block.tensor())
                opened[id(stored)] = (stored, values, values.to(stored.device))
            return opened[id(stored)][2]

        plain_args, plain_kwargs = tree_map_only(StoredTensor, local, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for written in written_values(func, args, kwargs):
            if not isinstance(written, StoredTensor):
                continue
            stored, values, used = opened[id(written)]
            if used.shape != values.shape:
                raise ShardedOpError(f"{func} expected a state's own shape {list(values.shape)}, found {list(used.shape)}")
            if used is not values:
                values.copy_(used)
            stored._block.touch()
        same = {id(used): stored for stored, _, used in opened.values()}
        return tree_map_only(Tensor, lambda value: same.get(id(value), value), result)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{self.plain()!r} (on the {self._block.tier.value} tier)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """In memory, and plain; copies of what shares memory share it, as torch's do."""
        if id(self) not in memo:
            memo[id(self)] = self.copied(memo)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


_OF_VALUES = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_OF_MEMORY = (torch.Tensor.data_ptr, torch.Tensor.untyped_storage)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views by the same operation on what has no memory; see Note [Views stay stored]."""
    of = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, StoredTensor))

    def bare(stored: StoredTensor) -> Tensor:
        return torch.empty_strided(tuple(stored.shape), stored.stride(), dtype=stored.dtype, device="meta")

    def back(view: Tensor) -> StoredTensor:
        return StoredTensor(of._block, of._start + int(view.storage_offset()) * view.dtype.itemsize, view)

    bare_args, bare_kwargs = tree_map_only(StoredTensor, bare, (args, kwargs))
    return tree_map_only(Tensor, back, func(*bare_args, **bare_kwargs))
