"""Owns which stretches of a long run a timeline keeps in full: the steps people look for first.

`timeline` calls it when a run has more spans than a page holds. It decides an order only; `lanes` sees how many fit.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zprof.analysis.analysis import Analysis
    from zprof.show.pages.memory import Clock

__all__ = ["Window", "marked", "windows_of"]

#: Why it is kept, or "", and from when to when, in nanoseconds of the page.
Window = tuple[str, int, int]
_MOST_WINDOWS = 4096
_MOST_MARKED = 8


def windows_of(ranks: Sequence[tuple[Analysis, Clock]]) -> list[Window]:
    """Windows that do not overlap, the dearest first: of each rank the steps of the peaks, the one that waited longest, the
    slowest, the first two and the last, then the steps after those."""
    asked = [list(_asked(*rank)) for rank in ranks]
    found: list[Window] = []
    taken: list[tuple[int, int]] = []
    for place in range(max(map(len, asked), default=0)):
        for each in (windows[place] for windows in asked if place < len(windows)):
            # Steps of several ranks overlap: what one of them keeps in full is kept of all.
            at = bisect(taken, each[1:])
            before = at > 0 and taken[at - 1][1] > each[1]
            behind = at < len(taken) and taken[at][0] < each[2]
            if len(found) < _MOST_WINDOWS and not before and not behind and each[1] < each[2]:
                taken.insert(at, each[1:])
                found.append(each)
    return found


def marked(windows: Sequence[Window], tick_ns: int) -> list[dict[str, Any]]:
    """Those with a reason, as the page's buttons have them."""
    named = [window for window in windows if window[0]][:_MOST_MARKED]
    return [{"name": name, "begin": begin // tick_ns, "end": end // tick_ns} for name, begin, end in named]


def _asked(analysis: Analysis, clock: Clock) -> Iterator[Window]:
    import numpy as np

    ledger, steps, stalls = analysis.ledger, analysis.steps, analysis.stalls
    peaks = {tier: ledger.peak(tier).time_ns for tier in ledger.tiers}
    if not steps.count:
        around = (ledger.end_ns - ledger.begin_ns) // 200
        for tier, time_ns in peaks.items():
            yield f"peak of {tier}", time_ns - around + clock.shift_ns, time_ns + around + clock.shift_ns
        return
    bounds = steps.bounds
    rank = ledger.trace.header.rank
    of = f" of rank {rank}" if ledger.trace.header.world > 1 else ""
    # The steps stalls were counted over are the last ones of all.
    skipped = len(bounds) - len(stalls.per_step_ns)
    first: dict[int, str] = {}
    for tier, time_ns in peaks.items():
        first.setdefault(max(0, int(np.searchsorted(steps.issued[:, 0], time_ns, side="right")) - 1), f"peak of {tier}")
    if len(stalls.per_step_ns):
        first.setdefault(skipped + int(np.argmax(stalls.per_step_ns)), "longest waits")
        first.setdefault(skipped + int(np.argmax(steps.duration_ns[skipped:])), "slowest")
    first.setdefault(len(bounds) - 1, "last")
    first.setdefault(0, "first")
    first.setdefault(min(1, len(bounds) - 1), "second")
    for step, why in first.items():
        part = "" if step or steps.unseen is None else "the update of "
        yield f"{part}step {step}{of}, {why}", *(bounds[step] + clock.shift_ns).tolist()
    done = set(first)
    for away in range(1, max(1, _MOST_WINDOWS // max(1, len(first)))):
        for step in [step + away for step in first if step + away < len(bounds) and step + away not in done]:
            done.add(step)
            yield "", *(bounds[step] + clock.shift_ns).tolist()
