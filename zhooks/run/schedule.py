"""From what a pass used to what the next one prefetches: the record, and the walk along it.

``runtime.py`` tells a ``Walk`` each use and does what it answers.  It is pure: it knows unit numbers, never tensors,
streams or ranks, and it never launches anything.

Note: [One order on every rank]
    Gathers are launched in the order of the path.  A rank that skips a unit still launches its gather when it comes past,
    and what is left when the pass ends.  A path starts as a guess (the order of registration, or the forward's reversed);
    after its first pass all ranks take over what rank 0 saw, completed by units whose use is still open: ranks may use
    different ones later.  A use the path does not hold is answered with that unit alone and joins the path.  One rank alone
    goes the way it went the last time.

Note: [Kept from pass to pass]
    What a budget leaves keeps units gathered from a forward to its backward, which needs the last ones first.  A forward
    without gradients keeps as many for the next one: generation goes the same way once a token, and gathers, or reads from a
    tier, only what does not fit.  Which units these are does not matter to it, so it keeps the last ones too; but frozen
    units as well, of which backward may need no parameter.  Without a budget it keeps none.

Note: [Ranks that differ]
    What a rank skips changes when it releases a unit that is used again, and so whether it gathers it again: alone.  Under
    ``[schedule] uneven`` a path has every unit once, and what was gathered stays until the pass ends: whatever a rank uses,
    and how often, its gathers are the path's, in the path's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scope:
    """A module a pass can begin at: its name, and the units that can be entered from it on: its own, then those below it in
    order of registration."""

    name: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the policy says about the schedule."""

    prefetch: int
    reshard: bool | str
    budget: int | None
    uneven: bool = False


@dataclass(slots=True)
class Path:
    """The order of use of one way through the model (training forward, its backward, evaluation, a branch)."""

    name: str
    order: list[int]
    recorded: bool = False
    used: frozenset[int] = field(default_factory=frozenset)
    #: Ranks may use other units, in other orders; see Note [Ranks that differ].
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What to do at a use: launch these gathers in this order; units in ``window`` stay, other idle ones may go.

    ``fetch``: the units after them, whose gathers will be launched next: what they send may be fetched from its tier.
    """

    launch: tuple[int, ...]
    window: frozenset[int]
    fetch: tuple[int, ...] = ()


class Walk:
    """One pass along a path."""

    __slots__ = ("_cursor", "_depth", "_launched", "last", "path", "used")

    def __init__(self, path: Path, depth: int) -> None:
        self.path = path
        self.used: list[int] = []
        self._depth = depth
        self._cursor = 0
        self._launched = 0
        #: The unit that was used last.
        self.last = -1

    def use(self, number: int) -> Step:
        """Unit ``number`` is about to be used."""
        order = self.path.order
        if number == self.last:
            return Step((), frozenset((number, *self._ahead())))
        self.last = number
        if not self.path.recorded:
            self.used.append(number)
        if self.path.uneven and number in order[: self._launched]:
            return Step((), frozenset((number, *self._ahead())))
        try:
            found = order.index(number, self._cursor)
        except ValueError:
            # Already launched units keep their place: this one comes before what is still to be launched.
            place = max(self._cursor, self._launched)
            order.insert(place, number)
            self._launched = place + 1
            if place == self._cursor:
                self._cursor += 1
            return Step((number,), frozenset((number, *self._ahead())))
        until = max(self._launched, min(len(order), found + 1 + self._depth))
        launch = tuple(order[self._launched : until])
        self._launched = until
        self._cursor = found + 1
        return Step(launch, frozenset((number, *self._ahead())), tuple(order[until : until + self._depth]))

    def finish(self) -> tuple[int, ...]:
        """The pass ended: gathers of the path that this rank has not launched, which other ranks may wait for."""
        rest = tuple(self.path.order[self._launched :])
        self._launched = len(self.path.order)
        return rest

    def launched(self, number: int) -> bool:
        """No gather of unit ``number`` is still to be launched."""
        return number not in self.path.order[self._launched :]

    def _ahead(self) -> list[int]:
        return self.path.order[self._cursor : min(self._launched, self._cursor + self._depth)]


class LoneWalk(Walk):
    """A pass of one rank, which waits for nobody: it goes the way of the last such pass, and launches nothing it skips."""

    __slots__ = ()

    def use(self, number: int) -> Step:
        order = self.path.order
        if number != self.last:
            self.last = number
            self.used.append(number)
            with suppress(ValueError):
                self._cursor = order.index(number, self._cursor) + 1
        window = (number, *order[self._cursor : self._cursor + self._depth])
        return Step(window, frozenset(window))

    def finish(self) -> tuple[int, ...]:
        self.path.order = self.used
        return ()

    def launched(self, number: int) -> bool:
        return True


def arrange(guess: Sequence[int], used: Sequence[int], open_: Set[int]) -> list[int]:
    """The order a path takes after its first pass: ``used``, and each unit of ``open_`` after its neighbour in the guess."""
    order = list(used)
    before: int | None = None
    for number in guess:
        if number not in order:
            if number not in open_:
                continue
            order.insert(order.index(before) + 1 if before is not None else 0, number)
        before = number
    return order


def backward_guess(forward: Sequence[int], around: Mapping[int, Set[int]]) -> list[int]:
    """The order a first backward is likely to use: the forward's reversed, each unit once, from its last use.

    ``around``: the units that run inside a unit's modules.  Such a unit is in use until the last of them has ended, so
    backward may need it before any of them.
    """
    order = list(dict.fromkeys(reversed(forward)))
    for number in [number for number in order if around.get(number)]:
        order.remove(number)
        inner = [place for place, other in enumerate(order) if other in around[number]]
        order.insert(inner[0] if inner else 0, number)
    return order


def keep_gathered(
    order: Sequence[int], nbytes: Mapping[int, int], *, reshard: bool | str, budget: int | None
) -> frozenset[int]:
    """The units that stay gathered between forward and backward.

    ``reshard`` is the policy's ``reshard_after_forward``: False keeps all; True keeps none; "auto" keeps, from the end of
    the forward (backward needs those first), as many as fit in ``budget`` bytes of gathered parameters, and without a
    budget the very last one, which backward would gather again at once.
    """
    if reshard is False:
        return frozenset(order)
    if reshard is True or not order:
        return frozenset()
    if budget is None:
        return frozenset(order[-1:])
    kept: set[int] = set()
    used = 0
    for number in reversed(order):
        if number in kept:
            continue
        if used + nbytes[number] > budget:
            break
        kept.add(number)
        used += nbytes[number]
    return frozenset(kept)
