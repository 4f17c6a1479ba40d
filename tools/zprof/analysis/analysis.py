"""Owns the analysis of time of one trace: its spans, steps, stalls, bandwidths and the remedy, from one pass over its rows.

Reports, diffs, checks and pages ask it, beside a ledger that sees the same pass. It puts the modules together and computes
nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zprof.analysis import bandwidth, prefetch, stalls, steps
from zprof.analysis.spans import Pairing, SpanTable
from zprof.bench import store as bench_store
from zprof.rows import TraceError

if TYPE_CHECKING:
    from zprof.analysis.bandwidth import Rate
    from zprof.analysis.ledger import Ledger
    from zprof.analysis.prefetch import Advice
    from zprof.analysis.stalls import Stalls
    from zprof.analysis.steps import Steps
    from zprof.trace.reader import Trace

__all__ = ["Times", "analysed", "both", "pairing", "times"]


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time of a trace went.

    Attributes:
        table: the spans all of this was taken from.
        steps: all of them; ``stalls`` and ``advice`` count those of ``steps.warm``.
        oom: failed requests for memory.
        problem: why the bandwidths have nothing to compare with, "" where they have or nothing was measured.
    """

    table: SpanTable
    steps: Steps
    stalls: Stalls
    rates: tuple[Rate, ...]
    advice: Advice
    oom: int
    problem: str = ""


def pairing(trace: Trace) -> Pairing:
    """What takes the rows of ``trace``: hand its ``feed`` to `Ledger.of`, and it to `analysed`."""
    whats = {"collective", *steps.WHATS, *stalls.WHATS, *bandwidth.WHATS, *prefetch.WHATS}
    return Pairing(trace, whats, (*prefetch.POINTS, "oom"))


def analysed(trace: Trace, pairing: Pairing) -> Times:
    """The analysis, once ``pairing`` has seen all rows."""
    table, points = pairing.table(), pairing.instants()
    found = steps.steps_of(table.of(*steps.WHATS))
    figures, problem = _figures(trace.header.host)
    return Times(
        table,
        found,
        stalls.stalls(table, found.warm),
        tuple(bandwidth.rates(table, device=trace.device, figures=figures)),
        prefetch.advice(table, points, found.warm, prefetch.policy_of(trace)),
        sum(1 for what in points.what.tolist() if table.strings[what] == "oom"),
        problem,
    )


def times(trace: Trace) -> Times:
    """The analysis, in a pass of its own.

    Raises:
        TraceError: the file is not what it should be.
    """
    taken = pairing(trace)
    for rows in trace.chunks():
        taken.feed(rows)
    return analysed(trace, taken)


def both(trace: Trace) -> tuple[Ledger, Times]:
    """The ledger and the analysis, in one pass."""
    from zprof.analysis.ledger import Ledger

    taken = pairing(trace)
    ledger = Ledger.of(trace, also=taken.feed)
    return ledger, analysed(trace, taken)


def _figures(host: str) -> tuple[list[bench_store.Figure], str]:
    try:
        return bench_store.stored(host), ""
    except TraceError as error:
        # A broken file beside the trace must not keep a report of the trace from its reader.
        return [], str(error)
