"""Owns the arithmetic of intervals: unions, portions counted once, and shares of steps, on arrays of nanoseconds.

``spans``, ``stalls`` and ``bandwidth`` call it. It knows neither traces nor what an interval means, and never loops over
its rows.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "Pieces", "next_of_key", "overlaps", "portions", "union_ns"]

Ints: TypeAlias = NDArray[np.int64]
#: For every pair of an interval and a bound that meet: which interval, which bound, and the nanoseconds they share.
Pieces: TypeAlias = tuple[Ints, Ints, Ints]


def portions(begin_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """What each interval adds to those that began before it, as (begin, end) in the order given.

    Time that several intervals share belongs to the one that began first, of those that began together to the longest. An
    interval inside others keeps nothing: its end is its begin. The portions are disjoint and their union is the intervals'.
    """
    later = begin_ns[1:] > begin_ns[:-1]
    if bool((later | ((begin_ns[1:] == begin_ns[:-1]) & (end_ns[1:] <= end_ns[:-1]))).all()):
        return _portions(begin_ns, end_ns)
    order = np.lexsort((-end_ns, begin_ns))
    own_begin, own_end = np.empty_like(begin_ns), np.empty_like(end_ns)
    own_begin[order], own_end[order] = _portions(begin_ns[order], end_ns[order])
    return own_begin, own_end


def _portions(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """As `portions`, of intervals in the order in which they have their say."""
    first = begin.copy()
    np.maximum(begin[1:], np.maximum.accumulate(end)[:-1], out=first[1:])
    return first, np.maximum(end, first)


def union_ns(begin_ns: Ints, end_ns: Ints) -> int:
    """Nanoseconds in which at least one of the intervals runs."""
    begin, end = portions(begin_ns, end_ns)
    return int((end - begin).sum())


def overlaps(begin_ns: Ints, end_ns: Ints, bounds: Ints) -> Pieces:
    """How the intervals fall into ``bounds``, int64 [n, 2], sorted and disjoint; what lies outside is left out."""
    first = np.searchsorted(bounds[:, 1], begin_ns, side="right")
    count = np.maximum(np.searchsorted(bounds[:, 0], end_ns, side="left") - first, 0)
    which = np.repeat(np.arange(len(begin_ns), dtype=np.int64), count)
    started = np.cumsum(count) - count
    bound = np.arange(len(which), dtype=np.int64) - started[which] + first[which]
    shared = np.minimum(end_ns[which], bounds[bound, 1]) - np.maximum(begin_ns[which], bounds[bound, 0])
    return which, bound, shared


def next_of_key(key: NDArray[np.int32], time_ns: Ints, keys: NDArray[np.int32], times_ns: Ints) -> Ints:
    """For each (key, time), the index of the first of (keys, times) with that key at or after that time; -1 for none."""
    asked = len(key)
    # The one who asks comes first where times are equal: "at" counts.
    side = np.concatenate((np.zeros(asked, np.int8), np.ones(len(keys), np.int8)))
    all_keys = np.concatenate((key, keys))
    order = np.lexsort((side, np.concatenate((time_ns, times_ns)), all_keys))
    place = np.arange(len(order))
    answers = np.where(side[order] == 1, place, len(order))
    following = np.minimum.accumulate(answers[::-1])[::-1] if len(order) else answers
    questions = place[side[order] == 0]
    found = following[questions]
    good = found < len(order)
    good[good] = all_keys[order[found[good]]] == all_keys[order[questions[good]]]
    result = np.full(asked, -1, np.int64)
    result[order[questions[good]]] = order[found[good]] - asked
    return result
