"""Checkpoints saved at any number of ranks, stage, mesh, tier and dtype, and loaded at any other: the product, by pairs.

pytest runs it: one pool of ranks saves, another loads.  Any two choices of either side that can meet do so in some case; few
cases, in which every choice is once, run by default.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import few_with_every_value, pairs_of, pairwise
from tests.support.ranks import Pool

RUN = "tests.support.any_layout"
SIDE: dict[str, tuple[Hashable, ...]] = {
    "world": (1, 2, 3, 4),
    "stage": (0, 1, 2, 3),
    "tier": ("device", "host", "disk"),
    "mesh": ("dp", "dp x tp", "pp"),
    "dtype": ("fp32", "mixed", "bf16"),
}
FACTORS = {f"{side} {factor}": values for factor, values in SIDE.items() for side in ("save", "load")}

# Sums over other ranks or micro-batches are rounded otherwise, of losses around 2.5: in fp32, and where bf16 is on a side.
FP32, BF16 = 2e-6, 2e-2


def may_meet(one: tuple[str, Hashable], other: tuple[str, Hashable]) -> bool:
    """A world of one has no other axes."""
    both = dict([one, other])
    return all(both.get(f"{side} world") != 1 or both.get(f"{side} mesh", "dp") == "dp" for side in ("save", "load"))


ROWS = pairwise(FACTORS, may_meet)


def sides_of(row: dict[str, Hashable]) -> tuple[dict[str, Any], dict[str, Any]]:
    save, load = ({factor: row[f"{side} {factor}"] for factor in SIDE} for side in ("save", "load"))
    return save, load


def same_ranks() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each arrangement of ranks to itself, at another stage and on another tier."""
    arranged = [(world, mesh) for world in SIDE["world"] for mesh in SIDE["mesh"] if world != 1 or mesh == "dp"]
    made = []
    for place, (world, mesh) in enumerate(arranged):
        common = {"world": world, "mesh": mesh, "dtype": SIDE["dtype"][place % 3]}
        each = [{"stage": (0, 3, 1, 2)[(place + at) % 4], "tier": SIDE["tier"][(place + at) % 3]} for at in (0, 1)]
        made.append((common | each[0], common | each[1]))
    return made


def case(before: dict[str, Any], after: dict[str, Any], *, slow: bool) -> Any:
    """Named by the largest pool that it asks for (tests/selection.py)."""
    both = (before, after)
    named = " to ".join(f"{side['world']} {side['mesh']} {side['stage']} {side['tier']} {side['dtype']}" for side in both)
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(before, after, id=f"world{max(side['world'] for side in both)}-{named}", marks=marks)


FEW = few_with_every_value(ROWS)
CASES = [case(*sides_of(row), slow=place not in FEW) for place, row in enumerate(ROWS)]
CASES += [case(*both, slow=True) for both in same_ranks()]


@pytest.mark.parametrize(("before", "after"), CASES)
def test_what_was_saved_anywhere_goes_on_anywhere(
    ranks: Callable[[int], Pool], tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    (world, setup), (other, other_setup) = (
        (side["world"], {key: value for key, value in side.items() if key != "world"}) for side in (before, after)
    )
    went_on = ranks(world).run(f"{RUN}:save", path=str(tmp_path), **setup)[0]
    resumed = ranks(other).run(f"{RUN}:load", path=str(tmp_path), **other_setup)[0]
    arranged = ("world", "mesh", "dtype")
    if [before[key] for key in arranged] == [after[key] for key in arranged]:
        # Ranks sum in the same order, whatever the stage and the tier.
        assert resumed == went_on
    else:
        assert resumed == pytest.approx(went_on, abs=FP32 if before["dtype"] == after["dtype"] == "fp32" else BF16)


def test_the_sample_has_every_pair_that_can_meet_and_no_other() -> None:
    shown = {pair for row in ROWS for pair in pairs_of(row)}
    possible = {
        frozenset({(one, value), (other, its)})
        for one, other in combinations(FACTORS, 2)
        for value in FACTORS[one]
        for its in FACTORS[other]
        if may_meet((one, value), (other, its))
    }
    # Four ways to save on a number of ranks, each with four to load, are sixteen rows at the least.
    assert shown == possible and 16 <= len(ROWS) <= 24


def test_the_few_that_run_by_default_have_every_choice() -> None:
    shown = {choice for place in FEW for choice in ROWS[place].items()}
    assert shown == {(key, one) for key, values in FACTORS.items() for one in values} and len(FEW) <= 5


def test_a_pair_that_no_row_can_have_is_an_error() -> None:
    def apart(one: tuple[str, Hashable], other: tuple[str, Hashable]) -> bool:
        return "c" not in {one[0], other[0]}

    with pytest.raises(ValueError, match="no c may meet"):
        pairwise({"a": (1,), "b": (1,), "c": (1,)}, apart)
