"""Adversities that other sharding libraries test: hooks, odd outputs, several models, recomputation, loops of optimizers.

pytest runs it, each story on two ranks, against plain replicas (see adversity.py); docs/explanation/peers-tests.md says
whose scenarios these are. It never repeats what its neighbours tell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.parity.adversity import Block, Net, Side, adversity, batch, loss_at, sgd
from tests.support.values import grad_of

STEPS = 2


def rows(side: Side, step: int) -> Tensor:
    """Inputs [4, 8] of that step and rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + side.rank))


def train(side: Side, model: nn.Module, loss_of: Callable[[int], Tensor]) -> None:
    """Train the attached ``model``, note losses and gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()
        side.settle(model)
        side.note("loss", loss)
        side.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


# ---- hooks


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
    train(side, model, lambda step: model(rows(side, step).requires_grad_(), scale=2.0).sum() + extra.pop())
    for value in seen:
        side.note("seen", value)
    kinds = ("before", "after", "backward", "backward done")
    places = {f"{name} {kind}": n for n, (name, kind) in enumerate((a, b) for a in ("early", "late", "root") for b in kinds)}
    side.note("calls", torch.tensor([places[call] for call in calls]))


# ---- what modules return and take


class Bias(nn.Linear):
    """Hands out its bias, which is used beside it."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight), self.bias


class Outputs(nn.Module):
    """A generator that runs after its module, an object, None, and a parameter used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy, self.silent, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), Bias(8, 8)
        self.lazy.forward = self._lazy  # type: ignore[method-assign, assignment]
        self.silent.forward = self._silent  # type: ignore[method-assign, assignment]
        self.kept: Tensor | None = None

    def _lazy(self, x: Tensor) -> Iterator[Tensor]:
        return (F.linear(half, self.lazy.weight, self.lazy.bias) for half in x.chunk(2))

    def _silent(self, x: Tensor) -> None:
        self.kept = F.linear(x, self.silent.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(list(self.lazy(x)))
        assert self.silent(y) is None and self.kept is not None
        out, bias = self.bias(torch.tanh(self.kept))
        return out + bias


@adversity(worlds=(2,), exact=False)
def test_modules_may_return_generators_none_and_their_own_parameters(side: Side) -> None:
    model = Outputs()
    side.attach(model)
    train(side, model, lambda step: model(rows(side, step)).square().mean())


class Chosen(nn.Module):
    """Rows go to the expert that a gate chooses; ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (logits.argmax(-1) == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return out + logits.sum(-1, keepdim=True)


@adversity(worlds=(2,), exact=False)
def test_experts_that_rows_choose_train_whichever_ranks_use_them(side: Side) -> None:
    model = Chosen()
    side.attach(model)
    train(side, model, lambda step: model(rows(side, step)).square().mean())


# ---- recomputation


class Again(nn.Module):
    """Calls itself, under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, more: int) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, more - 1) if more else x


class Recomputed(nn.Module):
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
        model = Recomputed(early=early)
        side.attach(model)
        torch.manual_seed(3 + side.rank)
        model.fails = True
        with pytest.raises(ValueError, match="in the second forward"):
            model(rows(side, 0)).sum().backward()
        model.zero_grad()
        model.fails = False
        torch.manual_seed(5 + side.rank)
        train(side, model, partial(spread, side, model))
        side.note("random", torch.rand(2))


# ---- several models


@adversity(worlds=(2,), exact=False)
def test_several_attached_models_share_a_loss_and_judge_each_other(side: Side) -> None:
    first, second, judge = (nn.Sequential(Block(), nn.Linear(8, 8)) for _ in range(3))
    for model in (first, second, judge):
        side.attach(model)
    optimizers = [sgd(model) for model in (first, second, judge)]
    for step in range(STEPS):
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


# ---- optimizers, gradients, states


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
    for step in range(STEPS):
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
