"""Owns what a step is: where each begins and ends, for runs under zhooks and for plain scripts.

Stalls, measures, reports and pages divide a run by it. It never guesses a step where no optimizer was seen: then the whole
recording is one interval, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from zprof.analysis.coverage import Unseen
from zprof.analysis.intervals import Ints, portions
from zprof.analysis.spans import SpanTable
from zprof.rows import QUEUED

__all__ = ["ONLY_UPDATE", "WHATS", "Steps", "steps_of"]

#: The spans that say where steps are, on the device and by the host that queued them.
WHATS = ("step", "update", "forward", "backward", *(f"{QUEUED}{what}" for what in ("step", "update", "forward", "backward")))
#: Why a first step is not known as a whole.
ONLY_UPDATE = Unseen("not seen as a whole: no forward was recorded before its update, which is all of it that is known")


@dataclass(frozen=True, slots=True)
class Steps:
    """A run cut into steps.

    Attributes:
        bounds: int64 [n, 2], begin and end, sorted and disjoint. A step begins where the one before ended, so that loading
            data counts; the first begins at the first forward of the recording.
        source: "step" (spans of optimizers), "update" (of units), or "" where nothing of the kind was recorded and
            ``bounds`` is the time from the first span to the last, or empty.
        unseen: why the first of them is only its update: no forward was recorded before that, as of any script that is not
            under zhooks. None where the first is whole, as the others always are.
        issued: the same of the host, where ``bounds`` are a device's that does later what it queued: memory is taken and
            given in the host's order, and sampled at its times.
    """

    bounds: Ints
    source: str
    unseen: Unseen | None = None
    issued: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def __post_init__(self) -> None:
        if len(self.issued) != len(self.bounds):
            # Of what the host queued last the device's times may be lost.
            issued = np.concatenate((self.issued, self.bounds[len(self.issued) :]))[: len(self.bounds)]
            object.__setattr__(self, "issued", issued)

    @property
    def count(self) -> int:
        return len(self.bounds) if self.source else 0

    @property
    def warm(self) -> Steps:
        """Without the first, which fills pools and learns the order, if there are more."""
        return Steps(self.bounds[1:], self.source, issued=self.issued[1:]) if len(self.bounds) > 1 else self

    def apart_from(self, spans: Iterable[tuple[int, int]]) -> Steps:
        """Those that the host issued in none of ``spans``; all where that leaves none."""
        apart = np.ones(len(self.bounds), np.bool_)
        for begin_ns, end_ns in spans:
            apart &= (self.issued[:, 1] <= begin_ns) | (self.issued[:, 0] >= end_ns)
        return self if not apart.any() else replace(self, bounds=self.bounds[apart], issued=self.issued[apart])

    @property
    def duration_ns(self) -> Ints:
        return self.bounds[:, 1] - self.bounds[:, 0]

    @property
    def whole_ns(self) -> int:
        return int(self.duration_ns.sum())

    def at(self, time_ns: int) -> int | None:
        """The first step that a moment of the host's falls in, counted from 0; None outside all."""
        inside = (self.issued[: self.count, 0] <= time_ns) & (time_ns <= self.issued[: self.count, 1])
        return int(inside.argmax()) if bool(inside.any()) else None


def steps_of(table: SpanTable) -> Steps:
    """The steps that ``table``, which holds the spans of `WHATS`, shows: as the device made them, where that is known.

    Where the device's part of an optimizer's steps is lost, they are as the host queued them.
    """
    done, queued = _steps_of(table, ""), _steps_of(table, QUEUED)
    if not queued.source:
        return done
    if done.source != queued.source:
        return queued
    return Steps(done.bounds, done.source, done.unseen, queued.bounds)


def _steps_of(table: SpanTable, prefix: str) -> Steps:
    """The steps by the spans of names that begin so.

    A step ends with the optimizer's ``step``. Of several optimizers the one that steps most often counts, among equals the
    one that comes last; of one inside another the outer. Without such spans it ends with the last ``update``. Where forwards
    are recorded, only the last end before the next forward counts: units are updated one by one, and optimizers that step
    one after the other share a step.
    """
    forward = table.of(f"{prefix}forward")
    for source in ("step", "update"):
        found = table.of(f"{prefix}{source}")
        if not len(found):
            continue
        ends = _ends_of_one(found) if source == "step" else np.sort(found.end_ns)
        if len(forward):
            # The number of forwards begun before each end: the last end of each number counts.
            begun = np.searchsorted(forward.begin_ns, ends, side="left")
            ends = ends[np.append(begun[1:] != begun[:-1], True)]
        seen = len(forward) > 0 and forward.begin_ns[0] < ends[0]
        first = forward if seen else found
        begins = np.concatenate((first.begin_ns[:1], ends[:-1]))
        return Steps(np.stack((begins, ends), axis=1), source, None if seen else ONLY_UPDATE)
    if not len(table):
        return Steps(np.zeros((0, 2), np.int64), "")
    return Steps(np.array([[table.begin_ns.min(), table.end_ns.max()]], np.int64), "")


def _ends_of_one(found: SpanTable) -> Ints:
    """Ends of the outermost spans of the optimizer that marks the steps."""
    begin, end = portions(found.begin_ns, found.end_ns)
    outer = found.where(end > begin) if bool((end > begin).any()) else found
    keys, first, count = np.unique(outer.key, return_index=True, return_counts=True)
    chosen = max(range(len(keys)), key=lambda index: (count[index], outer.end_ns[first[index]]))
    return np.unique(outer.end_ns[outer.key == keys[chosen]])
