"""Paths as pure arithmetic: what ranks agree on after a first pass, and what a path keeps gathered.

pytest runs it; no process and no tensor is made, and the other rank is a list of numbers. It never asks a runtime:
test_order.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from zhooks.comm import ControlPlane
from zhooks.layout import UnitPlan
from zhooks.run.paths import Paths
from zhooks.run.schedule import Choices, Scope, Walk

MIB = 1 << 20


@dataclass
class Block:
    """What of a unit its paths ask."""

    number: int
    releasable: bool = True
    trainable: bool = True
    full_nbytes: int = MIB
    group: Any = field(default_factory=lambda: SimpleNamespace(entries=()))


class WithAnother(ControlPlane):
    """Two ranks: this one is rank 0, and the other names ``others`` each time."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self.others, self.size = others, 2

    def on_first(self, call: Callable[[], Any]) -> Any:
        return call()

    def any(self, flags: Sequence[int], of: str = "all ranks") -> list[int]:
        assert all(0 <= number < len(flags) for number in self.others)
        return [int(flag or number in self.others) for number, flag in enumerate(flags)]


def paths(blocks: Sequence[Block], *others: int, **choices: Any) -> Paths:
    made = Paths(Choices(**{"prefetch": 1, "reshard": "auto", "budget": None, **choices}), WithAnother(others))
    made.take(cast(list[UnitPlan], list(blocks)))
    return made


def scope(*numbers: int) -> Scope:
    return Scope("model", numbers)


def passed(walk: Walk, *uses: int) -> Walk:
    for number in uses:
        walk.use(number)
    walk.finish()
    return walk


def trained(made: Paths, *uses: int, open_: Sequence[int] = ()) -> Walk:
    """A first forward with gradients that used these units."""
    walk = passed(made.forward("model train", scope(*range(4)), grad=True), *uses)
    made.record(walk, open_)
    return walk


def blocks(count: int = 4) -> list[Block]:
    return [Block(number) for number in range(count)]


def test_a_unit_that_another_rank_alone_used_counts_as_used() -> None:
    made = paths(blocks(), 2)
    walk = trained(made, 0, 1, 3)
    assert walk.path.used == {0, 1, 2, 3} and walk.path.recorded
    assert walk.path.order == [0, 1, 2, 3]


def test_a_unit_that_any_rank_has_released_is_not_among_those_that_nobody_has() -> None:
    # The other rank has released unit 3, whose number comes after the four that say what was used.
    made = paths(blocks(), 4 + 3)
    walk = passed(made.forward("model train", scope(*range(4)), grad=True), 0, 1, 2, 3)
    assert made.record(walk, [], released=[1]) == {0, 2}
    assert walk.path.used == {0, 1, 2, 3}


def test_where_ranks_may_differ_a_path_is_of_every_rank_and_has_each_unit_once() -> None:
    made = paths(blocks(), 3, uneven=True)
    walk = trained(made, 1, 0, 1, open_=[])
    assert walk.path.uneven
    assert sorted(walk.path.order) == [0, 1, 2, 3]
    assert walk.path.order.index(1) < walk.path.order.index(0)


def test_where_ranks_may_not_differ_a_unit_used_twice_is_in_the_order_twice() -> None:
    walk = trained(paths(blocks()), 0, 1, 0, 3)
    assert walk.path.order == [0, 1, 0, 3] and not walk.path.uneven


def test_a_backward_is_guessed_from_the_last_forward_with_gradients_without_what_is_never_released() -> None:
    held = [Block(0, releasable=False), *blocks()[1:]]
    made = paths(held)
    trained(made, 0, 1, 2, 3)
    passed(made.forward("model eval", scope(1), grad=False), 1)
    assert made.backward().path.order == [3, 2, 1]
    assert made.backward().path.name == "backward of model train"


def test_what_forward_used_and_backward_did_not_leaves_the_order_of_backward() -> None:
    made = paths(blocks())
    trained(made, 0, 1, 2)
    walk = passed(made.backward(), 2, 1)
    walk.path.order = [3, 2, 1, 0]
    made.record_backward(walk)
    assert walk.path.order == [3, 2, 1]


@pytest.mark.parametrize(("reshard", "kept"), [(False, {0, 1, 2, 3}), (True, set()), ("auto", set())])
def test_before_a_first_pass_all_is_kept_or_nothing(reshard: bool | str, kept: set[int]) -> None:
    made = paths(blocks(), reshard=reshard)
    walk = made.forward("model train", scope(*range(4)), grad=True)
    assert made.keep(walk.path, grad=True) == kept


@pytest.mark.parametrize(("reshard", "kept"), [(False, {0, 1, 2, 3}), (True, set()), ("auto", set())])
def test_where_ranks_may_differ_all_is_kept_or_nothing(reshard: bool | str, kept: set[int]) -> None:
    made = paths(blocks(), uneven=True, reshard=reshard, budget=2 * MIB)
    assert made.keep(trained(made, 0, 1, 2, 3).path, grad=True) == kept


def test_frozen_units_stay_where_no_backward_follows_and_only_there() -> None:
    frozen = [*blocks()[:3], Block(3, trainable=False)]
    made = paths(frozen, budget=1 * MIB)
    path = trained(made, 0, 1, 2, 3).path
    assert made.keep(path, grad=True) == {2}
    made.take(cast(list[UnitPlan], frozen))
    assert made.keep(path, grad=False) == {3}


def test_a_forward_without_gradients_keeps_nothing_where_no_budget_says_how_much() -> None:
    made = paths(blocks())
    path = trained(made, 0, 1, 2, 3).path
    assert made.keep(path, grad=False) == frozenset()


def test_what_is_kept_is_found_anew_for_another_order_and_other_choices() -> None:
    made = paths(blocks(), budget=MIB)
    path = trained(made, 0, 1, 2, 3).path
    assert made.keep(path, grad=True) == {3}
    path.order = [3, 2, 1, 0]
    assert made.keep(path, grad=True) == {0}
    made.choices = Choices(prefetch=1, reshard="auto", budget=2 * MIB)
    assert made.keep(path, grad=True) == {0, 1}
