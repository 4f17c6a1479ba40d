"""What is known of a unit before it has memory: where ranges lie, what comes and goes, and how many bytes that is.

pytest runs it; it is arithmetic and starts no process. That real memory is of this size is asked where it is allocated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offload.tier import Tier, Tiers
from zhooks.layout import FlatPlan, Group, Keeps, Kind, Layout, UnitPlan, flat_layout, inner_units

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NEAR = Tiers(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
NUMELS = (5, 9, 0)


def kind(compute: torch.dtype = FP32, tiers: Tiers = NEAR, *, reduce: torch.dtype = FP32, trainable: bool = True) -> Kind:
    return Kind(FP32, compute, reduce, torch.device("cpu"), trainable, tiers)


def layout(world: int, most: int | None = None) -> Layout:
    return flat_layout(NUMELS, world=world, itemsize=4, max_numel=most)


def flat(of: Kind, over: Layout, names: tuple[str, ...] = ("a", "b", "c"), **how: bool) -> FlatPlan:
    return FlatPlan("flat", 0, of, names, over, **{"replicated": False, "resident": False, "long": False, **how})


ALONE, TWO, CUT, EMPTY = layout(1), layout(2), layout(2, 8), flat_layout([0], world=2, itemsize=4)
HOST = Tiers(Tier.HOST, Tier.DEVICE, Tier.DEVICE)
MASTERS_ON_HOST = Tiers(Tier.DEVICE, Tier.DEVICE, Tier.HOST)


@pytest.mark.parametrize(
    ("made", "keeps"),
    [
        (flat(kind(), ALONE), Keeps.FULL),
        (flat(kind(BF16), ALONE), Keeps.RANGE),
        (flat(kind(), TWO), Keeps.RANGE),
        (flat(kind(), TWO, resident=True), Keeps.FULL),
        (flat(kind(BF16), TWO, resident=True), Keeps.RANGE),
        (flat(kind(), CUT, resident=True), Keeps.RANGE),
        (flat(kind(), TWO, replicated=True), Keeps.FULL),
        (flat(kind(tiers=HOST), TWO), Keeps.BLOCKS),
        (flat(kind(tiers=MASTERS_ON_HOST), TWO), Keeps.RANGE),
        (flat(kind(BF16, MASTERS_ON_HOST), TWO), Keeps.BLOCKS),
        (flat(kind(tiers=HOST), EMPTY), Keeps.FULL),
    ],
)
def test_a_range_lies_in_the_full_buffer_where_that_stays_in_the_dtype_that_is_updated(made: FlatPlan, keeps: Keeps) -> None:
    assert made.keeps is keeps
    assert made.shard_nbytes == (4 * made.shard_numel if keeps is Keeps.RANGE else 0)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("compute", [FP32, BF16])
def test_the_full_buffer_comes_and_goes_or_stays_or_is_what_is_kept(resident: bool, compute: torch.dtype) -> None:
    made = flat(kind(compute), TWO, resident=resident)
    nbytes = TWO.padded * compute.itemsize
    assert (TWO.padded, made.full_nbytes, made.moved_nbytes) == (24, nbytes, nbytes)
    assert made.releasable is not resident
    assert made.transient_nbytes == (0 if resident else nbytes)
    assert made.resident_nbytes == (nbytes if resident and compute is BF16 else 0)


def test_one_rank_has_its_range_in_the_full_buffer_and_exchanges_nothing() -> None:
    made = flat(kind(), ALONE)
    assert not made.sharded and not made.releasable
    assert (made.transient_nbytes, made.resident_nbytes, made.moved_nbytes) == (0, 0, 0)
    assert made.full_nbytes == 4 * 20


def test_what_is_replicated_is_every_ranks_own_though_it_is_reduced_over_all() -> None:
    both, one = (flat(kind(), TWO, replicated=replicated) for replicated in (True, False))
    assert (both.ranks, both.sharded, both.shard_numel, both.moved_nbytes) == (1, False, 24, 0)
    assert (one.ranks, one.sharded, one.shard_numel, one.moved_nbytes) == (2, True, 12, 96)
    assert both.layout is TWO and both.shared == TWO.undivided() and one.shared is TWO
    assert [both.owned_numel(index, 1) for index in range(3)] == list(NUMELS)
    owned = [[one.owned_numel(index, rank) for index in range(3)] for rank in range(2)]
    assert owned == [[5, 4, 0], [0, 5, 0]]


def test_partial_sums_are_counted_in_the_dtype_of_reductions() -> None:
    assert flat(kind(reduce=FP16), TWO).sum_nbytes == 2 * 24
    assert flat(kind(BF16), TWO).sum_nbytes == 4 * 24


@pytest.mark.parametrize(
    ("made", "cells"),
    [
        (flat(kind(), TWO), [(12, 4), (12, 4), (12, 0)]),
        (flat(kind(), TWO, resident=True), [(24, 4), (12, 4), (12, 0)]),
        (flat(kind(BF16), TWO), [(12, 4), (12, 4), (12, 0)]),
        (flat(kind(BF16), TWO, resident=True), [(24, 2), (12, 4), (12, 4)]),
        (flat(kind(BF16, MASTERS_ON_HOST), TWO), [(12, 2), (12, 4), (12, 4)]),
        (flat(kind(trainable=False), TWO), [(12, 4), (12, 0), (12, 0)]),
        (flat(kind(), TWO, replicated=True, resident=True), [(24, 4), (24, 4), (24, 0)]),
    ],
)
def test_a_rank_keeps_parameters_gradients_and_masters_of_its_range(made: FlatPlan, cells: list[tuple[int, int]]) -> None:
    found = made.footprint()
    assert [cell.tier for cell in found] == list(made.kind.tiers.cells)
    assert [(cell.numel, cell.itemsize) for cell in found] == cells


def unit(number: int, *flats: FlatPlan, entries: list[nn.Module] | None = None) -> UnitPlan:
    params = {name: nn.Parameter(torch.zeros(1)) for one in flats for name in one.names}
    return UnitPlan(Group(f"unit {number}", entries or [], params), number, flats)


def test_a_unit_is_what_its_flats_are_together() -> None:
    frozen = flat(kind(trainable=False), TWO, ("a",))
    kept = flat(kind(BF16), TWO, ("b", "c"), resident=True)
    both, first, last = unit(1, frozen, kept), unit(2, frozen), unit(3, kept)
    assert both.name == "unit 1"
    assert (both.trainable, first.trainable, last.trainable) == (True, False, True)
    assert (both.releasable, first.releasable, last.releasable) == (True, True, False)
    assert (both.full_nbytes, first.full_nbytes, last.full_nbytes) == (96 + 48, 96, 48)
    assert [(one, name) for one, name, _ in both.members()] == [(frozen, "a"), (kept, "b"), (kept, "c")]
    assert all(param is both.group.params[name] for _, name, param in both.members())
    assert both.params(kept) == [both.group.params["b"], both.group.params["c"]]


def test_units_that_run_inside_modules_of_others_are_known_by_their_numbers() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    whole = unit(0, entries=[model])
    holder, inside, beside = unit(1, entries=[model[0]]), unit(2, entries=[model[0][1]]), unit(3, entries=[model[1]])
    found = inner_units([whole, holder, inside, beside])
    assert found == {0: {1, 2, 3}, 1: {2}, 2: set(), 3: set()}


def test_two_units_with_one_entry_run_inside_each_other() -> None:
    model = nn.Linear(2, 2)
    assert inner_units([unit(5, entries=[model]), unit(7, entries=[model])]) == {5: {7}, 7: {5}}
