"""Steps of torch's own optimizers over ranges that lie one after another: as plain training, with fewer tensors."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import zhooks
from tests.support.on_ranks import on_accelerators, on_ranks

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW, foreach": ("AdamW", {"foreach": True, "amsgrad": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "Adam, maximize": ("Adam", {"maximize": True, "weight_decay": 0.1}),
    "SGD": ("SGD", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9, "foreach": True}),
    "ASGD": ("ASGD", {}),
    "Adadelta": ("Adadelta", {}),
    "Adagrad": ("Adagrad", {}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"foreach": True}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 4))


def backward(model: nn.Module, number: int, *, without_last: bool = False) -> None:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(4, 6, generator=generator)
    for layer in list(model)[: 3 if without_last else 4]:  # type: ignore[call-overload]
        x = layer(x)
    x.square().mean().backward()


def made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.05, **options)
    return optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, zhooks.ShardedTensor) else value


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [optimizer.state.get(param, {}) for param in model.parameters()]
    return [*map(whole, model.parameters()), *(whole(state[key]) for state in states for key in sorted(state))]


def train(name: str, policy: dict[str, Any] | None) -> list[Any]:
    """With a parameter that has no gradient in some steps, and states that are loaded in between."""
    model = net()
    attachment = None if policy is None else zhooks.attach(model, policy=policy)
    optimizer = made(name, model)
    for number in range(3):
        backward(model, number, without_last=number == 1)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = made(name, model)
    optimizer.load_state_dict(saved)
    for number in range(3, 6):
        backward(model, number, without_last=number == 4)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number != 4)
    found = [copy.deepcopy(value.detach()) if isinstance(value, Tensor) else value for value in values(model, optimizer)]
    if attachment is not None:
        attachment.detach()
    return found


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@on_ranks(1, 2, name=tuple(OPTIMIZERS), tier=("device", "host"))
def test_an_optimizer_of_torchs_computes_what_it_computes_on_a_plain_model(name: str, tier: str) -> None:
    away = {} if tier == "device" else {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
    expected, found = train(name, None), train(name, away)
    assert len(expected) == len(found) and all(map(same, expected, found))


class Longest(TorchDispatchMode):
    """The most tensors that a foreach operation was given, numbers aside."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("_foreach") and args[0][0].dim():
            self.most = max(self.most, len(args[0]))
        return func(*args, **(kwargs or {}))


@on_ranks(1, 2)
def test_a_unit_of_many_parameters_is_updated_as_one_tensor_after_its_states_were_loaded_too() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        model(torch.ones(2, 16)).square().mean().backward()
        with Longest() as seen:
            optimizer.step()
        assert seen.most == 1, seen.most
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    attachment.detach()


@on_ranks(1, 2)
def test_a_hook_of_all_optimizers_that_was_registered_after_attach_changes_gradients_before_they_are_used() -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)

    found = []
    for attached in (False, True):
        model = net()
        attachment = zhooks.attach(model) if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hook = register_optimizer_step_pre_hook(halve)
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        hook.remove()
        found.append([whole(param).detach().clone() for param in model.parameters()])
        if attachment is not None:
            attachment.detach()
    assert all(map(same, *found))


@on_ranks(1, 2)
def test_a_step_with_a_closure_and_hooks_of_its_own_optimizer_are_called_as_in_plain_pytorch() -> None:
    found = []
    for attached in (False, True):
        model, seen = net(), list[str]()
        attachment = zhooks.attach(model) if attached else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def closure(model: nn.Module = model, optimizer: Any = optimizer, seen: list[str] = seen) -> None:
            seen.append("closure")
            optimizer.zero_grad()
            backward(model, 0)

        with torch.enable_grad():
            optimizer.step(closure)
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        backward(model, 1)
        optimizer.step()
        found.append((seen, [whole(param).detach().clone() for param in model.parameters()]))
        if attachment is not None:
            attachment.detach()
    (plain, expected), (sharded, values) = found
    assert plain == sharded and all(map(same, expected, values))


@on_accelerators(1)
def test_states_whose_memory_is_adjacent_by_chance_are_not_taken_for_one() -> None:
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))).to("accel")
        attachment = zhooks.attach(model) if attached else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for number in range(2):
            model(torch.ones(2, 16, device="accel")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                # What is free in between: a device's allocator cuts the next blocks of 512 bytes from one segment.
                held = [torch.empty(256, device="accel") for _ in range(200)]
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
                starts = [(buffer.to_local() if attached else buffer).data_ptr() for buffer in buffers]
                assert [after - before for before, after in pairwise(starts)] == [1024] * 3
                del held
        found.append([whole(param).detach().cpu() for param in model.parameters()])
        if attachment is not None:
            attachment.detach()
    assert all(map(same, *found))


@on_ranks(2)
def test_an_alias_of_a_state_that_was_loaded_stays_one_when_states_are_put_together() -> None:
    model = net()
    attachment = zhooks.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    backward(model, 0)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state: Any = next(iter(optimizer.state.values()))["exp_avg"]
    alias = state.detach()
    optimizer.step()
    assert torch.equal(alias.full_tensor(), state.full_tensor())
    attachment.detach()
