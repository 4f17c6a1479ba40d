"""From what a pass used to what the next one prefetches: the record, and the walk along it.

``runtime.py`` tells a ``Walk`` each use and does what it answers.  This room is pure: it knows unit numbers, never tensors,
streams or ranks, and it never launches anything.

Note: [One order on every rank]
    Gathers are launched in the order of the record.  A rank that skips a recorded unit still launches its gather when it
    comes past, and what is left when the pass ends; a use outside the record is answered with that unit alone and joins
    the record.  So a branch that only one rank takes costs a gather, never a mismatch, as long as the record is common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Path:
    """The recorded order of use of one way through the model (training forward, its backward, evaluation, a branch)."""

    name: str
    order: list[int] = field(default_factory=list)
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What to do at a use: launch these gathers in this order; units in ``window`` stay, other idle ones may go."""

    launch: tuple[int, ...]
    window: frozenset[int]


class Walk:
    """One pass along a path."""

    __slots__ = ("_cursor", "_depth", "_launched", "path")

    def __init__(self, path: Path, depth: int) -> None:
        self.path = path
        self._depth = depth
        self._cursor = 0
        self._launched = 0

    def use(self, number: int) -> Step:
        """Unit ``number`` is about to be used."""
        order = self.path.order
        if self._cursor and order[self._cursor - 1] == number:
            return Step((), frozenset((number, *self._ahead())))
        if not self.path.recorded:
            order.append(number)
            self._cursor = self._launched = len(order)
            return Step((number,), frozenset((number,)))
        try:
            found = order.index(number, self._cursor)
        except ValueError:
            order.insert(self._cursor, number)
            self._cursor += 1
            self._launched = max(self._launched + 1, self._cursor)
            return Step((number,), frozenset((number, *self._ahead())))
        until = min(len(order), found + 1 + self._depth)
        launch = tuple(order[self._launched : until]) if until > self._launched else ()
        self._launched = max(self._launched, until)
        self._cursor = found + 1
        return Step(launch, frozenset((number, *self._ahead())))

    def finish(self) -> tuple[int, ...]:
        """The pass ended: gathers of the record that this rank has not launched, which other ranks may wait for."""
        rest = tuple(self.path.order[self._launched :]) if self.path.recorded else ()
        self.path.recorded = True
        return rest

    def _ahead(self) -> list[int]:
        return self.path.order[self._cursor : min(self._launched, self._cursor + self._depth)]


def keep_gathered(order: Sequence[int], nbytes: Mapping[int, int], *, reshard: bool | str, budget: int | None) -> frozenset[int]:
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
