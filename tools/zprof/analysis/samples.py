"""Owns what samplers said over time: counters that are no level of the ledger, such as "rss" or "nvml power", by what and key.

The ledger's pass hands it the rows, and reports, pages and exports ask the ledger for them. It keeps a bounded number of points
of each, and never loses the highest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zprof.trace.levels import starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

__all__ = ["Samples", "highest", "thinned"]

#: Points kept of one quantity before half of them go: 1 MiB each, two hours at the default interval.
MOST_POINTS = 1 << 16


class Samples:
    """The sampled quantities of one trace.

    Args:
        most: points kept of one quantity; beyond it every second one goes, never the higher of two neighbours.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._parts: dict[tuple[int, int], list[tuple[Int64s, Int64s]]] = {}
        self._counts: dict[tuple[int, int], int] = {}

    def take(self, what: NDArray[np.int32], key: NDArray[np.int32], value: Int64s, time_ns: Int64s) -> None:
        """Keep the samples of one batch, in file order; ``what`` and ``key`` are indices of strings."""
        if not len(what):
            return
        code = what.astype(np.int64) << 32 | key
        order = np.argsort(code, kind="stable")
        starts = starts_of(code[order])
        for rows in np.split(order, starts[1:]):
            self._add((int(what[rows[0]]), int(key[rows[0]])), time_ns[rows], value[rows])

    def _add(self, name: tuple[int, int], time_ns: Int64s, value: Int64s) -> None:
        parts = self._parts.setdefault(name, [])
        parts.append((time_ns, value))
        self._counts[name] = self._counts.get(name, 0) + len(time_ns)
        if self._counts[name] > self._most:
            parts[:] = [thinned(*_joined(parts), self._most // 2)]
            self._counts[name] = len(parts[0][0])

    def of(self, what: int, strings: Sequence[str]) -> dict[str, tuple[Int64s, Int64s]]:
        """key -> (time_ns, value), in time order, of the quantity whose name is string ``what``."""
        return {strings[key]: _joined(parts) for (named, key), parts in self._parts.items() if named == what}

    def whats(self) -> set[int]:
        """The quantities there are, as indices of strings."""
        return {what for what, _ in self._parts}


def _joined(parts: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    time_ns, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(time_ns, kind="stable")
    return time_ns[order], value[order]


def thinned(time_ns: Int64s, value: Int64s, points: int) -> tuple[Int64s, Int64s]:
    """At most ``points`` of the samples: of each of ``points // 2`` stretches the highest, and the last."""
    if len(value) <= points:
        return time_ns, value
    starts = np.linspace(0, len(value), max(points // 2, 1), endpoint=False).astype(np.int64)
    kept = np.zeros(len(value), np.bool_)
    kept[highest(value, starts)] = kept[np.append(starts[1:], len(value)) - 1] = True
    return time_ns[kept], value[kept]


def highest(value: Int64s, starts: Int64s) -> Int64s:
    """Where the first highest value of each stretch is; ``starts`` begins at 0 and ascends strictly."""
    tops = np.maximum.reduceat(value, starts)
    lengths = np.diff(np.append(starts, len(value)))
    at = np.flatnonzero(value == np.repeat(tops, lengths))
    first = np.searchsorted(at, starts)
    return at[first]

