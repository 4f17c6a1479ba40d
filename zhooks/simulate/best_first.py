"""The search over policies: by bounds to the few that are worth a simulation, best first.  It knows nothing of candidates.

Note: [Search]
    A candidate's bound is what it takes and holds at least, from layouts and rates alone; its outcome is what a simulation
    finds.  What cannot fit by its bound is left out; of the rest the one of the least bound is simulated next, which may raise
    the bounds of others.  What only saves memory beside one that fits (`Space.saves`) is never faster: it is expected to take
    that one's time, and as much more as its bound is higher.  The end is reached when nothing is below the slowest of the best
    ``keep`` by its bound or what is expected of it, or after ``most`` simulations; `Ranking.untried` then says what is not
    known of the first place.  Steps that differ by less than `TIE` are as quick as each other: the one that holds less comes
    first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from offload.text import as_size
from offload.tier import Tier

__all__ = ["Bound", "Limits", "Memory", "Outcome", "Ranking", "Space", "Tried", "search"]

#: Differences below this share of a step are no reason to choose.
TIE = 0.005
#: What is expected to need no more than this share above a limit may fit after all.
_DOUBT = 0.03

C = TypeVar("C")
_Given = TypeVar("_Given", contravariant=True)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a rank on each tier."""

    device: int
    host: int
    disk: int

    def on(self, tier: Tier) -> int:
        found: int = getattr(self, tier.value)
        return found


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that a rank may use on each tier.

    Attributes:
        one_memory: the device's memory is the host's (a CPU), and ``host`` bounds both together.
    """

    device: int
    host: int
    disk: int
    one_memory: bool = False

    def needs(self, memory: Memory) -> list[tuple[str, int, int]]:
        """Name, bytes needed and bytes there, of each memory that is one of its own."""
        if self.one_memory:
            return [("device and host", memory.device + memory.host, self.host), ("disk", memory.disk, self.disk)]
        return [(tier.value, memory.on(tier), getattr(self, tier.value)) for tier in Tier]

    def exceeded(self, memory: Memory) -> list[str]:
        """Of each tier that is too small, what is needed and what is there."""
        return [f"{name} {as_size(need)} of {as_size(limit)}" for name, need, limit in self.needs(memory) if need > limit]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a candidate takes and holds at least.

    Attributes:
        seconds: of a step.
        traffic: seconds of all transfers together, hidden or not: which of equal bounds is tried first.
        expected: bytes of the device by an estimate, which may be wrong either way: it only says what is tried first.
    """

    seconds: float
    traffic: float
    memory: Memory
    expected: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation found.

    Attributes:
        refused: why attaching failed; its time and memory are then nothing.
        least: it takes no less than these seconds; its memory is known, and is more than there is.
    """

    seconds: float
    memory: Memory
    refused: str = ""
    least: bool = False


class Space(Protocol[_Given]):
    """What the search asks of candidates."""

    def bound(self, candidate: _Given) -> Bound:
        """Never above the outcome; it may grow with every evaluation.  Infinite seconds: it is known to be impossible."""

    def saves(self, candidate: _Given, beside: _Given) -> bool:
        """It differs from the other only in what saves memory and takes no less time."""

    def evaluate(self, candidate: _Given) -> Outcome:
        """What it comes to."""


@dataclass(frozen=True, slots=True)
class Tried(Generic[C]):
    """A candidate and what is known of it.

    Attributes:
        seconds: of a step; of one that was not simulated, at least.
        why: why it does not fit; empty where it does.
    """

    candidate: C
    seconds: float
    memory: Memory
    simulated: bool
    why: str = ""


@dataclass(slots=True)
class Ranking(Generic[C]):
    """What a search found.

    Attributes:
        fits: the quickest first.
        unfit: the quickest first, by what is known of them.
        untried: bounds of those that could be among the best for all that is known.
        slower: how many were left out because their bound is no better than the best, or because they only save memory.
        lasted: nothing had fitted, and what needs the least was tried.
        stopped: by an interrupt, before its end.
    """

    fits: list[Tried[C]] = field(default_factory=list)
    unfit: list[Tried[C]] = field(default_factory=list)
    untried: list[Tried[C]] = field(default_factory=list)
    slower: int = 0
    simulations: int = 0
    lasted: bool = False
    stopped: bool = False

    def ordered(self) -> Ranking[C]:
        """The same in its final order, ties by memory."""
        self.fits.sort(key=lambda each: each.seconds)
        quick = [each for each in self.fits if each.seconds <= self.fits[0].seconds * (1 + TIE)]
        quick.sort(key=lambda each: each.memory.device + each.memory.host + each.memory.disk)
        self.fits[: len(quick)] = quick
        self.unfit.sort(key=lambda each: each.seconds)
        return self

    def joined(self, other: Ranking[C]) -> Ranking[C]:
        """What both found."""
        return Ranking(
            [*self.fits, *other.fits], [*self.unfit, *other.unfit], [*self.untried, *other.untried],
            self.slower + other.slower, self.simulations + other.simulations, stopped=self.stopped or other.stopped,
        ).ordered()  # fmt: skip

    @property
    def gap(self) -> float:
        """By how much of the best's time an untried one might be quicker, at the most."""
        if not self.fits or not self.untried:
            return 0.0
        best = self.fits[0].seconds
        return max(0.0, 1 - min(each.seconds for each in self.untried) / best)


