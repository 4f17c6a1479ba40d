"""``[optimizer] device_share``: which flats keep their states on the device, as integers and as bytes.

pytest runs it, in this process and on ranks. That training is the same is tests/parity's and
tests/zhooks/optim/test_device_share.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.policy import Policy
from offload.tier import Tier
from tests.support.inside import plans_of
from tests.support.on_ranks import on_ranks
from zhooks.layout import Group, Table, UnitPlan
from zhooks.plan import Layouts
from zhooks.plan.budget import device_floor, state_nbytes
from zhooks.plan.layouts import Bound

CPU = torch.device("cpu")
HOST = {"tier": "host"}


def layouts_of(policy: dict[str, Any]) -> Layouts:
    chosen = Policy.of(policy)
    return Layouts(chosen, Table.of(chosen.table()), Bound(1 << 20, 2), CPU, frozenset())


def groups_of(*widths: int) -> list[Group]:
    """A unit of 10 times so many elements each."""
    models = [nn.Linear(width, 10, bias=False) for width in widths]
    return [Group(str(place), [model], dict(model.named_parameters(str(place)))) for place, model in enumerate(models)]


def on_device(plans: tuple[UnitPlan, ...]) -> list[str]:
    return [flat.name for plan in plans for flat in plan.flats if flat.kind.tiers.optimizer is Tier.DEVICE]


@pytest.mark.parametrize(
    ("share", "names"),
    [(0, ""), (0.24, ""), (0.25, "0"), (0.5, "01"), (0.7, "01"), (0.99, "012"), (1, "0123")],
)
def test_states_of_the_first_units_stay_on_the_device_and_never_more_than_the_share(share: float, names: str) -> None:
    layouts = layouts_of({"optimizer": {**HOST, "device_share": share}})
    assert on_device(layouts.units(groups_of(5, 5, 5, 5))) == list(names)


def test_a_unit_that_is_too_large_for_what_is_left_is_passed_over() -> None:
    layouts = layouts_of({"optimizer": {**HOST, "device_share": 0.3}})
    assert on_device(layouts.units(groups_of(10, 2, 6, 2))) == ["1", "3"]


def test_frozen_parameters_and_what_a_rule_places_elsewhere_are_not_divided() -> None:
    rules = [{"match": "1.*", "optimizer.tier": "disk"}, {"match": "2.*", "optimizer.tier": "device"}]
    layouts = layouts_of({"optimizer": {**HOST, "device_share": 0.5}, "rule": rules})
    groups = groups_of(5, 5, 5, 5, 5)
    groups[0].params["0.weight"].requires_grad_(False)
    plans = layouts.units(groups)
    # Of units 3 and 4, one; a frozen parameter's cell is that of the parameter.
    assert on_device(plans) == ["0", "2", "3"]
    assert plans[1].flats[0].kind.tiers.optimizer is Tier.DISK


def test_any_share_has_the_same_layout() -> None:
    groups = groups_of(5, 7, 11)
    found = [
        [(flat.name, flat.number, flat.names, flat.layout) for plan in layouts_of(policy).units(groups) for flat in plan.flats]
        for policy in ({"optimizer": {**HOST, "device_share": share}} for share in (0, 0.4, 1))
    ]
    assert found[0] == found[1] == found[2]


def test_freezing_moves_nothing_else_and_what_is_unfrozen_takes_the_room_that_is_left() -> None:
    layouts, groups = layouts_of({"optimizer": {**HOST, "device_share": 0.5}}), groups_of(5, 5, 5, 5)

    def train(*trained: int) -> None:
        for place, group in enumerate(groups):
            group.params[f"{place}.weight"].requires_grad_(place in trained)

    plans = layouts.units(groups)
    assert on_device(plans) == ["0", "1"] and layouts.following(plans) == plans
    train(1, 2, 3)
    later = layouts.following(plans)
    assert later[1:] == plans[1:]
    train(0, 1, 2, 3)
    assert [plan.flats for plan in layouts.following(later)] == [plan.flats for plan in plans]
    train(3)
    few = layouts.units(groups)
    train(0, 1, 2, 3)
    later = layouts.following(few)
    assert later[3] is few[3] and on_device(later) == ["0", "1"]
    assert [plan.flats for plan in layouts.anew(later)] == [plan.flats for plan in plans]


@on_ranks(1, 2, stage=(0, 1, 3), param=(None, "bf16"))
def test_a_budget_counts_what_lies_on_the_device_to_the_byte(stage: int, param: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    placed = {"optimizer": {**HOST, "device_share": 0.5}, **({"precision": {"param": param}} if param else {})}
    policy: dict[str, Any] = {"stage": stage, "units": {"min_numel": 0}, **placed}
    attachment = zhooks.attach(model, policy=policy)
    optimizer, plans = torch.optim.AdamW(model.parameters()), plans_of(attachment)
    floor, (states, foreseen) = device_floor(attachment.policy, plans), state_nbytes(optimizer, plans, 0)
    kept = sum(flat.shard_numel for plan in plans for flat in plan.flats) // 2
    assert (states, foreseen) == (2 * 4 * kept, True)

    def step() -> None:
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()

    def held(tier: str) -> int:
        return sum(row.nbytes for row in attachment.memory().rows if (row.what, row.tier) == ("optimizer", tier))

    step()
    apart = param is not None
    on_host = kept * (12 if apart else 8)
    assert held("host") == on_host
    # Replicated parameters of 16 bit are copies beside their masters wherever these are.
    assert held("device") == kept * (12 if apart and stage != 3 else 8)
    assert all(row.nbytes == row.formula for row in attachment.memory().rows)
    attachment.apply({**policy, "budget": {"device": floor + states}})
    step()
    with pytest.raises(zhooks.BudgetError, match=r"lower \[optimizer\] device_share"):
        attachment.apply({**policy, "budget": {"device": floor + states - 1}})
    attachment.apply({**policy, "optimizer": {**HOST, "device_share": 0.25}, "budget": {"device": floor + states - 1}})
    step()
    attachment.detach()
