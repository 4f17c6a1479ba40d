"""Blocks of elements stored on a tier, and the leases that bring their values into memory for a while."""

from __future__ import annotations

from offload.store.allocation import Allocation, Allocator, Pools
from offload.store.block import Block, BlockRange, owner_of
from offload.store.lease import Lease, Mode
from offload.store.store import Store
from offload.store.transfer import Transfers

__all__ = [
    "Allocation",
    "Allocator",
    "Block",
    "BlockRange",
    "Lease",
    "Mode",
    "Pools",
    "Store",
    "Transfers",
    "owner_of",
]
