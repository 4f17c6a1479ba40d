"""Owns what is known of one trace: everything that the modules of this package find out, from one pass over its rows.

Reports, diffs, checks, pages, exports and `zprof.open` make one with `Analysis.of` and take from it; nobody else reads the rows
of a trace to analyse them. It puts the modules together and computes nothing itself; what not everybody asks for is found when
it is first asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from offload.events import FAILED, VERB
from zprof.analysis import bandwidth, children, compute, growth, loading, operators, prefetch, stalls, steps
from zprof.analysis.coverage import Coverage, coverage
from zprof.analysis.ledger import Ledger
from zprof.analysis.ranks import COLLECTIVES
from zprof.analysis.spans import Pairing, lanes_of
from zprof.bench import store as bench_store
from zprof.rows import TIERS, TraceError

if TYPE_CHECKING:
    from zprof.analysis.bandwidth import Rate
    from zprof.analysis.children import Children
    from zprof.analysis.compute import Computed
    from zprof.analysis.coverage import Unseen
    from zprof.analysis.growth import Grown
    from zprof.analysis.ledger import Moment
    from zprof.analysis.loading import Loading
    from zprof.analysis.operators import Operators
    from zprof.analysis.prefetch import Advice
    from zprof.analysis.spans import Instants, SpanTable
    from zprof.analysis.stalls import Stalls
    from zprof.analysis.steps import Steps
    from zprof.trace.header import Header
    from zprof.trace.reader import Trace

__all__ = ["Analysis"]

#: The spans and points that are taken from here, and kept of every trace.
_SPANS = frozenset({*COLLECTIVES, *steps.WHATS, *stalls.WHATS, *bandwidth.WHATS, *prefetch.WHATS, VERB})
_POINTS = (*prefetch.POINTS, "oom", "unit", FAILED)


class Analysis:
    """What one trace says; made by `Analysis.of`.

    Attributes:
        ledger: who held which bytes, and what was sampled.
        table: the spans there were, of the names that were asked for.
        instants: the points: "oom" for a request for memory that failed, "unit" for the size of one, and those of gathers.
    """

    def __init__(self, ledger: Ledger, table: SpanTable, instants: Instants) -> None:
        self.ledger, self.table, self.instants = ledger, table, instants
        self.trace: Trace = ledger.trace
        self.header: Header = self.trace.header

    @classmethod
    def of(cls, trace: Trace, *, spans: Collection[str] | None = (), points: int = 2000) -> Analysis:
        """Read ``trace`` once.

        Args:
            spans: names, or beginnings such as "disk *", of spans to keep beside those that are analysed; None keeps all.
            points: about how many points a curve over the whole run can have.
        Raises:
            TraceError: a row is of impossible times or sizes; chunks that cannot be read are left out, see `Ledger.damage`.
        """
        pairing = Pairing(trace, None if spans is None else _SPANS.union(spans), _POINTS)
        ledger = Ledger.of(trace, points=points, also=pairing.feed)
        return cls(ledger, pairing.table(), pairing.instants())

    # What was seen at all.

    @cached_property
    def covered(self) -> Coverage:
        """What the recording could see."""
        return coverage(self.trace, self.ledger.tiers)

    @cached_property
    def lanes(self) -> dict[int, str]:
        """The device's streams by name, as tables of spans have them for threads."""
        return lanes_of(self.trace)

    @cached_property
    def policy(self) -> Mapping[str, object]:
        """The last policy the run recorded; empty where it recorded none, or none that can be read."""
        return prefetch.policy_of(self.trace)

    @cached_property
    def end_clock(self) -> tuple[int, int] | None:
        """(monotonic, wall) as the recording ended; None where it does not say."""
        noted = [note.body for note in self.trace.notes("clock")]
        mono, wall = (noted[-1].get(name) for name in ("mono_ns", "wall_ns")) if noted else (None, None)
        return (mono, wall) if isinstance(mono, int) and isinstance(wall, int) else None

    # Memory.

    def moments(self, step: int | None = None) -> dict[str, Moment]:
        """When each tier in use held most: in the whole run, or within a step, counted from 0.

        Raises:
            TraceError: there is no such step; the line is about ``--at step:N``.
        """
        ledger = self.ledger
        if step is None:
            return {tier: ledger.peak(tier) for tier in ledger.tiers}
        count = self.steps.count
        if not 0 <= step < count:
            found = f"steps 0 to {count - 1}" if count else "no optimizer step"
            remedy = f"--at step:{count - 1} is the last" if count else "use --at peak"
            raise TraceError(f"{self.trace.path}: --at step:{step}: the recording has {found}; {remedy}")
        begin_ns, end_ns = self.steps.issued[step].tolist()
        return {tier: ledger.peak_between(tier, begin_ns, end_ns) for tier in ledger.tiers}

    @cached_property
    def peaks(self) -> dict[str, int | None]:
        """Tier -> the most bytes that were recorded on it; None where nothing on it could be."""
        return {tier: self.ledger.peak(tier).nbytes if self.covered.anything(tier) else None for tier in TIERS}

    @cached_property
    def grown(self) -> tuple[Grown, ...] | Unseen:
        """What held more after each step than after the one before."""
        return growth.growth(self.ledger, self.steps, self.covered)

    @cached_property
    def children(self) -> Children | Unseen:
        """What the processes under the recorded one held."""
        return children.children_of(self.ledger)

    # Time.

    @cached_property
    def steps(self) -> Steps:
        """All of them."""
        return steps.steps_of(self.table.of(*steps.WHATS))

    @cached_property
    def usual(self) -> Steps:
        """Those that figures of time are of: without the first, and without those in which the recording itself took long, to
        count what they compute or to record operators, where others are left."""
        return self.steps.warm.apart_from(compute.slowed(self.trace))

    @cached_property
    def stalls(self) -> Stalls:
        """What the training threads stood still for."""
        return stalls.stalls(self.table, self.usual)

    @cached_property
    def loading(self) -> Loading | Unseen:
        """What was waited for data loaders, and what would shorten it."""
        return loading.loading(self.trace, self.stalls, self.covered, self.children)

    @cached_property
    def rates(self) -> tuple[Rate, ...]:
        """Achieved bandwidths, beside the figures of ``zprof bench`` on this host."""
        return tuple(bandwidth.rates(self.table, device=self.trace.device, figures=self._bench[0]))

    @property
    def bench_problem(self) -> str:
        """Why the bandwidths have nothing to compare with, "" where they have or nothing was measured."""
        return self._bench[1]

    @cached_property
    def advice(self) -> Advice:
        """What can be done about gathers that were waited for."""
        return prefetch.advice(self.table, self.instants, self.steps.warm, self.policy)

    @cached_property
    def failures(self) -> Instants:
        """The requests for memory that failed."""
        return self.instants.of("oom")

    @cached_property
    def computed(self) -> Computed | Unseen:
        """What steps computed."""
        return compute.computed(self.trace, self.steps, self.covered)

    @cached_property
    def operators(self) -> Operators | Unseen:
        """What was recorded of operators and kernels."""
        units = self.instants.of("unit").key
        return operators.operators(self.trace, {self.trace.strings[key] for key in set(units.tolist())})

    @cached_property
    def _bench(self) -> tuple[list[bench_store.Figure], str]:
        try:
            return bench_store.stored(self.header.host), ""
        except TraceError as error:
            # A broken file beside the trace must not keep a report of the trace from its reader.
            return [], str(error)
