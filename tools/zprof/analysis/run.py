"""Owns what Python code asks of a recorded run: `zprof.open` gives one rank of it, in plain values, seconds and bytes.

It computes nothing: the ledger, the spans and the measures do, each once and when it is first asked for. It never needs torch.
What a recording did not see is None or left out, never 0, and `Run.unseen` says why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.text import as_size
from zprof.analysis.analysis import Analysis
from zprof.analysis.compute import Computed
from zprof.analysis.coverage import Unseen
from zprof.analysis.curves import BYS, By, lines_recorded
from zprof.analysis.growth import Grown
from zprof.analysis.ledger import Ledger, Moment
from zprof.analysis.measures import Value, measures
from zprof.analysis.operators import Operators, columns
from zprof.analysis.ranks import members_of, paths_of
from zprof.analysis.spans import FIRST_LANE
from zprof.rows import CATEGORIES, TIERS, TraceError
from zprof.trace.children import recorded_children
from zprof.trace.reader import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Curves", "Peak", "Run", "Span"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment when a tier held the most.

    Attributes:
        nbytes: held then, in bytes.
        time_s: since the recording began.
        step: in which optimizer step, counted from 0; None outside all.
        moment: the exact place in the trace, for `Run.held`: several events may share a time.
    """

    nbytes: int
    time_s: float
    step: int | None
    moment: Moment

    def __str__(self) -> str:
        return f"{as_size(self.nbytes)} at {self.time_s:.3f} s" + ("" if self.step is None else f", in step {self.step}")


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes over time: `pandas.DataFrame(curves.held, curves.time_s)` is a table of them.

    Attributes:
        time_s: float64 [points], ascending, since the recording began; a level holds until the next point.
        held: group -> int64 [points], in bytes.
    """

    time_s: NDArray[np.float64]
    held: dict[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: what it was, of which unit, from when to when in seconds since the recording began, the bytes
    it moved, and the number of its thread; of what a device's stream did its lane, "" otherwise."""

    what: str
    key: str
    begin_s: float
    end_s: float
    nbytes: int
    thread: int
    lane: str = ""


