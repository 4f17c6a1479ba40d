"""What the tests of zprof.recording.tracker share: the rows of one tracking, added up, and beside them the allocator's account.

``tests/zprof/test_alloc.py`` and ``tests/zprof/test_alloc_places.py`` call it. It never judges.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from tests.support.live_storages import accounted
from zprof.recording.storages import Storages
from zprof.recording.tracker import Tracker
from zprof.rows import RowKind

Alive = dict[tuple[str, str], int]
"""Bytes alive by category and key."""


@dataclass
class Ledger:
    """The rows of one tracking, and what they add up to."""

    rows: list[tuple[int, str, str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storages = Storages(lambda *row: self.rows.append(row))

    @property
    def levels(self) -> list[int]:
        """The sum after every change; a storage that only changes its category is no change."""
        levels, level = [0], 0
        for index, (kind, _, _, nbytes, ident) in enumerate(self.rows):
            level += nbytes if kind == RowKind.ALLOC else -nbytes
            after = self.rows[index + 1] if index + 1 < len(self.rows) else None
            if not (kind == RowKind.FREE and after and after[0] == RowKind.ALLOC and after[4] == ident):
                levels.append(level)
        return levels

    def alive(self) -> Alive:
        """Bytes alive by category and key."""
        found: Counter[tuple[str, str]] = Counter()
        for what, key, nbytes in self.storages.alive():
            found[what.partition(" ")[0], key] += nbytes
        return dict(found)

    def made(self) -> set[tuple[str, str]]:
        """Every category and key that was ever said."""
        return {(row[1].partition(" ")[0], row[2]) for row in self.rows}


def track(body: Callable[[], object], *, stacks: bool = False) -> Ledger:
    """The ledger of ``body``, and of what is garbage after it."""
    gc.collect()
    ledger = Ledger()
    tracker = Tracker(ledger.storages, stacks=stacks)
    tracker.start()
    try:
        body()
        gc.collect()
    finally:
        tracker.close()
    return ledger


@dataclass(frozen=True, slots=True)
class Both:
    """The most that was alive and what was left, by the ledger and by the allocator."""

    found: tuple[int, int]
    expected: tuple[int, int]
    begin: int
    lost: int

    @property
    def equal(self) -> bool:
        """To the byte; but for what other threads gave back, which the allocator's account cannot place."""
        (peak, end), (most, left) = self.found, self.expected
        return end == left and most - self.lost <= peak <= most and most > self.begin


def compare(body: Callable[[], object]) -> Both:
    """The ledger and the allocator's account of ``body``."""
    ledger = Ledger()
    tracker = Tracker(ledger.storages)
    # Ours first: a mode that lies below it is asked for whole operations of subclasses, not for what they are made of.
    tracker.start()
    try:
        with accounted() as account:
            first = len(ledger.levels) - 1
            body()
            gc.collect()
            levels = ledger.levels[first:]
    finally:
        tracker.close()
    return Both((max(levels), levels[-1]), (account.peak, account.end), account.begin, account.lost)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
