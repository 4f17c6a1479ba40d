"""Owns the way from a recording to what a replay needs: allocations in order, what was reserved, and where the device ended.

`zprof frag` and the exports call it with a snapshot or a trace, and `score` holds a replay against the recording. It never runs
the allocator's model except to give a trace without a snapshot one with synthetic addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offload.allocator import ALLOC, DEFAULTS, EMPTY, RELEASE, REQUEST, Events, Lane, Replayed, replay
from zprof.allocator.snapshot import INACTIVE, Entry, Frame, Snapshot, checked
from zprof.rows import BEFORE_STACK, TIERS, RowKind, TraceError
from zprof.trace.levels import TIER_OF

if TYPE_CHECKING:
    from zprof.trace.reader import Trace

__all__ = ["Recording", "Score", "of_snapshot", "of_trace", "score", "snapshot_of"]

_GIVES_BACK, _ASKS = ("segment_free", "segment_unmap"), ("segment_alloc", "segment_map")
_MOST_LANES = 1 << 16
_MOST_ASKED = 1 << 60
#: torch's own default for the length of a history; pages of more take minutes to open.
_ENTRIES = 100_000
_FREE_ENTRIES = ("free_requested", "free_completed")
#: In the place of a file, where the recording has no lines: then the frame's name is the module.
_NO_LINES = "lines not recorded (zprof run --level stack)"


@dataclass(frozen=True, slots=True)
class Recording:
    """Allocations of one device, with what its allocator had reserved where the recording says that.

    ``reserved`` are bytes, each after the event in ``reserved_event``. ``limit`` is what the device gave this process before
    it refused, where it did. ``begun`` bytes were reserved before the first event.
    """

    events: Events
    reserved_event: NDArray[np.int64]
    reserved: NDArray[np.int64]
    limit: int | None = None
    begun: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """How far a replay under the recorded settings is from what was recorded; bytes, over ``count`` moments."""

    peak_recorded: int
    peak_predicted: int
    mean_error: float
    count: int

    @property
    def peak_error(self) -> float:
        """Relative; positive where the replay reserves more."""
        return self.peak_predicted / self.peak_recorded - 1 if self.peak_recorded else 0.0


def score(recording: Recording, replayed: Replayed) -> Score | None:
    """Hold a replay made with ``each`` against the recording; None where that has nothing to compare."""
    if not len(recording.reserved) or not len(replayed.reserved):
        return None
    predicted = replayed.reserved[recording.reserved_event]
    error = float(np.abs(predicted - recording.reserved).mean())
    # The peak between two samples of a counter is not in the recording, so it is not held against it.
    return Score(int(recording.reserved.max()), int(predicted.max()), error, len(predicted))


# --- from a snapshot ----------------------------------------------------------------------------------------------------


class _Asked:
    """Events as they are found, one list a column."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.reserved: list[int] = []
        self._lanes: dict[Lane, int] = {}
        self._slots = 0

    def lane(self, pool: tuple[int, int], stream: int) -> int:
        return self._lanes.setdefault(Lane(pool, stream), len(self._lanes))

    def alloc(self, nbytes: int, lane: int, time_ns: int, reserved: int) -> int:
        self.add(ALLOC, self._slots, nbytes, lane, time_ns, reserved)
        self._slots += 1
        return self._slots - 1

    def add(self, action: int, slot: int, nbytes: int, lane: int, time_ns: int, reserved: int) -> None:
        self.rows.append((action, slot, nbytes, lane, time_ns))
        self.reserved.append(reserved)

    def events(self, device: int, held: int) -> Events:
        columns = np.asarray(self.rows, np.int64).reshape(-1, 5)
        return Events(
            action=columns[:, 0].astype(np.uint8),
            slot=columns[:, 1].copy(),
            nbytes=columns[:, 2].copy(),
            lane=columns[:, 3].astype(np.int32),
            time_ns=columns[:, 4].copy(),
            lanes=tuple(self._lanes) or (Lane((0, 0), 0),),
            device=device,
            held=held,
        )


