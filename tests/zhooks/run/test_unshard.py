"""``unshard`` and ``reshard``: units that stay gathered because the loop says so, and training that does not see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.on_ranks import on_ranks, place
from tests.support.values import copies, same

POLICY: dict[str, Any] = {"units": {"names": ["0", "1", "2"], "min_numel": 0}, "schedule": {"reshard_after_forward": True}}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))


def batch(step: int) -> Tensor:
    """One that wants a gradient: backward needs the first weight, too."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()


def gathers(recorder: Recorder) -> list[str]:
    """Units gathered since the last call."""
    events = [event.key for event in recorder.events if (event.kind, event.what) == ("begin", "gather")]
    recorder.events.clear()
    return events


@on_ranks(2, stage=(1, 2, 3))
def test_an_unsharded_module_is_gathered_once_a_step_and_trains_the_same(stage: int) -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={**POLICY, "stage": stage})
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    recorder = Recorder()
    attachment.unshard(model[1])
    with attachment.observe(recorder):
        for step in range(4):
            for one, optimizer in ((model, ours), (plain, theirs)):
                optimizer.zero_grad()
                one(batch(step)).square().mean().backward()
                optimizer.step()
            if step == 2:
                gathers(recorder)
    assert sorted(gathers(recorder)) == (["0", "0", "1", "2", "2"] if stage == 3 else ["0", "1", "2"])
    assert same(copies(model.parameters()), plain.parameters())
    attachment.reshard(model[1])
    with attachment.observe(recorder):
        for _ in range(2):
            gathers(recorder)
            model(batch(0)).sum().backward()
            ours.step()
    assert sorted(gathers(recorder)) == (["0", "0", "1", "1", "2", "2"] if stage == 3 else ["0", "1", "2"])


@on_ranks(2)
def test_reshard_between_forward_and_backward_frees_what_the_policy_keeps_and_backward_gathers_it() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy={**POLICY, "schedule": {"reshard_after_forward": False}})
    for _ in range(3):
        model.zero_grad()
        loss = model(batch(0)).square().mean()
        held = attachment.memory().transient["gathered units"]
        assert held >= 3 * 4 * 42
        attachment.reshard(model[0])
        attachment.reshard(model[2])
        assert attachment.memory().transient["gathered units"] == held // 3
        loss.backward()
    plain(batch(0)).square().mean().backward()
    assert same(copies(param.grad for param in model.parameters()), [param.grad for param in plain.parameters()])


@on_ranks(1, 2)
def test_the_whole_model_is_unsharded_and_a_parameter_of_it_is_read_without_a_collective() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    attachment.unshard()
    if place()[0] == 0:
        # One rank alone: what is gathered needs nobody else.
        assert torch.equal(model[1].weight @ torch.eye(6), net()[1].weight)
    attachment.reshard()
    assert attachment.memory().transient["gathered units"] == 0
    attachment.detach()
    assert same(model.parameters(), net().parameters())


@on_ranks(2)
def test_a_freeze_apply_and_an_exception_leave_an_unsharded_module_right() -> None:
    model, plain = net(), net()
    attachment = zhooks.attach(model, policy=POLICY)
    attachment.unshard(model[1])
    model[1].bias.requires_grad_(False)
    plain[1].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 5))
    attachment.apply({**POLICY, "stage": 2})
    for one in (model, plain):
        one(batch(1)).square().mean().backward()
    grads = [[param.grad for param in one.parameters() if param.grad is not None] for one in (model, plain)]
    assert same(copies(grads[0]), grads[1])
    attachment.reshard(model[1])


@on_ranks(2)
def test_a_module_without_attached_parameters_is_refused_on_every_rank() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=POLICY)
    for verb in (attachment.unshard, attachment.reshard):
        with pytest.raises(zhooks.AttachError, match="found Linear with none"):
            verb(nn.Linear(2, 2) if place()[0] else model[0])
