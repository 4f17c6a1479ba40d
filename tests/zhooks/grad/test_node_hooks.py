"""Hooks that wait for a gradient run once it is reduced and in place: on parameters, and on autograd's accumulation nodes.

pytest runs it, on one and two ranks. Hooks of every other kind are the parity suite's.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.values import grad_of, sharded


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_gradients(model: nn.Module, step: int) -> list[Tensor]:
    """The mean over the ranks of what plain PyTorch computes."""
    twin, world = copy.deepcopy(model), place()[1]
    twin.zero_grad()
    (sum((twin(batch(step, rank)).square().mean() for rank in range(world)), torch.zeros(())) / world).backward()
    return [grad_of(param) for param in twin.parameters()]


def note(found: list[Tensor], param: Any) -> None:
    found.append(param.grad.to_local().clone())


def note_of_node(found: list[Tensor], param: Any, ins: Any, outs: Any) -> None:
    note(found, param)


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_hooks_that_wait_for_a_gradient_find_that_of_this_backward(stage: int) -> None:
    for tier in ("device", "host") if stage > 1 else ("device",):
        model, plain = net(), net()
        attachment = zhooks.attach(model, policy={"stage": stage, "gradient": {"tier": tier}, "optimizer": {"tier": tier}})
        nodes, handles = [], []
        seen: dict[str, list[Tensor]] = {"node": [], "parameter": []}
        for param in model.parameters():
            nodes.append(param.view_as(param).grad_fn.next_functions[0][0])

            handles.append(nodes[-1].register_hook(partial(note_of_node, seen["node"], param)))
            param.register_post_accumulate_grad_hook(partial(note, seen["parameter"]))
        for step in range(3):
            model(batch(step, place()[0])).square().mean().backward()
            grads = [param.grad for param in model.parameters()]
            for kind, found in seen.items():
                assert len(found) == len(grads), f"{kind} hooks run once a backward"
                mine = sorted(float(one.sum()) for one in found)
                assert mine == sorted(float(grad.to_local().sum()) for grad in grads), f"{kind} hooks see this gradient"
                found.clear()
            for grad, theirs in zip(grads, plain_gradients(plain, step), strict=True):
                torch.testing.assert_close(grad.full_tensor(), theirs)
            del grads
            model.zero_grad()
        for handle in handles:
            handle.remove()
        model(batch(0, place()[0])).square().mean().backward()
        assert not seen["node"] and seen["parameter"]
        attachment.detach()


@on_ranks(1, 2, stage=(0, 3))
def test_pre_hooks_of_a_node_see_the_reduced_gradient_and_what_they_return_takes_its_place(stage: int) -> None:
    for tier in ("device", "host"):
        model, plain = net(), net()
        attachment = zhooks.attach(model, policy={"stage": stage, "gradient": {"tier": tier}, "optimizer": {"tier": tier}})
        nodes = [param.view_as(param).grad_fn.next_functions[0][0] for param in model.parameters()]
        seen: list[Tensor] = []

        def halved(ins: Any, seen: list[Tensor] = seen) -> Any:
            seen.append(ins[0].to_local().clone())
            return (ins[0] * 0.5,)

        handles = [node.register_prehook(halved) for node in nodes]
        for factor in (0.5, 0.5, 1.0):
            if factor == 1.0:
                while handles:
                    handles.pop().remove()
            model(batch(0, place()[0])).square().mean().backward()
            assert len(seen) == (len(nodes) if factor == 0.5 else 0)
            for param, theirs in zip(model.parameters(), plain_gradients(plain, 0), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), factor * theirs)
            seen.clear()
            model.zero_grad()
        attachment.detach()


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_optimizers_in_backward_step_with_the_gradients_of_this_backward(stage: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    model, plain = net(), net()
    zhooks.attach(model, policy={"stage": stage})
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for step in range(3):
        model(batch(step, place()[0])).square().mean().backward()
        expected = plain_gradients(plain, step)
        with torch.no_grad():
            for param, grad in zip(plain.parameters(), expected, strict=True):
                param.sub_(grad, alpha=0.1)
        assert all(param.grad is None for param in model.parameters())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded(ours).full_tensor(), theirs.detach())
