"""Owns the export to speedscope: who holds the bytes at the peak, by module; where each unit's time went, and in what order.

`commands.export` calls `write`. Weights are exact and nothing is sampled; of each thread's order the shortest spans are left
out where there are more than a browser draws, which it says.

Source: speedscope's file format, https://www.speedscope.app/file-format-schema.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from offload.text import counted
from zprof.analysis.bandwidth import VERBS
from zprof.analysis.ledger import Ledger
from zprof.rows import BEFORE_STACK, TraceError
from zprof.show.exports.exported import Read, Track, Written, afford, full, lost, read, shifts, text, tracks
from zprof.trace.reader import Trace
from zprof.writing import committed

__all__ = ["write"]

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
#: Of all spans' events and names.
_SPANS_NBYTES = 16_000_000
_SPAN_NBYTES = 100
#: Stacks of one profile; smaller ones are summed. Levels of one path; what lies deeper is one frame.
_MOST_STACKS = 100_000
_DEEPEST = 32

_Weights = dict[tuple[int, ...], int]


class _Frames:
    """Every frame once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(text(name), len(self.numbers))


def write(traces: Sequence[Trace], path: Path) -> Written:
    """Write one file with three kinds of profiles a rank: bytes of each tier at its peak, time by verb and unit, threads.

    Raises:
        TraceError: there is nothing to draw, which speedscope could not open.
    """
    reads = [read(trace) for trace in traces]
    kept = afford(reads, [_costs(one) for one in reads], _SPANS_NBYTES)
    frames = _Frames()
    profiles: list[dict[str, Any]] = []
    drawn = 0
    for one, mine, shift in zip(reads, kept, shifts(reads), strict=True):
        predicted = ", predicted" if one.trace.header.simulated else ""
        rank, ledger = f"rank {one.trace.header.rank}{predicted}", one.ledger
        covered = one.covered
        for tier in ledger.tiers:
            missing = ", ".join(covered.missing(tier)) if covered.tier(tier) else ""
            part = f", without {missing}" if missing else ""
            profiles.append(_profile(f"{rank}: {tier} bytes at the peak{part}", "bytes", _held(ledger, tier, frames), frames))
        if one.spent_ns:
            spent = {(frames(verb), *map(frames, _path(key))): spent for (verb, key), spent in one.spent_ns.items()}
            profiles.append(_profile(f"{rank}: time by verb and unit", "nanoseconds", spent, frames))
        for track in tracks(one.table, np.flatnonzero(mine), one.lanes)[0]:
            if track.on_thread:
                profiles.append(_ordered(one, track, shift, f"{rank}: {track.name}, in order", frames))
                drawn += len(track.places)
    profiles = [profile for profile in profiles if profile["endValue"] > profile["startValue"]]
    if not profiles:
        raise TraceError(f"{traces[0].path}: expected bytes held or spans, found none: there is nothing to draw")
    body = {
        "$schema": _SCHEMA,
        "name": text(traces[0].path.name),
        "exporter": f"zprof@{metadata.version('zhooks')}",
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": name} for name in frames.numbers]},
        "profiles": profiles,
    }
    committed(path, json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    whole = all(mine.all() and one.count == len(mine) for one, mine in zip(reads, kept, strict=True))
    left_out = "" if whole else ", the longest of their threads"
    said = f"{counted(len(profiles), 'profile')}, {counted(drawn, 'span')}{left_out}; open it at https://www.speedscope.app"
    return Written(said, [line for one in reads for line in lost(one.trace, one.ledger.damage)])


def _costs(one: Read) -> Any:
    """Bytes that each span takes at most, its frame included; nothing for transfers, which are in no thread's order."""
    lengths = np.array([len(json.dumps(name)) for name in one.trace.strings], np.int64)
    moves = np.array([name in VERBS for name in one.trace.strings], np.bool_)
    costs = _SPAN_NBYTES + lengths[one.table.what] + lengths[one.table.key]
    return np.where(moves[one.table.what], 0, costs)


def _profile(name: str, unit: str, weights: _Weights, frames: _Frames) -> dict[str, Any]:
    if len(weights) > _MOST_STACKS:
        order = sorted(weights, key=lambda stack: -weights[stack])
        smaller = sum(weights[stack] for stack in order[_MOST_STACKS:])
        weights = {stack: weights[stack] for stack in order[:_MOST_STACKS]}
        weights[(frames(f"({len(order) - _MOST_STACKS:,} smaller)"),)] = smaller
    # Side by side what shares its beginning, or the order of samples would show a module in pieces.
    stacks = sorted(weights)
    return {
        "type": "sampled",
        "name": name,
        "unit": unit,
        "startValue": 0,
        "endValue": sum(weights.values()),
        "samples": [list(stack) for stack in stacks],
        "weights": [weights[stack] for stack in stacks],
    }


def _held(ledger: Ledger, tier: str, frames: _Frames) -> _Weights:
    levels = ledger.at(ledger.peak(tier)).tolist()
    weights: _Weights = {}
    for series, nbytes in zip(ledger.series, levels, strict=True):
        # A damaged trace may free what it never allocated; no weight is below zero.
        if series.tier == tier and nbytes > 0:
            stack = tuple(frames(part) for part in (*_path(series.key), series.category))
            weights[stack] = weights.get(stack, 0) + nbytes
    return weights


def _path(key: str) -> list[str]:
    """"model", "model.layers", "model.layers.0" of model.layers.0: one frame a level, named by its whole path; then code."""
    module, *lines = key.split(BEFORE_STACK)
    names = module.split(".", _DEEPEST - 1) if module else ["(no module)"]
    return [".".join(names[: depth + 1]) for depth in range(len(names))] + lines[::-1]


def _ordered(one: Read, track: Track, shift: int, name: str, frames: _Frames) -> dict[str, Any]:
    table, events = one.table, []
    opened: list[tuple[int, int]] = []

    def close(until: float) -> None:
        while opened and opened[-1][0] <= until:
            at, frame = opened.pop()
            events.append({"type": "C", "frame": frame, "at": at})

    for span in track.places:
        begin, end = int(table.begin_ns[span]) + shift, int(table.end_ns[span]) + shift
        close(begin)
        frame = frames(full(table.strings[int(table.what[span])], table.strings[int(table.key[span])]))
        events.append({"type": "O", "frame": frame, "at": begin})
        opened.append((end, frame))
    close(float("inf"))
    first, last = events[0]["at"], events[-1]["at"]
    return {"type": "evented", "name": name, "unit": "nanoseconds", "startValue": first, "endValue": last, "events": events}
