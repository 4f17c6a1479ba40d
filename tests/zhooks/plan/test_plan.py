"""A plan is what attach will do, as data: made by looking, it changes no model and says what would be refused.

pytest runs it, on one and two ranks. That a failing attach is undone is test_attach_undo.py's.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.tier import Tier
from tests.support.on_ranks import hooks_left, on_ranks
from zhooks.comm import open_comm
from zhooks.plan import Plan, make, read


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def planned(model: nn.Module, policy: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Plan:
    request = read(model, optimizer, policy, None, None, True)
    comm = open_comm(request.mesh, request.policy, request.device, request.facts)
    try:
        return make(request, comm)
    finally:
        comm.close()


def tensors(value: Any) -> list[Tensor]:
    """Every tensor a plan holds, but for those of the model itself."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        return [found for field in fields(value) if field.name != "model" for found in tensors(getattr(value, field.name))]
    if isinstance(value, dict):
        return [found for each in value.values() for found in tensors(each)]
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in tensors(each)]
    return []


def untouched(model: nn.Module, params: list[nn.Parameter], values: list[Tensor]) -> bool:
    same = all(now is then for now, then in zip(model.parameters(), params, strict=True))
    plain = all(type(param) is nn.Parameter and torch.equal(param, value) for param, value in zip(params, values, strict=True))
    return same and plain and not hooks_left(model)


@on_ranks(1, 2, stage=(0, 3))
def test_a_plan_is_made_without_touching_the_model(stage: int) -> None:
    model = net()
    params = list(model.parameters())
    values = [param.detach().clone() for param in params]
    memory = [param.data_ptr() for param in params]
    rule = {"match": "3.*", "precision": {"param": "bf16"}}
    policy = {"stage": stage, "units": {"min_numel": 0}, "optimizer": {"tier": "host"}, "rule": [rule]}
    plan = planned(model, policy)
    assert untouched(model, params, values) and [param.data_ptr() for param in params] == memory
    assert {id(tensor) for tensor in tensors(plan)} == {id(param) for param in params}
    assert [name for unit in plan.units for name in unit.group.params] == [name for name, _ in model.named_parameters()]
    assert [island.module for island in plan.islands.islands] == [model[3]]
    assert plan.tiers is not None and plan.tiers.need.off_device[Tier.DISK] == 0
    with pytest.raises(AttributeError):
        plan.units = ()  # type: ignore[misc]


@on_ranks(1, 2)
def test_the_same_model_is_planned_alike_twice() -> None:
    model = net()
    one, other = (planned(model, {"budget": {"device": "1GiB"}}) for _ in range(2))
    assert one.headroom.limit == other.headroom.limit == 1 << 30
    assert one.headroom.spare == other.headroom.spare and one.headroom.spare is not None
    assert [unit.flats for unit in one.units] == [unit.flats for unit in other.units]


@on_ranks(1, 2)
def test_an_optimizer_that_is_passed_has_its_states_foreseen() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = {"budget": {"device": "1GiB"}}
    without, known = planned(model, budget).headroom, planned(model, budget, optimizer).headroom
    assert known.foreseen == (optimizer,) and without.foreseen == ()
    assert without.spare is not None and known.spare is not None and known.spare < without.spare


REFUSED = (
    ({"budget": {"device": "16B"}}, zhooks.BudgetError, "device"),
    ({"optimizer": {"tier": "host"}, "parameter": {"tier": "host"}, "budget": {"host": "16B"}}, zhooks.BudgetError, "host"),
    ({"rule": [{"match": "0.weight", "precision": {"param": "bf16"}}]}, zhooks.AttachError, "0"),
)


@on_ranks(1, 2)
def test_what_a_plan_refuses_attach_refuses_with_nothing_changed() -> None:
    for policy, error, match in REFUSED:
        model = net()
        params = list(model.parameters())
        values = [param.detach().clone() for param in params]
        memory = [param.data_ptr() for param in params]
        with pytest.raises(error, match=match):
            planned(model, policy)
        with pytest.raises(error, match=match):
            zhooks.attach(model, policy=policy)
        # Never sharded and put back: the memory is the one it had.
        assert untouched(model, params, values) and [param.data_ptr() for param in params] == memory
