"""What autograd may be asked for: recomputation, several graphs and models at once, gradients asked for directly.

pytest runs it, each story on one rank and on two or on two alone, against plain replicas (see adversity.py).
It never tests hooks and errors: test_hooks_and_errors.py does.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.parity.adversity import (
    Block,
    Net,
    Recomputed,
    RecomputedReentrant,
    Side,
    adam,
    adversity,
    batch,
    loss_at,
    rows,
    sgd,
    train_by,
    train_noting_gradients,
)
from tests.support.averaging import average_gradients
from tests.support.values import grad_of

# ---- recomputation


class RecomputedInside(Block):
    """Recomputes a part of itself, so that recomputation begins inside the unit."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda given: F.gelu(self.linear(self.norm(given))), x, use_reentrant=False)


@adversity(stages=(3, 2))
def test_blocks_may_be_checkpointed_without_reentrance(side: Side) -> None:
    model = Recomputed()
    train_by(side, model, lambda step: loss_at(model, step, side))


@adversity(stages=(3, 2))
def test_blocks_may_be_checkpointed_with_reentrance(side: Side) -> None:
    model = RecomputedReentrant()
    train_by(side, model, lambda step: loss_at(model, step, side))


@adversity(stages=(3, 2))
def test_a_block_may_checkpoint_a_part_of_itself(side: Side) -> None:
    model = Net(block=RecomputedInside)
    train_by(side, model, lambda step: loss_at(model, step, side))


