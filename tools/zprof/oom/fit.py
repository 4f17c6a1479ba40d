"""Owns the counterfactuals of an out-of-memory: which changes would have let it fit, how much, in order of what they cost.

`explanation` asks it for a failed request and what was held at that moment. Pure arithmetic on recorded bytes: it reads no
trace and no machine.

Note: [Together]
    A change turns what was held into what would have been held. Several are carried out one after the other, so that what two
    of them save together is never counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any

from offload.text import as_size
from zprof.oom.changes import ALLOCATOR, Change, Plight, changes
from zprof.oom.held import Held, bytes_in

__all__ = ["Remedy", "Verdict", "remedies"]

_MOST_TOGETHER = 3


class Verdict(Enum):
    """What can be promised of a remedy, the best first; the value is the line above such remedies."""

    WOULD = "would have let it fit:"
    MAY = "may let it fit (what they save is not known exactly):"
    REQUEST_ALONE = "would have let this request fit; what the rest of the step needs is not known (no whole step was seen):"
    LACK_UNKNOWN = "would have saved (how much was missing is unknown):"
    NOT_THE_STEP = "would have let this request fit, but not a whole step:"
    NOT_ENOUGH = "not enough alone:"

    @property
    def good(self) -> bool:
        """It may help, as far as is known."""
        return self not in (Verdict.NOT_THE_STEP, Verdict.NOT_ENOUGH)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, or several together.

    Attributes:
        nbytes: saved where they lacked.
        fits: the request that failed would have fitted; None where its lack is unknown.
        whole: so would the whole step; None where no whole step is known.
        malloc: memory was malloc's, which may keep what is freed.
    """

    changes: tuple[Change, ...]
    nbytes: int
    fits: bool | None
    whole: bool | None = None
    malloc: bool = False

    @property
    def verdict(self) -> Verdict:
        """What can be promised of it."""
        if not self.fits:
            return Verdict.LACK_UNKNOWN if self.fits is None else Verdict.NOT_ENOUGH
        if not self.whole:
            return Verdict.REQUEST_ALONE if self.whole is None else Verdict.NOT_THE_STEP
        return Verdict.MAY if self.at_most or self.malloc else Verdict.WOULD

    @property
    def what(self) -> str:
        return " and ".join(change.what for change in self.changes)

    @property
    def price(self) -> str:
        return "; ".join(change.price for change in self.changes)

    def __str__(self) -> str:
        saved = f"{'at most ' if self.at_most else ''}{as_size(self.nbytes)}"
        return f"{self.what}: saves {saved}; {self.price}"

    @property
    def keys(self) -> dict[str, Any] | None:
        """What to write into the policy, table by table; None where something of it is no policy's."""
        found: dict[str, Any] = {}
        for change in self.changes:
            if change.keys is None:
                return None
            for table, value in change.keys.items():
                found[table] = {**found.get(table, {}), **value} if isinstance(value, Mapping) else value
        return found

    @property
    def batches(self) -> int:
        """Micro-batches in the place of one."""
        return max(change.batches for change in self.changes)

    @property
    def at_most(self) -> bool:
        return any(change.at_most for change in self.changes)


_ORDER = tuple(Verdict)


def remedies(plight: Plight) -> list[Remedy]:
    """Single changes, first those that fit, the cheapest first; where none fits, the cheapest that fit together.

    A change that saves nothing is left out; so is one whose bytes would not fit where they would go.
    """
    known = sorted(changes(plight), key=lambda change: change.cost)
    single = [remedy for change in known if (remedy := _remedy(plight, (change,))) is not None]
    single.sort(key=lambda remedy: _ORDER.index(remedy.verdict))
    useful = [remedy.changes[0] for remedy in single]
    if plight.short is None or any(remedy.verdict.good for remedy in single):
        return single
    together = [
        remedy
        for count in range(2, _MOST_TOGETHER + 1)
        for some in combinations(useful, count)
        if _apart(some)
        and (remedy := _remedy(plight, some)) is not None
        and remedy.verdict.good
    ]
    # Fewest changes first, then by what they cost together.
    together.sort(key=lambda remedy: (len(remedy.changes), *_cost(remedy)))
    together.sort(key=lambda remedy: _ORDER.index(remedy.verdict))
    return together[:2] + sorted(single, key=lambda remedy: (_ORDER.index(remedy.verdict), -remedy.nbytes))


def _cost(remedy: Remedy) -> tuple[bool, float]:
    alters, lost_ns = zip(*(change.cost for change in remedy.changes), strict=True)
    return any(alters), sum(lost_ns)


def _apart(some: tuple[Change, ...]) -> bool:
    """No two are about the same."""
    return len(frozenset[str]().union(*(change.about for change in some))) == sum(len(change.about) for change in some)


def _remedy(plight: Plight, some: tuple[Change, ...]) -> Remedy | None:
    held: Held = dict(plight.held)
    for change in some:
        held = change.after(held)
    saved = bytes_in(plight.held, plight.pool) - bytes_in(held, plight.pool)
    if any(ALLOCATOR in change.about for change in some):
        saved += plight.idle
    if saved <= 0 or not _fits(plight, held):
        return None
    fits = None if plight.short is None else saved >= plight.short
    return Remedy(some, saved, fits, _whole(plight, some), plight.shared and len(plight.pool) > 1)


def _whole(plight: Plight, some: tuple[Change, ...]) -> bool | None:
    """Whether the fullest moments of a whole step fit, too; None where none was seen."""
    if not plight.step or plight.room is None:
        return None
    after = []
    for held in plight.step:
        for change in some:
            held = change.after(held)
        after.append(held)
    # What is computed again in backward is there beside gradients that were made when the recorded step had freed it.
    again = max(bytes_in(held, plight.pool, "activation") for held in after)
    others = [bytes_in(held, plight.pool) - bytes_in(held, plight.pool, "activation") for held in after]
    idle = plight.idle if any(ALLOCATOR in change.about for change in some) else 0
    if any("activation" in change.about for change in some):
        return max(others) + again - idle <= plight.room
    return max(bytes_in(held, plight.pool) for held in after) - idle <= plight.room


def _fits(plight: Plight, held: Held) -> bool:
    for tier, free in (plight.free or {}).items():
        if free is not None and tier not in plight.pool and bytes_in(held, (tier,)) - bytes_in(plight.held, (tier,)) > free:
            return False
    return True
