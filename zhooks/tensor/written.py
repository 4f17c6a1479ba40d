"""Which arguments an operation writes, by its schema.

Every tensor here that is not the memory it stands for asks it: a write into a copy of its values would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.utils._pytree import tree_leaves

__all__ = ["is_collective", "written_names", "written_values"]

_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
#: Their names do not end in "_", as those of other operations that write do.
_RECEIVES = ("irecv", "batch_p2p_ops")


def is_collective(func: Any) -> bool:
    """An operation of torch.distributed."""
    return str(func.namespace) in _COLLECTIVES


@cache
def written_names(func: Any) -> frozenset[str]:
    """The names of the arguments that the overload ``func`` writes."""
    schema = func._schema
    marked = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    name = schema.name.split("::")[1]
    if is_collective(func) and not marked and (name.endswith("_") or name in _RECEIVES):
        # Schemas of torch.distributed do not mark what is written: all but inputs.
        marked = {one.name for one in schema.arguments if not one.name.startswith("input")}
    return frozenset(marked)


def written_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """What a call writes, those in lists one by one."""
    names = written_names(func)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in names:
            yield from tree_leaves(value)
    for name in names & kwargs.keys():
        yield from tree_leaves(kwargs[name])
