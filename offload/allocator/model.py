"""Owns the replay of recorded allocations: what torch's caching allocator would have reserved under other settings or limits.

`zprof frag`, the export of snapshots and the tests of long-lived arenas call `replay` with the `Events` of a recording. It
never touches a device, reads no file, and imports numba when a replay first runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.allocator import machine_code
from offload.allocator.segments import Block, Entry, Segment
from offload.allocator.settings import DEFAULTS, Settings
from offload.errors import CapabilityError

__all__ = ["ALLOC", "EMPTY", "RELEASE", "REQUEST", "Events", "Failure", "Lane", "Level", "Replayed", "replay"]

#: What an event asks for: REQUEST is a free while another stream still uses the block, EMPTY is torch.cuda.empty_cache().
ALLOC, RELEASE, REQUEST, EMPTY = range(4)
_FIRST_ADDRESS = 1 << 40
#: Address space of an expandable segment where no limit says how large the device is.
_SPACE = 1 << 40
_SLACK = 1 << 26
_FAILURES = 64
_LOG_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")


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
            (event, Entry(_LOG_ACTIONS[action], address, size, events.lanes[lane].stream, int(events.time_ns[event]) // 1000))
            for event, action, address, size, lane in self.log.tolist()
        ]


def replay(
    events: Events,
    settings: Settings = DEFAULTS,
    *,
    limit: int | None = None,
    points: int = 1000,
    each: bool = False,
) -> Replayed:
    """Run ``events`` through a model of the allocator.

    Args:
        limit: bytes the allocator may reserve; a request that then fails is noted, and the run goes on without it.
        points: at most so many levels over the run.
        each: also keep the reserved bytes and the address of every event.
    Raises:
        CapabilityError: numba does not work here.
    """
    loops, blocks = _loops()
    memory = _Memory(blocks, events, settings, limit, points)
    every = max(1, -(-len(events) // max(1, points - 1)))
    kept = len(events) if each else 0
    reserved, addresses = np.zeros(kept, np.int64), np.full(kept, -1, np.int64)
    columns = (events.action, events.slot, events.nbytes, events.lane, reserved, addresses)
    done = 0
    while (done := loops.run(*memory.arrays, *columns, done, every)) < len(events):
        memory.grow()
    return _result(blocks, memory, events, settings, limit, (reserved, addresses))


def _loops() -> tuple[Any, Any]:
    """The compiled modules; numba costs memory and time that a command without a replay should not pay."""
    try:
        where = machine_code.folder()
        with machine_code.kept(where):
            return _imported()
    # Machine code on disk may be damaged in ways that numba does not foresee; without it the same is compiled.
    except Exception:
        try:
            with machine_code.kept(None):
                return _imported()
        # Whatever numba, llvmlite or the dynamic linker raises is the reason.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CapabilityError(f"replay needs numba to work here, found {reason}; install numba>=0.60") from error


def _imported() -> tuple[Any, Any]:
    return import_module("offload.allocator.replay_loops"), import_module("offload.allocator.replay_blocks")


class _Memory:
    """The arrays of one replay: see Note [Where blocks lie] in `replay_blocks`."""

    def __init__(self, layout: Any, events: Events, settings: Settings, limit: int | None, points: int) -> None:
        self._layout = layout
        lanes = len(events.lanes)
        self.first = layout.PRIVATE + lanes
        cells = np.zeros(self.first, np.int64)
        cells[layout.NEXT_ADDRESS] = _FIRST_ADDRESS
        cells[[layout.PEAK_RESERVED_AT, layout.PEAK_ACTIVE_AT, layout.WORST_AT]] = -1
        cells[layout.EXPANDABLE] = settings.expandable_segments
        cells[layout.MAX_SPLIT] = settings.max_split_size
        cells[layout.MAX_ROUNDING] = settings.max_non_split_rounding
        cells[layout.LARGE_SEGMENT] = settings.large_segment_size
        cells[layout.LIMIT] = limit or 0
        cells[layout.GC_THRESHOLD] = int(settings.garbage_collection_threshold * limit) if limit else 0
        # torch reserves addresses for 1 1/8 of the device; the limit is all that is known of it.
        largest = int(events.nbytes.max(initial=0))
        cells[layout.SPACE] = limit + limit // 8 + _SLACK if limit else max(_SPACE, 2 * largest)
        cells[layout.LANES] = lanes
        cells[layout.DIVISIONS : layout.PRIVATE] = settings.roundup_power2_divisions
        cells[layout.PRIVATE :] = [lane.pool != (0, 0) for lane in events.lanes]
        self.cells = cells
        self.rows = np.zeros((layout.ROWS, 0), np.int64)
        self.slots = np.full(int(events.slot.max(initial=-1)) + 1, -1, np.int64)
        self.failures = np.zeros((_FAILURES, layout.FAILURE_WIDTH), np.int64)
        self.points = np.zeros((max(2, points) + 1, layout.POINT_WIDTH), np.int64)
        self.grow()

    @property
    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """What the loops take first."""
        return self.cells, self.rows, self.slots, self.failures, self.points

    def grow(self) -> None:
        """Make arrays for twice as many blocks and segment events."""
        layout, old = self._layout, self.rows.shape[1]
        more = max(old, 1024)
        added = np.zeros((more, layout.BLOCK_WIDTH), np.int64)
        added[:, layout.STATE] = layout.UNUSED
        rows = np.zeros((layout.ROWS, old + more), np.int64)
        rows[:, :old] = self.rows
        spare = int(self.cells[layout.SPARES])
        last = len(self.cells) + (more - 1) * layout.BLOCK_WIDTH
        rows[layout.SPARES, spare : spare + more] = last - layout.BLOCK_WIDTH * np.arange(more)
        self.rows = rows
        self.cells = np.concatenate([self.cells, added.ravel()])
        self.cells[layout.SPARES] += more

    @property
    def blocks(self) -> NDArray[np.int64]:
        """One row a block, those in use, by address."""
        table = self.cells[self.first :].reshape(-1, self._layout.BLOCK_WIDTH)
        table = table[table[:, self._layout.STATE] != self._layout.UNUSED]
        ordered: NDArray[np.int64] = table[np.argsort(table[:, self._layout.ADDRESS], kind="stable")]
        return ordered


def _result(
    blocks: Any,
    memory: _Memory,
    events: Events,
    settings: Settings,
    limit: int | None,
    each: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Replayed:
    cells = memory.cells[: blocks.PRIVATE].tolist()

    def level(event: int, values: list[int]) -> Level:
        return Level(event, int(events.time_ns[event]), *values)

    rows = memory.points[: cells[blocks.POINTS]]
    failures = memory.failures[: min(cells[blocks.FAILED], _FAILURES)].tolist()
    return Replayed(
        settings=settings,
        limit=limit,
        peak_reserved=cells[blocks.PEAK_RESERVED],
        peak_reserved_event=cells[blocks.PEAK_RESERVED_AT],
        peak_allocated=cells[blocks.PEAK_ACTIVE],
        peak_allocated_event=cells[blocks.PEAK_ACTIVE_AT],
        worst_event=cells[blocks.WORST_AT],
        worst_stuck=cells[blocks.WORST],
        retries=cells[blocks.RETRIES],
        failed=cells[blocks.FAILED],
        failures=tuple(Failure(row[1], level(row[0], row[2:])) for row in failures),
        points=tuple(level(row[0], row[1:7]) for row in rows.tolist()),
        peaks=rows[:, 7:9].copy(),
        segments=_segments(blocks, memory, events),
        log=memory.rows[blocks.LOG :, : cells[blocks.LOGGED]].T.copy(),
        reserved=each[0],
        addresses=each[1],
    )


def _segments(blocks: Any, memory: _Memory, events: Events) -> tuple[Segment, ...]:
    """The state at the end, as a snapshot shows it: an expandable segment is one for each mapped range."""
    states = {blocks.FREE: "inactive", blocks.ACTIVE: "active_allocated", blocks.PENDING: "active_awaiting_free"}
    segments: list[Segment] = []
    held: list[Block] = []
    expandable = bool(memory.cells[blocks.EXPANDABLE])
    rows = memory.blocks.tolist()
    for number, row in enumerate(rows):
        if row[blocks.STATE] == blocks.UNMAPPED:
            continue
        held.append(Block(row[blocks.ADDRESS], row[blocks.SIZE], row[blocks.REQUESTED], states[row[blocks.STATE]]))
        after = rows[number + 1] if row[blocks.NEXT] >= 0 else None
        if after is None or after[blocks.STATE] == blocks.UNMAPPED:
            lane = events.lanes[row[blocks.LANE]]
            segments.append(
                Segment(
                    device=events.device,
                    address=held[0].address,
                    total_size=sum(block.size for block in held),
                    stream=lane.stream,
                    large=row[blocks.POOL] == blocks.LARGE,
                    pool=lane.pool,
                    expandable=expandable,
                    blocks=tuple(held),
                )
            )
            held = []
    return tuple(segments)
