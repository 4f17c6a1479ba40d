"""Rows of choices in which any two values that can meet do: a covering array of strength two, the same one every time.

Tests whose product of choices is too large to run take their cases from it.  It knows nothing of what a choice means.

Source: AETG, Cohen et al., IEEE Transactions on Software Engineering 23(7), 1997; without its random candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product

__all__ = ["few_with_every_value", "pairs_of", "pairwise"]

Choice = tuple[str, Hashable]
Pair = frozenset[Choice]
Row = dict[str, Hashable]
Meet = Callable[[Choice, Choice], bool]


def pairwise(factors: Mapping[str, Sequence[Hashable]], may_meet: Meet) -> list[Row]:
    """Few rows with one value of each factor.

    Every pair of values of two factors that may meet is in some row, and no pair that may not.

    Raises:
        ValueError: a pair may meet, but in no row of the others' values that was found.
    """
    # Each pair is asked for again for every row that is tried.
    may_meet = cache(may_meet)
    missing = {
        frozenset(pair): None
        for one, other in combinations(factors, 2)
        for pair in product(_choices(factors, one), _choices(factors, other))
        if may_meet(*pair)
    }
    rows: list[Row] = []
    while missing:
        tried = (_row(factors, may_meet, pair, missing) for pair in missing)
        rows.append(max(tried, key=lambda row: len(pairs_of(row) & missing.keys())))
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of choices in a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def few_with_every_value(rows: Sequence[Row]) -> list[int]:
    """The places of few rows that have every value of every factor that any row has, in order."""
    missing = {choice for row in rows for choice in row.items()}
    places: list[int] = []
    while missing:
        places.append(max(range(len(rows)), key=lambda place: (len(rows[place].items() & missing), -place)))
        missing -= rows[places[-1]].items()
    return sorted(places)


def _choices(factors: Mapping[str, Sequence[Hashable]], factor: str) -> Iterator[Choice]:
    return ((factor, value) for value in factors[factor])


def _row(factors: Mapping[str, Sequence[Hashable]], may_meet: Meet, first: Pair, missing: Mapping[Pair, None]) -> Row:
    """A row with this pair in it, and at each factor the value that adds most of those that are missing."""
    row = dict(sorted(first, key=lambda choice: list(factors).index(choice[0])))
    for factor in factors:
        if factor in row:
            continue
        fitting = [choice for choice in _choices(factors, factor) if all(may_meet(choice, other) for other in row.items())]
        if not fitting:
            raise ValueError(f"no {factor} may meet {row}")

        def adds(choice: Choice) -> int:
            return sum(frozenset({choice, other}) in missing for other in row.items())

        row[factor] = max(fitting, key=adds)[1]
    return {factor: row[factor] for factor in factors}
