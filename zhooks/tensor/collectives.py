"""The user's own collectives (torch.distributed) on sharded tensors.

``aten.py`` calls it, below autograd.  What reads a parameter gets the gathered value.  What writes the same values on every
rank into one (an all-reduce, a broadcast) works on the whole value, of which each rank keeps its range; anything else that
writes is refused, as its result would be a different parameter on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from zhooks.comm import wait_for
from zhooks.tensor.elementwise import refuse, whole
from zhooks.tensor.range_tensor import RangeTensor
from zhooks.tensor.written import written_values

__all__ = ["collective"]

_SAME_ON_ALL_RANKS = {
    "allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
    "all_reduce_", "all_reduce_coalesced_", "all_gather_into_tensor_out",
}  # fmt: skip


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective with a sharded tensor among its arguments; what writes one is complete when it returns.

    Raises:
        ShardedOpError: it writes a gradient or a state, or each rank would get other values.
    """
    written = [value for value in written_values(func, args, kwargs) if isinstance(value, RangeTensor)]
    if not written:
        return whole(func, args, kwargs)
    memories = [_memory(tensor) for tensor in written]
    for tensor, memory in zip(written, memories, strict=True):
        if tensor._bound is None or (memory is None and func._schema.name.split("::")[1] not in _SAME_ON_ALL_RANKS):
            refuse(func, tensor, writes=True)
    values = {
        id(tensor): tensor.full_tensor() if memory is None else memory for tensor, memory in zip(written, memories, strict=True)
    }
    plain, named = tree_map_only(RangeTensor, lambda value: values.get(id(value), value), (args, kwargs))
    out = func(*plain, **named)
    if None in memories:
        wait_for(out)
    for tensor, memory in zip(written, memories, strict=True):
        if memory is None:
            tensor.copy_(values[id(tensor)])
        else:
            tensor._written()
    return out


def _memory(tensor: RangeTensor) -> Tensor | None:
    """The whole value in the memory that it is kept in, where this rank has all of it."""
    spec = tensor._spec
    if spec.group.sharded or spec.division is not None or tensor._block is not None:
        return None
    return tensor._local.as_strided(spec.part_shape, spec.part_stride)
