"""Owns the traces of a job of many ranks on hosts of eight, a few of them unlike the others, for tests of what is said of them.

Tests of reports and pages call it. It writes through the real writer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.support.zprof_traces import HEADER, MIB, write_trace
from zprof.rows import Row, RowKind, placed

BEGIN, END, COUNTER = RowKind.BEGIN, RowKind.END, RowKind.COUNTER
MS = 1_000_000
PER_HOST = 8
#: Ranks of `job` that are unlike the others: one works longer, so that all others wait for it, and one holds more.
SLOW, LARGE = 7, 11


def rows_of_rank(
    rank: int, *, steps: int = 6, units: int = 4, begin_ns: int = HEADER.mono_ns, alike: bool = False
) -> Iterator[Row]:
    """Steps of about 100 ms, of which 60 are work, but 90 of `SLOW`; all within half a millisecond by chance."""
    slow, large = rank == SLOW and not alike, rank == LARGE and not alike
    draw = random.Random(rank)
    held = placed("parameter", "device")
    for unit in range(units):
        yield Row(COUNTER, held, f"layers.{unit}", (64 if large else 16) * MIB, begin_ns + 1)
    for step in range(steps):
        at = begin_ns + (step + 1) * 100 * MS
        work = (90 if slow else 60) * MS + draw.randrange(MS // 2)
        yield Row(BEGIN, "forward", "model", 0, at)
        begin = at + work
        for unit in range(units):
            begun = at + work * (unit + 1) // (units + 1)
            yield Row(BEGIN, "gather", f"layers.{unit}", MIB, begun)
            yield Row(END, "gather", f"layers.{unit}", MIB, begun + MS)
        yield Row(BEGIN, "wait gather", "layers.0", 0, begin)
        yield Row(END, "wait gather", "layers.0", 0, at + 95 * MS)
        yield Row(END, "forward", "model", 0, at + 95 * MS)
        yield Row(BEGIN, "step", "AdamW", 0, at + 96 * MS)
        yield Row(END, "step", "AdamW", 0, at + 97 * MS)


def job(folder: Path, world: int, *, steps: int = 6, units: int = 4, alike: bool = False) -> Path:
    """``folder``, with a trace of each rank; each host has a clock of its own. ``alike``: none is unlike the others."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        host = rank // PER_HOST
        mono_ns = HEADER.mono_ns + host * 3_600_000 * MS
        write_trace(
            folder / f"job7.{rank}.zprof",
            rows_of_rank(rank, steps=steps, units=units, begin_ns=mono_ns, alike=alike),
            notes={"end": {"exit": 0, "reason": ""}},
            rank=rank,
            world=world,
            host=f"node{host}",
            boot=f"boot{host}",
            mono_ns=mono_ns,
        )
    return folder
