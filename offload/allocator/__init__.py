"""A model of torch's CUDA caching allocator: its settings, and the replay of recorded allocations."""

from __future__ import annotations

from offload.allocator.facts import Block, Entry, Events, Failure, Frame, Lane, Level, Replayed, Segment
from offload.allocator.model import ALLOC, EMPTY, RELEASE, REQUEST, replay
from offload.allocator.settings import DEFAULTS, UNBOUNDED, Settings, environment_line, parse_settings

__all__ = [
    "ALLOC", "DEFAULTS", "EMPTY", "RELEASE", "REQUEST", "UNBOUNDED", "Block", "Entry", "Events", "Failure", "Frame", "Lane",
    "Level", "Replayed", "Segment", "Settings", "environment_line", "parse_settings", "replay",
]  # fmt: skip
