"""Which optimizers an attachment knows, in which order, and that it looks through all objects only where it must.

pytest runs it, on one and two ranks. What becomes of states that torch loads is tests/zhooks/checkpoint/test_torch_state.py's.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.values import grad_of

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (factor * model(torch.ones(2, 6)).square().sum()).backward()


def full(optimizer: torch.optim.Optimizer, param: Any, key: str = "exp_avg") -> Tensor:
    value: Any = optimizer.state[param][key]
    return value.full_tensor() if isinstance(value, zhooks.ShardedTensor) else value


@contextmanager
def no_collector() -> Iterator[None]:
    """Whoever asks the garbage collector for anything inside fails."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("get_objects", "collect", "get_referrers"):
            patched.setattr(gc, name, lambda *_, name=name: pytest.fail(f"gc.{name} was called"))
        yield


@on_ranks(2, end=("freeze", "detach"))
def test_equal_optimizers_go_through_collectives_in_the_order_they_stepped_in_wherever_memory_has_them(end: str) -> None:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    params = list(model.parameters())
    made = [torch.optim.Adam(params, lr=0.1) for _ in range(2)]
    first, second = reversed(made) if rank else made
    backward(model)
    first.step()
    for param in params:
        param.grad = -3 * grad_of(param)
    second.step()
    wanted = [full(one, param) for one in (first, second) for param in params]
    assert not torch.equal(wanted[0], wanted[len(params)]), "the two could not be told apart"
    if end == "freeze":
        model[0].bias.requires_grad_(False)
        model(torch.ones(2, 6))
    else:
        attachment.detach()
    found = [full(one, param) for one in (first, second) for param in params]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@on_ranks(1, 2)
def test_reports_freezes_and_saves_ask_nothing_of_the_garbage_collector() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    optimizer = torch.optim.Adam(model.parameters())
    with folder() as path:
        with no_collector():
            backward(model)
            optimizer.step()
            attachment.memory()
            attachment.observe(Recorder()).close()
            model[0].bias.requires_grad_(False)
            backward(model)
            optimizer.step()
            attachment.save(path / "run")
            attachment.load(path / "run")
            attachment.state_dict(optimizer)
        attachment.detach()


@on_ranks(2)
def test_an_optimizer_dropped_on_one_rank_earlier_than_on_another_holds_up_nobody() -> None:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    old: Any = torch.optim.Adam(model.parameters())
    new = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for one in (old, new):
        backward(model)
        one.step()
    wanted = full(new, model[0].weight, "momentum_buffer")
    gc.disable()
    try:
        gone, old.itself = weakref.ref(old), old if rank else None
        del one, old
        assert (gone() is None) == (rank == 0)
        model[0].bias.requires_grad_(False)
        model(torch.ones(2, 6))
        assert torch.equal(full(new, model[0].weight, "momentum_buffer"), wanted)
        attachment.detach()
        assert torch.equal(full(new, model[0].weight, "momentum_buffer"), wanted)
    finally:
        gc.enable()


@on_ranks(1, 2, verb=("detach", "apply", "state_dict"))
def test_ranges_given_to_an_optimizer_that_has_not_stepped_are_never_left_behind(verb: str) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    params = list(model.parameters())
    one, other = (torch.optim.Adam(params) for _ in range(2))
    backward(model)
    one.step()
    wanted = [full(one, param) for param in params]
    other.load_state_dict(one.state_dict())
    del one
    if verb == "apply":
        attachment.apply({**POLICY, "optimizer": {"tier": "host"}})
    if verb == "state_dict":
        state = attachment.state_dict(other)
        assert bool(state) == (place()[0] == 0)
        found = state["optimizer"]["state"] if state else {}
        assert all(torch.equal(states["exp_avg"], wanted[number]) for number, states in found.items())
        assert len(found) == (0 if place()[0] else len(params))
    else:
        assert all(torch.equal(full(other, param), value) for param, value in zip(params, wanted, strict=True))
    backward(model)
    other.step()
    attachment.detach()
    for param in params:
        assert type(other.state[param]["exp_avg"]) is Tensor and other.state[param]["exp_avg"].shape == param.shape
    backward(model)
    other.step()


