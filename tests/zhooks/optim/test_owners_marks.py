"""What is noted of a parameter, by its user or by the step itself, and what that means for how it is updated.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.matrix_optimizers import batch, net, train
from tests.support.on_ranks import on_ranks
from tests.support.plain_matrices import check_equal, orthogonal

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60, "buffer": "2KiB"}}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


class Notes(torch.optim.Optimizer):
    """Notes in a flag that a parameter has its states."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state.get("ready"):
                state["ready"], state["momentum"] = True, torch.zeros_like(param)
            param.add_(orthogonal(state["momentum"].lerp_(param.grad, 0.1)), alpha=-0.02)


@on_ranks(1, 2)
def test_a_flag_that_the_step_itself_notes_makes_no_other_parameter_of_it() -> None:
    models = [net(), net()]
    attachment = zhooks.attach(models[1], policy=POLICY)
    optimizers = [Notes(matrices(model), {}) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    kept = attachment.state_dict(optimizers[1])
    attachment.load_state_dict(kept, optimizers[1])
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3, 5))
    check_equal(models[1], models[0])


@on_ranks(1, 2)
def test_flags_of_steps_before_attach_are_no_hindrance() -> None:
    models = [net(), net()]
    optimizers = [Notes(matrices(model), {}) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    zhooks.attach(models[1], optimizers[1], policy=POLICY)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2, 4))
    check_equal(models[1], models[0])


class Counted(torch.optim.Optimizer):
    """Has one number as the state of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.add_(orthogonal(param.grad), alpha=-0.05 / state["step"])


@on_ranks(1, 2)
def test_states_without_tensors_stay_with_their_owners_when_groups_are_added_and_states_are_loaded() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        first, *rest = matrices(model)
        optimizer = Counted([first], {})
        train(model, optimizer, range(3))
        optimizer.add_param_group({"params": rest})
        train(model, optimizer, range(3, 5))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, range(5, 7))
    check_equal(models[1], models[0])


class Marked(torch.optim.Optimizer):
    """Has the sign of the gradient, but for parameters that are marked, which are updated whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                update = orthogonal(param.grad) if getattr(param, "whole", False) else param.grad.sign()
                param.add_(update, alpha=-0.02)


@on_ranks(1, 2)
def test_parameters_that_their_user_has_marked_are_judged_apart() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        for number, param in enumerate(matrices(model)):
            param.whole = number == 2  # type: ignore[attr-defined]
            param.number = number  # type: ignore[attr-defined]
        train(model, Marked(model.parameters(), {}), range(3))
    check_equal(models[1], models[0])


class RaisesWithOthers(torch.optim.Optimizer):
    """Raises where the gradients of all parameters together are too large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        if len(params) > 1 and not float(sum(param.grad.abs().sum() for param in params)) < 1e5:
            raise ValueError("too large")
        for param in params:
            param.add_(orthogonal(param.grad), alpha=-0.02)


@on_ranks(2)
def test_a_trial_that_raises_because_of_other_parameters_is_a_refusal() -> None:
    model = net()
    zhooks.attach(model, policy=POLICY)
    model(batch(0)).square().mean().backward()
    with pytest.raises(zhooks.ShardedOpError, match="with other gradients of one of the parameters raised ValueError"):
        RaisesWithOthers(matrices(model), {}).step()
