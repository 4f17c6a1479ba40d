"""Which cases of a parametrised test run by default where every case starts ranks, and the rest of which is slow.

conftest.py marks cases by ``default``; test_selection.py holds the whole suite to what a default run owes.
It knows no test by name, and looks at nothing but parameters: a product of tiers, stages and worlds may grow without
the default run growing with it.

Note: [What a default run owes]
Of a test, one case, on two ranks where it has any: the configuration that most people train in; and every value of its own
factors, on two ranks where they ever meet two. World, stage, tier and transport are factors of most tests: of these, each
value in a file, and each on two ranks, by whichever of its tests. Of worlds those below four, and four where a test has
nothing else: a mesh of two axes. What holds on two ranks and on four is shown on four by the parity matrix, which owes all
of this by test, and by a run of the slow cases. A default run chooses few cases that hold all that; a test that starts no
ranks is cheap, and runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

#: Of a case: its parameters by name, as text where they cannot be compared.
Row = Mapping[str, Hashable]
#: That a test runs, or that a value of a factor is met by it or in its file; alone, or on two ranks.
Fact = tuple[Hashable, ...]

MAIN_WORLD = 2
#: More ranks cost more than they show where there are cases on two.
LARGEST_WORLD = 3
#: What a test seldom has to itself: how the model that it trains is trained.
SHARED = frozenset({"world", "stage", "tier", "transport"})
#: The fixtures that start ranks, and the world of those that have always one; of ``ranks`` it is a parameter.
POOLS: Mapping[str, int | None] = {"ranks": None, "ranks2": 2, "ranks1": 1}
#: All that this session has collected, before any of it is deselected.
COLLECTED = pytest.StashKey[list[pytest.Item]]()
#: What the name of every case on four ranks holds.
FOUR_RANKS = "world4"


class Case(NamedTuple):
    """One case of a parametrised test."""

    test: str
    """The test's identifier without its parameters: "tests/a/test_b.py::test_c"."""
    row: Row


def starts_ranks(item: pytest.Item) -> bool:
    """Whether this is a case of several that asks for a pool of ranks."""
    return hasattr(item, "callspec") and any(
        pool in item.fixturenames and pool not in item.callspec.params  # type: ignore[attr-defined]
        for pool in POOLS
    )


def case_of(item: pytest.Function) -> Case:
    """What is known of the choice of one that ``starts_ranks``."""
    row = row_of(item.callspec.params)
    for pool, world in POOLS.items():
        if world is not None and pool in item.fixturenames:
            row.setdefault("world", world)
    return Case(item.nodeid.partition("[")[0], row)


def file_of(test: str) -> str:
    return test.partition("::")[0]


def in_matrix(test: str) -> bool:
    """Whether this test has its every world in a default run, and shares no factor with others."""
    return test.startswith("tests/parity/test_matrix.py")


def row_of(params: Mapping[str, Any]) -> dict[str, Hashable]:
    """The factors of one case; a parameter that is a mapping of choices is a factor for each of them."""
    row: dict[str, Hashable] = {}
    for name, value in params.items():
        row |= {key: _plain(one) for key, one in value.items()} if name == "chosen" else {name: _plain(value)}
    return row


def owed(case: Case) -> set[Fact]:
    """What this case shows of that which a default run must show; see Note [What a default run owes]."""
    whole = in_matrix(case.test)
    facts: list[Fact] = [(case.test,)]
    for name, value in case.row.items():
        if whole or not _large(name, value):
            facts.append((file_of(case.test) if name in SHARED and not whole else case.test, name, value))
    on_two = [(*fact, "on two ranks") for fact in facts] if case.row.get("world") == MAIN_WORLD else []
    return {*facts, *on_two}


def covering(cases: Sequence[Case], wanted: Callable[[Case], set[Fact]] = owed) -> list[int]:
    """The places of few cases that show all that any of them shows, in order; the same ones every time.

    Greedy: the case with most that is still missing comes next, the main configuration first among equals.
    """
    shown = [wanted(case) for case in cases]
    missing = set().union(*shown)
    places: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda place: (len(shown[place] & missing), *_main(cases[place].row), -place))
        places.append(best)
        missing -= shown[best]
    return sorted(places)


def _main(row: Row) -> tuple[bool, bool]:
    return row.get("world") == MAIN_WORLD, row.get("stage") == 3


def _large(name: str, value: Hashable) -> bool:
    return name == "world" and isinstance(value, int) and value > LARGEST_WORLD


def _plain(value: Any) -> Hashable:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
