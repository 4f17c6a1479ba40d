"""Owns the view of a run that is still being recorded: what its growing trace says now, and how that is drawn on a terminal.

``zprof run --live`` shows one while it waits, and ``zprof top`` asks `Follower` about the runs it finds. It only reads, and a
trace that cannot be read yet is simply not there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.text import as_duration, as_size
from zprof.analysis.coverage import NOT_MEASURED, coverage
from zprof.clock import now_ns
from zprof.rows import CATEGORIES, MOVES, TIERS, RowKind, TraceError, placement
from zprof.running.child import Child, Ending
from zprof.running.screen import Screen

if TYPE_CHECKING:
    from zprof.trace.columns import Rows
    from zprof.trace.reader import Trace

__all__ = ["Follower", "Glance", "watch"]

_REFRESH_S = 0.25
_LOOK_NS = 1_000_000_000
#: Bandwidths and waits are of this long before the last row.
_WINDOW_NS = 5_000_000_000
_MOST_UNITS = 6
_MOST_PENDING = 1 << 16


@dataclass(frozen=True, slots=True)
class Glance:
    """A run at its last row.

    Attributes:
        tiers: tier -> (bytes held now, the most that were held). places: (category, tier) -> bytes now.
        units: what holds most now, "category on tier of unit" -> bytes.
        moved: kind of transfer -> bytes a second over the last seconds. waited: share of that time somebody stood still; None
            on CUDA, where the host does not.
        samples: the last answer of each sampler, "rss" or "cuda allocated cuda:0" -> value.
        steps: optimizer steps so far, and step_ns from the end of the last but one to the end of the last.
    """

    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    places: dict[tuple[str, str], int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    waited: float | None = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    step_ns: int = 0
    elapsed_ns: int = 0


class Follower:
    """Reads what is new in one trace, each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace: Trace | None = None
        self._levels: dict[tuple[int, int], int] = {}
        self._stated: dict[tuple[int, int], int] = {}
        self._peaks = dict.fromkeys(TIERS, 0)
        self._totals = dict.fromkeys(TIERS, 0)
        self._samples: dict[str, int] = {}
        self._open: dict[tuple[int, int], list[int]] = {}
        self._closed: list[tuple[str, int, int, int]] = []
        self._steps, self._step_end_ns, self._step_ns = 0, 0, 0
        self._last_ns = 0

    def poll(self) -> Glance | None:
        """The run as it is now; None where there is no trace yet, or it is another run's."""
        from zprof.trace.reader import Trace

        try:
            if self.trace is None:
                self.trace = Trace.open(self.path)
            for rows in self.trace.more():
                self._take(rows)
        except TraceError:
            return None
        return self._glance(self.trace)

    def _take(self, rows: Rows) -> None:
        if len(rows):
            self._last_ns = max(self._last_ns, int(rows.time_ns.max()))
        self._take_levels(rows)
        self._take_spans(rows)

    def _take_levels(self, rows: Rows) -> None:
        assert self.trace is not None
        strings = self.trace.strings
        places = {int(what): placement(strings[what]) for what in np.unique(rows.what)}
        # Held bytes row by row: a chunk has few thousand, and the highest moment may be any of them.
        wanted = (rows.kind >= RowKind.COUNTER).nonzero()[0].tolist()
        kinds, whats, keys, sizes = (column.tolist() for column in (rows.kind, rows.what, rows.key, rows.nbytes))
        for at in wanted:
            place = places[whats[at]]
            if place is None:
                if kinds[at] == RowKind.COUNTER:
                    self._samples[f"{strings[whats[at]]} {strings[keys[at]]}".strip()] = sizes[at]
                continue
            series, tier = (whats[at], keys[at]), place[1]
            if kinds[at] == RowKind.COUNTER:
                # A level is what counters stated last and what storages hold, together.
                change = sizes[at] - self._stated.get(series, 0)
                self._stated[series] = sizes[at]
            else:
                change = sizes[at] if kinds[at] == RowKind.ALLOC else -sizes[at]
            self._levels[series] = self._levels.get(series, 0) + change
            self._totals[tier] += change
            self._peaks[tier] = max(self._peaks[tier], self._totals[tier])

    def _take_spans(self, rows: Rows) -> None:
        assert self.trace is not None
        strings = self.trace.strings
        for at in (rows.kind <= RowKind.END).nonzero()[0].tolist():
            what, key, when = int(rows.what[at]), int(rows.key[at]), int(rows.time_ns[at])
            begun = self._open.setdefault((what, key), [])
            if rows.kind[at] == RowKind.BEGIN:
                begun.append(when)
            elif begun:
                self._closed.append((strings[what], begun.pop(), when, int(rows.nbytes[at])))
                if strings[what] == "step":
                    self._steps += 1
                    self._step_ns = when - self._step_end_ns if self._step_end_ns else 0
                    self._step_end_ns = when
        since = self._last_ns - _WINDOW_NS
        self._closed = [span for span in self._closed if span[2] >= since][-_MOST_PENDING:]

    def _glance(self, trace: Trace) -> Glance:
        strings, elapsed = trace.strings, max(0, self._last_ns - trace.header.mono_ns)
        window = max(1, min(_WINDOW_NS, elapsed))
        covered = coverage(trace)
        moved: dict[str, float] = {}
        waited = 0
        for name, begin, end, nbytes in self._closed:
            if covered.queued(name) is not None:
                continue
            if name in MOVES and nbytes:
                moved[name] = moved.get(name, 0.0) + nbytes * 1e9 / window
            elif name.startswith("wait "):
                waited += end - max(begin, self._last_ns - window)
        places: dict[tuple[str, str], int] = {}
        units: dict[str, int] = {}
        for (what, key), nbytes in self._levels.items():
            place = placement(strings[what])
            if nbytes > 0 and place is not None:
                places[place] = places.get(place, 0) + nbytes
                units[f"{strings[what]} of {strings[key]}"] = nbytes
        largest = sorted(units.items(), key=lambda pair: -pair[1])[:_MOST_UNITS]
        tiers = {tier: (self._totals[tier], self._peaks[tier]) for tier in TIERS if self._peaks[tier]}
        share = None if covered.queued("wait") is not None else waited / window
        samples = dict(self._samples)
        return Glance(tiers, places, dict(largest), moved, share, samples, self._steps, self._step_ns, elapsed)