def of_snapshot(snapshot: Snapshot, device: int = 0, *, limited: bool = False) -> Recording:
    """The history of one device; what it does not explain counts as allocated when it began.

    A request that failed is in it as an allocation that is freed at once: a replay under a limit shows whether it would fit.
    Segments that were given back are read as torch.cuda.empty_cache(), except where the allocator may have done so itself to
    serve the next request, and the replay will too: at its limit, or under settings that make it give back early.

    Args:
        limited: the replay will have a limit, also where the recording has none.
    Raises:
        TraceError: it asks for more than a replay can count.
    """
    entries = snapshot.traces[device] if device < len(snapshot.traces) else ()
    segments = [segment for segment in snapshot.segments if segment.device == device]
    change = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    begun = sum(segment.total_size for segment in segments) - sum(change.get(entry.action, 0) * entry.size for entry in entries)
    limited |= any(entry.action == "oom" for entry in entries)
    limited |= any(name in (snapshot.settings or "") for name in ("max_split_size", "garbage_collection"))
    own = (*_GIVES_BACK, *_ASKS, "oom") if limited else _GIVES_BACK
    asked = _Asked()
    pools = {block.address: segment.pool for segment in segments for block in segment.blocks}
    live = {
        address: (asked.alloc(nbytes, lane, time_ns, begun), lane)
        for address, nbytes, lane, time_ns in _held(snapshot, device, entries, asked)
    }
    held, reserved, limit = len(asked.rows), begun, None
    for number, entry in enumerate(entries):
        following = entries[number + 1] if number + 1 < len(entries) else None
        time_ns = entry.time_us * 1000
        reserved += change.get(entry.action, 0) * entry.size
        if entry.action == "alloc" and entry.size:
            lane = asked.lane(entry.pool or pools.get(entry.address, (0, 0)), entry.stream)
            live[entry.address] = (asked.alloc(entry.size, lane, time_ns, reserved), lane)
        elif entry.action in _FREE_ENTRIES and entry.address in live:
            slot, lane = live[entry.address]
            if entry.action == "free_completed":
                del live[entry.address]
                asked.add(RELEASE, slot, 0, lane, time_ns, reserved)
            elif following is None or following.action != "free_completed" or following.address != entry.address:
                asked.add(REQUEST, slot, 0, lane, time_ns, reserved)
        elif entry.action in _GIVES_BACK and not (following and following.action in own):
            asked.add(EMPTY, 0, 0, 0, time_ns, reserved)
        elif entry.action == "oom":
            limit = max(limit or 0, reserved + entry.device_free)
            slot = asked.alloc(entry.size, asked.lane(entry.pool or (0, 0), entry.stream), time_ns, -1)
            asked.add(RELEASE, slot, 0, 0, time_ns, reserved)
    events = asked.events(device, held)
    _countable(events, snapshot.source)
    after = np.asarray(asked.reserved, np.int64)
    # Before the first event only the sum is known, and while a failed request is in the replay only the replay knows.
    known = np.flatnonzero((np.arange(len(after)) >= held) & (after >= 0))
    return Recording(events, known, after[known], limit, begun)


def _held(
    snapshot: Snapshot, device: int, entries: tuple[Entry, ...], asked: _Asked
) -> Iterator[tuple[int, int, int, int]]:
    """(address, bytes, lane, time) of what was allocated before the first entry, in the order of addresses."""
    start_ns = entries[0].time_us * 1000 if entries else 0
    born: set[int] = set()
    found: dict[int, tuple[int, Lane]] = {}
    for entry in entries:
        if entry.action == "alloc":
            born.add(entry.address)
        elif entry.action in _FREE_ENTRIES and entry.address not in born and entry.address not in found and entry.size:
            found[entry.address] = (entry.size, Lane(entry.pool or (0, 0), entry.stream))
    for segment in snapshot.segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state != INACTIVE and block.address not in born and block.address not in found:
                found[block.address] = (max(block.requested, 1), Lane(segment.pool, segment.stream))
    for address, (nbytes, lane) in sorted(found.items()):
        yield address, nbytes, asked.lane(*lane), start_ns


def _countable(events: Events, subject: str) -> None:
    if len(events.lanes) > _MOST_LANES or float(events.nbytes.sum(dtype=np.float64)) > _MOST_ASKED:
        found = f"{len(events.lanes)} streams and {events.nbytes.sum(dtype=np.float64):.3g} bytes in all"
        raise TraceError(f"{subject}: expected a history that a replay can count, found {found}; record a shorter one")


# --- from a trace -------------------------------------------------------------------------------------------------------


def of_trace(trace: Trace) -> Recording:
    """The storages a trace holds on its device; with "cuda reserved" where it was sampled.

    Raises:
        TraceError: the trace records no storages.
    """
    columns = _storages(trace)
    events = _paired(*columns, labels=tuple(trace.strings), device=_index(trace.device))
    if not len(events):
        raise TraceError(f"{trace.path}: expected allocations, found none; record with zprof run --level alloc")
    _countable(events, str(trace.path))
    times, reserved = _sampled(trace)
    at = np.searchsorted(events.time_ns, times, side="right") - 1
    return Recording(events, at[at >= 0], reserved[at >= 0])


