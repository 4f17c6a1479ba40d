"""What a policy costs: the table of the paper with fp32 masters, cell by cell and tier by tier."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from offload.policy import Policy, cost, footprint
from offload.text import Share
from offload.tier import Tier, Tiers

PSI = 8_000_000


@pytest.mark.parametrize(
    ("stage", "param", "whole", "sharded"),
    [
        (0, None, 16, 0),
        (1, None, 4, 12),
        (2, None, 4, 12),
        (3, None, 0, 16),
        (0, "bf16", 18, 0),
        (1, "bf16", 2, 16),
        (2, "fp16", 2, 16),
        (3, "bf16", 0, 16),
        (3, "fp32", 0, 16),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_on_the_device_each_stage_costs_what_the_readme_says(
    stage: int, param: str | None, whole: int, sharded: int, ranks: int
) -> None:
    spent = cost(Policy.of({"stage": stage, "precision": {"param": param}}), PSI, ranks)
    assert spent.nbytes == PSI * (whole + Fraction(sharded, ranks))
    assert {tier.tier: tier.nbytes for tier in spent.tiers} == {Tier.DEVICE: spent.nbytes, Tier.HOST: 0, Tier.DISK: 0}


def test_on_tiers_the_16_bit_copy_and_the_masters_are_apart() -> None:
    placed = {"parameter": {"tier": "host"}, "optimizer": {"tier": "disk"}, "precision": {"param": "bf16"}}
    spent = cost(Policy.of(placed), PSI, 4)
    assert [(cell.what, cell.tier.value, cell.per_numel, cell.numel) for cell in spent.cells] == [
        ("parameter", "host", 2, PSI // 4),
        ("gradient", "device", 4, PSI // 4),
        ("optimizer", "disk", 12, PSI // 4),
    ]
    assert [tier.nbytes for tier in spent.tiers] == [PSI, PSI // 2, 3 * PSI]


def test_a_share_on_the_device_costs_there_what_it_would_alone() -> None:
    placed = {"optimizer": {"tier": "host", "device_share": 0.25}, "precision": {"param": "bf16"}}
    spent = cost(Policy.of(placed), PSI, 4)
    assert [(cell.what, cell.tier.value, cell.per_numel, cell.numel) for cell in spent.cells] == [
        ("parameter", "device", 2, PSI * 3 // 16),
        ("parameter", "device", 4, PSI // 16),
        ("gradient", "device", 4, PSI // 4),
        ("optimizer", "host", 12, PSI * 3 // 16),
        ("optimizer", "device", 8, PSI // 16),
    ]
    alone = cost(Policy.of({"precision": {"param": "bf16"}}), PSI, 4)
    whole = cost(Policy.of({**placed, "optimizer": {"tier": "host", "device_share": 1}}), PSI, 4)
    assert (whole.cells, whole.tiers) == (alone.cells, alone.tiers)
    odd = Policy.of({"optimizer": {"tier": "disk", "device_share": 0.5}})
    assert [cell.numel for cell in cost(odd, 7, 2).cells] == [4, 4, 2, 2]


def test_a_rule_that_places_anything_sets_the_copy_apart_too() -> None:
    ruled: dict[str, Any] = {"precision": {"param": "bf16"}, "rule": [{"match": "*", "optimizer.tier": "host"}]}
    assert [cell.per_numel for cell in cost(Policy.of(ruled), PSI, 1).cells] == [2, 4, 12]
    ruled["rule"][0]["optimizer.tier"] = "device"
    assert [cell.per_numel for cell in cost(Policy.of(ruled), PSI, 1).cells] == [4, 4, 8]


def test_a_share_of_an_odd_number_is_rounded_up() -> None:
    assert [cell.numel for cell in cost(Policy(), 7, 2).cells] == [4, 4, 4]


def test_a_budget_holds_it_or_not_and_a_share_is_undecided() -> None:
    budget = {"device": 64 * PSI, "host": "80%", "disk": 1}
    policy = Policy.of({"budget": budget, "optimizer": {"tier": "disk"}})
    assert [(tier.budget, tier.holds) for tier in cost(policy, PSI, 1).tiers] == [
        (64 * PSI, True),
        (Share(0.8), None),
        (1, False),
    ]
    exact = Policy.of({"budget": {"device": 16 * PSI}})
    assert [tier.holds for tier in cost(exact, PSI, 1).tiers] == [True, None, None]


@pytest.mark.parametrize("policy", [{"stage": 0}, {"stage": 1}, {"stage": 3, "parameter": {"tier": "host"}}])
@pytest.mark.parametrize("param", [None, "bf16"])
def test_a_footprint_is_the_cost_without_the_moments(policy: dict[str, Any], param: str | None) -> None:
    chosen = Policy.of({**policy, "precision": {"param": param}})
    spent = {cell.what: cell for cell in cost(chosen, PSI, 4).cells}
    tiers = Tiers(*(spent[what].tier for what in ("parameter", "gradient", "optimizer")))
    parameter, shard = spent["parameter"].numel, spent["optimizer"].numel
    apart = param is not None
    cells = footprint(tiers, parameter=parameter, shard=shard, master=4, compute=2 if apart else 4, apart=apart)
    assert sum(cell.nbytes for cell in cells) + 8 * shard == spent["parameter"].nbytes + sum(
        spent[what].nbytes for what in ("gradient", "optimizer")
    )


def test_frozen_parameters_have_no_gradient() -> None:
    frozen = footprint(Tiers(*[Tier.DEVICE] * 3), parameter=8, shard=2, master=4, compute=4, apart=False, trainable=False)
    assert [cell.nbytes for cell in frozen] == [32, 0, 0]
