"""Owns the traces that zprof's tests read: a header, a file from given rows, and the rows of a run as the recorder writes them.

Every test of a room that reads traces calls it. It writes through the real writer and knows no test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zprof.analysis.spans import Pairing, SpanTable
from zprof.rows import Row, RowKind, TraceError, placed
from zprof.trace.header import VERSION, Header
from zprof.trace.reader import Trace
from zprof.trace.writer import Writer

HEADER = Header(
    version=VERSION,
    rank=0,
    world=1,
    host="node",
    boot="4a3c5b0e",
    pid=4321,
    mono_ns=1_000_000_000,
    wall_ns=1_700_000_000_000_000_000,
    level="alloc",
    device="cpu",
    rss_nbytes=200 << 20,
    argv=("train.py", "--steps", "5"),
    versions={"torch": "2.13.0", "zhooks": "0.1"},
)

KIB, MIB = 1 << 10, 1 << 20
#: Bytes of one unit of `sample_rows`: its shard at rest, and gathered whole.
SHARD, WHOLE = 3 * MIB, 12 * MIB


def write_trace(
    path: Path,
    rows: Iterable[Row],
    *,
    notes: Mapping[str, Mapping[str, object]] | None = None,
    zhooks: bool = True,
    **header_changes: Any,
) -> Path:
    """A closed trace of ``rows``, after them ``notes``; ``header_changes`` replace fields of `HEADER`.

    It is of a run under zhooks, whose policy nobody stated, unless ``zhooks`` is false.
    """
    writer = Writer(path, dataclasses.replace(HEADER, **header_changes))
    writer.rows(list(rows))
    bodies: dict[str, Any] = ({"policy": {}} if zhooks else {}) | dict(notes or {})
    for name, body in bodies.items():
        writer.note(name, body)
    writer.close()
    return path


class _Clock:
    """Moves on by a number of nanoseconds that varies, and the same in every run."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._state = 12345

    def tick(self, about_ns: int) -> int:
        self._state = (self._state * 1103515245 + 12345) & 0x7FFFFFFF
        self.now_ns += about_ns // 2 + self._state % about_ns
        return self.now_ns


def sample_rows(*, steps: int = 5, units: int = 8, level: str = "events", start_ns: int = 1_000_000_000) -> Iterator[Row]:
    """A training run of ``units`` units under stage 3 with optimizer states on the host, some blocks on disk.

    What is held rests at ``units * SHARD`` of parameters on the device; each gathered unit adds `WHOLE` of them while it
    computes. At level "alloc" every unit also allocates activations (one storage a saved tensor), and backward frees them.
    """
    clock = _Clock(start_ns)
    names = [f"model.layers.{number}" for number in range(units)]
    storage = 0

    def row(kind: RowKind, what: str, key: str, nbytes: int = 0, ident: int = 0, thread: int = 0, about_ns: int = 2000) -> Row:
        return Row(kind, what, key, nbytes, clock.tick(about_ns), thread, ident)

    def gathered(name: str) -> Iterator[Row]:
        yield row(RowKind.BEGIN, "gather", name, WHOLE)
        yield row(RowKind.BEGIN, "wait gather", name)
        yield row(RowKind.END, "gather", name, WHOLE, about_ns=900_000)
        yield row(RowKind.END, "wait gather", name)
        yield row(RowKind.COUNTER, placed("parameter", "device"), name, SHARD + WHOLE)

    def released(name: str) -> Iterator[Row]:
        yield row(RowKind.INSTANT, "release", name, WHOLE)
        yield row(RowKind.COUNTER, placed("parameter", "device"), name, SHARD)

    for name in names:
        yield row(RowKind.COUNTER, placed("parameter", "device"), name, SHARD)
        yield row(RowKind.COUNTER, placed("optimizer", "host"), name, 3 * SHARD)
    for step in range(steps):
        saved: dict[str, list[tuple[int, int]]] = {}
        yield row(RowKind.BEGIN, "forward", "model train")
        for name in names:
            yield from gathered(name)
            yield row(RowKind.BEGIN, "compute", name)
            if level != "events":
                for part, nbytes in (("attn", 4 * MIB), ("attn", 512 * KIB), ("mlp", 8 * MIB), ("mlp", 2 * MIB + 64)):
                    storage += 1
                    saved.setdefault(name, []).append((storage, nbytes))
                    yield row(RowKind.ALLOC, placed("activation", "device"), f"{name}.{part}", nbytes, storage)
            yield row(RowKind.END, "compute", name, about_ns=1_500_000)
            yield from released(name)
        yield row(RowKind.END, "forward", "model train")
        yield row(RowKind.BEGIN, "backward", "backward of model train")
        for name in reversed(names):
            yield from gathered(name)
            yield row(RowKind.BEGIN, "compute", name, thread=1)
            yield row(RowKind.COUNTER, placed("gradient", "device"), name, WHOLE, thread=1)
            for place, (ident, nbytes) in enumerate(saved.get(name, [])):
                part = "attn" if place < 2 else "mlp"
                yield row(RowKind.FREE, placed("activation", "device"), f"{name}.{part}", nbytes, ident, thread=1)
            yield row(RowKind.END, "compute", name, thread=1, about_ns=3_000_000)
            yield row(RowKind.INSTANT, "ready", name, thread=1)
            yield from released(name)
            yield row(RowKind.BEGIN, "reduce", name, WHOLE, thread=1)
            yield row(RowKind.END, "reduce", name, WHOLE, about_ns=700_000)
            yield row(RowKind.COUNTER, placed("gradient", "device"), name, SHARD)
        yield row(RowKind.END, "backward", "backward of model train")
        yield row(RowKind.BEGIN, "step", "AdamW")
        for number, name in enumerate(names):
            if number % 2:
                yield row(RowKind.BEGIN, "disk read", f"optim/{name}", 3 * SHARD, thread=2)
                yield row(RowKind.END, "disk read", f"optim/{name}", 3 * SHARD, thread=2, about_ns=4_000_000)
                yield row(RowKind.BEGIN, "wait fetch", f"optim/{name}")
                yield row(RowKind.END, "wait fetch", f"optim/{name}", about_ns=500_000)
            yield row(RowKind.BEGIN, "update", name)
            yield row(RowKind.END, "update", name, about_ns=800_000)
            yield row(RowKind.COUNTER, placed("gradient", "device"), name, 0)
        yield row(RowKind.END, "step", "AdamW")
        held = 200 * MIB + (units * SHARD * 4) + step * 64 * KIB
        yield row(RowKind.COUNTER, "rss", "", held, thread=3)
        yield row(RowKind.COUNTER, "cgroup memory", "", held + 20 * MIB, thread=3)