@adversity()
def test_the_whole_model_may_be_checkpointed(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        x, y = batch(step, side.rank)
        return F.mse_loss(checkpoint(model, x, use_reentrant=False), y)

    train_by(side, model, loss_of)


# ---- several graphs


@adversity(stages=(3, 2))
def test_several_forwards_may_come_before_a_backward(side: Side) -> None:
    model = Net()
    train_by(side, model, lambda step: loss_at(model, 2 * step, side) + loss_at(model, 2 * step + 1, side))


@adversity(stages=(3, 2), exact=False)
def test_two_graphs_may_be_alive_and_go_backward_one_after_the_other(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        first, second = (loss_at(model, 2 * step + place, side) for place in range(2))
        first.backward()
        return second

    train_by(side, model, loss_of)


@adversity(stages=(3, 2), exact=False)
def test_a_graph_may_go_backward_twice(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        loss = loss_at(model, step, side)
        loss.backward(retain_graph=True)
        return loss

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_a_forward_whose_graph_is_thrown_away_leaves_no_trace(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        side.note("thrown away", loss_at(model, 100 + step, side))
        return loss_at(model, step, side)

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_no_grad_evaluation_between_steps_changes_nothing(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        with torch.no_grad():
            side.note("evaluated", loss_at(model, 100 + step, side))
        return loss_at(model, step, side)

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_no_grad_evaluation_between_forward_and_backward_changes_nothing(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        loss = loss_at(model, step, side)
        with torch.no_grad():
            side.note("evaluated", loss_at(model, 100 + step, side))
        return loss

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_inference_mode_may_be_the_first_use_and_come_between_steps(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        with torch.inference_mode():
            evaluated = loss_at(model, 100 + step, side).item()
        side.note("evaluated", evaluated)
        return loss_at(model, step, side)

    train_by(side, model, loss_of)


class Prefixed(Net):
    """Its first part runs under no_grad, as a frozen backbone does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](self.enter(x))
        for block in self.blocks[1:]:
            x = block(x)
        return self.leave(x)


@adversity(stages=(3, 2))
def test_a_part_of_the_forward_may_run_under_no_grad(side: Side) -> None:
    model = Prefixed()
    train_by(side, model, lambda step: loss_at(model, step, side))


# ---- gradients asked for directly


@adversity(stages=(3, 2))
def test_autograd_grad_gives_the_full_gradients_and_leaves_grad_alone(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(2):
        grads = torch.autograd.grad(loss_at(model, step, side), list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        # The replicas average what they were given through ``grad``; a sharded gradient can only be the average.
        if type(side) is Side:
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            average_gradients(model, side.world)
            grads = tuple(grad_of(p) for p in model.parameters())
            model.zero_grad()
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            side.note(f"gradient {name}", grad)
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_backward_with_inputs_fills_those_gradients_and_no_others(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(3):
        loss_at(model, step, side).backward(inputs=[model.blocks[1].linear.weight, model.leave.bias])
        side.settle(model)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_the_gradient_of_the_input_is_right(side: Side) -> None:
    model = Net()
    model.requires_grad_(False)
    side.attach(model)
    for step in range(2):
        x, y = batch(step, side.rank)
        F.mse_loss(model(x.requires_grad_()), y).backward()
        side.note("gradient of the input", grad_of(x))


@adversity(stages=(3, 2), exact=False)
def test_a_penalty_on_the_gradient_of_the_input_is_right(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(2):
        x, y = batch(step, side.rank)
        x.requires_grad_()
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    side.note_state(attachment)


@adversity(stages=(3, 2), exact=False)
def test_a_penalty_over_the_parameters_may_be_part_of_the_loss(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        penalty = sum(p.square().sum() + p.abs().mean() for p in model.parameters())
        return loss_at(model, step, side) + 0.05 * penalty

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_autocast_sees_the_weights_of_this_step(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_at(model, step, side).float()

    train_by(side, model, loss_of)


@adversity(stages=(3, 2))
def test_a_users_own_saved_tensor_hooks_work_beside_ours(side: Side) -> None:
    model = Net()

    def loss_of(step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept):
            return loss_at(model, step, side)

    train_by(side, model, loss_of)


# ---- recomputation of what is frozen, nested and fails


class Again(nn.Module):
    """Calls itself, under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, more: int) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, more - 1) if more else x


class NestedRecomputation(nn.Module):
    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.again, self.frozen, self.adapter = Again(), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.early, self.fails = early, False

    def _part(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        if self.fails and torch._C._current_graph_task_id() >= 0:
            raise ValueError("in the second forward")
        x = F.dropout(self.adapter(torch.sin(x)), 0.25)
        torch.cos(self.adapter(x.detach()))
        return x

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(self.early):
            x = checkpoint(self.again, checkpoint(self._part, x, use_reentrant=False), 2, use_reentrant=False)
        out: Tensor = self.adapter(x)
        return out


def spread(side: Side, model: nn.Module, step: int) -> Tensor:
    out: Tensor = model(rows(side, step))
    return out.square().mean()


@adversity(worlds=(2,), exact=False)
def test_recomputed_parts_may_be_frozen_call_themselves_stop_early_and_fail_once(side: Side) -> None:
    for early in (True, False):
        torch.manual_seed(2)
        model = NestedRecomputation(early=early)
        side.attach(model)
        torch.manual_seed(3 + side.rank)
        model.fails = True
        with pytest.raises(ValueError, match="in the second forward"):
            model(rows(side, 0)).sum().backward()
        model.zero_grad()
        model.fails = False
        torch.manual_seed(5 + side.rank)
        train_noting_gradients(side, model, partial(spread, side, model))
        side.note("random", torch.rand(2))


# ---- several models


@adversity(worlds=(2,), exact=False)
def test_several_attached_models_share_a_loss_and_judge_each_other(side: Side) -> None:
    first, second, judge = (nn.Sequential(Block(), nn.Linear(8, 8)) for _ in range(3))
    for model in (first, second, judge):
        side.attach(model)
    optimizers = [sgd(model) for model in (first, second, judge)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (first(rows(side, step)).square().mean() + second(first(rows(side, step + 9))).square().mean() / 2).backward()
        found = judge(first(rows(side, step))).sum() * 0.01
        # The judge is frozen after its forward: it is to be left alone by the generator's backward.
        judge.requires_grad_(False)
        found.backward()
        judge.requires_grad_(True)
        for model in (first, second, judge):
            side.settle(model)
            side.note_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
