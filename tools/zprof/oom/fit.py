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
from itertools import combinations
from typing import Any

from offload.text import as_size
from zprof.oom.changes import ALLOCATOR, Change, Plight, changes
from zprof.oom.held import Held, bytes_in

__all__ = ["Remedy", "remedies"]

_MOST_TOGETHER = 3


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change, or several together: bytes saved where they lacked, and whether the request would have fitted."""

    changes: tuple[Change, ...]
    nbytes: int
    fits: bool | None

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


def remedies(plight: Plight) -> list[Remedy]:
    """Single changes, first those that fit, the cheapest first; where none fits, the cheapest that fit together.

    A change that saves nothing is left out; so is one whose bytes would not fit where they would go.
    """
    known = sorted(changes(plight), key=lambda change: change.rank)
    single = [remedy for change in known if (remedy := _remedy(plight, (change,))) is not None]
    fitting = [remedy for remedy in single if remedy.fits]
    if fitting or plight.short is None:
        return fitting + [remedy for remedy in single if not remedy.fits]
    useful = [remedy.changes[0] for remedy in single]
    together = [
        remedy
        for count in range(2, _MOST_TOGETHER + 1)
        for some in combinations(useful, count)
        if _apart(some)
        and (remedy := _remedy(plight, some)) is not None
        and remedy.fits
    ]
    # Fewest changes first, then by the dearest of them.
    together.sort(key=lambda remedy: (len(remedy.changes), sorted((change.rank for change in remedy.changes), reverse=True)))
    return together[:2] + sorted(single, key=lambda remedy: -remedy.nbytes)


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
    return Remedy(some, saved, None if plight.short is None else saved >= plight.short)


def _fits(plight: Plight, held: Held) -> bool:
    for tier, free in (plight.free or {}).items():
        if free is not None and tier not in plight.pool and bytes_in(held, (tier,)) - bytes_in(plight.held, (tier,)) > free:
            return False
    return True
