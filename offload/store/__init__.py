"""Blocks of elements stored on a tier, and the leases that bring their values into memory for a while."""

from __future__ import annotations

from offload.store.allocation import Allocation, Allocator, Pools
from offload.store.block import Block, BlockRange, Lease, Mode, owner_of
from offload.store.store import Store

__all__ = ["Allocation", "Allocator", "Block", "BlockRange", "Lease", "Mode", "Pools", "Store", "owner_of"]
