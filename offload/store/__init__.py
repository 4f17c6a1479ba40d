"""Blocks of elements stored on a tier, and the leases that bring their values into memory for a while."""

from __future__ import annotations

from offload.store.allocation import Allocation, Allocator, Pools
from offload.store.block import Block, BlockRange
from offload.store.lease import Mode
from offload.store.store import Store
from offload.store.transfer import Transfers

__all__ = [
    "Allocation",
    "Allocator",
    "Block",
    "BlockRange",
    "Mode",
    "Pools",
    "Store",
    "Transfers",
]
