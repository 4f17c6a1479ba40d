"""Units as they are planned: the sizes that budgets add up are those of what is built, and planning needs no tensor.

pytest runs it, in this process and on ranks. What a plan refuses is test_plan.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import AttachError, PolicyError
from offload.policy import Policy
from offload.tier import Tier
from tests.support.on_ranks import on_ranks
from zhooks.layout import Group, Keeps, Table, UnitPlan
from zhooks.plan import Layouts
from zhooks.plan.budget import needs
from zhooks.plan.layouts import Bound

CPU = torch.device("cpu")


def planned(model: nn.Module, policy: dict[str, Any], *, ranks: int = 2, nbytes: int = 1 << 20) -> UnitPlan:
    chosen = Policy.of(policy)
    layouts = Layouts(chosen, Table.of(chosen.table()), Bound(nbytes, ranks), CPU, frozenset())
    return layouts.unit(Group("u", [model], dict(model.named_parameters())), 3)


def test_a_model_without_memory_is_laid_out_like_one_with() -> None:
    with torch.device("meta"):
        hollow = nn.Linear(64, 64)
    assert planned(hollow, {}).flats == planned(nn.Linear(64, 64), {}).flats


def test_parameters_that_differ_in_kind_have_flats_of_their_own_in_the_order_they_come() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    frozen, trained = planned(model, {}).flats
    assert (frozen.names, trained.names) == (("0.weight", "0.bias"), ("1.weight", "1.bias"))
    assert (frozen.name, trained.name) == ("u", "u#1") and trained.number == frozen.number + 1


def test_a_unit_is_planned_anew_where_a_parameter_was_frozen_and_nowhere_else() -> None:
    chosen = Policy.of({})
    layouts = Layouts(chosen, Table.of(chosen.table()), Bound(1 << 20, 2), CPU, frozenset())
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    plans = layouts.units([Group(str(place), [model], dict(model.named_parameters())) for place, model in enumerate(models)])
    models[1].weight.requires_grad_(False)
    same, other = layouts.following(plans)
    assert same is plans[0] and len(other.flats) == 2
    models[1].weight.requires_grad_(True)
    assert layouts.anew([other])[0].flats == plans[1].flats


def test_a_parameter_above_the_bound_is_long_and_alone() -> None:
    model = nn.Linear(64, 64)
    weight, bias = planned(model, {}, nbytes=1 << 10).flats
    assert weight.long and weight.names == ("weight",) and not bias.long
    with pytest.raises(PolicyError, match="one aligned row"):
        planned(model, {}, nbytes=8)


def test_more_flats_than_have_numbers_are_refused() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(300)])
    with pytest.raises(AttachError, match="at most 256 flat buffers"):
        planned(model, {}, nbytes=1 << 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tier_needs_memory_for_the_range_that_a_rank_updates(stage: int) -> None:
    model = nn.Linear(8, 4, bias=False)
    policy: dict[str, Any] = {"stage": stage, "gradient": {"tier": "host"}, "optimizer": {"tier": "disk"}}
    need = needs([planned(model, policy)])
    # Of fp32 the parameters are the masters: on the disk there will be states alone.
    assert need.off_device == {Tier.HOST: 4 * 32 // (2 if stage else 1), Tier.DISK: 0}
    need = needs([planned(model, {**policy, "precision": {"param": "bf16"}})])
    assert need.off_device[Tier.DISK] == need.off_device[Tier.HOST]


@on_ranks(1, 2, stage=(0, 1, 2, 3), param=("fp32", "bf16"), tier=("device", "host"))
def test_what_is_built_has_the_sizes_that_were_planned(stage: int, param: str, tier: str) -> None:
    model = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 3, bias=False))
    policy = {"stage": stage, "units": {"min_numel": 0}, "precision": {"param": param}, "optimizer": {"tier": tier}}
    attachment = zhooks.attach(model, policy=policy)
    for flat in [flat for unit in attachment.session.units for flat in unit.flats]:
        plan, own = flat.plan, flat.storage.memory
        assert (plan.keeps is Keeps.FULL) is flat.storage.in_full and plan.sharded is flat.group.sharded
        assert plan.shard_nbytes == (0 if own is None else own.nbytes)
        assert plan.shard_numel == flat.group.layout.shard_numel
        owned = [plan.owned_numel(index, flat.transport.axis.rank) for index in range(len(plan.names))]
        assert owned == [flat.span(index)[1] for index in range(len(plan.names))]
    model(torch.ones(1, 24)).sum().backward()
    rows = {row.what: row.nbytes for row in attachment.memory().rows if row.tier == "device"}
    cells = [cell for unit in attachment.session.units for flat in unit.plan.flats for cell in flat.footprint()]
    assert rows["gradient"] == sum(cell.nbytes for cell in cells if cell.what == "gradient")
    attachment.detach()


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_what_a_rank_moves_to_a_tier_at_once_does_not_shrink_with_the_number_of_ranks(ranks: int) -> None:
    with torch.device("meta"):
        block = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12 * ranks)))
    placed = {cell: {"tier": "host"} for cell in ("parameter", "gradient", "optimizer")}
    flats = planned(block, placed, ranks=ranks, nbytes=16 << 30).flats
    assert [flat.shard_numel * 4 for flat in flats] == [32 << 20] * 6
