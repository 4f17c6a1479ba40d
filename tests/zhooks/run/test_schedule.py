"""The schedule as pure arithmetic: what a pass launches, what stays, and how a use outside the record is taken in.

pytest runs it; no tensor and no process is made. It never asks a runtime: test_order.py does.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zhooks.run import keep_gathered
from zhooks.run.schedule import LoneWalk, Path, Walk, arrange, backward_guess

passes = st.lists(st.integers(0, 5), max_size=10)
depths = st.integers(0, 4)


def recorded(*order: int) -> Path:
    """A path whose order is settled."""
    return Path("train", list(order), recorded=True)


def launches(path: Path, uses: list[int], depth: int) -> list[int]:
    """Everything one pass launches, in order, its end included."""
    walk = Walk(path, depth)
    out = [number for use in uses for number in walk.use(use).launch]
    return [*out, *walk.finish()]


# ---- the record


def test_the_first_pass_follows_the_guess_and_notes_what_it_used() -> None:
    path = Path("train", [0, 1, 2])
    walk = Walk(path, 1)
    assert [walk.use(number).launch for number in (0, 2)] == [(0, 1), (2,)]
    assert walk.finish() == ()
    assert walk.used == [0, 2]


def test_the_use_of_a_unit_again_at_once_is_one_use() -> None:
    walk = Walk(Path("train", [0, 1]), 0)
    assert [walk.use(number).launch for number in (0, 0, 1, 1)] == [(0,), (), (1,), ()]
    assert walk.used == [0, 1]


def test_the_settled_order_is_the_use_and_open_units_after_their_neighbours_of_the_guess() -> None:
    assert arrange([0, 1, 2, 3], [0, 2, 3], {0, 1, 2, 3}) == [0, 1, 2, 3]
    assert arrange([0, 1, 2, 3], [3, 0, 2], {1}) == [3, 0, 1, 2]
    assert arrange([0, 1, 2], [1, 2, 1], {0}) == [0, 1, 2, 1]


@given(st.permutations(range(5)), passes, st.sets(st.integers(0, 4)))
def test_the_settled_order_keeps_the_order_of_use_and_misses_no_open_unit(
    guess: list[int], used: list[int], open_: set[int]
) -> None:
    used = [number for number in used if number < 5]
    order = arrange(guess, used, open_)
    assert set(order) == set(used) | open_
    assert [number for number in order if number in used] == used


# ---- another way than the record


def test_a_use_outside_the_record_is_launched_alone_and_joins_the_record() -> None:
    path = recorded(0, 1, 2)
    walk = Walk(path, 0)
    assert [walk.use(number).launch for number in (0, 7, 1, 2)] == [(0,), (7,), (1,), (2,)]
    assert path.order == [0, 7, 1, 2]
    assert launches(path, [0, 7, 1, 2], 0) == [0, 7, 1, 2]


def test_a_use_outside_the_record_comes_after_what_is_launched_already() -> None:
    path = recorded(0, 1, 2)
    walk = Walk(path, 1)
    assert [walk.use(number).launch for number in (0, 7, 1, 2)] == [(0, 1), (7,), (), (2,)]
    assert path.order == [0, 1, 7, 2]


@given(passes, passes, depths)
def test_another_route_taken_again_and_again_settles(record: list[int], uses: list[int], depth: int) -> None:
    path = recorded(*record)
    for _ in range(10):
        launches(path, uses, depth)
    settled = list(path.order)
    launches(path, uses, depth)
    assert path.order == settled


@given(passes, passes, depths)
def test_every_unit_of_the_record_and_every_use_is_launched_whatever_path_a_rank_takes(
    record: list[int], uses: list[int], depth: int
) -> None:
    path = recorded(*record)
    planned = list(path.order)
    launched = launches(path, uses, depth)
    assert set(launched) >= set(planned) | set(uses)


@given(passes, passes, depths)
def test_a_rank_that_skips_launches_as_one_that_does_not(record: list[int], uses: list[int], depth: int) -> None:
    # As long as nobody leaves the record, all ranks launch the record: in the same order, however they go through it.
    path = recorded(*record)
    order = list(path.order)
    skipping, at = [], 0
    for use in uses:
        if use in order[at:]:
            at = order.index(use, at) + 1
            skipping.append(use)
    assert launches(path, skipping, depth) == order
    assert path.order == order


@given(passes, passes, depths)
def test_a_use_is_launched_before_or_at_the_use(record: list[int], uses: list[int], depth: int) -> None:
    walk = Walk(recorded(*record), depth)
    launched: set[int] = set()
    for use in uses:
        step = walk.use(use)
        launched.update(step.launch)
        assert use in launched
        assert use in step.window


# ---- one rank alone


def test_one_rank_alone_launches_what_comes_next_the_way_it_went_last_time() -> None:
    path = recorded(3, 0, 2, 1)
    walk = LoneWalk(path, 2)
    assert [walk.use(number).launch for number in (3, 0, 0, 1)] == [(3, 0, 2), (0, 2, 1), (0, 2, 1), (1,)]
    assert walk.finish() == () and path.order == [3, 0, 1] and walk.launched(2)


def test_one_rank_alone_keeps_its_place_at_a_use_outside_its_last_way() -> None:
    walk = LoneWalk(recorded(3, 0, 2), 1)
    assert [walk.use(number).launch for number in (3, 7, 0)] == [(3, 0), (7, 0), (0, 2)]


# ---- the way back


def test_a_backward_is_guessed_as_the_forward_reversed_from_each_units_last_use() -> None:
    assert backward_guess([0, 1, 2, 1], {}) == [1, 2, 0]


def test_a_unit_around_others_comes_before_the_first_of_them_in_backward() -> None:
    assert backward_guess([0, 1, 2, 3], {0: {1, 2}}) == [3, 0, 2, 1]
    assert backward_guess([0, 1, 2], {1: {5}}) == [1, 2, 0]


# ---- what stays gathered between forward and backward

SIZES = {0: 10, 1: 20, 2: 30, 3: 40}


def test_a_unit_that_is_used_twice_is_counted_once() -> None:
    assert keep_gathered([2, 0, 2, 1], SIZES, reshard="auto", budget=60) == {0, 1, 2}


def test_a_pass_of_no_units_keeps_none() -> None:
    assert keep_gathered([], {}, reshard="auto", budget=100) == frozenset()


@given(st.permutations(list(SIZES)), st.integers(0, 120))
def test_what_is_kept_fits_the_budget_and_nothing_more_would(order: list[int], budget: int) -> None:
    kept = keep_gathered(order, SIZES, reshard="auto", budget=budget)
    total = sum(SIZES[number] for number in kept)
    assert total <= budget
    assert kept == set(order[len(order) - len(kept) :])
    if len(kept) < len(order):
        assert total + SIZES[order[len(order) - len(kept) - 1]] > budget
