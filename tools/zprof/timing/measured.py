"""Owns the runs that are compared and checked: their measures and what they held at the peak, rank by rank.

``zprof diff`` and ``zprof check`` read their runs through it. It keeps numbers and names, so that a hundred ranks fit in
memory, and never prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zprof.timing.coverage import Coverage
    from zprof.timing.measures import Value

__all__ = ["NO_END", "Measured", "measured"]

NO_END = "has no end: the run was killed, or is still going on; what it held last may be missing"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of one rank's trace.

    Attributes:
        path: as the user would name it.
        values: all measures. damage: what of the file could not be read, or that it has no end; "" for neither.
        covered: what the recording saw.
        held: for "category" and "unit": (name, tier) -> bytes when that tier held most.
        names: every unit that was gathered, computed or updated.
    """

    path: str
    rank: int
    values: dict[str, Value]
    damage: str
    covered: Coverage
    held: dict[str, dict[tuple[str, str], int]]
    names: frozenset[str]


def measured(runs: Sequence[str]) -> list[Measured]:
    """The ranks of ``runs``, files or folders, by rank.

    Raises:
        TraceError: one is missing or no trace, or they are not one run's.
    """
    from zprof.ledger.ranks import traces_of
    from zprof.rows import TIERS
    from zprof.timing.analysis import both
    from zprof.timing.coverage import coverage
    from zprof.timing.measures import measures

    found = []
    for trace in traces_of(runs):
        ledger, times = both(trace)
        held: dict[str, dict[tuple[str, str], int]] = {"category": {}, "unit": {}}
        for tier in TIERS:
            peak = ledger.peak(tier)
            held["category"] |= {(name, tier): nbytes for name, nbytes in ledger.table(peak, "category", tier).items()}
            held["unit"] |= {(name, tier): nbytes for name, nbytes in ledger.table(peak, "unit", tier).items()}
        keys = set(times.table.of("gather", "compute", "update").key.tolist())
        found.append(
            Measured(
                str(trace.path),
                trace.header.rank,
                measures(trace, ledger, times),
                trace.damage or ("" if trace.notes("end") else NO_END),
                coverage(trace, ledger.tiers),
                held,
                frozenset(trace.strings[key] for key in keys),
            )
        )
        trace.close()
    return found
