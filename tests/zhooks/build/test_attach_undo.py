"""An attach that fails at any of its steps, on all ranks or on one, leaves a plain model that trains and can be attached.

pytest runs it, on one and two ranks. What attach refuses before it begins is test_bad_input.py's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import zhooks
from tests.support.inside import transports_of
from tests.support.on_ranks import hooks_left, on_ranks, place

#: What attach calls once ranks are connected, in the order of the calls; of methods the class is named.
LATER = (
    "zhooks.plan.plan.find_units",
    "zhooks.plan.layouts.flat_layout",
    "zhooks.plan.plan.device_headroom",
    "zhooks.plan.plan.chart",
    "zhooks.build.tiers.preflight",
    "zhooks.unit.buffer_pool.Pool.keep",
    "zhooks.run.runtime.Members",
    "zhooks.run.runtime.Scaling",
    "zhooks.run.runtime.Reducer",
    "zhooks.run.runtime.Node",
    "zhooks.run.runtime.Paths",
    "zhooks.session.open.Runtime",
    "zhooks.build.shard.scratch_for",
    "zhooks.build.shard.Materializer",
    "zhooks.build.shard.shard_states",
    "zhooks.session.session.rest_reserve",
    "zhooks.run.runtime.Runtime.take",
    "zhooks.activation.saved.open_stash",
    "zhooks.activation.saved.open_division",
    "zhooks.activation.saved.open_inputs",
    "zhooks.session.open.Budgets",
    "zhooks.session.open.StockState",
    "zhooks.session.open.Optimizers",
    "zhooks.session.open.install",
    "zhooks.run.hooks.install_casts",
    "zhooks.run.members.Members.open",
    "zhooks.tensor.sharded.Registries.open",
    "zhooks.checkpoint.full_state.StockState.open",
    "zhooks.optim.optimizers.Optimizers.open",
    "zhooks.grad.scaling.Scaling.open",
    "zhooks.session.open.watch_steps",
    "zhooks.session.open.open_stepper",
    "offload.events.Bus.stated_by",
)
#: Of these every rank runs its own, and may fail alone: the call that fails is the second or third of its kind.
ALONE = (
    "zhooks.unit.buffer_pool.Pool.keep",
    "zhooks.unit.storage.ParamStorage.reserve",
    "zhooks.unit.flat.Flat.adopt",
    "zhooks.build.shard._swap_in",
    "zhooks.session.open.install",
    "zhooks.session.open.open_stepper",
    "torch.nn.Module.register_forward_hook",
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Broken(Exception):
    """What a step of attach raises here."""


def broken(name: str, at: int, ranks: Callable[[int], bool]) -> Any:
    """Let the call number ``at`` of what ``name`` names raise on these ranks."""
    owner, _, attribute = name.rpartition(".")
    try:
        holder: Any = import_module(owner)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        holder = getattr(import_module(module), kind)
    calls: list[object] = []
    real = getattr(holder, attribute)

    def instead(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == at and ranks(place()[0]):
            raise Broken(name)
        return real(*args, **kwargs)

    return mock.patch.object(holder, attribute, instead)


def refused(name: str, at: int, ranks: Callable[[int], bool], policy: dict[str, Any]) -> None:
    """An attach in which that call fails leaves everything as it was; the next one trains like plain PyTorch."""
    model, plain = net(), net()
    mine, theirs = (torch.optim.AdamW(either.parameters(), lr=0.01) for either in (model, plain))
    for either, optimizer in ((model, mine), (plain, theirs)):
        train(either, optimizer, range(2))
        either(batch(9)).square().mean().backward()
    before = list(model.parameters())
    values = [(param.detach().clone(), param.grad.clone()) for param in before]
    opened: list[Any] = []

    def noting(*args: Any) -> Any:
        opened.append(real_open(*args))
        return opened[-1]

    composition: Any = import_module("zhooks.attach")
    real_open = composition.open_comm
    tables = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    steps, foreach = [len(table) for table in tables], list(torch_optimizer._foreach_supported_types)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {**policy, "disk": {"path": folder}}
        with mock.patch.object(composition, "open_comm", noting), broken(name, at, ranks):
            error = Broken if ranks(place()[0]) else zhooks.AttachError
            with pytest.raises(error, match=name.rpartition(".")[2]) as raised:
                zhooks.attach(model, mine, policy=chosen)
        assert error is Broken or str(raised.value).startswith("rank 1: Cannot attach. Expected no"), str(raised.value)
        assert list(Path(folder).iterdir()) == []
        for now, then, (value, grad) in zip(model.parameters(), before, values, strict=True):
            assert now is then and type(now) is nn.Parameter and torch.equal(now, value), name
            assert type(now.grad) is Tensor and torch.equal(now.grad, grad), name
            assert now.untyped_storage().nbytes() == now.nbytes, f"{name}: memory of its own"
        assert all(type(value) is Tensor for state in mine.state.values() for value in state.values()), name
        assert not hooks_left(model), name
        assert [len(table) for table in tables] == steps and torch_optimizer._foreach_supported_types == foreach, name
        assert all(transport.closed for transport in transports_of(opened[0]) if transport.axis.world > 1), name
        attachment = zhooks.attach(model, mine, policy=chosen)
        train(model, mine, range(2, 4))
        attachment.detach()
    train(plain, theirs, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), name


@on_ranks(1, 2, stage=(0, 3))
def test_an_attach_whose_later_steps_fail_leaves_the_model_plain(stage: int) -> None:
    policy = {"stage": stage, "units": {"min_numel": 0}, "optimizer": {"tier": "disk"}, "budget": {"device": "1GiB"}}
    for name in LATER:
        refused(name, 1, lambda rank: True, policy)


@on_ranks(2, stage=(0, 3))
def test_an_attach_that_fails_on_one_rank_fails_on_all_and_leaves_them_plain(stage: int) -> None:
    policy = {"stage": stage, "units": {"min_numel": 0}, "optimizer": {"tier": "host"}}
    for name in ALONE:
        methods = name.startswith(("zhooks.unit", "zhooks.build.shard", "torch"))
        refused(name, 2 if methods else 1, lambda rank: rank == 1, policy)
    for at in (1, 2, 3, 4, 5, 6):
        refused("zhooks.build.shard._swap_in", at, lambda rank: rank == 1, {"stage": stage})


@on_ranks(2)
def test_an_attach_that_fails_within_a_parameter_larger_than_any_buffer_leaves_it_plain() -> None:
    refused("zhooks.build.shard._swap_in", 1, lambda rank: rank == 1, {"comm": {"buffer": "1KiB"}, "units": {"min_numel": 0}})