def watch(arguments: Sequence[str], path: Path) -> Ending:
    """Run `zprof.running.launch` and show its trace below what the script prints, on stderr."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    screen = Screen(console)
    follower, glance, looked_ns, began_ns = Follower(path), None, 0, now_ns()
    child = Child(arguments, screen.outputs)
    with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
        screen.show()
        ending = None
        while ending is None:
            ending = child.wait(_REFRESH_S)
            if now_ns() - looked_ns > _LOOK_NS:
                looked_ns = now_ns()
                found = follower.poll()
                # An older run's trace may lie there until the new one is begun.
                if found is not None and follower.trace is not None and follower.trace.header.mono_ns >= began_ns:
                    glance = found
                else:
                    follower = Follower(path)
            live.update(_drawn(glance, screen.unfinished), refresh=True)
        screen.close()
    return ending


def _drawn(glance: Glance | None, unfinished: str) -> Any:
    """A few lines: tiers by category, then steps, transfers, waits and the largest units."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    parts: list[Any] = [Text.from_ansi(unfinished)] if unfinished else []
    if glance is None:
        return Group(*parts, Text("zprof: waiting for the first rows", style="dim"))
    text = f"zprof: {as_duration(round(glance.elapsed_ns, -9))}"
    if glance.steps:
        text += f", {glance.steps} steps" + (f", the last {as_duration(glance.step_ns)}" if glance.step_ns else "")
    if "rss" in glance.samples:
        text += f", rss {as_size(glance.samples['rss'])}"
    if glance.waited is None:
        text += f", waits {NOT_MEASURED}"
    elif glance.waited >= 0.005:
        text += f", {glance.waited:.0%} of the time waited for transfers"
    parts.append(line(text, "bold"))
    for tier, (now, most) in glance.tiers.items():
        held = [(name, glance.places.get((name, tier), 0)) for name in CATEGORIES]
        of = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in held if nbytes)
        parts.append(line(f"  {tier:<7}{as_size(now):>10}  most {as_size(most):>10}  {of}"))
    if glance.moved:
        parts.append(line("  moves  " + ", ".join(f"{what} {as_size(int(speed))}/s" for what, speed in glance.moved.items())))
    if glance.units:
        largest = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in glance.units.items())
        parts.append(line(f"  most   {largest}", "dim"))
    return Group(*parts)
