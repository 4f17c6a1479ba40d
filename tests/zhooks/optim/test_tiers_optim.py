"""Optimizers over tiers: any element-wise one, entered through torch's own hooks, and the policy of a living model changed.

pytest runs it on one rank and on two; the reference is the device tier, which other tests hold to plain PyTorch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zhooks
from tests.support.inside import block_range_of, tier_of, units_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from tests.support.tiers import AWAY, adamw, loss_of, policy, run, step, three_steps
from tests.support.values import copies, same
from tests.support.zoo import ZOO

KINDS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, amsgrad=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, fused=True),
    "tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), eps=1e-3, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "plain": lambda params: torch.optim.SGD(params, lr=0.05),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01, eps=1e-3),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01, eps=1e-3),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5, eps=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01, eps=1e-3),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.003, eps=1e-2, centered=True, momentum=0.5),
}


class Coupled(torch.optim.Optimizer):
    """Divides by the norm of all gradients, and keeps what it found in its group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["seen"] = sum(float(g.norm()) for g in grads)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (group["seen"] + 1.0))


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups and beside them, as some write it."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.01, "turn": 0, "decayed": torch.ones(())})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["turn"] += 1
            group["late"] = group.get("late", 0) + 1
            group["decayed"].mul_(0.5)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / group["turn"] * group["decayed"]))


@on_ranks(*slow(1), 2, tier=("host", "disk"))
def test_every_elementwise_optimizer_steps_as_on_the_device(tier: str) -> None:
    for kind, make in KINDS.items():

        def build(model: nn.Module, make: Callable[..., torch.optim.Optimizer] = make) -> torch.optim.Optimizer:
            return make(model.parameters())

        one, two = (run(three_steps(), policy(each), optimizer=build) for each in ("device", tier))
        assert one[0] == two[0] and same(one[1], two[1]), kind


@on_ranks(1, 2, tier=AWAY)
def test_every_state_rests_on_its_tier_after_the_first_step(tier: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model, amsgrad=True)
    step(model, optimizer, 0)
    for param in model.parameters():
        named = {key: value for key, value in optimizer.state[param].items() if value.dim()}
        assert named.keys() == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for value in named.values():
            assert tier_of(value) == policy(tier)["optimizer"]["tier"]
    states = [state for param in model.parameters() for state in optimizer.state[param].values() if state.dim()]
    assert len({id(at.block) for state in states if (at := block_range_of(state))}) == 3 * len(units_of(attachment))
    attachment.detach()