def search(
    space: Space[C],
    candidates: Iterable[C],
    limits: Limits,
    *,
    keep: int = 5,
    most: int = 10,
    before: Ranking[C] | None = None,
) -> Ranking[C]:
    """The best of these candidates; see Note [Search].

    Args:
        keep: how many to find.
        before: what others were found to be: only what could be among the best beside them is tried.
        most: simulations, with those of ``before``; where nothing has fitted by then, one more of what is expected to need
            the least of the device.
    """
    found, left = Ranking[C]() if before is None else replace(before, lasted=False), list(candidates)
    while left:
        bounds = [space.bound(each) for each in left]
        excluded = [limits.exceeded(bound.memory) for bound in bounds]
        for each, bound, why in zip(left, bounds, excluded, strict=True):
            if why:
                found.unfit.append(Tried(each, bound.seconds, bound.memory, False, "needs at least " + ", ".join(why)))
        known = [(each, bound) for each, bound, why in zip(left, bounds, excluded, strict=True) if not why]
        # Bounds only grow: what is no better than the slowest of the best never will be.
        if len(found.fits) >= keep:
            slowest = found.fits[keep - 1].seconds
            ahead = [each for each in known if each[1].seconds < slowest]
            found.slower, known = found.slower + len(known) - len(ahead), ahead
        left = [each for each, _ in known]
        chosen = _next(space, known, limits, found, keep, most)
        if chosen is None:
            break
        try:
            outcome = space.evaluate(chosen)
        except KeyboardInterrupt:
            found.stopped = True
            break
        left.remove(chosen)
        found.simulations += 1
        short = limits.exceeded(outcome.memory)
        if outcome.refused:
            bound = space.bound(chosen)
            found.unfit.append(Tried(chosen, bound.seconds, bound.memory, True, outcome.refused))
        elif short:
            needs = "needs " + ", ".join(short)
            found.unfit.append(Tried(chosen, outcome.seconds, outcome.memory, not outcome.least, needs))
        else:
            found.fits.append(Tried(chosen, outcome.seconds, outcome.memory, True))
            found.fits.sort(key=lambda each: each.seconds)
    best = found.fits[:keep]
    for each in left:
        bound = space.bound(each)
        saves = any(space.saves(each, other.candidate) for other in found.fits)
        if not best or (bound.seconds < best[0].seconds and not saves):
            found.untried.append(Tried(each, bound.seconds, bound.memory, False))
        else:
            found.slower += 1
    return found.ordered()


def _next(
    space: Space[C], known: Sequence[tuple[C, Bound]], limits: Limits, found: Ranking[C], keep: int, most: int
) -> C | None:
    """What to simulate next; None where nothing is worth it."""
    known = [each for each in known if each[1].seconds < math.inf]
    hopeful = [each for each in known if each[1].expected <= limits.device * (1 + _DOUBT)]
    if not found.fits and (not hopeful or found.simulations >= most):
        if not known or found.lasted:
            return None
        # One more, of what is expected to need the least: if that does not fit, what does is not known.
        found.lasted = True
        return min(known, key=lambda each: max(each[1].expected, each[1].memory.device))[0]
    if not hopeful or found.simulations >= most:
        return None
    beside = [(each, space.bound(each.candidate).seconds) for each in found.fits]

    def expected(candidate: C, bound: Bound) -> float:
        # Of what only saves memory beside others their time, and by how much its bound is above theirs.
        saves = [(each.seconds, least) for each, least in beside if space.saves(candidate, each.candidate)]
        return max((took + max(0.0, bound.seconds - least) for took, least in saves), default=bound.seconds)

    # Of equal ones the first: the order of the space is the order of preference.
    ahead = [(each, expected(each, bound), bound.traffic) for each, bound in hopeful]
    chosen, seconds, _ = min(ahead, key=lambda each: each[1:])
    return None if len(found.fits) >= keep and seconds >= found.fits[keep - 1].seconds else chosen
