"""``[budget] device`` refuses what does not fit, an optimizer's states included, before anything is allocated or updated.

pytest runs it, on one and two ranks. Sums in flight are test_order.py's and test_pipeline.py's.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.events import Event
from tests.support.inside import plans_of, runtime_of
from tests.support.on_ranks import hooks_left, on_ranks, place
from zhooks.plan.budget import device_floor, gathered_nbytes, state_nbytes

WIDTH = 64


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(dtype)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def policy_of(stage: int, nbytes: int | None = None, **more: Any) -> dict[str, Any]:
    bound = {} if nbytes is None else {"budget": {"device": nbytes}}
    return {"stage": stage, "units": {"min_numel": 0}, **bound, **more}


def floor_of(stage: int) -> tuple[int, int]:
    """What attach counts without states, and what one state a parameter adds on the rank that has most."""
    attachment = zhooks.attach(net(), policy=policy_of(stage))
    plans = plans_of(attachment)
    flats = [flat for plan in plans for flat in plan.flats]
    floor, one = device_floor(attachment.policy, plans), sum(flat.shard_numel * 4 for flat in flats)
    attachment.detach()
    return floor, one


def values(model: nn.Module) -> list[Tensor]:
    return [param.full_tensor() if isinstance(param, zhooks.ShardedTensor) else param.detach() for param in model.parameters()]


def on_device(attachment: zhooks.Attachment) -> int:
    return sum(row.nbytes for row in attachment.memory().rows if row.tier == "device")


class Fading(torch.optim.Optimizer):
    """Keeps one state a parameter and cannot be built from groups alone."""

    def __init__(self, params: Any, owner: nn.Module) -> None:
        super().__init__(params, {"lr": 0.1})
        self.owner = owner

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.sub_(state["mean"], alpha=group["lr"])


class Noisy(torch.optim.SGD):
    """Draws random numbers, and says so."""

    def step(self, closure: Any = None) -> Any:
        warnings.warn("noisy", stacklevel=1)
        torch.randn(3)
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"fused": True}, 2),
        (torch.optim.Adam, {"capturable": True}, 2),
        (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.1)}, 3),
        (torch.optim.Rprop, {}, 2),
        (Noisy, {"momentum": 0.9}, 1),
        (torch.optim.LBFGS, {}, None),
    ],
)
def test_states_are_foreseen_by_stepping_a_stand_in(kind: Any, options: dict[str, Any], states: int | None) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(3))
    optimizer, plans = kind(model.parameters(), **options), plans_of(attachment)
    drawn, before = torch.get_rng_state(), values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = state_nbytes(optimizer, plans, 0)
    numel = sum(param.numel() for param in model.parameters())
    assert found == (4 * (states or 0) * numel, states is not None)
    assert torch.equal(drawn, torch.get_rng_state()) and not optimizer.state
    assert all(map(torch.equal, values(model), before))
    attachment.detach()


def test_groups_differ_and_rounded_parameters_have_wide_states() -> None:
    model = net(torch.bfloat16)
    attachment = zhooks.attach(model, policy=policy_of(0))
    plans = plans_of(attachment)
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "momentum": 0.9}, {"params": others}]
    assert state_nbytes(torch.optim.SGD(groups, lr=0.1), plans, 0) == (2 * first.numel(), True)
    assert state_nbytes(torch.optim.SGD(groups, lr=0.1), plans, 0, wide=True) == (4 * first.numel(), True)
    attachment.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_a_budget_without_memory_for_states_is_refused_at_the_first_step_before_anything_is_updated(stage: int) -> None:
    floor, one = floor_of(stage)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(stage, floor + one))
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.1), values(model)
    backward(model)
    for _ in range(2):
        with pytest.raises(zhooks.BudgetError, match=r"\[budget\] device.*states of AdamW.*Nothing has been updated"):
            optimizer.step()
    assert not optimizer.state and all(map(torch.equal, values(model), before))
    attachment.apply(policy_of(stage, floor + 2 * one))
    for _ in range(2):
        step(model, optimizer)
    assert on_device(attachment) <= floor + 2 * one
    with pytest.raises(zhooks.BudgetError, match="states of AdamW"):
        attachment.apply(policy_of(stage, floor + one))
    attachment.apply(policy_of(stage, floor + one, optimizer={"tier": "host"}))
    step(model, optimizer)
    attachment.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_apply_counts_states_that_were_made_without_a_budget_in_its_first(stage: int) -> None:
    floor, one = floor_of(stage)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    before = values(model)
    with pytest.raises(zhooks.BudgetError, match=r"\[budget\] device.*states of AdamW.*Nothing has been changed"):
        attachment.apply(policy_of(stage, floor + one))
    assert attachment.policy.budget.device is None and all(map(torch.equal, values(model), before))
    attachment.apply(policy_of(stage, floor + 2 * one))
    step(model, optimizer)
    assert on_device(attachment) <= floor + 2 * one
    attachment.detach()


@on_ranks(1, 2)
def test_parameters_that_an_optimizer_is_given_later_count_at_its_next_step_before_anything_is_updated() -> None:
    floor, one = floor_of(3)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(3, floor + one))
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([first], lr=0.1)
    step(model, optimizer)
    optimizer.add_param_group({"params": others})
    before, states = values(model), len(optimizer.state)
    backward(model)
    for _ in range(2):
        with pytest.raises(zhooks.BudgetError, match=r"\[budget\] device.*states of AdamW.*Nothing has been updated"):
            optimizer.step()
    assert len(optimizer.state) == states and all(map(torch.equal, values(model), before))
    attachment.apply(policy_of(3, floor + 2 * one))
    step(model, optimizer)
    assert on_device(attachment) <= floor + 2 * one
    attachment.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_with_the_optimizer_attach_refuses_what_does_not_fit_before_it_builds_anything(stage: int) -> None:
    floor, one = floor_of(stage)
    model, plain = net(), net()
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=0.1), [param.data_ptr() for param in model.parameters()]
    with pytest.raises(zhooks.BudgetError, match="states of AdamW"):
        zhooks.attach(model, optimizer, policy=policy_of(stage, floor + one))
    with pytest.raises(zhooks.BudgetError, match="what is stored there and the units in flight"):
        zhooks.attach(model, policy=policy_of(stage, floor - 1))
    assert [param.data_ptr() for param in model.parameters()] == kept
    assert not hooks_left(model) and all(map(torch.equal, values(model), values(plain)))
    step(model, optimizer)
    # States that it has count as those it will make.
    with pytest.raises(zhooks.BudgetError, match="states of AdamW"):
        zhooks.attach(model, optimizer, policy=policy_of(stage, floor + one))
    attachment = zhooks.attach(model, optimizer, policy=policy_of(stage, floor + 2 * one))
    step(model, optimizer)
    assert on_device(attachment) <= floor + 2 * one
    attachment.detach()


@on_ranks(1, 2)
def test_states_that_cannot_be_foreseen_count_after_the_first_step() -> None:
    floor, one = floor_of(3)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(3, floor + one // 2))
    optimizer = Fading(model.parameters(), model)
    backward(model)
    with pytest.raises(zhooks.BudgetError, match=r"states of Fading.*This step has been made"):
        optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    with pytest.raises(zhooks.BudgetError, match=r"states of Fading.*Nothing has been updated"):
        optimizer.step()
    attachment.apply(policy_of(3, floor + one))
    step(model, optimizer)
    attachment.detach()


@on_ranks(1, 2)
def test_the_budget_of_one_rank_refuses_the_step_on_all() -> None:
    floor, one = floor_of(3)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(3, floor + one if place()[0] == place()[1] - 1 else None))
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    with pytest.raises(zhooks.BudgetError, match="states of AdamW"):
        optimizer.step()
    attachment.detach()


@on_ranks(1, 2)
def test_states_take_their_room_from_units_that_stay_gathered() -> None:
    floor, one = floor_of(3)
    model = net()
    attachment = zhooks.attach(model, policy=policy_of(3, floor + 3 * one))
    optimizer = torch.optim.AdamW(model.parameters())
    assert runtime_of(attachment).paths.choices.budget == 3 * one
    step(model, optimizer)
    room = runtime_of(attachment).paths.choices.budget
    assert room is not None and one <= room < 3 * one
    # Several optimizers of one model add up.
    other = torch.optim.Adam(model.parameters(), amsgrad=True)
    with pytest.raises(zhooks.BudgetError, match="states of Adam, AdamW"):
        other.step()
    attachment.detach()


# ---- units that stay gathered while others run


class Embedded(nn.Module):
    """Blocks between two uses of the root's own scale, and of an embedding that the head may be tied to."""

    def __init__(self, *, tied: bool, own: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.scale = nn.Parameter(torch.ones(own, WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale.mean(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale.mean(0))


class Gathered:
    """The most bytes of full buffers at once, by the events of an attachment."""

    def __init__(self, nbytes: dict[str, int]) -> None:
        self.nbytes, self.here, self.most = nbytes, set[str](), 0

    def on_event(self, event: Event) -> None:
        if (event.kind, event.what) == ("begin", "gather"):
            self.here.add(event.key)
            self.most = max(self.most, sum(self.nbytes[name] for name in self.here))
        elif event.what == "release":
            self.here.discard(event.key)


@on_ranks(2, prefetch=(0, 1), tied=(False, True), own=(1, 300))
def test_units_that_stay_while_others_run_are_counted_beside_those_under_way(prefetch: int, tied: bool, own: int) -> None:
    torch.manual_seed(0)
    model = Embedded(tied=tied, own=own)
    attachment = zhooks.attach(model, policy=policy_of(3, schedule={"prefetch": prefetch, "reshard_after_forward": True}))
    plans = plans_of(attachment)
    seen = Gathered({plan.name: plan.full_nbytes for plan in plans})
    for _ in range(3):
        attachment.observe(seen)
        model(torch.arange(40)).sum().backward()
    counted = gathered_nbytes(attachment.policy, plans)
    assert 0 < seen.most <= counted, (seen.most, counted)
    if not tied:
        assert counted - seen.most <= max(seen.nbytes.values()) * prefetch
    attachment.detach()


def frozen(budget: int | None = None) -> tuple[nn.Module, zhooks.Attachment]:
    """Of the two layers the second does not train."""
    model = net()
    model[2].requires_grad_(False)  # type: ignore[index]
    return model, zhooks.attach(model, policy=policy_of(3, budget))


def for_one_layer() -> int:
    """Bytes of the device that one of the layers needs to train."""
    _, probe = frozen()
    plans = plans_of(probe)
    one = sum(flat.shard_numel * 4 for plan in plans for flat in plan.flats if flat.kind.trainable)
    budget = device_floor(probe.policy, plans) + 2 * one
    probe.detach()
    return budget


@on_ranks(1, 2)
def test_what_is_unfrozen_must_fit_too_and_is_refused_before_anything_is_laid_out() -> None:
    budget = for_one_layer()
    model, attachment = frozen(budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    before, layers = values(model), list(model.parameters())[2:]
    for param in layers:
        param.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(zhooks.BudgetError, match=r"\[budget\] device.*were unfrozen: freeze them again, or .*apply"):
            backward(model)
    assert all(map(torch.equal, values(model), before))
    for param in layers:
        param.requires_grad_(False)
    step(model, optimizer)
    assert all(param.grad is None for param in layers) and on_device(attachment) <= budget
    for param in layers:
        param.requires_grad_(True)
    attachment.apply(policy_of(3, 3 * budget))
    step(model, optimizer)
    assert all(param.grad is not None for param in layers)


@on_ranks(1, 2)
def test_what_is_frozen_leaves_its_memory_to_what_is_unfrozen_next() -> None:
    # Either layer trains, not both.
    budget = for_one_layer()
    model, attachment = frozen(budget)
    every = list(model.parameters())
    step(model, torch.optim.AdamW(every[:2], lr=0.1))
    model.zero_grad()
    for param in every:
        param.requires_grad_(not param.requires_grad)
    step(model, torch.optim.AdamW(every[2:], lr=0.1))
    assert [param.grad is None for param in every] == [True, True, False, False]
    assert on_device(attachment) <= budget
