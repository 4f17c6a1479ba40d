"""One rank on paper: torch's "virtual" device without data, clocks of a host and its streams, the order of memory's uses."""

from __future__ import annotations

from offload.virtual.machine import Access, Costs, Happening, Listener, Machine, Moment, Stream, access, running
from offload.virtual.races import Race, Races
from offload.virtual.torch_device import ACCELERATOR, HOST, NAME, Operation, memory_at, take_address

__all__ = [
    "ACCELERATOR",
    "HOST",
    "NAME",
    "Access",
    "Costs",
    "Happening",
    "Listener",
    "Machine",
    "Moment",
    "Operation",
    "Race",
    "Races",
    "Stream",
    "access",
    "memory_at",
    "running",
    "take_address",
]
