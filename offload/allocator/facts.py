"""What torch's caching allocator holds and did, and what a replay of it comes to, as facts: nothing here is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.allocator.settings import Settings

__all__ = ["Block", "Entry", "Events", "Failure", "Frame", "Lane", "Level", "Replayed", "Segment"]

#: What the log of a replay says, by number.
_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


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


class Lane(NamedTuple):
    """What a block never leaves: a memory pool, (0, 0) unless a graph or a program made its own, and a stream."""

    pool: tuple[int, int]
    stream: int


@dataclass(frozen=True, slots=True)
class Events:
    """Allocations in the order the allocator was asked; all arrays have one length.

    ``slot`` numbers allocations from 0; a free carries its allocation's. ``nbytes`` is what was asked for, before rounding;
    ``lane`` indexes ``lanes``. The first ``held`` events stand for what was already allocated when the recording began.
    ``label`` indexes ``labels`` and says whose an allocation is.
    """

    action: NDArray[np.uint8]
    slot: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    lane: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    lanes: tuple[Lane, ...] = (Lane((0, 0), 0),)
    device: int = 0
    held: int = 0
    label: NDArray[np.int32] | None = None
    labels: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.action)

    @classmethod
    def of(cls, rows: list[tuple[int, int, int]]) -> Events:
        """Events on one stream from (action, slot, nbytes), a nanosecond apart; for examples and tests."""
        columns = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
        return cls(
            action=columns[:, 0].astype(np.uint8),
            slot=columns[:, 1].copy(),
            nbytes=columns[:, 2].copy(),
            lane=np.zeros(len(columns), np.int32),
            time_ns=np.arange(len(columns), dtype=np.int64),
        )

    def first(self, count: int) -> Events:
        """The first ``count`` events."""
        names = ("action", "slot", "nbytes", "lane", "time_ns")
        cut = {name: getattr(self, name)[:count] for name in names}
        return replace(self, **cut, label=None if self.label is None else self.label[:count])


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes after one event; ``free`` and ``pending`` are reserved and not allocated, ``stuck`` cannot go back."""

    event: int
    time_ns: int
    reserved: int
    allocated: int
    pending: int
    free: int
    releasable: int
    largest: int

    @property
    def stuck(self) -> int:
        """Free bytes that share a segment, or a page, with bytes in use."""
        return self.free - self.releasable

    @property
    def index(self) -> float:
        """1 - largest free block / free; 0 where nothing is free."""
        return 1 - self.largest / self.free if self.free else 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A request torch would have raised for: what was asked, and the levels when everything had been tried."""

    nbytes: int
    level: Level


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a run would have reserved under ``settings``; ``limit`` is what the device gives, or None for no end.

    ``points`` are levels at even distances and at the end, ``peaks`` (int64 [points, 2]) the most reserved and allocated since
    the point before. ``worst_event`` had the most stuck bytes, ``worst_stuck``. ``reserved`` and ``addresses`` (one an event,
    -1 for none) are there where they were asked for, ``log`` where segments came and went: rows of (event, action, address,
    size, lane).
    """

    settings: Settings
    limit: int | None
    peak_reserved: int
    peak_reserved_event: int
    peak_allocated: int
    peak_allocated_event: int
    worst_event: int
    worst_stuck: int
    retries: int
    failed: int
    failures: tuple[Failure, ...]
    points: tuple[Level, ...]
    peaks: NDArray[np.int64]
    segments: tuple[Segment, ...]
    log: NDArray[np.int64]
    reserved: NDArray[np.int64]
    addresses: NDArray[np.int64]

    def segment_entries(self, events: Events) -> list[tuple[int, Entry]]:
        """(event, entry) for each segment that came or went, as torch's history has them."""
        return [
            (event, Entry(_ACTIONS[action], address, size, events.lanes[lane].stream, int(events.time_ns[event]) // 1000))
            for event, action, address, size, lane in self.log.tolist()
        ]
