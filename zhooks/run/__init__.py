"""What runs in every pass: module hooks, the schedule of gathers, and the runtime that carries it out."""

from __future__ import annotations

from zhooks.run.hooks import Before, Casts, Inert, install, rehook, remove, watch
from zhooks.run.islands import Map, chart
from zhooks.run.join import batches
from zhooks.run.members import Members, wrapper
from zhooks.run.paths import Paths
from zhooks.run.runtime import Runtime, forget_idle_graphs
from zhooks.run.schedule import Choices, keep_gathered

__all__ = [
    "Before",
    "Casts",
    "Choices",
    "Inert",
    "Map",
    "Members",
    "Paths",
    "Runtime",
    "batches",
    "chart",
    "forget_idle_graphs",
    "install",
    "keep_gathered",
    "rehook",
    "remove",
    "watch",
    "wrapper",
]