def _index(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 5 else 0


def _storages(trace: Trace) -> tuple[NDArray[np.int64], ...]:
    """(kind, ident, nbytes, time_ns, key) of every ALLOC and FREE of a storage on the device, in the order of time."""
    parts: list[NDArray[np.int64]] = []
    device = TIERS.index("device")
    for rows in trace.chunks():
        mask = (rows.kind >= RowKind.ALLOC) & (rows.ident > 0) & (rows.place >= 0)
        mask &= (TIER_OF.take(rows.place) == device) & (rows.nbytes > 0) & (rows.nbytes < 1 << 44)
        columns = (rows.kind, rows.ident, rows.nbytes, rows.time_ns, rows.key)
        parts.append(np.stack([column[mask].astype(np.int64) for column in columns]))
    table = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    return tuple(table[:, np.argsort(table[3], kind="stable")])


def _paired(
    kind: NDArray[np.int64],
    ident: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    time_ns: NDArray[np.int64],
    key: NDArray[np.int64],
    *,
    labels: tuple[str, ...],
    device: int,
) -> Events:
    """Give each life of a storage a slot; a change of category, a free without a beginning and a second beginning drop out."""
    order = np.argsort(ident, kind="stable")
    allocs = kind[order] == RowKind.ALLOC
    same = ident[order][1:] == ident[order][:-1]
    renamed = same & ~allocs[:-1] & allocs[1:]
    renamed &= (time_ns[order][1:] == time_ns[order][:-1]) & (nbytes[order][1:] == nbytes[order][:-1])
    kept = np.ones(len(order), bool)
    kept[:-1] &= ~renamed
    kept[1:] &= ~renamed
    order, allocs = order[kept], allocs[kept]
    after_alloc = np.zeros(len(order), bool)
    after_alloc[1:] = allocs[:-1] & (ident[order][1:] == ident[order][:-1])
    sound = allocs != after_alloc
    order, allocs = order[sound], allocs[sound]
    slots = np.cumsum(allocs) - 1
    back = np.argsort(order, kind="stable")
    order, allocs, slots = order[back], allocs[back], slots[back]
    return Events(
        action=np.where(allocs, ALLOC, RELEASE).astype(np.uint8),
        slot=slots.astype(np.int64),
        nbytes=np.where(allocs, nbytes[order], 0),
        lane=np.zeros(len(order), np.int32),
        time_ns=time_ns[order],
        device=device,
        label=key[order].astype(np.int32),
        labels=labels,
    )


def _sampled(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    times, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for rows in trace.chunks():
        if "cuda reserved" in trace.strings:
            mask = (rows.kind == RowKind.COUNTER) & (rows.what == trace.strings.index("cuda reserved"))
            times.append(rows.time_ns[mask])
            values.append(rows.nbytes[mask])
    order = np.argsort(time_ns := np.concatenate(times), kind="stable")
    return time_ns[order], np.concatenate(values)[order]


# --- a snapshot of a trace ----------------------------------------------------------------------------------------------


def snapshot_of(trace: Trace, *, most_entries: int = _ENTRIES) -> Snapshot:
    """The last snapshot a trace holds; where it holds none, one that a replay with torch's defaults makes, addresses and all.

    Raises:
        TraceError: the trace has neither a snapshot nor storages.
    """
    notes = trace.notes("snapshot")
    if notes:
        return checked(notes[-1].body, f"{trace.path}: its snapshot")
    recording = of_trace(trace)
    return replayed_snapshot(recording.events, replay(recording.events, each=True), most_entries=most_entries)


def replayed_snapshot(events: Events, replayed: Replayed, *, most_entries: int = _ENTRIES) -> Snapshot:
    """The end of a replay made with ``each``, with the last of its history; stacks are the recorded lines."""
    begin = max(0, len(events) - most_entries)
    entries = [(event, 0, entry) for event, entry in replayed.segment_entries(events) if event >= begin]
    sizes = np.zeros(int(events.slot.max(initial=-1)) + 1, np.int64)
    sizes[events.slot[events.action == ALLOC]] = events.nbytes[events.action == ALLOC]
    for event in range(begin, len(events)):
        action, address, slot = int(events.action[event]), int(replayed.addresses[event]), int(events.slot[event])
        if address < 0 or action == EMPTY:
            continue
        lane = events.lanes[int(events.lane[event])]
        names = ("alloc",) if action == ALLOC else _FREE_ENTRIES if action == RELEASE else ("free_requested",)
        frames = _frames(events, event)
        for name in names:
            made = Entry(name, address, int(sizes[slot]), lane.stream, int(events.time_ns[event]) // 1000, lane.pool, 0, frames)
            entries.append((event, 1, made))
    entries.sort(key=lambda item: item[:2])
    trace = tuple(entry for _, _, entry in entries)
    named = {entry.address: entry.frames for entry in trace if entry.action == "alloc"}
    segments = tuple(
        replace(segment, blocks=tuple(block._replace(frames=named.get(block.address, ())) for block in segment.blocks))
        for segment in replayed.segments
    )
    traces = ((),) * events.device + (trace,)
    settings = replayed.settings.text if replayed.settings is not DEFAULTS else ""
    return Snapshot(segments, traces, settings, "replay")


def _frames(events: Events, event: int) -> tuple[Frame, ...]:
    if events.label is None or events.action[event] != ALLOC:
        return ()
    module, *lines = events.labels[int(events.label[event])].split(BEFORE_STACK)
    return tuple(map(_frame, lines)) or (Frame(_NO_LINES, 0, module),)


def _frame(text: str) -> Frame:
    """Of "model.py:31:forward"."""
    parts = text.rsplit(":", 2)
    line = int(parts[1]) if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 10 else 0
    return Frame(parts[0], line, parts[2]) if line else Frame("", 0, text)
