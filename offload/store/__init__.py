"""Blocks of elements at home on a tier, and the leases that bring their values into memory for a while."""

from __future__ import annotations

from offload.store.block import Block, BlockRange, owner_of
from offload.store.grants import Grant, Grants, Pools
from offload.store.lease import Lease, Mode
from offload.store.store import Store

__all__ = [
    "Block",
    "BlockRange",
    "Grant",
    "Grants",
    "Lease",
    "Mode",
    "Pools",
    "Store",
    "owner_of",
]
