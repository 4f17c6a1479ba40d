"""Weights exchanged by pointer (`p.data = value`), averaged into plain tensors, reduced by the user: beside plain PyTorch.

pytest runs it, on one rank and on two.  Single writes of every operation are test_written.py's.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import full, same, whole


class Net(nn.Module):
    """Sizes that no number of ranks divides, a scalar, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x)) * self.scale + self.shift
        return out


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def score(net: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = net(torch.ones(1, 5))
    return out.clone()


def policy(stage: int, tier: str) -> dict[str, Any]:
    tiers: dict[str, Any] = {} if tier == "device" else {key: {"tier": tier} for key in ("parameter", "gradient", "optimizer")}
    disk = {"disk": {"path": tempfile.mkdtemp()}} if tier == "disk" else {}
    return {"stage": stage, "units": {"min_numel": 0}, **tiers, **disk}


# ---- exchanges


def assigned(params: list[Any], values: list[Any]) -> None:
    for param, value in zip(params, values, strict=True):
        param.data = value


def evaluate_averages(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    average, backup = [torch.full(tuple(param.shape), 0.2) for param in params], [param.data for param in params]
    assigned(params, average)
    scored = score(net)
    assigned(params, backup)
    return [scored]


def evaluate_views(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    backup = [param.data.view(-1) for param in params]
    assigned(params, [torch.ones(tuple(param.shape)) for param in params])
    scored = score(net)
    assigned(params, [one.view(tuple(param.shape)) for one, param in zip(backup, params, strict=True)])
    return [scored]


def exchange_in_one_line(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    others, scored = [param.data.clone() * 2 for param in params], []
    for _ in range(2):
        for index, param in enumerate(params):
            param.data, others[index] = others[index], param.data
        scored.append(score(net))
    return [*scored, *others]


def train_on_others(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    backup = [param.detach() for param in params]
    assigned(params, [param.data.clone() * 0.5 for param in params])
    act()
    assigned(params, backup)
    return []


def write_the_backup(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    backup = [param.data for param in params]
    others = [one.data for one in backup]
    assigned(params, [param.data + 1 for param in params])
    torch._foreach_mul_(backup, 2.0)
    scored = score(net)
    assigned(params, others)
    return [scored, *backup]


def assign_to_an_alias(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    aliases = [param.data for param in params]
    assigned(aliases, [torch.ones(tuple(param.shape)) for param in params])
    return aliases


def ascend_and_come_back(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    net(torch.ones(2, 5)).square().sum().backward()
    trained = [param for param in params if param.grad is not None]
    backup = [param.data for param in trained]
    assigned(trained, [param.data + 0.1 * param.grad for param in trained])
    net.zero_grad()
    scored = score(net)
    assigned(trained, backup)
    return [scored]


def exchange_gradients(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    net(torch.ones(2, 5)).square().sum().backward()
    grads = [param.grad for param in params if param.grad is not None]
    backup = [grad.data for grad in grads]
    assigned(grads, [torch.ones(tuple(grad.shape)) for grad in grads])
    kept = [whole(one) for one in backup]
    assigned(grads, [one.mul_(2) for one in backup])
    return kept


def exchange_two_parameters(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    one, other = params[3], params[4]
    assert one.shape == other.shape
    one.data, other.data = other.data, one.data
    return []


def keep_a_copy(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    backup = copy.deepcopy([param.data for param in params])
    assigned(params, [torch.ones(tuple(param.shape)) for param in params])
    scored = score(net)
    assigned(params, backup)
    return [scored]


def assign_itself(net: nn.Module, params: list[Any], act: Callable[[], None]) -> list[Any]:
    aliases = [param.data for param in params]
    assigned(params, [param.data for param in params])
    torch._foreach_mul_(aliases, 2.0)
    return []


EXCHANGES = (
    evaluate_averages, evaluate_views, exchange_in_one_line, train_on_others, write_the_backup, assign_to_an_alias,
    ascend_and_come_back, exchange_gradients, exchange_two_parameters, keep_a_copy, assign_itself,
)  # fmt: skip


@on_ranks(1, 2, stage=(0, 1, 2, 3), tier=("device", "host", "disk"))
def test_weights_that_are_exchanged_by_pointer_are_those_of_plain_pytorch(stage: int, tier: str) -> None:
    if tier != "device" and stage != 3:
        return
    attached, plain = Net(), Net()
    attachment = zhooks.attach(attached, policy=policy(stage, tier))
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (attached, plain)]
    for exchange in EXCHANGES:
        ends = []
        for net, optimizer in zip((attached, plain), optimizers, strict=True):
            params: list[Any] = [net.first.weight, net.first.bias, net.second.weight, net.second.bias, net.shift, net.scale]
            step(net, optimizer)
            out = exchange(net, params, lambda net=net, optimizer=optimizer: step(net, optimizer))  # type: ignore[misc]
            kept = [whole(one) for one in out]
            step(net, optimizer)
            ends.append([*kept, score(net), *map(whole, params)])
        assert same(*ends), exchange.__name__
    attachment.detach()


# ---- averages in plain tensors


def diffusers(foreach: bool) -> Callable[..., tuple[Callable[[], None], Callable[[], list[Any]]]]:
    def make(net: nn.Module) -> tuple[Callable[[], None], Callable[[], list[Any]]]:
        average = pytest.importorskip("diffusers.training_utils").EMAModel(net.parameters(), decay=0.9, foreach=foreach)

        def end() -> list[Any]:
            average.store(net.parameters())
            average.copy_to(net.parameters())
            averaged = score(net)
            average.restore(net.parameters())
            return [averaged, score(net), *average.shadow_params]

        return lambda: average.step(net.parameters()), end

    return make


def averaged_model(net: nn.Module) -> tuple[Callable[[], None], Callable[[], list[Any]]]:
    average = AveragedModel(Net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return lambda: average.update_parameters(net), lambda: [*average.parameters(), score(average)]


def by(update: Callable[[Any, Any], Any]) -> Callable[..., tuple[Callable[[], None], Callable[[], list[Any]]]]:
    def make(net: nn.Module) -> tuple[Callable[[], None], Callable[[], list[Any]]]:
        average = list(Net().state_dict().values())

        @torch.no_grad()
        def act() -> None:
            for one, param in zip(average, net.state_dict(keep_vars=True).values(), strict=True):
                update(one, param)

        return act, lambda: average

    return make


AVERAGES: dict[str, Callable[..., tuple[Callable[[], None], Callable[[], list[Any]]]]] = {
    "diffusers": diffusers(False),
    "diffusers, foreach": diffusers(True),
    "torch": averaged_model,
    "copy_": by(lambda one, param: one.copy_(0.9 * one + 0.1 * param)),
    "sub_": by(lambda one, param: one.sub_(0.1 * (one - param))),
    "lerp_": by(lambda one, param: one.lerp_(param, 0.1)),
    "mul_ and add_": by(lambda one, param: one.mul_(0.9).add_(param.data, alpha=0.1)),
    "out": by(lambda one, param: torch.add(one, one - param, alpha=-0.1, out=one)),
    "foreach": by(lambda one, param: torch._foreach_sub_([one], torch._foreach_sub([one], [param]), alpha=0.1)),
}


@on_ranks(1, 2, stage=(1, 3))
def test_averages_that_are_plain_tensors_are_those_of_plain_pytorch(stage: int) -> None:
    attached, plain = Net(), Net()
    attachment = zhooks.attach(attached, policy=policy(stage, "device"))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9) for net in (attached, plain)]
    for name, make in AVERAGES.items():
        ends = []
        for net, optimizer in zip((attached, plain), optimizers, strict=True):
            act, end = make(net)
            for _ in range(2):
                step(net, optimizer)
                act()
            ends.append([*map(whole, end()), *map(whole, net.parameters())])
        assert same(*ends), name
    attachment.detach()


# ---- the user's own collectives


def reduced(param: Any) -> None:
    dist.all_reduce(param.data)
    param.data /= dist.get_world_size()


def coalesced(param: Any) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(param.data)


FUNCTIONAL: Any = torch.ops._c10d_functional
SAME_ON_ALL_RANKS: dict[str, Callable[[Any], Any]] = {
    "all_reduce, divided": reduced,
    "all_reduce, later": lambda param: dist.all_reduce(param.detach(), async_op=True).wait(),
    "all_reduce, coalesced": coalesced,
    "broadcast": lambda param: dist.broadcast(param.data, 1),
    "all_gather": lambda param: dist.all_gather([param.data, torch.empty(3, 7)], torch.ones(3, 7)),
    "all_reduce_": lambda param: FUNCTIONAL.wait_tensor(FUNCTIONAL.all_reduce_(param.data, "sum", dist.group.WORLD.group_name)),
}
APART: dict[str, Callable[[Any], Any]] = {
    "reduce": lambda param: dist.reduce(param.data, 0),
    "scatter": lambda param: dist.scatter(param.data, [torch.ones(3, 7)] * 2 if place()[0] == 0 else None),
    "reduce_scatter": lambda param: dist.reduce_scatter(param.data, [torch.ones(3, 7)] * 2),
    "all_to_all": lambda param: dist.all_to_all_single(param.data.view(21)[:20], torch.ones(20)),
    "recv": lambda param: dist.recv(param.data, 1 - place()[0]),
    "irecv": lambda param: dist.irecv(param.data, 1 - place()[0]),
    "view": lambda param: dist.all_reduce(param.data.view(-1)),
    "gradient": lambda param: dist.all_reduce(param.grad),
}


@on_ranks(2, stage=(0, 1, 3), tier=("device", "host"))
def test_what_a_collective_writes_into_a_parameter_is_there_or_it_is_refused(stage: int, tier: str) -> None:
    attached, plain = Net(), Net()
    attachment = zhooks.attach(attached, policy=policy(stage, "device" if stage < 3 else tier))
    for name, act in SAME_ON_ALL_RANKS.items():
        for net in (attached, plain):
            act(net.second.weight)
        assert torch.equal(whole(attached.second.weight), plain.second.weight), name
    attached(torch.ones(2, 5)).sum().backward()
    before = full(attached)
    for name, act in APART.items():
        if stage > 0 or name in ("view", "gradient"):
            with pytest.raises(zhooks.ShardedOpError, match=r"would be lost|To write it"):
                act(attached.second.weight)
            assert same(full(attached), before), name
    attachment.detach()


# ---- swapped tensors


@on_ranks(1, 2, stage=(0, 3))
def test_swapping_an_attached_parameter_for_another_is_refused_and_nothing_changed(stage: int) -> None:
    net = Net()
    attachment = zhooks.attach(net, policy={"stage": stage})
    before, kept = full(net), net.second.bias
    with pytest.raises(zhooks.ShardedOpError, match=r"second\.bias.*copy_\(value\).*detach\(\)"):
        torch.utils.swap_tensors(kept, nn.Parameter(torch.ones(3)))
    with pytest.raises(zhooks.ShardedOpError, match=r"second\.bias"):
        torch.utils.swap_tensors(nn.Parameter(torch.ones(3)), kept)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for convert in (net.double, net.float):
            with pytest.raises(RuntimeError, match="Couldn't swap") as raised:
                convert()
            assert isinstance(raised.value.__cause__, zhooks.ShardedOpError)
            assert "swap_tensors" in str(raised.value.__cause__)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(full(net), before) and net.second.bias is kept
    attachment.detach()
    assert same(net.parameters(), before)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.shift


class TwoBranches(nn.Module):
    """A frozen branch beside each layer that trains, as an adapter and its average: two flats of one unit, cut unlike.

    On two ranks each weight is on one of them, at other places of the two flats: of the other rank's both are empty.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.average = nn.ModuleList(Shifted().requires_grad_(False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for trained, average in zip(self.trained, self.average, strict=True):
            x = trained(x) + average(x)
        return x


def averaged(model: TwoBranches) -> list[Tensor]:
    pairs: list[Any] = [(one.weight, other.weight) for one, other in zip(model.trained, model.average, strict=True)]
    with torch.no_grad():
        for trained, average in pairs:
            average.copy_(trained)
        first = model(torch.ones(2, 8))
        for trained, average in pairs:
            average.mul_(0.5).add_(trained, alpha=0.25)
        torch._foreach_lerp_([average for _, average in pairs], [trained for trained, _ in pairs], 0.5)
        return [first, model(torch.ones(2, 8)), pairs[0][0] - pairs[0][1], torch.add(*pairs[1])]


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_parameters_meet_others_of_which_only_some_ranks_have_the_same_elements(stage: int) -> None:
    expected = averaged(TwoBranches())
    model = TwoBranches()
    zhooks.attach(model, policy={"stage": stage, "units": {"min_numel": 10000}})
    assert same([whole(value) for value in averaged(model)], expected)
