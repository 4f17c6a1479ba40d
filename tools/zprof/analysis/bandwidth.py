"""Owns achieved bandwidths: bytes a second of gathers, reductions, copies and disk requests, against what the machine can do.

Reports, measures and the remedy ask it. It takes spans and never the clock; the figures to compare with are those that
``zprof bench`` stored for the same host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zprof.analysis.intervals import next_of_key, portions, union_ns
from zprof.analysis.spans import SpanTable
from zprof.bench.store import Figure

__all__ = ["VERBS", "WHATS", "Rate", "rates", "really_waited"]

#: Spans that move bytes -> the figure of ``zprof bench`` they compare with on a GPU, and on a CPU, where the device is host
#: memory and copies to it are those of memory.
VERBS: dict[str, tuple[str, str]] = {
    "gather": ("gather", "gather"),
    "gather activation": ("gather", "gather"),
    "reduce": ("", ""),
    "copy h2d": ("h2d", "memcpy"),
    "copy d2h": ("d2h", "memcpy"),
    "copy h2h": ("memcpy", "memcpy"),
    "stash": ("d2h", "memcpy"),
    "unstash": ("h2d", "memcpy"),
    "disk read": ("disk read", "disk read"),
    "disk write": ("disk write", "disk write"),
}
WHATS = (*VERBS, *(f"wait {verb}" for verb in VERBS))


@dataclass(frozen=True, slots=True)
class Rate:
    """What one verb moved.

    Attributes:
        verb: the span, e.g. "disk read".
        count, nbytes: of all closed spans that moved bytes.
        busy_ns: in which at least one was under way.
        median_bytes_per_s: of single transfers; those under way together share the wire.
        waited_bytes_per_s: of the transfers somebody stood and waited for, one after the other; None where there were none.
            The others end when their end is noticed, which is later.
        bench: the figure of this machine; None where none is stored.
    """

    verb: str
    count: int
    nbytes: int
    busy_ns: int
    median_bytes_per_s: float
    waited_bytes_per_s: float | None
    bench: Figure | None = None

    @property
    def bytes_per_s(self) -> float:
        """Over the busy time: what was reached at least, for spans may end later than what they wait for."""
        return self.nbytes * 1e9 / self.busy_ns if self.busy_ns else 0.0

    @property
    def reached_bytes_per_s(self) -> float:
        """The better founded: of the transfers waited for where there are such, else over the busy time."""
        return max(self.waited_bytes_per_s or 0.0, self.bytes_per_s)

    @property
    def share_of_bench(self) -> float | None:
        """Of the stored figure, 1 is all of it."""
        return self.reached_bytes_per_s / self.bench.bytes_per_s if self.bench else None


def rates(table: SpanTable, *, device: str = "cpu", figures: Sequence[Figure] = ()) -> list[Rate]:
    """The rate of every verb that moved bytes; ``table`` holds the spans of `WHATS`, ``figures`` are this host's."""
    found = []
    for verb, (on_gpu, on_cpu) in VERBS.items():
        moved = table.of(verb)
        real = (moved.nbytes > 0) & (moved.duration_ns > 0)
        moved = moved if real.all() else moved.where(real)
        if not len(moved):
            continue
        name = on_cpu if device == "cpu" else on_gpu
        bench = max((figure for figure in figures if figure.name == name), key=lambda figure: figure.date, default=None)
        single = float(np.median(moved.nbytes / moved.duration_ns)) * 1e9
        facts = (len(moved), int(moved.nbytes.sum()), union_ns(moved.begin_ns, moved.end_ns), single)
        found.append(Rate(verb, *facts, waited_rate(moved, table.of(f"wait {verb}")), bench))
    return found


def really_waited(moved: SpanTable, waits: SpanTable) -> NDArray[np.int64]:
    """For each wait the index of the transfer of its key that it was for; -1 for none.

    That is the first that ends after the wait began. It began before the wait ended.
    """
    found = next_of_key(waits.key, waits.begin_ns, moved.key, moved.end_ns)
    began = np.zeros(len(found), np.bool_)
    began[found >= 0] = moved.begin_ns[found[found >= 0]] <= waits.end_ns[found >= 0]
    return np.where(began, found, -1)


def waited_rate(moved: SpanTable, waits: SpanTable) -> float | None:
    """Bytes a second of the transfers that ended while somebody waited, as if each used the wire from the end of the last."""
    chosen = really_waited(moved, waits)
    ended = np.zeros(len(moved), np.bool_)
    ended[chosen[(chosen >= 0) & (waits.duration_ns > 0)]] = True
    chosen = np.flatnonzero(ended)
    if not len(chosen):
        return None
    begin, end = portions(moved.begin_ns[chosen], moved.end_ns[chosen])
    # One that lies within another took no time of its own that could be known; together they are the union's.
    busy_ns = int((end - begin).sum())
    return float(moved.nbytes[chosen].sum()) * 1e9 / busy_ns if busy_ns else None
