"""Owns the allocator snapshots that zprof's tests read: one written by hand, and any number made by a replay of random runs.

The tests of snapshots and of ``zprof frag`` call it. It makes plain values, as torch.cuda.memory._snapshot() would return them.
"""

from __future__ import annotations

import random
from typing import Any

from offload.allocator import ALLOC, RELEASE, Events, parse_settings, replay
from zprof.allocator.recordings import replayed_snapshot
from zprof.allocator.snapshot import plain

MIB = 1 << 20
_BASE = 0x7F0000000000


def _segment(address: int, sizes: list[tuple[int, str, int]], **changes: Any) -> dict[str, Any]:
    blocks, at = [], address
    for size, state, requested in sizes:
        frames = [{"filename": "train.py", "line": 7, "name": "forward"}] if state != "inactive" else []
        blocks.append({"address": at, "size": size, "requested_size": requested, "state": state, "frames": frames})
        at += size
    total = at - address
    told = {
        "device": 0,
        "address": address,
        "total_size": total,
        "allocated_size": sum(size for size, state, _ in sizes if state == "active_allocated"),
        "active_size": sum(size for size, state, _ in sizes if state != "inactive"),
        "requested_size": sum(requested for _, _, requested in sizes),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {**told, **changes}


def golden() -> dict[str, Any]:
    """By hand: 20 MiB half used in three parts, a free 64 MiB segment, a small one, one of stream 9, an expandable range.

    Large pool of stream 0: 84 MiB reserved, 8 allocated (1 KiB of it rounding), 2 pending, 64 releasable, 10 stuck.
    Expandable range of stream 3: 60 MiB, of which [0, 1) and [30, 31) are used: 29 + 29 free, of them one whole page
    releasable.
    """
    busy, waiting, free = "active_allocated", "active_awaiting_free", "inactive"
    mixed = [(4 * MIB, busy, 4 * MIB - 1024), (6 * MIB, free, 0), (4 * MIB, busy, 4 * MIB)]
    mixed += [(2 * MIB, waiting, 2 * MIB), (4 * MIB, free, 0)]
    return {
        "segments": [
            _segment(_BASE, mixed),
            _segment(_BASE + 64 * MIB, [(64 * MIB, free, 0)]),
            _segment(_BASE + 256 * MIB, [(512, busy, 4), (2 * MIB - 512, free, 0)], segment_type="small"),
            _segment(_BASE + 512 * MIB, [(32 * MIB, free, 0)], stream=9),
            _segment(
                _BASE + 1024 * MIB,
                [(MIB, busy, MIB), (29 * MIB, free, 0), (MIB, busy, MIB), (29 * MIB, free, 0)],
                stream=3,
                is_expandable=True,
            ),
        ],
        "device_traces": [
            [
                {"action": "segment_alloc", "addr": _BASE, "size": 20 * MIB, "stream": 0, "time_us": 1, "frames": []},
                {"action": "alloc", "addr": _BASE, "size": 4 * MIB - 1024, "stream": 0, "time_us": 2, "frames": []},
                {"action": "oom", "device_free": 100 * MIB, "size": 512 * MIB, "stream": 0, "time_us": 3, "frames": []},
                {"action": "snapshot", "addr": 0, "size": 12 * MIB, "stream": 0, "time_us": 4, "frames": []},
            ]
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }


def random_run(seed: int, count: int, *, live: int = 60) -> Events:
    """Allocations from 1 KiB to 48 MiB, about ``live`` of them at a time."""
    dice = random.Random(seed)
    rows: list[tuple[int, int, int]] = []
    alive: list[int] = []
    for slot in range(count):
        rows.append((ALLOC, slot, int(2 ** dice.uniform(10, 25.6))))
        alive.append(slot)
        while len(alive) > live * dice.uniform(0.2, 1.2):
            rows.append((RELEASE, alive.pop(dice.randrange(len(alive))), 0))
    return Events.of(rows)


def made(seed: int = 0, count: int = 120, text: str = "") -> dict[str, Any]:
    """The snapshot a replay of a random run ends in, with its whole history."""
    events = random_run(seed, count)
    return plain(replayed_snapshot(events, replay(events, parse_settings(text), each=True)))