@on_ranks(1, 2, tier=AWAY)
def test_groups_schedulers_and_strangers_in_the_same_optimizer_keep_their_ways(tier: str) -> None:
    values = []
    for chosen in ("device", tier):
        model, stranger, late = ZOO["mlp"].build(7), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        attachment = zhooks.attach(model, policy=policy(chosen))
        params = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": params[:3], "lr": 0.1}, {"params": [stranger]}]
        groups += [{"params": params[3:], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01, 0.02], total_steps=6)
        identities = [id(group) for group in optimizer.param_groups], [[id(p) for p in g["params"]] for g in groups]
        for number in range(4):
            (loss_of(model, number) + (stranger * stranger).sum() + late.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if number == 1:
                optimizer.add_param_group({"params": [late], "lr": 0.5})
                scheduler.base_lrs.append(0.5)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        found = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        assert [id(group) for group in optimizer.param_groups][:3] == identities[0] and found == [*identities[1], [id(late)]]
        assert late.detach().ne(1.0).all() and stranger.detach().ne(1.0).all()
        values.append([*copies(params), stranger.detach(), late.detach()])
        attachment.detach()
    assert same(*values)


@on_ranks(1, 2, tier=("host", "disk"))
def test_a_counter_in_the_groups_or_beside_them_counts_once_a_step(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> list[float]:
        losses = [step(model, optimizer, number) for number in range(3)]
        group: Any = optimizer.param_groups[0]
        assert group["turn"] == group["late"] == optimizer.steps == 3 and group["decayed"] == 0.125  # type: ignore[attr-defined]
        return losses

    one, two = (run(loop, policy(each), optimizer=lambda m: Counting(m.parameters())) for each in ("device", tier))
    assert one[0] == two[0] and same(one[1], two[1])


@on_ranks(1, 2, prefetch=(1, 3))
def test_a_step_needs_no_more_of_a_bounded_host_than_buffers_for_one_unit(prefetch: int) -> None:
    _, world = place()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: zhooks.Attachment | None) -> None:
        for number in range(3):
            model(torch.full((2, 16), 1.0 + number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    # A gradient and two states of one layer, divided over the ranks.
    away = policy("device", budget={"host": 3 * 16 * 16 * 4 // world}, schedule={"prefetch": prefetch})
    away |= {"gradient": {"tier": "disk"}, "optimizer": {"tier": "disk"}}
    one, two = (run(loop, each, build=build)[1] for each in (policy("device"), away))
    assert same(one, two)


class KeepsItsModel(torch.optim.AdamW):
    """Reaches the model, and so the attachment with all it has open, and counts its steps in a module of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01, eps=1e-3)
        self.model, self.average = model, nn.Module()
        self.average.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def step(self, closure: Any = None) -> Any:
        self.average.get_buffer("steps").add_(1)
        return super().step(closure)


@on_ranks(1, 2, tier=("host", "disk"))
def test_an_optimizer_that_keeps_its_model_steps_and_counts_as_on_the_device(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: zhooks.Attachment | None) -> Any:
        assert isinstance(optimizer, KeepsItsModel)
        return [step(model, optimizer, number) for number in range(3)], int(optimizer.average.get_buffer("steps"))

    one, two = (run(loop, policy(each), optimizer=KeepsItsModel) for each in ("device", tier))
    assert one[0] == two[0] and one[0][1] == 3 and same(one[1], two[1])


@on_ranks(1, 2, tier=AWAY)
def test_what_cannot_be_stepped_unit_by_unit_is_refused_by_name(tier: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    before, params = copies(model.parameters()), list(optimizer.param_groups[0]["params"])
    loss_of(model, 1).backward()
    for call in (lambda: optimizer.step(lambda: 1.0), lambda: optimizer.step(closure=lambda: 1.0)):
        with pytest.raises(zhooks.ShardedOpError, match=r"AdamW\.step\(closure\) expected a step without a closure"):
            call()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
        assert same(copies(model.parameters()), before)
    handle = optimizer.register_step_pre_hook(lambda *_: ((optimizer,), {}))
    with pytest.raises(zhooks.ShardedOpError, match="expected step pre-hooks that return None"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert not same(copies(model.parameters()), before)
    coupled = Coupled(model.parameters())
    with pytest.raises(zhooks.ShardedOpError, match="Coupled cannot be used with tiers"):
        coupled.step()
    assert len(coupled.param_groups[0]["params"]) == len(params)
    optimizer.zero_grad()
    step(model, optimizer, 2)
    attachment.detach()


@on_ranks(1, 2, tier=AWAY)
def test_a_hook_after_a_step_steps_another_optimizer_as_the_loop_would(tier: str) -> None:
    def trained(hooked: bool) -> tuple[list[Tensor], set[str]]:
        model: Any = ZOO["mlp"].build(7)
        attachment = zhooks.attach(model, policy=policy(tier))
        params = list(model.parameters())
        first, other = (torch.optim.AdamW(some, lr=0.01, eps=1e-3) for some in (params[:2], params[2:]))
        if hooked:
            first.register_step_post_hook(lambda *_: other.step())
        for number in range(2):
            loss_of(model, number).backward()
            first.step()
            if not hooked:
                other.step()
            model.zero_grad()
        kept = {tier_of(value) for state in other.state.values() for value in state.values() if value.dim()}
        found = copies(params)
        attachment.detach()
        return found, kept

    (expected, placed), (found, kept) = trained(False), trained(True)
    assert same(found, expected)
    assert kept == placed


@on_ranks(1, 2, tier=AWAY)
def test_step_hooks_run_once_in_order_and_see_the_whole_optimizer(tier: str) -> None:
    model: Any = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model)
    said: list[tuple[str, int, float]] = []
    probe = model[0].weight

    def note(word: str) -> Callable[..., None]:
        def hook(called: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            said.append((word, len(called.param_groups[0]["params"]), float(probe.detach().sum())))

        return hook

    optimizer.register_step_pre_hook(note("before 1"))
    optimizer.register_step_pre_hook(note("before 2"))
    optimizer.register_step_post_hook(note("after 1"))
    optimizer.register_step_post_hook(note("after 2"))
    handle = register_optimizer_step_post_hook(note("after all"))
    count = len(list(model.parameters()))
    for number in range(2):
        said.clear()
        step(model, optimizer, number)
        assert [word for word, _, _ in said] == ["before 1", "before 2", "after 1", "after 2", "after all"]
        assert {found for _, found, _ in said} == {count}
        assert said[0][2] == said[1][2] != said[2][2] == said[3][2] == said[4][2]
    handle.remove()
    assert [len(hooks) for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)] == [2, 2]
    attachment.detach()
    said.clear()
    optimizer.step()
    assert [word for word, _, _ in said] == ["before 1", "before 2", "after 1", "after 2"]


@on_ranks(1, 2, tier=AWAY)
def test_two_optimizers_over_one_model_keep_their_own_states(tier: str) -> None:
    values = []
    for chosen in ("device", tier):
        model = ZOO["gpt"].build(7)
        attachment = zhooks.attach(model, policy=policy(chosen))
        weights = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        two = torch.optim.AdamW(weights, lr=0.01, eps=1e-3), torch.optim.SGD(others, lr=0.1, momentum=0.9)
        for number in range(3):
            loss_of(model, number, "gpt").backward()
            for optimizer in two:
                optimizer.step()
                optimizer.zero_grad()
        values.append(copies(model.parameters()))
        attachment.detach()
        for optimizer in two:
            assert all(type(s) is Tensor for state in optimizer.state.values() for s in state.values())
    assert same(*values)


@on_ranks(1, 2, tier=AWAY)
def test_one_optimizer_over_two_attached_models_steps_both_and_keeps_its_groups(tier: str) -> None:
    values = []
    for chosen in ("device", tier):
        models = [ZOO["mlp"].build(seed) for seed in (7, 8)]
        attachments = [zhooks.attach(model, policy=policy(chosen)) for model in models]
        params = [param for model in models for param in model.parameters()]
        optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-3)
        for number in range(3):
            for model in models:
                loss_of(model, number).backward()
            optimizer.step()
            assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in params]
            optimizer.zero_grad()
        values.append(copies(params))
        for attachment in attachments:
            attachment.detach()
        optimizer.step()
    assert same(*values)


# ---- another policy for a living model -------------------------------------------------------------------------------


@on_ranks(
    1, 2,
    path=(("device", "host", "disk", "device"), ("disk", "mixed", "device", "states"), *slow(("host", "device", "disk"))),
)  # fmt: skip
def test_moving_between_tiers_does_not_change_a_bit(path: tuple[str, ...]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
        losses = []
        for number in range(2 * len(path)):
            if attachment is not None and moves and number % 2 == 0 and number:
                if number == 4:
                    loss_of(model, 99).backward()
                attachment.apply(policy(path[number // 2]))
                if number == 4:
                    assert all(param.grad is not None for param in model.parameters())
                    optimizer.zero_grad()
                rows = {row.what: row.tier for row in attachment.memory().rows if row.nbytes}
                cells = {what: policy(path[number // 2])[what]["tier"] for what in rows}
                assert {what: where for what, where in rows.items() if what != "gradient"} == {
                    what: where for what, where in cells.items() if what != "gradient"
                }
            losses.append(step(model, optimizer, number))
        return losses

    moves = False
    wanted = run(loop, policy("device"))
    moves = True
    found = run(loop, policy(path[0]))
    assert found[0] == wanted[0] and same(found[1], wanted[1])


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_changing_the_stage_of_a_living_model_keeps_parameters_and_states(tier: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier, 3))
    optimizer = adamw(model)
    twin = ZOO["mlp"].build(7)
    other = zhooks.attach(twin, policy=policy("device", 3))
    plain = adamw(twin)
    for number, stage in enumerate((3, 0, 3, 0)):
        attachment.apply(policy(tier, stage))
        for state in ("exp_avg", "exp_avg_sq"):
            if number:
                mine = [optimizer.state[param][state] for param in model.parameters()]
                theirs = [plain.state[param][state] for param in twin.parameters()]
                for one, two in zip(copies(mine), copies(theirs), strict=True):
                    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(step(model, optimizer, number), step(twin, plain, number), rtol=1e-5, atol=1e-6)
    for one, two in zip(copies(model.parameters()), copies(twin.parameters()), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    other.detach()
    attachment.detach()


@on_ranks(1, 2)
def test_a_change_of_units_is_refused_and_changes_nothing() -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy("disk"))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    before = copies(model.parameters())
    with pytest.raises(zhooks.PolicyError, match=r"apply expected \[units\] as at attach"):
        attachment.apply({**policy("disk"), "units": {"min_numel": 5}})
    assert attachment.policy.units.min_numel == 0 and same(copies(model.parameters()), before)
    step(model, optimizer, 1)
    attachment.detach()


@on_ranks(1, 2, tier=AWAY)
def test_parameters_unfrozen_by_the_user_train_after_apply(tier: str) -> None:
    values = []
    for chosen in ("device", tier):
        model: Any = ZOO["mlp"].build(7)
        for param in model[2].parameters():
            param.requires_grad_(False)
        attachment = zhooks.attach(model, policy=policy(chosen))
        optimizer = adamw(model)
        losses = [step(model, optimizer, number) for number in range(2)]
        for param in model[2].parameters():
            param.requires_grad_(True)
        attachment.apply(policy(chosen))
        losses += [step(model, optimizer, number) for number in range(2, 4)]
        assert all(optimizer.state[param] for param in model[2].parameters())
        values.append([torch.tensor(losses), *copies(model.parameters())])
        attachment.detach()
    assert same(*values)


@on_ranks(1, 2, then=("freeze", "apply", "detach"))
def test_parameters_that_find_no_room_when_they_are_unfrozen_are_refused_until_there_is(then: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[1].requires_grad_(False)
    tight = {**policy("device"), "precision": {"param": "bf16"}, "optimizer": {"tier": "host"}}
    # For the fp32 masters of two layers of three, and their momentum.
    attachment = zhooks.attach(model, policy={**tight, "budget": {"host": 2 * 2 * 4 * 64 // place()[1]}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def trained() -> bool:
        """A step; whether the middle layer took part."""
        before = model[1].weight.full_tensor()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return not torch.equal(model[1].weight.full_tensor(), before)

    assert not trained()
    model[1].requires_grad_(True)
    for _ in range(2):
        with pytest.raises(zhooks.BudgetError, match="host tier cannot admit"):
            model(torch.ones(2, 8))
    if then == "freeze":
        model[1].requires_grad_(False)
        assert not trained()
    elif then == "apply":
        attachment.apply(tight)
        assert trained()
    attachment.detach()
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 3
    assert model[1].weight.requires_grad == (then != "freeze")


def test_no_hook_of_ours_is_left_with_torch() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    gc.collect()
    zhooks.attach(ZOO["mlp"].build(7), policy=policy("host")).detach()
    seen: list[str] = []
    counts = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("step"))
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy("host"))
    attachment.apply(policy("device"))
    attachment.apply(policy("disk"))
    attachment.detach()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    handle.remove()
    assert seen == ["step"]
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == counts
