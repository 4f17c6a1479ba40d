"""Owns leaks: which lines, or modules, hold more after each optimizer step than after the one before.

Measures, reports and `zprof.open` ask it. It reads levels from the ledger at the ends of steps and judges nothing else: what
grows may be meant to.

Note: [What has grown]
    Levels are taken where steps end, at most `MOST_POINTS` of them, for there a script is each time at the same place of its
    loop; the first step, which fills pools and makes optimizer states, is left out. A group has grown if it held more at each
    point of the last third than at any of the first, and went on to grow in the second half. Where batches differ in length,
    levels move up and down, and a group that only does so fails the first; one that is filled once fails the second. Of a
    short run, whose thirds are a point or two, a group must never have shrunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offload.text import counted
from zprof.analysis.coverage import Coverage, Unseen
from zprof.analysis.curves import NO_KEY, module_of
from zprof.analysis.operators import unfollowed
from zprof.rows import BEFORE_STACK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from zprof.analysis.ledger import Ledger, Series
    from zprof.analysis.steps import Steps

    Int64s = NDArray[np.int64]

__all__ = ["Grown", "growth", "line_of"]

#: Ends of steps looked at; each is a chunk or two read again.
MOST_POINTS = 32
#: Steps it takes to tell growth from filling: the first does not count.
LEAST_STEPS = 5
#: Ends from which on levels may move up and down between.
MANY = 9


@dataclass(frozen=True, slots=True)
class Grown:
    """What held more and more.

    Attributes:
        name: the line that made the storages ("folder/train.py:12:step") where lines were recorded, else the module.
        callers: the lines that led there, the nearest first; of most of the growth.
        module: in whose forward most of the growth was made, or "(outside modules)".
        tier, category: where, and what most of the growth is.
        nbytes: by how much, from the end of step ``first`` to the end of step ``last``, counted from 0.
        per_step: of it, bytes a step.
    """

    name: str
    callers: tuple[str, ...]
    module: str
    tier: str
    category: str
    nbytes: int
    first: int
    last: int

    @property
    def per_step(self) -> float:
        return self.nbytes / (self.last - self.first)


def line_of(key: str) -> str | None:
    """The line nearest the allocation in the key of a series; None where none was recorded."""
    _, *lines = key.split(BEFORE_STACK, 2)
    return lines[0] if lines else None


def growth(ledger: Ledger, steps: Steps, covered: Coverage) -> tuple[Grown, ...] | Unseen:
    """What grew from step to step, the fastest first; see Note: [What has grown]."""
    if not covered.every_storage or covered.lost:
        return covered.place("other", "device") or Unseen("not recorded")
    if (unseen := covered.steps()) is not None:
        return unseen
    if steps.count < LEAST_STEPS:
        return Unseen(f"{counted(steps.count, 'optimizer step')} recorded: growth is seen from {LEAST_STEPS} on")
    ends = np.arange(1, steps.count)
    for begin_ns, end_ns in unfollowed(ledger.trace):
        # What was made there is met when it is over.
        ends = ends[(steps.issued[ends, 1] <= begin_ns) | (steps.issued[ends, 1] > end_ns)]
    if len(ends) < LEAST_STEPS - 1:
        followed = f"storages were followed to the end of {counted(len(ends), 'step')}"
        return Unseen(f"{followed}: growth is seen from {LEAST_STEPS - 1} on")
    numbers = ends[np.unique(np.linspace(0, len(ends) - 1, min(MOST_POINTS, len(ends))).astype(np.int64))]
    levels = np.array([ledger.at(int(end_ns)) for end_ns in steps.issued[numbers, 1]])
    groups: dict[tuple[str, str], list[int]] = {}
    for place, series in enumerate(ledger.series):
        groups.setdefault((series.tier, _name(series)), []).append(place)
    found = []
    for (tier, name), places in groups.items():
        if not _grew(levels[:, places].sum(axis=1)):
            continue
        by_series = levels[-1, places] - levels[0, places]
        most = ledger.series[places[int(by_series.argmax())]]
        path, *lines = most.key.split(BEFORE_STACK)
        total, between = int(by_series.sum()), (int(numbers[0]), int(numbers[-1]))
        found.append(Grown(name, tuple(lines[1:]), path or NO_KEY, tier, most.category, total, *between))
    return tuple(sorted(found, key=lambda grown: (-grown.nbytes, grown.name)))


def _name(series: Series) -> str:
    return line_of(series.key) or module_of(series.key) or NO_KEY


def _grew(levels: Int64s) -> bool:
    third = max(len(levels) // 3, 1)
    if levels[-third:].min() <= levels[:third].max():
        return False
    changes = np.diff(levels)
    if len(levels) < MANY and bool((changes < 0).any()):
        return False
    return int((changes[len(changes) // 2 :] > 0).sum()) >= 2
