"""[optimizer] overlap = true: updates in backward have the same bits as updates in the step, and what comes in between
is refused.

pytest runs it on ranks over Gloo. It never looks at a clock.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.errors import ShardedOpError
from tests.on_ranks import on_ranks, place

STEPS = 4


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def policy(tier: str, *, overlap: bool) -> dict[str, Any]:
    cell = {"tier": tier}
    optimizer = {"tier": tier, "overlap": overlap}
    return {"parameter": cell, "gradient": cell, "optimizer": optimizer, "units": {"min_numel": 0}}


def loss_of(model: nn.Module, step: int) -> Tensor:
    rank, _ = place()
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs).square().mean()


class Training:
    """A model under overlapped updates, with what it did written down."""

    def __init__(self, tier: str = "host", *, overlap: bool = True) -> None:
        self.model = build()
        self.attachment = zhooks.attach(self.model, policy=policy(tier, overlap=overlap))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.log = zhooks.Recorder()
        self.attachment.observe(self.log)

    def step(self, number: int) -> None:
        loss_of(self.model, number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm(self) -> Training:
        self.step(0)
        self.log.clear()
        return self

    def state(self) -> dict[str, Tensor]:
        self.attachment.detach()
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_early_updates_have_the_bits_of_late_ones(tier: str) -> None:
    states = []
    for overlap in (True, False):
        training = Training(tier, overlap=overlap)
        for number in range(STEPS):
            training.step(number)
        states.append(training.state())
    early, late = states
    assert all(torch.equal(early[name], late[name]) for name in late)


@on_ranks(1, 2, tier=("device", "host"))
def test_updates_happen_in_backward_from_the_second_step_on(tier: str) -> None:
    training = Training(tier).warm()
    training.step(1)
    names = [name for name in training.log.names() if "update" in name or "backward of" in name]
    end = next(place for place, name in enumerate(names) if name.startswith("end backward"))
    assert [name for name in names[:end] if name.startswith("begin update")] == [f"begin update {n}" for n in (4, 2, 0)]
    assert not [name for name in names[end:] if "update" in name]


@on_ranks(1, 2)
def test_a_clip_before_the_step_is_refused_and_the_next_step_works() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"overlap = true updates in backward, found a look at the gradient"):
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.optimizer.step()
    training.step(2)


@on_ranks(1, 2)
def test_a_new_learning_rate_before_the_step_is_refused() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    training.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ShardedOpError, match="a learning rate"):
        training.optimizer.step()
    training.step(2)


@on_ranks(1, 2)
def test_a_learning_rate_changed_after_the_step_is_used_in_the_next() -> None:
    states = []
    for overlap in (True, False):
        training = Training(overlap=overlap)
        for number in range(STEPS):
            training.step(number)
            training.optimizer.param_groups[0]["lr"] *= 0.5
        states.append(training.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@on_ranks(1)
def test_a_second_backward_before_the_step_is_refused_once() -> None:
    training = Training().warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match="a second backward"):
        loss_of(training.model, 2).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(3)


@on_ranks(1, 2)
def test_two_forwards_in_one_backward_are_left_to_the_step() -> None:
    states = []
    for overlap in (True, False):
        training = Training(overlap=overlap).warm()
        (loss_of(training.model, 1) + loss_of(training.model, 2)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(3)
        states.append(training.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


class Factored(torch.optim.AdamW):
    """Its step takes an argument, too."""

    def step(self, closure: Any = None, factor: float = 1.0) -> None:  # type: ignore[override]
        super().step()


@on_ranks(1)
def test_arguments_of_a_step_whose_updates_were_made_in_backward_are_refused() -> None:
    training = Training()
    training.optimizer = Factored(training.model.parameters(), lr=1e-2)
    training.warm()
    loss_of(training.model, 1).backward()
    with pytest.raises(ShardedOpError, match=r"Factored.step: expected nothing between .* found arguments \(factor\)"):
        training.optimizer.step(factor=2.0)  # type: ignore[call-arg]
    training.step(2)