def begun(path: Path) -> Trace | None:
    """A trace that is being written, as far as it is there; None before its header is."""
    try:
        return Trace.growing(path)
    except (FileNotFoundError, TraceError):
        return None


def rows_of(trace: Trace) -> Iterator[Row]:
    """The rows as they were given to the writer, a chunk at a time."""
    for rows in trace.chunks():
        what, key = (np.array(trace.strings, object)[column] for column in (rows.what, rows.key))
        columns = (rows.kind, what, key, rows.nbytes, rows.time_ns, rows.thread, rows.ident)
        yield from map(Row, *(column.tolist() for column in columns))


def spans_of(trace: Trace, whats: Collection[str] | None = None) -> SpanTable:
    """The spans of ``trace``: of these names or beginnings, or all."""
    pairing = Pairing(trace, whats)
    for rows in trace.chunks():
        pairing.feed(rows)
    return pairing.table()


#: The lanes of `on_device`, as the note of a recording has them.
DEVICE_LANES = {"lanes": ["compute", "copy h2d"], "untimed": {}, "unknown": 0}
_BY_HOST = ("disk read", "disk write", "save")


def on_device(rows: Iterable[Row], late_ns: int = 3_000_000) -> list[Row]:
    """The rows of a run whose host only queued passes, transfers and waits when ``rows`` say: the device did them that much
    later, and took as long."""
    found: list[Row] = []
    opened: dict[tuple[str, str], list[Row]] = {}
    waiting: list[tuple[int, Row]] = []
    for row in rows:
        # A span is written when the host has seen its end.
        found += [span for end_ns, span in waiting if end_ns <= row.time_ns]
        waiting = [(end_ns, span) for end_ns, span in waiting if end_ns > row.time_ns]
        if row.kind == RowKind.INSTANT and row.what == "ready":
            at_ns = row.time_ns + late_ns
            waiting.append((at_ns, Row(RowKind.SPAN, row.what, row.key, 0, at_ns, 0, 0)))
        elif row.kind > RowKind.END or row.what in _BY_HOST:
            found.append(row)
        else:
            found.append(row._replace(what=f"queued {row.what}"))
            if row.kind == RowKind.BEGIN:
                opened.setdefault((row.what, row.key), []).append(row)
            else:
                begin = opened[row.what, row.key].pop()
                lasted, nbytes = row.time_ns - begin.time_ns, max(row.nbytes, begin.nbytes)
                span = Row(RowKind.SPAN, row.what, row.key, nbytes, begin.time_ns + late_ns, 0, lasted)
                waiting.append((row.time_ns + late_ns, span))
    return [*found, *(span for _, span in waiting)]
