"""One rank on paper: torch's "virtual" device without data, clocks of a host and its streams, the order of memory's uses."""

from __future__ import annotations

from offload.virtual.calls import Calls, active_profiler
from offload.virtual.machine import Access, Costs, Happening, Listener, Machine, Moment, Stream, access
from offload.virtual.memory import ACCELERATOR, HOST, NAME, memory_at, running, take_address
from offload.virtual.operations import Operation
from offload.virtual.races import Race, Races
from offload.virtual.turns import Turns

__all__ = [
    "ACCELERATOR",
    "HOST",
    "NAME",
    "Access",
    "Calls",
    "Costs",
    "Happening",
    "Listener",
    "Machine",
    "Moment",
    "Operation",
    "Race",
    "Races",
    "Stream",
    "Turns",
    "access",
    "active_profiler",
    "memory_at",
    "running",
    "take_address",
]
