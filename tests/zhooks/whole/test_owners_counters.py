"""What a step counts is counted once a step, wherever the optimizer keeps it, however many rounds the step is made of.

pytest runs it, on one and two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from tests.support.matrix_optimizers import batch, net, train
from tests.support.on_ranks import on_ranks
from tests.support.values import full

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60, "buffer": "2KiB"}}


class Counter:
    def __init__(self) -> None:
        self.done = [0]


class Counts(torch.optim.Optimizer):
    """Divides the learning rate by counters kept in a tensor, a dict, a list of its group, an object, and its state."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.tensor, self.table, self.counter = torch.tensor(0.0), {"step": 0}, Counter()
        self.alias = self.table
        self.param_groups[0]["list"] = [0, 0, 0]

    def counted(self) -> list[float]:
        state: Any = self.state
        kept = [self.table["step"], self.counter.done[0], self.param_groups[0]["list"][1], state["all"]["step"]]
        return [float(self.tensor), *map(float, kept)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.tensor += 1
        self.table["step"] += 1
        self.counter.done[0] += 1
        self.param_groups[0]["list"][1] += 1
        state: Any = self.state
        state["all"]["step"] = state["all"].get("step", 0) + 1
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                left, _, right = torch.linalg.svd(param.grad, full_matrices=False)
                param.add_(left @ right, alpha=-0.05 / sum(self.counted()))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


@on_ranks(1, 2)
def test_counters_in_tensors_containers_objects_and_states_go_on_by_one_a_step() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    made = [Counts(matrices(model)) for model in models]
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, range(4))
    assert made[0].counted() == made[1].counted() == [4.0] * 5
    assert made[1].alias is made[1].table
    for value, other in zip(full(models[1]), models[0].parameters(), strict=True):
        torch.testing.assert_close(value.detach(), other.detach(), rtol=0, atol=0)


class Averages(torch.optim.Optimizer):
    """Keeps an average of its gradients' norms in a dict, which it makes use of late."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.average = {"steps": 0, "norm": 0.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        self.average["norm"] += float(sum(param.grad.norm() for param in params))
        self.average["steps"] += 1
        for param in params:
            left, _, right = torch.linalg.svd(param.grad, full_matrices=False)
            param.add_(left @ right, alpha=-0.05 * (1.0 if self.average["steps"] < 9 else self.average["norm"]))


class ByPlace(torch.optim.Optimizer):
    """The further down its list a matrix is, the smaller its updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for place, param in enumerate(self.param_groups[0]["params"]):
            if param.grad is not None:
                left, _, right = torch.linalg.svd(param.grad, full_matrices=False)
                param.add_(left @ right, alpha=-0.05 * 0.5**place)


class Polar(torch.optim.Optimizer):
    """Updates matrices whole."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.note(param)
                left, _, right = torch.linalg.svd(param.grad, full_matrices=False)
                param.add_(left @ right, alpha=-0.05)

    def note(self, param: nn.Parameter) -> None:
        """What it keeps."""


class NotesOnce(Polar):
    """Remembers that it has seen a matrix, as what warns once does."""

    def note(self, param: nn.Parameter) -> None:
        self.seen = True


class Projector:
    """No plain data."""


class KeepsObjects(Polar):
    """Has an object in the states."""

    def note(self, param: nn.Parameter) -> None:
        self.state[param]["projector"] = Projector()


@on_ranks(1, 2)
def test_a_flag_that_a_step_sets_once_and_nothing_depends_on_does_not_matter() -> None:
    models = [net(), net()]
    zhooks.attach(models[1], policy=POLICY)
    for model in models:
        train(model, NotesOnce(matrices(model)), range(3))
    for value, other in zip(full(models[1]), models[0].parameters(), strict=True):
        torch.testing.assert_close(value.detach(), other.detach(), rtol=0, atol=0)


@on_ranks(2, case=("averages", "by place", "objects"))
def test_what_differs_with_the_parameters_of_a_round_is_refused_by_name(case: str) -> None:
    model = net()
    zhooks.attach(model, policy=POLICY)
    before = [value.clone() for value in full(model)]
    if case == "averages":
        optimizer: torch.optim.Optimizer = Averages(matrices(model))
        reason = "a step changes its .* by the parameters it updates"
    elif case == "objects":
        optimizer, reason = KeepsObjects(matrices(model)), r"a Projector in state\[param\]\['projector'\]"
    else:
        optimizer, reason = ByPlace(matrices(model), {}), "depends on which other parameters are in the step"
    model(batch(0)).square().mean().backward()
    with pytest.raises(zhooks.ShardedOpError, match=rf"(?s){type(optimizer).__name__}.*{reason}"):
        optimizer.step()
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
