"""Owns the allocator snapshot: what torch.cuda.memory._snapshot() says, checked, as facts, and written for torch's viewer.

`fragmentation`, `history`, `recordings` and `zprof frag` read snapshots; the recorder reduces them to notes of a trace, and the
export writes them. It never asks a device, and never trusts a value it has not looked at.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload.allocator import Block, Entry, Frame, Segment
from zprof.allocator.snapshot_files import decoded, read_bytes
from zprof.rows import TraceError

__all__ = [
    "ACTIONS",
    "Block",
    "Entry",
    "Frame",
    "Segment",
    "Snapshot",
    "checked",
    "load_snapshot",
    "plain",
    "reduced",
    "write_snapshot",
]

ACTIVE, INACTIVE = "active_allocated", "inactive"
#: A block is in use, freed while another stream still uses it (torch has two words for that), or free.
PENDING = ("active_pending_free", "active_awaiting_free")
_STATES = (ACTIVE, *PENDING, INACTIVE)
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
_MOST_BLOCKS = 1 << 21
_MOST_ENTRIES = 1 << 24
_MOST_DEVICES = 1 << 10
_MOST_FRAMES = 64
_MOST_TEXT = 4096
#: No address or size is larger: sums of all of them stay whole numbers of 64 bits.
_MOST_ADDRESS = 1 << 62
_MOST_SIZE = 1 << 44


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every device's allocator, and what led to it as far back as was recorded.

    ``traces`` has one history for each device, oldest first. ``settings`` is the text of PYTORCH_ALLOC_CONF, None where the
    snapshot does not say.
    """

    segments: tuple[Segment, ...]
    traces: tuple[tuple[Entry, ...], ...] = ()
    settings: str | None = None
    source: str = field(default="snapshot", compare=False)

    @property
    def devices(self) -> list[int]:
        """The devices it says anything of."""
        return sorted({segment.device for segment in self.segments} | {i for i, trace in enumerate(self.traces) if trace})


