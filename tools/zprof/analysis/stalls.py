"""Owns exposed time: how long the training threads stood still, in which step, for which unit, and what for.

Reports, measures and pages ask it. Time that several waits share is counted once, for the one that began first; it never
counts what a background thread waited for as a span of another name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zprof.analysis.intervals import Ints, Pieces, overlaps, portions
from zprof.analysis.spans import SpanTable
from zprof.analysis.steps import Steps

__all__ = ["DATA", "SETTINGS", "WHATS", "Stall", "Stalls", "stalls"]

#: The spans that are waits.
WHATS = ("wait *",)
#: That for a data loader, whose time is the rank's own: it keeps the other ranks waiting.
DATA = "wait data"

#: What a wait is for -> the keys of a policy that bear on it, or the arguments of the loader, the likeliest first.
SETTINGS = {
    "gather": ("[schedule] prefetch", "[schedule] reshard_after_forward", "[precision] param"),
    "gather activation": ("[schedule] prefetch", "[activation] partition", "[activation] min_bytes"),
    "fetch": ("[schedule] prefetch", "[parameter] tier", "[optimizer] tier", "[disk] threads"),
    "fetch optimizer": ("[optimizer] tier", "[disk] threads"),
    "reduce": ("[schedule] max_reductions", "[precision] reduce"),
    "stash": ("[activation] min_bytes", "[activation] keep"),
    "unstash": ("[activation] keep", "[activation] checkpoint"),
    "update": ("[optimizer] overlap", "[optimizer] kernel", "[optimizer] compute"),
    "data": ("num_workers", "persistent_workers", "prefetch_factor"),
}


#: Up to this number codes are counted in a table.
_DENSE = 1 << 20


@dataclass(frozen=True, slots=True)
class Stall:
    """What one unit made the run wait for, over the steps counted.

    Attributes:
        what: "gather", "fetch", "reduce", ...: the span's name without "wait".
        key: the unit or block.
        exposed_ns: counted once where waits overlap.
        count: waits that added to it.
        longest_ns: in one step; ``longest_step`` is that step's number in ``Stalls.steps``.
        inner, inner_ns: the other wait that filled most of it, e.g. "fetch" inside "gather"; "" and 0 for none.
    """

    what: str
    key: str
    exposed_ns: int
    count: int
    longest_ns: int
    longest_step: int
    inner: str = ""
    inner_ns: int = 0

    @property
    def settings(self) -> tuple[str, ...]:
        """The keys of a policy that bear on it."""
        if self.what == "fetch" and self.key.startswith("optimizer/"):
            return SETTINGS["fetch optimizer"]
        return SETTINGS.get(self.what, ())


@dataclass(frozen=True, slots=True)
class Stalls:
    """Exposed time by step and by unit; ``steps`` are those counted, ``per_step_ns`` belongs to them.

    Attributes:
        data_ns: of each step, what was waited for data loaders alone.
    """

    steps: Steps
    per_step_ns: Ints
    units: tuple[Stall, ...]
    data_ns: Ints

    @property
    def exposed_ns(self) -> int:
        return int(self.per_step_ns.sum())

    @property
    def share(self) -> float:
        """Of the time of the steps counted; 0 where there is none."""
        whole = self.steps.whole_ns
        return self.exposed_ns / whole if whole else 0.0

    @property
    def ns_per_step(self) -> float:
        return self.exposed_ns / len(self.per_step_ns) if len(self.per_step_ns) else 0.0

    def by_what(self) -> dict[str, int]:
        """Exposed nanoseconds by what was waited for."""
        sums: dict[str, int] = {}
        for unit in self.units:
            sums[unit.what] = sums.get(unit.what, 0) + unit.exposed_ns
        return sums


def stalls(table: SpanTable, steps: Steps) -> Stalls:
    """The exposed time of the steps of ``steps``; ``table`` holds the spans of `WHATS`."""
    waits = table.of(*WHATS)
    begin, end = portions(waits.begin_ns, waits.end_ns)
    which, step, shared = _met(begin, end, steps)
    per_step = np.zeros(len(steps.bounds), np.int64)
    np.add.at(per_step, step, shared)
    data = np.zeros(len(steps.bounds), np.int64)
    if not len(which):
        return Stalls(steps, per_step, (), data)
    of_data = waits.what[which] == (waits.strings.index(DATA) if DATA in waits.strings else -1)
    np.add.at(data, step[of_data], shared[of_data])
    # One number for what and key together: sorting pairs of numbers is many times as slow.
    codes = waits.what.astype(np.int64) * len(waits.strings) + waits.key
    units, member = _grouped(codes[which])
    exposed = _sums(member, shared, len(units))
    first = np.append(True, which[1:] != which[:-1])
    counts = np.bincount(member[first], minlength=len(units))
    cells, place = _grouped(member * len(steps.bounds) + step)
    in_step_ns = _sums(place, shared, len(cells))
    # Sorted by unit and then by time: the last of a unit is its worst step.
    order = np.lexsort((in_step_ns, cells // len(steps.bounds)))
    worst = order[np.searchsorted(cells[order] // len(steps.bounds), np.arange(len(units)), side="right") - 1]
    inner = _inner(waits, begin, end, steps)
    found = []
    for number, code in enumerate(units.tolist()):
        what, key = divmod(code, len(waits.strings))
        name, name_ns = inner.get(code, ("", 0))
        facts = (int(exposed[number]), int(counts[number]), int(in_step_ns[worst[number]]))
        in_step = int(cells[worst[number]] % len(steps.bounds))
        most = min(name_ns, facts[0])
        found.append(Stall(_named(waits.strings[what]), waits.strings[key], *facts, in_step, name, most))
    longest = tuple(sorted(found, key=lambda stall: (-stall.exposed_ns, stall.what, stall.key)))
    return Stalls(steps, per_step, longest, data)


def _named(what: str) -> str:
    return what.removeprefix("wait ")


def _grouped(codes: Ints) -> tuple[Ints, Ints]:
    """The codes there are, sorted, and for each row the place of its own."""
    most = int(codes.max()) if len(codes) else 0
    if most > max(_DENSE, len(codes)):
        units, member = np.unique(codes, return_inverse=True)
        return units, member.reshape(-1)
    # Counting is many times as fast as sorting.
    units = np.flatnonzero(np.bincount(codes, minlength=most + 1))
    place = np.zeros(most + 1, np.int64)
    place[units] = np.arange(len(units))
    return units, place[codes]


def _sums(member: NDArray[np.intp], values: Ints, count: int) -> Ints:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, member, values)
    return sums


def _met(begin: Ints, end: Ints, steps: Steps) -> Pieces:
    """As `overlaps`, without the pairs that share no time."""
    pieces = overlaps(begin, end, steps.bounds)
    real = pieces[2] > 0
    return pieces[0][real], pieces[1][real], pieces[2][real]


def _inner(waits: SpanTable, begin: Ints, end: Ints, steps: Steps) -> dict[int, tuple[str, int]]:
    """For each what and key, as one number, the other wait that filled most of its time, itself counted once."""
    outer, nested = np.flatnonzero(end > begin), np.flatnonzero(end == begin)
    if not len(outer) or not len(nested):
        return {}
    outer = outer[np.argsort(begin[outer], kind="stable")]
    which, _, shared = _met(*portions(waits.begin_ns[nested], waits.end_ns[nested]), steps)
    nested = nested[which]
    around = outer[np.maximum(np.searchsorted(begin[outer], waits.begin_ns[nested], side="right") - 1, 0)]
    count = len(waits.strings)
    rows = (waits.what[around].astype(np.int64) * count + waits.key[around]) * count + waits.what[nested]
    triples, member = _grouped(rows)
    most: dict[int, tuple[str, int]] = {}
    for triple, spent in zip(triples.tolist(), _sums(member, shared, len(triples)).tolist(), strict=True):
        code, other = divmod(triple, count)
        if code // count != other and spent > most.get(code, ("", 0))[1]:
            most[code] = (_named(waits.strings[other]), spent)
    return most
