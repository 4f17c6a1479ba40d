"""Which cases of a parametrised test run by default where every case starts ranks, and the rest of which is slow.

conftest.py marks cases by ``default``; test_selection.py holds the whole suite to what a default run owes.
It knows no test by name, and looks at nothing but parameters: a product of tiers, stages and worlds may grow without
the default run growing with it.

Note: [What a default run owes]
Every value of every factor, and every value on two ranks where it ever meets two: the configuration that most people train in.
Of worlds those below four, and four where the test has no case on two: a mesh of two axes. What holds on two ranks and on four
is shown on four by the parity matrix, which has every stage at every world, and by a run of the slow cases. A default run
chooses few cases that hold all that; a test that starts no ranks is cheap, and runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pytest

#: Of a case: its parameters by name, as text where they cannot be compared.
Row = Mapping[str, Hashable]
#: A set of (factor, value), one or two, that some case must have.
Fact = frozenset[tuple[str, Hashable]]

MAIN_WORLD = 2
#: More ranks cost more than they show where there are cases on two.
LARGEST_WORLD = 3
#: All that this session has collected, before any of it is deselected.
COLLECTED = pytest.StashKey[list[pytest.Item]]()
#: What the name of every case on four ranks holds.
FOUR_RANKS = "world4"


def starts_ranks(item: pytest.Item) -> bool:
    """Whether this is a case of several that asks for a pool of ranks."""
    return hasattr(item, "callspec") and "ranks" in item.fixturenames and "ranks" not in item.callspec.params  # type: ignore[attr-defined]


def in_matrix(name: str) -> bool:
    """Whether a test of this name has its every world in a default run."""
    return name.startswith("tests/parity/")


def row_of(params: Mapping[str, Any]) -> dict[str, Hashable]:
    """The factors of one case; a parameter that is a mapping of choices is a factor for each of them."""
    row: dict[str, Hashable] = {}
    for name, value in params.items():
        row |= {key: _plain(one) for key, one in value.items()} if name == "chosen" else {name: _plain(value)}
    return row


def owed(row: Row) -> set[Fact]:
    """What this case shows of that which a default run must show."""
    facts = [{choice} for choice in row.items()]
    if row.get("world") == MAIN_WORLD:
        facts += [{("world", MAIN_WORLD), choice} for choice in row.items()]
    return {frozenset(fact) for fact in facts}


def owing(rows: Sequence[Row], *, every_world: bool) -> Callable[[Row], set[Fact]]:
    """What each case shows of that which is owed of a test with these cases; see Note [What a default run owes]."""
    if every_world or all(row.get("world") != MAIN_WORLD for row in rows):
        return owed
    return lambda row: {fact for fact in owed(row) if not any(map(_large, fact))}


def _large(choice: tuple[str, Hashable]) -> bool:
    name, value = choice
    return name == "world" and isinstance(value, int) and value > LARGEST_WORLD


def covering(rows: Sequence[Row], wanted: Callable[[Row], set[Fact]] = owed) -> list[int]:
    """The places of few rows that show all that any row shows, in order; the same ones every time.

    Greedy: the row with most that is still missing comes next, the main configuration first among equals.
    """
    shown = [wanted(row) for row in rows]
    missing = set().union(*shown)
    places: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda place: (len(shown[place] & missing), *_main(rows[place]), -place))
        places.append(best)
        missing -= shown[best]
    return sorted(places)


def _main(row: Row) -> tuple[bool, bool]:
    return row.get("world") == MAIN_WORLD, row.get("stage") == 3


def _plain(value: Any) -> Hashable:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
