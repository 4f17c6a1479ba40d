"""The sharded tensor: global outside, one range inside."""

from __future__ import annotations

import zhooks.tensor.functions  # noqa: F401  (fills the table of functions)
from zhooks.tensor.aten import overflowed
from zhooks.tensor.elementwise import as_step
from zhooks.tensor.group import Engine, HeldSums, Name, Overflow, Overflows, ShardGroup, Watch, hash_of
from zhooks.tensor.shard import ParamShard, VectorShard
from zhooks.tensor.sharded import Registries, ShardedOverTp, ShardedTensor, ShardedVector, part_numel, range_alone, vector_of
from zhooks.tensor.stored import StoredTensor, check_together, spanned

__all__ = [
    "Engine",
    "HeldSums",
    "Name",
    "Overflow",
    "Overflows",
    "ParamShard",
    "Registries",
    "ShardGroup",
    "ShardedOverTp",
    "ShardedTensor",
    "ShardedVector",
    "StoredTensor",
    "VectorShard",
    "Watch",
    "as_step",
    "check_together",
    "hash_of",
    "overflowed",
    "part_numel",
    "range_alone",
    "spanned",
    "vector_of",
]
