"""What the trial of an optimizer's step finds out, where its options hide it: warm-up from 0, options that change.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, net, train
from tests.support.on_ranks import on_ranks
from tests.support.plain_matrices import check_equal, orthogonal

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


@on_ranks(1, 2, kind=("muon", "adafactor"), tensor=(False, True))
def test_warm_up_from_a_learning_rate_of_zero_trains_as_plain_training_does(kind: str, tensor: bool) -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        optimizer = MATRIX_OPTIMIZERS[kind](model.parameters())
        if tensor:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        for step in range(5):
            train(model, optimizer, [step])
            schedule.step()
    check_equal(models[1], models[0])


class Switched(torch.optim.Optimizer):
    """Couples the updates of matrices while its option says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            total = sum(float(param.grad.norm()) for param in params) if group["coupled"] else 1.0
            for param in params:
                param.add_(orthogonal(param.grad), alpha=-0.01 * total)


class Noisy(torch.optim.Optimizer):
    """Adds noise to the updates of matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(orthogonal(param.grad) + torch.randn_like(param), alpha=-0.01)


class Unprepared(torch.optim.Optimizer):
    """Reads a state that its constructor makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        for param in self.param_groups[0]["params"]:
            self.state[param]["mask"] = torch.ones_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(orthogonal(param.grad) * self.state[param]["mask"])


@on_ranks(2)
def test_what_a_trial_met_is_said_in_words() -> None:
    cases: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "its step draws random numbers": lambda params: Noisy(params, {}),
        "'mask'.*reads a state .* no step has made": Unprepared,
    }
    for words, made in cases.items():
        model = net()
        zhooks.attach(model, policy=POLICY)
        optimizer = made(matrices(model))
        with pytest.raises(zhooks.ShardedOpError, match=rf" cannot train this model\. .*{words}"):
            train(model, optimizer, [0])


@torch.compile(fullgraph=True, backend="eager")
def compiled(param: torch.Tensor, grad: torch.Tensor) -> None:
    param.sub_(grad.float().sign() * 0.01)


class Compiled(torch.optim.Optimizer):
    """Updates each element by itself in a compiled function, as torchao's do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                compiled(param.detach(), param.grad)


@on_ranks(1, 2)
def test_a_step_that_is_compiled_gets_the_plain_tensors_that_it_takes() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        train(model, Compiled(model.parameters(), {}), range(2))
    check_equal(models[1], models[0])


@on_ranks(2)
def test_an_optimizer_that_was_refused_is_tried_again_at_the_next_step() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    optimizers = [Switched(matrices(model), {"coupled": attached}) for attached, model in enumerate(models)]
    with pytest.raises(zhooks.ShardedOpError, match="depends on the gradients of others"):
        train(models[1], optimizers[1], [0])
    optimizers[1].param_groups[0]["coupled"] = False
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    check_equal(models[1], models[0])
