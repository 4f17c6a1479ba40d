"""Memory reserved ahead: the slabs of the host tier, and the arena on the device."""

from __future__ import annotations

from offload.memory.arena import Arena, Use, grain, rounded
from offload.memory.host_tier import HostPool

__all__ = [
    "Arena",
    "HostPool",
    "Use",
    "grain",
    "rounded",
]
