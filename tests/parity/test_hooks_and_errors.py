"""What happens in mid-step: hooks of the user, errors in forward and in backward, data changed between the two.

pytest runs it, each story on one rank and on two or on two alone, against plain replicas (see adversity.py). It never tests
what autograd is asked to compute: test_autograd.py does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.adversity import (
    Block,
    Net,
    RecomputedReentrant,
    Side,
    adam,
    adversity,
    loss_at,
    rows,
    sgd,
    train_by,
    train_noting_gradients,
)  # fmt: skip

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


# ---- hooks on modules


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.second(self.first(x) * scale)
        return out


def halved(module: nn.Module, into: Any, grads: Any) -> tuple[Tensor, ...]:
    return tuple(grad * 0.5 for grad in into)


@adversity(worlds=(2,), exact=False)
def test_hooks_of_the_user_run_in_their_order_and_find_weights_whole(side: Side) -> None:
    model, calls = Scaled(), []

    def watch(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda m, args, kwargs: calls.append(f"{name} before"), with_kwargs=True)
        module.register_forward_hook(lambda m, args, kwargs, out: calls.append(f"{name} after"), with_kwargs=True)
        module.register_full_backward_pre_hook(lambda m, grads: calls.append(f"{name} backward"))
        module.register_full_backward_hook(lambda m, into, grads: calls.append(f"{name} backward done"))

    watch("early", model.first)
    side.attach(model)
    watch("late", model.first)
    watch("root", model)
    seen: list[float] = []
    model.first.register_forward_hook(lambda m, args, out: seen.append(m.linear.weight.sum().item()))
    model.second.register_full_backward_hook(lambda m, into, grads: seen.append(model.second.linear.weight.norm().item()))
    extra: list[Tensor] = []
    model.second.register_forward_hook(lambda m, args, out: extra.append(m.linear.weight.square().sum()))
    model.first.register_forward_hook(lambda m, args, out: out * 2)
    model.second.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.second.register_full_backward_hook(halved)
    train_noting_gradients(side, model, lambda step: model(rows(side, step).requires_grad_(), scale=2.0).sum() + extra.pop())
    for value in seen:
        side.note("seen", value)
    kinds = ("before", "after", "backward", "backward done")
    places = {f"{name} {kind}": n for n, (name, kind) in enumerate((a, b) for a in ("early", "late", "root") for b in kinds)}
    side.note("calls", torch.tensor([places[call] for call in calls]))


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
