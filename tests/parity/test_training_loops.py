"""What users do between steps: with optimizers, checkpoints, copies of the model and its parameters.

pytest runs it, each story on one rank and on two or on two alone, against plain replicas (see adversity.py).
It never tests unusual models or autograd calls: test_unusual_models.py and test_autograd.py do.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.adversity import Block, Net, Side, adam, adversity, batch, loss_at, sgd
from tests.support.averaging import average_gradients
from tests.support.values import grad_of

STEPS = 3


def backward(side: Side, model: nn.Module, step: int) -> Tensor:
    """Forward and backward of that step, the gradients settled; the loss."""
    x, y = batch(step, side.rank)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    side.settle(model)
    side.note("loss", loss)
    return loss


# ---- optimizers


@adversity(stages=(3, 2, 1, 0))
def test_an_optimizer_built_before_attach_goes_on_working(side: Side) -> None:
    model = Net()
    optimizer = adam(model)
    attachment = side.attach(model)
    for step in range(STEPS):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_an_optimizer_that_holds_state_is_passed_to_attach_and_keeps_it(side: Side) -> None:
    model = Net()
    optimizer = adam(model)
    for step in range(2):
        # Not attached yet: both sides are replicas.
        x, y = batch(step, side.rank)
        F.mse_loss(model(x), y).backward()
        average_gradients(model, side.world)
        optimizer.step()
        optimizer.zero_grad()
    attachment = side.attach(model, optimizer)
    for step in range(2, 5):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_parameter_group_may_be_added_later(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    early = [*model.enter.parameters(), *model.blocks[0].parameters()]
    optimizer = torch.optim.AdamW(early, lr=0.02, eps=1e-3, weight_decay=0.1)
    side.step(model, optimizer, 0)
    model.zero_grad()
    late = [*model.blocks[1:].parameters(), *model.leave.parameters()]
    optimizer.add_param_group({"params": late, "lr": 0.01, "weight_decay": 0.0})
    for step in range(1, 4):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_groups_may_differ_in_every_option(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "lr": 0.05, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)
    for step in range(STEPS):
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2), exact=False)
def test_several_optimizers_may_share_a_model(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    first = torch.optim.SGD([*model.enter.parameters(), *model.blocks.parameters()], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.leave.parameters(), lr=0.02, eps=1e-3)
    for step in range(4):
        backward(side, model, step)
        first.step()
        # The second steps every other time, on two steps' gradients.
        if step % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_an_optimizer_may_hold_other_parameters_beside_the_models(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    scale = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.02, eps=1e-3)
    for step in range(STEPS):
        x, y = batch(step, side.rank)
        loss = F.mse_loss(model(x) * scale, y)
        loss.backward()
        side.settle(model)
        optimizer.step()
        optimizer.zero_grad()
        side.note("loss", loss)
    # Nobody averages a parameter that is not the model's: each rank has its own.
    side.note("the user's own parameter", scale)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_step_may_take_a_closure(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            return backward(side, model, step)

        side.note("returned", optimizer.step(closure))
    side.note_state(attachment)


@adversity(stages=(3, 2, 1), exact=False)
def test_zero_grad_may_keep_the_gradients_and_fill_them_with_zeros(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    for step in range(STEPS):
        backward(side, model, step)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(p.grad is not None for p in model.parameters())
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_the_models_own_zero_grad_drops_the_gradients(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        backward(side, model, 100 + step)
        model.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())
        side.step(model, optimizer, step)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_learning_rate_schedulers_work_unchanged(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
        ],
        milestones=[2],
    )
    for step in range(4):
        side.step(model, optimizer, step)
        side.note("rate", scheduler.get_last_lr()[0])
        scheduler.step()
    side.note_state(attachment)


# ---- gradients between backward and step


@adversity(stages=(3, 2, 1, 0), exact=False)
def test_gradients_are_clipped_by_any_norm_and_by_value(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step, norm_type in enumerate([2.0, float("inf"), 1.0, 3.0, 0.0]):
        backward(side, model, step)
        side.note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    side.note_state(attachment)


@adversity(stages=(3, 2), exact=False)
def test_the_norm_of_a_part_of_the_model_is_that_parts(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        backward(side, model, step)
        # Three elements: with more ranks than elements some shards are empty.
        side.note("bias norm", torch.nn.utils.clip_grad_norm_([model.leave.bias], 0.02))
        side.note("block norm", torch.nn.utils.clip_grad_norm_(model.blocks[1].parameters(), 0.02))
        side.note("total norm", torch.nn.utils.get_total_norm([grad_of(p) for p in model.parameters()]))
        side.note("weight norm", model.enter.weight.norm())
        optimizer.step()
        optimizer.zero_grad()
    side.note_state(attachment)


@adversity(stages=(3, 2, 1, 0))
def test_an_overflow_on_one_rank_makes_every_rank_skip_the_step(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        x, y = batch(step, side.rank)
        loss = F.mse_loss(model(x), y)
        if step == 1 and side.rank == side.world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        side.settle(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        side.note("scale", scaler.get_scale())
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_gradients_may_be_changed_by_hand_before_the_step(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        backward(side, model, step)
        for p in model.parameters():
            p.grad.mul_(0.5)
            p.grad = p.grad.sign() * p.grad.abs().sqrt()
        model.leave.bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    side.note_state(attachment)


# ---- parameters between steps


@adversity(stages=(3, 2, 1, 0))
def test_parameters_may_be_updated_by_hand_under_no_grad(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    for step in range(STEPS):
        backward(side, model, step)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * grad_of(p)  # type: ignore[misc]
                p.clamp_(-0.5, 0.5)
                p.grad = None
            model.leave.weight.mul_(0.9)
            model.enter.weight.copy_(torch.full((8, 6), 0.01 * step))
            nn.init.ones_(model.blocks[0].norm.weight)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_deepcopy_follows_as_a_moving_average(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(STEPS):
        side.step(model, optimizer, step)
        with torch.no_grad():
            for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.25)
    for name, p in average.named_parameters():
        side.note(f"average {name}", p)
    side.note_state(attachment)


@adversity(stages=(3, 2))
def test_a_deepcopy_can_be_evaluated(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = adam(model)
    side.step(model, optimizer, 0)
    frozen = copy.deepcopy(model)
    side.step(model, optimizer, 1)
    with torch.no_grad():
        side.note("the copy's output", frozen(batch(2, side.rank)[0]))
        side.note("the model's output", model(batch(2, side.rank)[0]))
    side.note_state(attachment)


@adversity(stages=(3, 2, 1, 0))
def test_state_dicts_kept_in_memory_resume_another_model(side: Side) -> None:
    model = Net()
    side.attach(model)
    optimizer = adam(model)
    for step in range(2):
        side.step(model, optimizer, step)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = Net()
    attachment = side.attach(resumed)
    again = adam(resumed)
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    for step in range(2, 5):
        side.step(resumed, again, step)
    side.note_state(attachment)


@adversity(stages=(3, 2, 1, 0))
def test_after_detach_the_model_is_plain_and_trains_on(side: Side) -> None:
    model = Net()
    before = {name: id(p) for name, p in model.named_parameters()}
    attachment = side.attach(model)
    optimizer = sgd(model)
    side.step(model, optimizer, 0)
    attachment.detach()
    side.attachments.remove(attachment)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert all(type(p) is nn.Parameter for p in model.parameters())
    plain = sgd(model)
    for step in range(1, 3):
        x, y = batch(step, side.rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        average_gradients(model, side.world)
        plain.step()
        plain.zero_grad()
        side.note("loss", loss)
    for name, p in model.named_parameters():
        side.note(name, p)


# ---- all of them at once


@adversity(worlds=(2,), exact=False)
def test_groups_states_and_gradients_of_an_optimizer_may_be_exchanged(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    members: tuple[list[nn.Parameter], ...] = ([], [*model.enter.parameters()], [*model.blocks.parameters()])
    groups: list[dict[str, Any]] = [{"params": each} for each in members]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01), eps=1e-3, foreach=False)
    side.step(model, optimizer, 0)
    taken = optimizer.param_groups.pop()
    side.step(model, optimizer, 1)
    model.zero_grad()
    optimizer.param_groups.append(taken)
    optimizer.param_groups[1]["params"] = list(model.leave.parameters())
    optimizer.param_groups[2]["lr"].fill_(0.1)
    side.step(model, optimizer, 2)
    optimizer.state.clear()
    loss_at(model, 3, side).backward()
    side.settle(model)
    one, other = model.blocks[0].linear.weight, model.blocks[1].linear.weight
    one.grad, other.grad = other.grad, one.grad
    model.leave.weight.grad = torch.arange(24.0).view(3, 8)
    model.leave.bias.grad.data = torch.ones_like(grad_of(model.leave.bias)) * 2
    optimizer.step()
    side.note_state(attachment)


@adversity(worlds=(2,), exact=False)
def test_sharpness_aware_steps_and_total_norms_are_those_of_plain_gradients(side: Side) -> None:
    model = Net()
    attachment = side.attach(model)
    optimizer = sgd(model)
    for step in range(2):
        loss_at(model, step, side).backward()
        side.settle(model)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        side.note("norm", norm)
        with torch.no_grad():
            moves = [p.grad * (0.05 / norm) for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        model.zero_grad()
        loss_at(model, step, side).backward()
        side.settle(model)
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm, foreach=step == 0)
        optimizer.step()
        optimizer.zero_grad()
    (loss_at(model, 5, side) * (float("nan") if side.rank else 1.0)).backward()
    side.settle(model)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    side.note_state(attachment)


class Extra(Net):
    """Extra state, and a buffer that is not saved."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.count = 3
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) + self.steps


@adversity(worlds=(2,), exact=False)
def test_partial_states_extra_states_and_state_hooks_are_as_in_the_plain_model(side: Side) -> None:
    model = Extra()
    model._register_state_dict_hook(lambda module, state, prefix, local: state.update({prefix + "added": torch.ones(1)}))
    model._register_load_state_dict_pre_hook(lambda state, prefix, *rest: state.pop(prefix + "added", None))
    side.attach(model)
    optimizer = sgd(model)
    state = copy.deepcopy(model.state_dict())
    side.note("keys", len(state))
    side.step(model, optimizer, 0)
    model.count = 0
    model.load_state_dict(state)
    side.note("extra", model.count)
    part = {f"blocks.0.{name}": value for name, value in Block().state_dict().items()}
    missed = model.load_state_dict({**part, "unknown": torch.zeros(1)}, strict=False)
    side.note("missing", len(missed.missing_keys) + 100 * len(missed.unexpected_keys))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.blocks[1].load_state_dict({**Block().state_dict(), "linear.weight": torch.zeros(2, 2)})
    model.blocks[1].load_state_dict(Block().state_dict())
    side.step(model, optimizer, 1)
    side.note("output", model(batch(7, side.rank)[0]))
