"""The choice of cells: names, exclusions, and that the covering array covers.

pytest runs it.
It never trains anything.
"""

from __future__ import annotations

import pytest

from tests.parity.cells import FACTORS, Cell, cell_of, legal_pairs, pairs_of, pairwise, sample, why_excluded
from tests.support.zoo import ZOO

ROWS = pairwise(FACTORS, why_excluded)


def test_every_legal_pair_of_choices_is_in_the_covering_array() -> None:
    covered = set().union(*(pairs_of(row) for row in ROWS))
    assert set(legal_pairs(FACTORS, why_excluded)) <= covered


def test_no_row_of_the_covering_array_is_excluded() -> None:
    assert [row for row in ROWS if why_excluded(row)] == []


def test_the_covering_array_is_small_and_the_same_every_time() -> None:
    assert pairwise(FACTORS, why_excluded) == ROWS
    assert len(ROWS) <= 90


def test_a_pair_that_is_excluded_is_not_asked_for() -> None:
    rows = pairwise({"a": (1, 2), "b": (1, 2)}, lambda row: "no" if row == {"a": 1, "b": 1} else None)
    assert sorted((row["a"], row["b"]) for row in rows) == [(1, 2), (2, 1), (2, 2)]


def test_three_factors_of_two_need_four_rows() -> None:
    assert len(pairwise(dict.fromkeys("abc", (0, 1)), lambda row: None)) == 4


def test_a_name_says_the_whole_cell() -> None:
    assert [Cell.parse(cell_of(row).name) for row in ROWS] == [cell_of(row) for row in ROWS]


def test_a_choice_that_is_tried_by_name_is_parsed_too() -> None:
    cell = Cell(tier="disk70")
    assert Cell.parse(cell.name) == cell
    assert cell.policy()["optimizer"] == {"tier": "disk", "device_share": 0.7}


def test_an_unknown_word_in_a_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"optimizer: expected one of sgd, adamw, .*, found adam$"):
        Cell.parse(Cell().name.replace("sgd", "adam"))


def test_the_sample_is_legal_distinct_and_the_same_for_the_same_seed() -> None:
    rows = list(sample(50, seed=1))
    assert rows == list(sample(50, seed=1)) != list(sample(50, seed=2))
    assert len({cell_of(row) for row in rows}) == 50
    assert not any(why_excluded(row) for row in rows)


def test_every_model_of_the_zoo_is_in_the_matrix() -> None:
    assert set(FACTORS["model"]) == set(ZOO)
