"""The parity matrix: every cell of a pairwise covering array trains as the oracle does, losses and final state alike.

pytest runs it; a cell's name is its test's parameter, and ``python -m tests.parity NAME`` runs one cell alone with
more to read. It never states a tolerance: closeness.py does.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.parity import oracle, run
from tests.parity.cells import BY_NAME, FACTORS, ON_ACCELERATOR, Cell, Row, cell_of, pairwise, sample, why_excluded
from tests.parity.closeness import EXACT, REORDERED, compare, differences, tolerance_of
from tests.support.ranks import Pool

COVERING = [pytest.param(cell_of(row).name, id=cell_of(row).name) for row in pairwise(FACTORS, why_excluded)]
SAMPLED = [pytest.param(cell_of(row).name, id=cell_of(row).name) for row in sample(400, seed=20250101)]


ACCELERATED = [pytest.param(cell_of(row).name, id=cell_of(row).name) for row in pairwise(ON_ACCELERATOR, why_excluded)]
PRODUCT_FACTORS = ("stage", "tier", "precision", "activation", "world", "device")
EVERY = itertools.product(*(ON_ACCELERATOR[factor] for factor in PRODUCT_FACTORS))
TRAINED: Row = {"model": "gpt", "accumulation": "twice", "optimizer": "adamw"}
PRODUCT = [cell_of(TRAINED | dict(zip(PRODUCT_FACTORS, choices, strict=True))).name for choices in EVERY]


@pytest.mark.parametrize("name", COVERING)
def test_training_under_zhooks_equals_plain_training(name: str, ranks: Callable[[int], Pool]) -> None:
    hold_to_the_oracle(Cell.parse(name), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_training_equals_plain_training_in_a_sample_of_the_full_product(
    name: str, ranks: Callable[[int], Pool]
) -> None:
    hold_to_the_oracle(Cell.parse(name), ranks)


# In a reduce dtype of 8 bits every other order of additions shows.
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "transport"), [(2, "stock"), (4, "auto")], ids=["world2-stock", "world4-auto"])
def test_accumulated_gradients_are_added_in_the_order_of_plain_training(
    stage: int, world: int, transport: str, ranks: Callable[[int], Pool]
) -> None:
    cell = Cell("recursion", stage, "bf16reduce", world, "twicequiet", optimizer="rmsprop", transport=transport)
    assert tolerance_of(cell) == EXACT
    hold_to_the_oracle(cell, ranks)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", BY_NAME["tier"])
@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (0, "fp32"), (2, "bf16")])
def test_states_divided_over_the_device_and_a_tier_train_as_plain_ones(
    stage: int, precision: str, tier: str, world: int, ranks: Callable[[int], Pool]
) -> None:
    cell = Cell("gpt", stage, precision, world, optimizer="adamw", tier=tier)
    assert tolerance_of(cell) == EXACT
    hold_to_the_oracle(cell, ranks)


@pytest.mark.parametrize("name", ACCELERATED)
def test_training_on_the_accelerator_equals_plain_training_on_it(name: str, accelerators: Callable[[int], Pool]) -> None:
    hold_to_its_oracle(Cell.parse(name), accelerators)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCT)
def test_every_stage_tier_precision_and_activation_trains_on_the_accelerator(
    name: str, accelerators: Callable[[int], Pool]
) -> None:
    hold_to_its_oracle(Cell.parse(name), accelerators)


def hold_to_the_oracle(cell: Cell, ranks: Callable[[int], Pool]) -> None:
    found = run.gather(ranks(cell.world).run(run.JOB, name=cell.name))
    compare(cell, found, oracle.train(cell))


def hold_to_its_oracle(cell: Cell, accelerators: Callable[[int], Pool]) -> None:
    found = run.gather(accelerators(cell.world).run(run.JOB, name=cell.name))
    compare(cell, found, _plain_on_accelerator(replace(cell, device="eager"), accelerators))


@functools.cache
def _plain_on_accelerator(cell: Cell, accelerators: Callable[[int], Pool]) -> oracle.Record:
    record: oracle.Record = accelerators(1).run("tests.parity.oracle:train_by_name", name=cell.name)[0]
    return record


def test_the_comparison_sees_a_missing_clip() -> None:
    clipped, free = (oracle.train(Cell(clip=clip)) for clip in ("clipped", "unclipped"))
    assert differences(free, clipped, REORDERED)
