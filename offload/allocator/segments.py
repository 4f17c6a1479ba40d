"""What torch's caching allocator holds and did, as facts: segments, their blocks, and entries of its history.

The replay ends in them, and zprof reads them from snapshots.  They check nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Block", "Entry", "Frame", "Segment"]


class Frame(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """A part of a segment; ``requested`` is what was asked for, 0 where it is free."""

    address: int
    size: int
    requested: int
    state: str
    frames: tuple[Frame, ...] = ()


class Entry(NamedTuple):
    """One event of a device's history; ``size`` of an allocation is what was asked for. ``device_free``: of "oom" only."""

    action: str
    address: int
    size: int
    stream: int
    time_us: int
    pool: tuple[int, int] | None = None
    device_free: int = 0
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of the device that the allocator holds; of an expandable segment one contiguous mapped range.

    ``blocks`` lie one after the other, and fill it. ``pool`` is (0, 0), or the id of a graph's or a program's own pool.
    """

    device: int
    address: int
    total_size: int
    stream: int
    large: bool
    pool: tuple[int, int]
    expandable: bool
    blocks: tuple[Block, ...]