class Run:
    """One rank of a recorded run; a context manager that closes its file.

    Attributes:
        path: the trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.path = trace.path
        self._trace = trace
        self._closed = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, rank: int | None = None) -> Run:
        """See `zprof.open`."""
        where = Path(path)
        if rank is not None:
            return cls(Trace.open(paths_of([rank], [where])[0]))
        members = members_of([where])
        if len(members) > 1:
            first = members[0].header.rank
            raise TraceError(f"{where}: expected one rank, found {len(members)}; choose one, such as rank={first}")
        return cls(Trace.open(members[0].path))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; after that, only what its header holds can be read."""
        self._closed = True
        self._trace.close()

    def __repr__(self) -> str:
        return f"<zprof.Run {str(self.path)!r}: rank {self.rank} of {self.world}, level {self.level}>"

    # What ran.

    @property
    def rank(self) -> int:
        """The rank of the process that was recorded."""
        return self._trace.header.rank

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self._trace.header.world

    @property
    def level(self) -> str:
        """The level it was recorded at: "events", "alloc", "stack" or "ops"."""
        return self._trace.level

    @property
    def device(self) -> str:
        """The compute device, such as "cpu" or "cuda:0"."""
        return self._trace.device

    @property
    def host(self) -> str:
        """The name of the machine that it ran on."""
        return self._trace.header.host

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line."""
        return tuple(self._trace.header.argv)

    @property
    def simulated(self) -> str:
        """The hardware of a simulation; "" for a real run."""
        return self._trace.header.simulated

    @property
    def duration_s(self) -> float:
        """Seconds that the recording covers."""
        return (self._ledger.end_ns - self._ledger.begin_ns) / 1e9

    @property
    def damage(self) -> str | None:
        """Which part of the file could not be read, in one line; None if all of it was."""
        return self._ledger.damage

    @property
    def not_recorded(self) -> list[str]:
        """What the figures do not include, and why, one line each."""
        return list(self._analysis.covered.lines())

    @property
    def children(self) -> list[Path]:
        """The traces of child processes, in the order they began; from ``zprof run --children record``."""
        return [child.path for child in recorded_children(self._trace)]

    # Memory.

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers on which anything was held: some of "device", "host" and "disk"."""
        return self._ledger.tiers

    def peak(self, tier: str = "device", category: str | None = None, *, step: int | None = None) -> Peak | None:
        """Return when ``tier`` held the most: of ``category`` or in total, in the whole run or within a step, counted from 0.

        Only what was recorded counts, see `not_recorded`; None if that is nothing.

        Raises:
            ValueError: there is no such tier, category or step.
        """
        _known("tier", tier, TIERS)
        if category is not None:
            _known("category", category, CATEGORIES)
        found = self._analysis.covered.place(category, tier) if category is not None else None
        if found is not None or not self._analysis.covered.anything(tier):
            return None
        if step is None:
            moment = self._ledger.peak(tier, category)
        else:
            count = self._analysis.steps.count
            if not 0 <= step < count:
                raise ValueError(f"step: expected one of the {count} recorded, counted from 0, found {step}")
            begin_ns, end_ns = self._analysis.steps.issued[step].tolist()
            moment = self._ledger.peak_between(tier, begin_ns, end_ns, category)
        return Peak(moment.nbytes, self._seconds(moment.time_ns), self._analysis.steps.at(moment.time_ns), moment)

    def held(self, when: float | Peak | None = None, *, by: By = "category", tier: str = "device") -> dict[str, int]:
        """Return the bytes of each group on ``tier``, the largest first, without groups that held nothing or were not recorded.

        Args:
            when: a peak, or seconds since the recording began; None is the peak of ``tier``.
            by: "category", "module", "unit", "tier", "rank", or, if recorded at level "stack", "line".
        Raises:
            ValueError: there is no such tier or way to group.
            TraceError: no line was recorded.
        """
        self._check(tier, by)
        if when is None:
            moment: Moment | int = self._ledger.peak(tier)
        elif isinstance(when, Peak):
            moment = when.moment
        else:
            moment = self._ledger.begin_ns + round(when * 1e9)
        return self._ledger.table(moment, by, tier)

    def curves(self, *, by: By = "category", tier: str = "device", points: int = 2000) -> Curves:
        """Return the bytes of each group on ``tier`` over time, at about ``points`` points, including the peak.

        Raises:
            ValueError: there is no such tier or way to group.
            TraceError: no line was recorded.
        """
        self._check(tier, by)
        drawn = self._ledger.curves(by, tier, points)
        return Curves((drawn.time_ns - self._ledger.begin_ns) / 1e9, drawn.levels)

    @property
    def sampled(self) -> list[str]:
        """The names of sampled quantities, such as "rss"."""
        return self._ledger.sampled()

    def samples(self, what: str, points: int = 2000) -> dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Return key -> (seconds since the recording began, values) of a sampled quantity; {} if it was not sampled."""
        found = self._ledger.samples(what, points)
        return {key: ((time_ns - self._ledger.begin_ns) / 1e9, values) for key, (time_ns, values) in found.items()}

    # Time.

    @property
    def steps(self) -> NDArray[np.float64]:
        """Begin and end of each optimizer step, float64 [steps, 2] in seconds since the recording began.

        Without zhooks, the first step covers only its update.
        """
        steps = self._analysis.steps
        return (steps.bounds[: steps.count] - self._ledger.begin_ns) / 1e9

    def spans(self, *whats: str) -> Iterator[Span]:
        """Yield spans in the order they began: those with these names, or patterns such as "wait *"; all if none is given.

        Spans that had not ended when the recording did are left out. Spans on a stream of the device have the times of that
        stream; when the host queued them are separate spans, such as "queued gather".
        """
        table, lanes = self._analysis.table.of(*whats or ("*",)), self._analysis.lanes
        columns = (table.what, table.key, table.begin_ns, table.end_ns, table.nbytes, table.thread)
        for what, key, begin_ns, end_ns, nbytes, thread in zip(*(column.tolist() for column in columns), strict=True):
            names = table.strings[what], table.strings[key]
            times = self._seconds(begin_ns), self._seconds(end_ns)
            yield Span(*names, *times, nbytes, thread & (FIRST_LANE - 1), lanes.get(thread, ""))

    def growth(self) -> tuple[Grown, ...] | None:
        """Return what held more after each step than after the previous one, the fastest first: by line if recorded at level
        "stack", else by module. None if it was not recorded, see `unseen["growth.bytes_per_step"]`."""
        return None if isinstance(self._analysis.grown, Unseen) else self._analysis.grown

    def computed(self) -> Computed | None:
        """Return what steps computed: FLOPs by module, batches, and, with `Computed.on`, the share of a hardware profile's
        peak. None if it was not recorded, see `unseen["flops.per_step"]`."""
        return None if isinstance(self._analysis.computed, Unseen) else self._analysis.computed

    def operators(self) -> Operators | None:
        """Return the time that steps spent in operators, by operator, kernel and module. None if no operators were recorded,
        see `unseen["ops.self_ms"]`."""
        return None if isinstance(self._analysis.operators, Unseen) else self._analysis.operators

    def ops(self) -> dict[str, NDArray[Any]]:
        """Return every recorded operator, kernel, copy, runtime call and module's forward: `pandas.DataFrame(run.ops())`.

        Columns of equal length; {} if none was recorded, see `unseen["ops.self_ms"]`:
            name, kind, module, pass, where, line: strings; "" if there is none. ``where`` is the thread or device.
            step: counted from 0, -1 outside. window, stream: numbers; -1 for no stream.
            begin_s: since the recording began. duration_s, self_s (without what ran inside), device_s (of what it launched).
            parent, cause: rows: what it ran inside, and what launched a kernel or created a backward node; -1 for none.
        """
        ran = self._analysis.operators
        if isinstance(ran, Unseen):
            return {}
        found = columns(ran)
        begin = (found.pop("begin_ns") - self._ledger.begin_ns) / 1e9
        seconds = {f"{name}_s": found.pop(f"{name}_ns") / 1e9 for name in ("duration", "self", "device")}
        return {"begin_s": begin, **seconds, **found}

    # In all.

    @cached_property
    def measures(self) -> dict[str, float]:
        """The measures of ``zprof check`` that were recorded, by name; `unseen` has the others."""
        return {name: value for name, value in self._measured.items() if not isinstance(value, Unseen)}

    @cached_property
    def unseen(self) -> dict[str, str]:
        """The measures that were not recorded, and why."""
        return {name: value.why for name, value in self._measured.items() if isinstance(value, Unseen)}

    @cached_property
    def _read(self) -> Analysis:
        return Analysis.of(self._trace, spans=None)

    @property
    def _analysis(self) -> Analysis:
        if self._closed:
            raise TraceError(f"{self.path}: expected an open run, found a closed one; use it inside its `with` block")
        return self._read

    @property
    def _ledger(self) -> Ledger:
        return self._analysis.ledger

    @cached_property
    def _measured(self) -> dict[str, Value]:
        return measures(self._analysis)

    def _check(self, tier: str, by: By) -> None:
        _known("tier", tier, TIERS)
        _known("by", by, BYS)
        if by == "line":
            lines_recorded(self._trace)

    def _seconds(self, time_ns: int) -> float:
        return (time_ns - self._ledger.begin_ns) / 1e9


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
