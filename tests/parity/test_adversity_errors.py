"""Adversities in mid-step: hooks on parameters, errors in forward and in backward, data changed between the two.

pytest runs it, each story at worlds 1 and 2, against plain replicas (see adversity.py). It never tests what autograd is
asked to compute: test_adversity_autograd.py does.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.adversity import Block, Net, RecomputedReentrant, Side, adam, adversity, loss_at, sgd, train_by

STEPS = 3


# ---- hooks on parameters


@adversity(stages=(3, 2))
def test_a_gradient_hook_put_on_before_attach_is_carried_over(side: Side) -> None:
    model = Net()
    for p in model.blocks[1].parameters():
        p.register_hook(lambda grad: grad * 0.5)
    train_by(side, model, lambda step: loss_at(model, step, side))


@adversity(stages=(3, 2))
def test_a_gradient_hook_put_on_after_attach_scales_the_gradient_until_removed(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in model.blocks[1].parameters()]
    side.step(model, optimizer, 0)
    for handle in handles:
        handle.remove()
    side.step(model, optimizer, 1)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_post_accumulate_hook_runs_once_a_backward_and_may_change_grad(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    calls: list[tuple[int, ...]] = []

    def halve(p: Tensor) -> None:
        calls.append(tuple(p.shape))
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for step in range(STEPS):
        side.step(model, optimizer, step)
        assert sorted(calls) == sorted(tuple(p.shape) for p in model.parameters())
        calls.clear()
    side.note_state(attachment)


# ---- errors in mid-step


class Faulty(Block):
    """Raises in forward or in backward when told to."""

    raise_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.raise_in == "forward":
            raise ArithmeticError("a fault in forward")
        y = super().forward(x)
        # Under reentrant checkpointing the first forward builds no graph; the recomputation does.
        if self.raise_in == "backward" and y.requires_grad:
            y.register_hook(self._raise)
        return y

    def _raise(self, grad: Tensor) -> Tensor:
        raise ArithmeticError("a fault in backward")


def raise_once(side: Side, where: str) -> None:
    model = Net(block=Faulty)
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(4):
        if step in (0, 2):
            model.blocks[1].raise_in = where
            with pytest.raises(ArithmeticError, match=f"a fault in {where}"):
                loss_at(model, 100 + step, side).backward()
            model.blocks[1].raise_in = ""
            # A loop that skips the batch drops what the broken backward had already left.
            optimizer.zero_grad()
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2, 1))
def test_the_step_after_an_exception_in_forward_is_right(side: Side) -> None:
    raise_once(side, "forward")


@adversity(stages=(3, 2, 1))
def test_the_step_after_an_exception_in_backward_is_right(side: Side) -> None:
    raise_once(side, "backward")


@adversity()
def test_the_step_after_an_exception_in_a_reentrant_backward_is_right(side: Side) -> None:
    model = RecomputedReentrant(block=Faulty)
    attachment = side.attach(model)
    optimizer = adam(model)
    model.blocks[1].raise_in = "backward"
    with pytest.raises(ArithmeticError, match="a fault in backward"):
        loss_at(model, 100, side).backward()
    model.blocks[1].raise_in = ""
    optimizer.zero_grad()
    for step in range(2):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_parameter_changed_between_forward_and_backward_raises_torchs_own_error(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    side.step(model, optimizer, 0)
    loss = loss_at(model, 1, side)
    with torch.no_grad():
        model.blocks[1].linear.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    side.step(model, optimizer, 2)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_an_optimizer_step_between_forward_and_backward_raises_torchs_own_error(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    loss_at(model, 0, side).backward()
    side.settle(model)
    stale = loss_at(model, 1, side)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    optimizer.zero_grad()
    side.step(model, optimizer, 2)
    side.note_state(attachment)


class Keeping(Block):
    """Keeps its output, so that the loop can spoil it."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x).exp()
        return self.kept * 0.1


@adversity(stages=(3, 2))
def test_an_activation_changed_between_forward_and_backward_raises_torchs_own_error(side: Side) -> None:
    model = Net(block=Keeping)
    attachment = side.attach(model)
    optimizer = adam(model)
    loss = loss_at(model, 0, side)
    with torch.no_grad():
        model.blocks[1].kept.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    side.step(model, optimizer, 1)
    side.note_state(attachment)
