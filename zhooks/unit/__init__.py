"""Units and their flat buffers: gathered, shown to modules, released, kept on tiers."""

from __future__ import annotations

from zhooks.unit.buffer_pool import Pool, Reserve, Scratch
from zhooks.unit.flat import Flat, Links, State
from zhooks.unit.full_values import Ranges, all_copies, full_copies, passing, spread
from zhooks.unit.storage import Storage
from zhooks.unit.unit import Unit, find_slots, loose_references

__all__ = [
    "Flat",
    "Links",
    "Pool",
    "Ranges",
    "Reserve",
    "Scratch",
    "State",
    "Storage",
    "Unit",
    "all_copies",
    "find_slots",
    "full_copies",
    "loose_references",
    "passing",
    "spread",
]
