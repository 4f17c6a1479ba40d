"""torch's CUDA caching allocator on paper: its settings, and a compiled model that replays allocations."""

from __future__ import annotations

from offload.allocator.model import (
    ALLOC,
    EMPTY,
    RELEASE,
    REQUEST,
    Events,
    Failure,
    Lane,
    Level,
    Replayed,
    replay,
)
from offload.allocator.segments import Block, Entry, Frame, Segment
from offload.allocator.settings import DEFAULTS, UNBOUNDED, Settings, environment_line, parse_settings

__all__ = [
    "ALLOC",
    "DEFAULTS",
    "EMPTY",
    "RELEASE",
    "REQUEST",
    "UNBOUNDED",
    "Block",
    "Entry",
    "Events",
    "Failure",
    "Frame",
    "Lane",
    "Level",
    "Replayed",
    "Segment",
    "Settings",
    "environment_line",
    "parse_settings",
    "replay",
]
