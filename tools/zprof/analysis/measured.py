"""Owns the runs that are compared and checked: their measures and what they held at the peak, rank by rank.

``zprof diff`` and ``zprof check`` read their runs through it. It keeps numbers and names, so that a hundred ranks fit in
memory, and never prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zprof.analysis.coverage import Coverage
    from zprof.analysis.measures import Value

__all__ = ["NO_END", "Measured", "measured", "simulated"]

NO_END = "has no end: the run was killed, or is still running; its last rows may be missing"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of one rank's trace.

    Attributes:
        path: as the user would name it.
        values: all measures. damage: what of the file could not be read, or that it has no end; "" for neither.
        covered: what the recording saw.
        held: for "category" and "unit": (name, tier) -> bytes when that tier held most.
        names: every unit that was gathered, computed or updated.
        ops: kernel, or without a GPU operator, whose calls were recorded -> (nanoseconds, calls) of a step.
        world: ranks of its run. simulated: the hardware that a simulation was of, whose values are predicted; "" for a run.
    """

    path: str
    rank: int
    values: dict[str, Value]
    damage: str
    covered: Coverage
    held: dict[str, dict[tuple[str, str], int]]
    names: frozenset[str]
    ops: dict[str, tuple[float, float]] = field(default_factory=dict)
    world: int = 1
    simulated: str = ""


def simulated(run: str) -> bool:
    """Whether the traces of a file or a folder are of a simulation.

    Raises:
        TraceError: as of `measured`.
    """
    from zprof.analysis.ranks import members_of

    return any(member.header.simulated for member in members_of([run]))


def measured(runs: Sequence[str], *, steps_only: bool = False) -> list[Measured]:
    """The ranks of ``runs``, files or folders, by rank.

    Args:
        steps_only: peaks are of the time from the first step to the last, as a simulation has them, not of what was held
            while the model was built or saved.
    Raises:
        TraceError: one is missing or no trace, or they are not one run's.
    """
    from zprof.analysis.analysis import Analysis
    from zprof.analysis.coverage import Unseen
    from zprof.analysis.measures import measures
    from zprof.analysis.operators import by_operator
    from zprof.analysis.ranks import members_of
    from zprof.rows import TIERS
    from zprof.trace.reader import Trace

    found = []
    for member in members_of(runs):
        trace = Trace.open(member.path)
        analysis = Analysis.of(trace)
        ledger, bounds = analysis.ledger, analysis.steps.issued
        within = (int(bounds[0, 0]), int(bounds[-1, 1])) if steps_only and analysis.steps.count else None
        held: dict[str, dict[tuple[str, str], int]] = {"category": {}, "unit": {}}
        for tier in TIERS:
            peak = ledger.peak(tier) if within is None or tier not in ledger.tiers else ledger.peak_between(tier, *within)
            held["category"] |= {(name, tier): nbytes for name, nbytes in ledger.table(peak, "category", tier).items()}
            held["unit"] |= {(name, tier): nbytes for name, nbytes in ledger.table(peak, "unit", tier).items()}
        keys = set(analysis.table.of("gather", "compute", "update").key.tolist())
        found.append(
            Measured(
                str(trace.path),
                trace.header.rank,
                measures(analysis, within=within),
                trace.damage or ("" if trace.notes("end") else NO_END),
                analysis.covered,
                held,
                frozenset(trace.strings[key] for key in keys),
                {} if isinstance(analysis.operators, Unseen) else by_operator(analysis.operators),
                trace.header.world,
                trace.header.simulated,
            )
        )
        trace.close()
    return found
