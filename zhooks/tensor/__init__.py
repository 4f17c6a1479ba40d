"""The sharded tensor: global outside, one range inside."""

from __future__ import annotations

from zhooks.tensor.checkpoint_chunks import check_together
from zhooks.tensor.elementwise import as_step
from zhooks.tensor.group import Engine, HeldSums, ShardGroup
from zhooks.tensor.hashes import hash_of
from zhooks.tensor.overflow import Name, Overflow, Overflows, Watch, overflowed
from zhooks.tensor.range_tensor import ParamShard, part_numel, range_alone
from zhooks.tensor.sharded import Registries, ShardedOverTp, ShardedTensor, ShardedVector, vector_of
from zhooks.tensor.stored import StoredTensor, spanned
from zhooks.tensor.vectors import VectorShard

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