@on_ranks(2)
def test_without_a_name_all_optimizers_are_saved_those_that_have_not_stepped_among_them() -> None:
    with folder() as path:
        def make() -> tuple[nn.Sequential, zhooks.Attachment, list[torch.optim.Optimizer]]:
            model = net()
            attachment = zhooks.attach(model, policy=POLICY)
            parts = (model[0].parameters(), model[2].parameters())
            made: list[torch.optim.Optimizer] = []
            made += [torch.optim.Adam(part, lr=0.1) for part in (reversed(parts) if place()[0] else parts)]
            return model, attachment, made[::-1] if place()[0] else made

        model, attachment, (first, _) = make()
        backward(model)
        first.step()
        attachment.save(path / "run")
        twin, again, (resumed, unused) = make()
        again.load(path / "run")
        assert torch.equal(full(resumed, twin[0].weight), full(first, model[0].weight)) and not unused.state
        backward(twin)
        resumed.step()
        attachment.detach()
        again.detach()


@on_ranks(2)
def test_optimizers_that_no_step_has_told_apart_are_refused_where_their_order_would_matter() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with folder() as path:
        with pytest.raises(zhooks.CheckpointError, match=r"save expected optimizers that can be told apart, found two SGD"):
            attachment.save(path / "run")
        for one in pair:
            attachment.state_dict(one)
        attachment.save(path / "run")
        attachment.load(path / "run", pair)
        attachment.detach()


@on_ranks(2)
def test_optimizers_of_one_rank_alone_are_refused_where_all_are_meant() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    only = torch.optim.SGD(model.parameters(), lr=0.1) if place()[0] else None
    with folder() as path, pytest.raises(zhooks.DivergenceError, match="load expected the same optimizers"):
        attachment.load(path / "run")
    del only
    attachment.detach()


@on_ranks(2)
def test_groups_added_to_an_optimizer_that_has_stepped_are_compared_too() -> None:
    rank, _ = place()
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1 + rank})
    backward(model)
    with pytest.raises(zhooks.DivergenceError, match=r"group 1 lr = 0.1 on rank 0 and group 1 lr = 1.1 on rank 1"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    attachment.detach()


def test_an_optimizer_with_state_that_nobody_refers_to_forbids_no_attach() -> None:
    model = net()
    optimizer: Any = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.itself, waits = optimizer, weakref.ref(optimizer)
    gc.disable()
    try:
        with pytest.raises(zhooks.AttachError, match="expected an optimizer without state, found Adam"):
            zhooks.attach(model, policy=POLICY)
        del optimizer
        assert waits() is not None, "it waits for the collector"
        zhooks.attach(model, policy=POLICY).detach()
        assert waits() is None
    finally:
        gc.enable()


def test_attach_collects_no_garbage_for_optimizers_without_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("collected"))
    monkeypatch.setattr(sys.modules["zhooks.build.shard"], "forget_idle_graphs", lambda: None)
    attachment = zhooks.attach(model, policy=POLICY)
    monkeypatch.undo()
    attachment.detach()
    del optimizer


@on_ranks(2)
def test_optimizers_that_step_in_backward_are_known_in_one_order() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    params = list(model.parameters())
    each = {id(param): torch.optim.Adam([param]) for param in (reversed(params) if place()[0] else params)}

    def step(param: Tensor) -> None:
        each[id(param)].step()
        param.grad = None

    for param in params:
        param.register_post_accumulate_grad_hook(step)
    backward(model)
    wanted = [full(each[id(param)], param) for param in params]
    model[0].bias.requires_grad_(False)
    backward(model.eval())
    model[0].bias.requires_grad_(True)
    attachment.detach()
    frozen = full(each[id(params[1])], params[1])
    assert torch.equal(frozen, wanted[1]) and all(type(full(each[id(p)], p)) is Tensor for p in params)
