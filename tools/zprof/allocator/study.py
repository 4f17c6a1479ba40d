"""Owns what ``zprof frag`` finds out of one file: the state it speaks of, its history, and replays under other settings.

`commands.frag` asks for a `Study` and shows it. It never prints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from offload.allocator import DEFAULTS, Level, Replayed, Settings, parse_settings, replay
from offload.errors import PolicyError
from offload.regular_files import open_regular
from offload.text import as_size
from zprof.allocator.fragmentation import Answer, Part, parts, would_succeed
from zprof.allocator.history import history
from zprof.allocator.recordings import Recording, Score, of_snapshot, of_trace, score
from zprof.allocator.snapshot import Segment, Snapshot, checked, load_snapshot
from zprof.rows import TraceError
from zprof.trace.frames import MAGIC
from zprof.trace.reader import Trace

__all__ = ["MOMENTS", "Study", "study"]

#: Of a run that is replayed: the most stuck bytes (or the first failure), the most reserved bytes, the end.
MOMENTS = ("worst", "peak", "end")
_CANDIDATES = ("expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4")
_UNDER_LIMIT = ("garbage_collection_threshold:0.8",)


@dataclass(frozen=True, slots=True)
class Study:
    """All that is known of one device of one file.

    ``moment`` says in words of when ``segments`` are. ``what_if``: they come from a replay, because the file holds no state
    of an allocator. ``replays`` begins with the recorded settings. ``device_free`` is None where nothing says it.
    """

    source: str
    device: int
    moment: str
    what_if: bool
    settings: Settings
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]
    device_free: int | None
    history: tuple[Level, ...]
    replays: tuple[Replayed, ...] = ()
    score: Score | None = None
    begun: int = 0
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Level | None:
        """The moment of the history with the most stuck bytes."""
        return max(self.history, key=lambda level: (level.stuck, level.reserved), default=None)

    def answer(self, nbytes: int, stream: int = 0) -> Answer:
        """Whether ``nbytes`` would be had at the moment."""
        return would_succeed(
            self.segments, nbytes, self.settings, device_free=self.device_free, device=self.device, stream=stream
        )


def study(
    path: str, *, device: int | None = None, limit: int | None = None, others: Sequence[Settings] = (), at: str = "worst"
) -> Study:
    """Read a trace or a snapshot and work out all of it.

    Args:
        device: which one; the first that the file speaks of unless said.
        limit: bytes the device gives this process.
        others: settings to compare with; a few that often help unless said.
        at: one of `MOMENTS`, for a trace without a snapshot.
    Raises:
        TraceError: the file is neither, or says nothing of allocations.
    """
    if not _is_trace(path):
        return _of_snapshot(load_snapshot(path), path, device, limit, others)
    trace = Trace.open(path)
    notes = trace.notes("snapshot")
    if notes:
        return _of_snapshot(checked(notes[-1].body, f"{path}: its snapshot"), path, device, limit, others)
    return _of_trace(trace, path, limit, others, at)


def _is_trace(path: str) -> bool:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: expected a trace or a snapshot, found: {reason}; check the path") from None


def _recorded(snapshot: Snapshot, device: int) -> tuple[Settings, list[str]]:
    """The settings a snapshot was made under, and what could not be made of them."""
    if snapshot.settings:
        try:
            return parse_settings(snapshot.settings), []
        except PolicyError as error:
            return DEFAULTS, [f"its settings are not understood, torch's defaults are used instead: {error}"]
    if any(segment.expandable for segment in snapshot.segments if segment.device == device):
        return parse_settings("expandable_segments:True"), []
    return DEFAULTS, []


def _of_snapshot(
    snapshot: Snapshot, path: str, device: int | None, limit: int | None, others: Sequence[Settings]
) -> Study:
    known = snapshot.devices
    if device is None:
        device = known[0] if known else 0
    elif device not in known:
        raise TraceError(f"{path}: expected device {device}, found {', '.join(map(str, known)) or 'none'}; choose one of them")
    settings, notes = _recorded(snapshot, device)
    segments = tuple(segment for segment in snapshot.segments if segment.device == device)
    recording = of_snapshot(snapshot, device, limited=limit is not None)
    reserved = sum(segment.total_size for segment in segments)
    if limit is None and recording.limit is not None:
        limit = recording.limit
        notes.append(f"the device refused memory at {as_size(limit)}: taken as its limit")
    if limit is not None and limit < reserved:
        expected = f"a limit of at least the {as_size(reserved)} reserved"
        raise TraceError(f"{path}: expected {expected}, found {as_size(limit)}; raise --limit")
    compared = _compared(recording, settings, limit, others) if len(recording.events) > recording.events.held else ()
    if recording.begun:
        notes.append(f"the history begins with {as_size(recording.begun)} reserved: the replay allocates that again, packed")
    return Study(
        source=path,
        device=device,
        moment="when the snapshot was taken",
        what_if=False,
        settings=settings,
        segments=segments,
        parts=tuple(parts(segments, settings)),
        device_free=None if limit is None else limit - reserved,
        history=tuple(history(snapshot, device)),
        replays=compared,
        score=score(recording, compared[0]) if compared else None,
        begun=recording.begun,
        notes=tuple(notes),
    )


def _of_trace(trace: Trace, path: str, limit: int | None, others: Sequence[Settings], at: str) -> Study:
    recording = of_trace(trace)
    compared = _compared(recording, DEFAULTS, limit, others)
    base = compared[0]
    event, moment = _moment(base, len(recording.events), at)
    segments = replay(recording.events.first(event + 1), DEFAULTS, limit=limit).segments
    reserved = sum(segment.total_size for segment in segments)
    made = "simulated for" if trace.header.simulated else "recorded on"
    notes = [f"{trace.path.name} was {made} {trace.device}: what torch's CUDA allocator would do, by replay"]
    if trace.damage:
        notes.append(f"the trace is damaged, only what can be read is used: {trace.damage}")
    return Study(
        source=path,
        device=recording.events.device,
        moment=moment,
        what_if=True,
        settings=DEFAULTS,
        segments=segments,
        parts=tuple(parts(segments, DEFAULTS)),
        device_free=None if limit is None else limit - reserved,
        history=base.points,
        replays=compared,
        score=score(recording, base),
        notes=tuple(notes),
    )


def _moment(base: Replayed, count: int, at: str) -> tuple[int, str]:
    if at == "worst" and base.failures:
        event = base.failures[0].level.event
        return event, f"at the first failure, event {event} of {count}"
    event = {"worst": base.worst_event, "peak": base.peak_reserved_event}.get(at, count - 1)
    event = count - 1 if event < 0 else event
    words = {"worst": "when most was stuck", "peak": "when most was reserved"}.get(at, "at the end")
    return event, f"{words}, event {event} of {count}"


def _compared(
    recording: Recording, settings: Settings, limit: int | None, others: Sequence[Settings]
) -> tuple[Replayed, ...]:
    """Replays under the recorded settings, then under each other; the first also says every event's reserved bytes."""
    if not others:
        names = ("", *_CANDIDATES, *(_UNDER_LIMIT if limit else ()))
        others = [parse_settings(name) for name in names]
    distinct = {other.text: other for other in others if other.text != settings.text}
    first = replay(recording.events, settings, limit=limit, each=True)
    return (first, *(replay(recording.events, other, limit=limit) for other in distinct.values()))