def load_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot: torch's pickle, or the same as JSON or msgpack.

    Raises:
        TraceError: it cannot be read, or is no snapshot; one line.
    """
    return checked(decoded(read_bytes(path), str(path)), str(path))


def checked(raw: object, subject: str) -> Snapshot:
    """The snapshot that plain values say, e.g. those of torch.cuda.memory._snapshot() or of a trace's note.

    Raises:
        TraceError: they say none; one line that starts with ``subject``.
    """
    return _Check(subject).snapshot(raw)


class _Check:
    """Turns plain values into facts; counts what it meets, since values may be shared and so look larger than they are."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._blocks = 0
        self._entries = 0
        self._known: dict[tuple[object, ...], Frame] = {}

    def snapshot(self, raw: object) -> Snapshot:
        if isinstance(raw, list):
            raw = {"segments": raw}
        table = self._map(raw, "a snapshot")
        segments = tuple(
            self._segment(segment, f"segments[{number}]")
            for number, segment in enumerate(self._list(table.get("segments"), "segments", _MOST_BLOCKS))
        )
        traces = self._list(table.get("device_traces", []), "device_traces", _MOST_DEVICES)
        checked_traces = tuple(tuple(self._trace(trace, f"device_traces[{number}]")) for number, trace in enumerate(traces))
        self._apart(segments)
        return Snapshot(segments, checked_traces, self._settings(table.get("allocator_settings")), self._subject)

    def _apart(self, segments: Sequence[Segment]) -> None:
        ordered = sorted(segments, key=lambda segment: (segment.device, segment.address))
        for one, two in pairwise(ordered):
            if one.device == two.device and one.address + one.total_size > two.address:
                raise self._refused(f"segment at {two.address:#x}", "memory of its own", f"another segment at {one.address:#x}")

    def _segment(self, raw: object, at: str) -> Segment:
        table = self._map(raw, at)
        address = self._number(table, "address", at, _MOST_ADDRESS)
        total = self._number(table, "total_size", at, _MOST_SIZE, least=1)
        kind = table.get("segment_type", "large" if total > 2 << 20 else "small")
        if kind not in ("large", "small"):
            raise self._refused(f"{at}.segment_type", "large or small", _shown(kind))
        expandable = table.get("is_expandable", False)
        if type(expandable) is not bool:
            raise self._refused(f"{at}.is_expandable", "true or false", _shown(expandable))
        blocks = tuple(self._filling(table.get("blocks"), address, at))
        held = sum(block.size for block in blocks)
        if held != total:
            raise self._refused(f"{at}.blocks", f"{total} bytes, the segment's total_size", f"{held}")
        device = self._number(table, "device", at, _MOST_DEVICES, default=0)
        stream = self._number(table, "stream", at, _MOST_ADDRESS, default=0)
        pool = self._pool(table.get("segment_pool_id"), f"{at}.segment_pool_id") or (0, 0)
        return Segment(device, address, total, stream, kind == "large", pool, expandable, blocks)

    def _filling(self, raw: object, address: int, at: str) -> Iterator[Block]:
        for number, item in enumerate(self._list(raw, f"{at}.blocks", _MOST_BLOCKS)):
            self._blocks += 1
            if self._blocks > _MOST_BLOCKS:
                raise self._refused("segments", f"at most {_MOST_BLOCKS} blocks", "more")
            where = f"{at}.blocks[{number}]"
            table = self._map(item, where)
            size = self._number(table, "size", where, _MOST_SIZE, least=1)
            state = table.get("state")
            if state not in _STATES:
                raise self._refused(f"{where}.state", " or ".join(_STATES), _shown(state))
            if self._number(table, "address", where, _MOST_ADDRESS, default=address) != address:
                raise self._refused(f"{where}.address", f"{address}, where the one before ends", _shown(table["address"]))
            requested = self._number(table, "requested_size", where, _MOST_SIZE, default=size)
            if state != INACTIVE and requested > size:
                raise self._refused(f"{where}.requested_size", f"at most its size, {size}", f"{requested}")
            frames = self._frames(table.get("frames", []), where)
            yield Block(address, size, 0 if state == INACTIVE else requested, state, frames)
            address += size

    def _frames(self, raw: object, at: str) -> tuple[Frame, ...]:
        found = []
        for item in self._list(raw, f"{at}.frames", 1 << 16)[:_MOST_FRAMES]:
            table = self._map(item, f"{at}.frames")
            line, name, filename = table.get("line", 0), table.get("name", ""), table.get("filename", "")
            if type(line) is not int or type(name) is not str or type(filename) is not str:
                raise self._refused(f"{at}.frames", "a filename, a line and a name", _shown(item))
            key = (filename, line, name)
            if key not in self._known:
                self._known[key] = Frame(filename[:_MOST_TEXT], line, name[:_MOST_TEXT])
            found.append(self._known[key])
        return tuple(found)

    def _trace(self, raw: object, at: str) -> Iterator[Entry]:
        for number, item in enumerate(self._list(raw, at, _MOST_ENTRIES)):
            self._entries += 1
            if self._entries > _MOST_ENTRIES:
                raise self._refused("device_traces", f"at most {_MOST_ENTRIES} entries", "more")
            where = f"{at}[{number}]"
            table = self._map(item, where)
            action = table.get("action")
            if action not in ACTIONS:
                raise self._refused(f"{where}.action", "one of " + ", ".join(ACTIONS), _shown(action))
            # The viewer needs stacks, zprof does not: they would be most of the memory.
            yield Entry(
                ACTIONS[ACTIONS.index(action)],
                self._number(table, "addr", where, _MOST_ADDRESS, default=0 if action in ("oom", "snapshot") else None),
                self._number(table, "size", where, _MOST_ADDRESS if action == "snapshot" else _MOST_SIZE),
                self._number(table, "stream", where, _MOST_ADDRESS, default=0),
                self._number(table, "time_us", where, _MOST_ADDRESS, default=0),
                self._pool(table.get("pool_id"), f"{where}.pool_id"),
                self._number(table, "device_free", where, _MOST_ADDRESS, default=0),
            )

    def _settings(self, raw: object) -> str | None:
        if raw is None:
            return None
        table = self._map(raw, "allocator_settings")
        text = table.get("PYTORCH_ALLOC_CONF", table.get("PYTORCH_CUDA_ALLOC_CONF"))
        if text is not None and type(text) is not str:
            raise self._refused("allocator_settings.PYTORCH_CUDA_ALLOC_CONF", "a text", _shown(text))
        return None if text is None else text[:_MOST_TEXT]

    def _pool(self, raw: object, at: str) -> tuple[int, int] | None:
        if raw is None:
            return None
        if isinstance(raw, (tuple, list)) and len(raw) == 2 and all(type(part) is int and 0 <= part < 1 << 62 for part in raw):
            return raw[0], raw[1]
        raise self._refused(at, "two numbers", _shown(raw))

    def _map(self, raw: object, at: str) -> Mapping[Any, Any]:
        if isinstance(raw, dict):
            return raw
        raise self._refused(at, "a map", _shown(raw))

    def _list(self, raw: object, at: str, most: int) -> Sequence[Any]:
        if isinstance(raw, (list, tuple)) and len(raw) <= most:
            return raw
        found = f"{len(raw)} items" if isinstance(raw, (list, tuple)) else _shown(raw)
        raise self._refused(at, f"a list of at most {most}", found)

    def _number(
        self, table: Mapping[Any, Any], name: str, at: str, most: int, *, least: int = 0, default: int | None = None
    ) -> int:
        value = table.get(name, default)
        if type(value) is int and least <= value <= most:
            return value
        raise self._refused(f"{at}.{name}", f"a whole number from {least} to {most}", _shown(value))

    def _refused(self, at: str, expected: str, found: str) -> TraceError:
        remedy = "write it again with torch.cuda.memory._dump_snapshot"
        return TraceError(f"{self._subject}: {at}: expected {expected}, found {found}; {remedy}")


