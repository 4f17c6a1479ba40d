"""The search over spaces made up at random: what it returns fits, and is the best there is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from zhooks.simulate.best_first import Bound, Limits, Memory, Outcome, search

LIMITS = Limits(100, 100, 100)


@dataclass
class Made:
    """Candidates are numbers; ``tight`` is how near bounds are to outcomes, and ``pairs`` which only save memory."""

    seconds: list[float]
    device: list[int]
    tight: float = 1.0
    pairs: set[tuple[int, int]] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    evaluated: list[int] = field(default_factory=list)

    def bound(self, candidate: int) -> Bound:
        return Bound(self.seconds[candidate] * self.tight, 0.0, Memory(int(self.device[candidate] * self.tight), 0, 0))

    def saves(self, candidate: int, beside: int) -> bool:
        return (candidate, beside) in self.pairs

    def evaluate(self, candidate: int) -> Outcome:
        assert candidate not in self.evaluated
        self.evaluated.append(candidate)
        refused = "cannot" if candidate in self.refused else ""
        return Outcome(self.seconds[candidate], Memory(self.device[candidate], 0, 0), refused)


def made(seed: int) -> Made:
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    space = Made([draw.uniform(1, 3) for _ in range(count)], [draw.randint(1, 200) for _ in range(count)], draw.random())
    space.refused = {each for each in range(count) if draw.random() < 0.1}
    for each in range(count):
        beside = draw.randrange(count)
        if space.seconds[each] > space.seconds[beside] and space.device[each] < space.device[beside]:
            space.pairs.add((each, beside))
    return space


@pytest.mark.parametrize("seed", range(40))
def test_the_best_found_is_the_best_there_is_and_fits(seed: int) -> None:
    space = made(seed)
    found = search(space, range(len(space.seconds)), LIMITS, most=1000)
    possible = [each for each in range(len(space.seconds)) if space.device[each] <= 100 and each not in space.refused]
    assert all(each.candidate in possible and not each.why for each in found.fits)
    assert bool(found.fits) == bool(possible)
    if possible:
        # Of two that differ by less than half a percent the smaller one is first.
        assert found.fits[0].seconds <= 1.005 * min(space.seconds[each] for each in possible)
    assert not found.untried
    assert len(found.fits) + len(found.unfit) + found.slower == len(space.seconds)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_was_cut_short_says_how_much_quicker_the_rest_may_be(seed: int) -> None:
    space = made(seed)
    found = search(space, range(len(space.seconds)), LIMITS, most=3)
    assert found.simulations <= 4
    if found.fits:
        possible = [each for each in range(len(space.seconds)) if space.device[each] <= 100 and each not in space.refused]
        assert min(space.seconds[each] for each in possible) >= (1 - found.gap) * found.fits[0].seconds * (1 - 0.005)


def test_what_cannot_fit_by_its_bound_is_never_simulated() -> None:
    space = Made([1.0, 2.0], [200, 50])
    found = search(space, range(2), LIMITS)
    assert space.evaluated == [1]
    assert found.unfit[0].why == "needs at least device 200 B of 100 B" and not found.unfit[0].simulated


def test_nothing_is_simulated_that_is_no_better_than_the_last_of_the_best_by_its_bound() -> None:
    space = Made([1.0, 1.1, 1.2, 1.3], [1] * 4)
    search(space, range(4), LIMITS, keep=2)
    assert space.evaluated == [0, 1]


def test_what_only_saves_memory_comes_after_what_it_saves_beside_and_before_what_is_slower() -> None:
    space = Made([1.0, 1.1, 2.0, 5.0], [50, 40, 60, 30], 1.0, {(1, 0), (2, 0)})
    assert [each.candidate for each in search(space, range(4), LIMITS, keep=3).fits] == [0, 1, 2]
    assert space.evaluated == [0, 1, 2], "the last is slower by its bound than three that were found"


@pytest.mark.parametrize("seed", range(40))
def test_all_of_the_best_are_the_best_there_are_where_bounds_are_exact(seed: int) -> None:
    space = made(seed)
    space.tight = 1.0
    found = search(space, range(len(space.seconds)), LIMITS, keep=3, most=1000)
    possible = [each for each in range(len(space.seconds)) if space.device[each] <= 100 and each not in space.refused]
    best = sorted(space.seconds[each] for each in possible)[:3]
    assert sorted(each.seconds for each in found.fits)[:3] == best


def test_of_steps_as_quick_as_each_other_the_one_that_holds_less_is_first() -> None:
    space = Made([1.0, 1.001, 1.2], [50, 40, 10])
    assert [each.candidate for each in search(space, range(3), LIMITS).fits] == [1, 0, 2]


def test_where_nothing_fitted_the_one_that_needs_least_is_tried_last() -> None:
    space = Made([1.0, 2.0, 3.0, 9.0], [190, 180, 170, 101], 0.5)
    found = search(space, range(4), LIMITS, most=2)
    assert space.evaluated == [0, 1, 3] and not found.fits
    assert "needs device 101 B of 100 B" in [each.why for each in found.unfit]


def test_one_memory_bounds_device_and_host_together() -> None:
    shared = Limits(100, 100, 0, one_memory=True)
    assert shared.exceeded(Memory(60, 60, 0)) == ["device and host 120 B of 100 B"]
    assert Limits(100, 100, 0).exceeded(Memory(60, 60, 0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_search_that_goes_on_from_another_finds_the_best_of_both(seed: int) -> None:
    space = made(seed)
    every = range(len(space.seconds))
    first = search(space, every[::2], LIMITS, most=1000)
    found = search(space, every[1::2], LIMITS, most=1000, before=first)
    possible = [each for each in every if space.device[each] <= 100 and each not in space.refused]
    assert bool(found.fits) == bool(possible) and found.simulations == len(space.evaluated)
    if possible:
        assert found.fits[0].seconds <= 1.005 * min(space.seconds[each] for each in possible)
