"""Owns the tables of a policy file about the memory of the device and of the host.

`offload.policy` puts them together with those of ``tables.py``, whose words they use. It compares nothing.
"""

from __future__ import annotations

from typing import Literal

from offload.policy.tables import _AUTO, _SIZES, Size, Table, Toggle, words

__all__ = ["DeviceMemory", "Host"]


class DeviceMemory(Table):
    """[device]: the memory of the device."""

    arena: Literal["none", "states", "all"] = words(
        "none",
        expected='"none", "states" or "all"',
        does="What lies in memory reserved ahead, apart from what comes and goes: shards, gathered units and sums (states), "
        'and also the inputs that checkpoint = "unit" keeps, which are copied there (all).',
        why="Of use where the allocator fails with much memory free, which `zprof frag` shows; measured on no GPU yet.",
    )


class Host(Table):
    """[host]: the memory of the host tier."""

    pin: Toggle = words(
        "auto",
        expected=_AUTO,
        does="Locks host memory in place, so that a GPU reads and writes it at full speed while it computes.",
        why="auto pins where there is CUDA.",
    )
    slab: Size = words(
        64 << 20,
        expected=f"{_SIZES}, at least 4 KiB",
        does="Host memory is taken from the system in pieces of at least this size, and cut to exact size.",
        why="Pinning is slow a call and quick a byte.",
        ge=4096,
    )