def _shown(value: object) -> str:
    """A value as part of one line, whatever it is: nothing nested, nothing long, nothing a terminal would act on."""
    if value is None:
        return "nothing"
    if type(value) is int:
        return str(value) if value.bit_length() < 128 else "a huge number"
    if type(value) is str:
        return repr(value[:60]) if value[:60].isprintable() else ascii(value[:60])
    return f"a {type(value).__name__}"


# --- written back -----------------------------------------------------------------------------------------------------------


def plain(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as torch.cuda.memory._snapshot() lays it out."""
    body: dict[str, Any] = {
        "segments": [_plain_segment(segment) for segment in snapshot.segments],
        "device_traces": [[_plain_entry(entry) for entry in trace] for trace in snapshot.traces],
    }
    if snapshot.settings is not None:
        body["allocator_settings"] = {
            "PYTORCH_CUDA_ALLOC_CONF": snapshot.settings,
            "expandable_segments": any(segment.expandable for segment in snapshot.segments),
        }
    return body


def _plain_frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [{"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in frames]


def _plain_segment(segment: Segment) -> dict[str, Any]:
    active = [block for block in segment.blocks if block.state != INACTIVE]
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.total_size,
        "allocated_size": sum(block.size for block in active if block.state == ACTIVE),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "large" if segment.large else "small",
        "segment_pool_id": segment.pool,
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": block.state,
                "frames": _plain_frames(block.frames),
            }
            for block in segment.blocks
        ],
    }


def _plain_entry(entry: Entry) -> dict[str, Any]:
    body: dict[str, Any] = {"action": entry.action, "size": entry.size, "stream": entry.stream, "time_us": entry.time_us}
    body["device_free" if entry.action == "oom" else "addr"] = entry.device_free if entry.action == "oom" else entry.address
    body["frames"] = _plain_frames(entry.frames)
    if entry.pool is not None:
        body["pool_id"] = entry.pool
    return body


def write_snapshot(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Write a snapshot that torch.cuda._memory_viz and pytorch.org/memory_viz open.

    Raises:
        TraceError: the file cannot be written.
    """
    # The public viewer reads no protocol above 4.
    data = pickle.dumps(plain(snapshot), protocol=4)
    try:
        Path(path).write_bytes(data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be written: {reason}; name another file") from None


def reduced(raw: Mapping[str, Any], *, most_nbytes: int = 12 << 20) -> dict[str, Any]:
    """A live snapshot of torch as a note of a trace: checked, without stacks, with as much history as fits ``most_nbytes``.

    Raises:
        TraceError: ``raw`` is not what this torch should give.
    """
    snapshot = checked(raw, "the live snapshot")
    segments = [_plain_segment(segment) for segment in snapshot.segments]
    for segment in segments:
        segment["segment_pool_id"] = list(segment["segment_pool_id"])
        segment["blocks"] = [{**block, "frames": []} for block in segment["blocks"]]
    # As msgpack a block is at most 90 bytes, a segment 220 and an entry 110.
    left = most_nbytes - sum(220 + 90 * len(segment["blocks"]) for segment in segments)
    each = max(0, left // 110 // max(1, sum(1 for trace in snapshot.traces if trace)))
    traces = [[_note_entry(entry) for entry in trace[max(0, len(trace) - each) :]] for trace in snapshot.traces]
    body: dict[str, Any] = {"segments": segments, "device_traces": traces}
    if snapshot.settings is not None:
        body["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": snapshot.settings}
    return body


def _note_entry(entry: Entry) -> dict[str, Any]:
    body = _plain_entry(entry)
    del body["frames"]
    if entry.pool is not None:
        body["pool_id"] = list(entry.pool)
    return body
