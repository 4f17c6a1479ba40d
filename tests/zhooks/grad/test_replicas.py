"""Gradients are means over replicas that are jobs of their own, and over the ranks of the mesh again when these have gone.

pytest runs it on one rank, with replicas that have its own gradients. Real jobs that come and go are torchft's tests.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.work import DONE, Work
from tests.support.values import copies
from zhooks.comm import Call
from zhooks.resilience import Replica


class Alike:
    """Other jobs whose every gradient is this one's."""

    jobs = several = True

    def __init__(self, count: int) -> None:
        self.count, self.sums = count, 0

    def averaged(self) -> int:
        return self.count

    def add_up(self, call: Call, out: Tensor) -> Work:
        out.mul_(self.count)
        self.sums += 1
        return DONE

    def merge(self, flags: Tensor) -> None:
        return None


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def backward(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
    return copies(param.grad for param in model.parameters())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_mean_is_over_all_replicas_and_a_sum_is_their_sum(count: int, reduce: str) -> None:
    model, expected = net(), backward(net())
    attachment = zhooks.attach(model, policy={"gradient": {"reduce": reduce}, "units": {"min_numel": 0}})
    replicas = Alike(count)
    replica = Replica(attachment.session, ())
    replica.reduce_over(replicas)
    wanted = expected if reduce == "mean" else [count * grad for grad in expected]
    torch.testing.assert_close(backward(model), wanted)
    assert replicas.sums == 2, "a sum for each unit"
    replica.reduce_over(None)
    torch.testing.assert_close(backward(model), expected)
    assert replicas.sums == 2
    attachment.detach()


def test_sums_that_are_held_back_go_over_replicas_once_with_what_was_added_up() -> None:
    model, expected = net(), backward(net())
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    replicas = Alike(3)
    Replica(attachment.session, ()).reduce_over(replicas)
    with attachment.accumulate():
        for _ in range(2):
            model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean().backward()
        assert replicas.sums == 0
    torch.testing.assert_close(copies(param.grad for param in model.parameters()), [2 * grad for grad in expected])
    assert replicas.sums == 2
    attachment.detach()


def test_what_autograd_grad_returns_is_a_mean_over_replicas_too() -> None:
    model, expected = net(), backward(net())
    attachment = zhooks.attach(model)
    Replica(attachment.session, ()).reduce_over(Alike(3))
    loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
    torch.testing.assert_close(copies(torch.autograd.grad(loss, list(model.parameters()))), expected)
    attachment.detach()
