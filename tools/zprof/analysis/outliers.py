"""Owns which ranks stand out of a run: by robust distance from the median rank, in pace, waiting and memory.

`zprof report` and `zprof timeline` ask it which of many ranks to show first. It reads no trace, and takes what was kept of each
rank; a figure that a rank's recording did not see is no figure of that rank.

Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993): the modified z-score and its bound of 3.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from zprof.analysis.ranks import SLOW
from zprof.rows import TIERS

if TYPE_CHECKING:
    from zprof.analysis.ranks import Lane

__all__ = ["MANY", "Distance", "Figure", "Odd", "Spread", "deviations", "distances", "figures_of", "spread"]

#: More ranks than this are shown by those that stand out.
MANY = 16
#: The score from which a rank stands out.
ODD = 3.5
#: Of a normal distribution the median distance from the median is this share of the standard deviation.
_NORMAL = 1.4826
#: Ranks that are all but equal differ by this share of the figure, at least, before that is counted.
_LEAST = 0.01


@dataclass(frozen=True, slots=True)
class Figure:
    """What ranks are compared in.

    Attributes:
        name: "step", "own work", "waiting", or a tier's peak, such as "device peak".
        tier: whose peak; "" of times.
        values: rank -> nanoseconds or bytes, of the ranks that have it.
        scale: what a difference is large or small beside: of times the median step, of bytes their own median.
    """

    name: str
    tier: str
    values: dict[int, int]
    scale: float


@dataclass(frozen=True, slots=True)
class Odd:
    """One figure in which a rank stands out; ``score`` is how many robust deviations it is from the median."""

    figure: str
    value: int
    median: int
    score: float


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a rank is from the others: the largest score of any figure, and the figures in which it stands out."""

    rank: int
    score: float
    odds: tuple[Odd, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over ranks: how many have it, the median, and between which values all are."""

    figure: str
    count: int
    median: int
    low: int
    high: int


def figures_of(lanes: Sequence[Lane]) -> list[Figure]:
    """What the ranks can be compared in; a figure that no rank has is left out."""
    found = [
        ("step", "", {lane.header.rank: lane.step_ns for lane in lanes}),
        ("own work", "", {lane.header.rank: lane.work_ns for lane in lanes}),
        ("waiting", "", {lane.header.rank: lane.wait_ns for lane in lanes}),
        *((f"{tier} peak", tier, {lane.header.rank: lane.peaks.get(tier) for lane in lanes}) for tier in TIERS),
    ]
    steps = [lane.step_ns for lane in lanes if lane.step_ns is not None]
    pace = float(median(steps)) if steps else 0.0
    figures = []
    for name, tier, mixed in found:
        values = {rank: value for rank, value in mixed.items() if value is not None}
        if any(values.values()):
            own = float(median(values.values()))
            # Of a tier that most ranks do not use, what one rank holds is large beside that.
            figures.append(Figure(name, tier, values, (own if tier else pace) or float(max(values.values()))))
    return figures


def distances(figures: Sequence[Figure], ranks: Sequence[int]) -> list[Distance]:
    """Every rank, the one farthest from the others first; those that stand out come before all others."""
    scores: dict[int, float] = dict.fromkeys(ranks, 0.0)
    odds: dict[int, list[Odd]] = {rank: [] for rank in ranks}
    for figure in figures:
        middle = int(median(figure.values.values()))
        for rank, apart in deviations(figure).items():
            odd = Odd(figure.name, figure.values[rank], middle, abs(apart))
            scores[rank] = max(scores[rank], odd.score)
            if odd.score > ODD and abs(odd.value - odd.median) > (SLOW - 1) * figure.scale:
                odds[rank].append(odd)
    found = [Distance(rank, scores[rank], tuple(sorted(odds[rank], key=lambda odd: -odd.score))) for rank in ranks]
    return sorted(found, key=lambda each: (not each.odds, -each.score, each.rank))


def deviations(figure: Figure) -> dict[int, float]:
    """How many robust deviations each rank is above the median, or below it where that is negative."""
    middle = median(figure.values.values())
    apart = median(abs(value - middle) for value in figure.values.values())
    unit = max(_NORMAL * apart, _LEAST * figure.scale)
    return {rank: (value - middle) / unit for rank, value in figure.values.items()}


def spread(figure: Figure, without: Sequence[int] = ()) -> Spread | None:
    """The figure over all ranks but these; None where no other has it."""
    left = set(without)
    values = [value for rank, value in figure.values.items() if rank not in left]
    return Spread(figure.name, len(values), int(median(values)), min(values), max(values)) if values else None
