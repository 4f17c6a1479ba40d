"""Passes through part of a model: a head run chunk by chunk, several forwards before a backward, methods beside forward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.averaging import average_gradients
from tests.support.on_ranks import on_ranks, place
from tests.support.values import copies, whole

POLICY: dict[str, Any] = {"units": {"names": ["embed", "body", "norm", "head"], "min_numel": 0}}


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, head: bool = True) -> Tensor:
        hidden = self.norm(self.body(self.embed(tokens)))
        return self.head(hidden) if head else hidden


def tokens(step: int) -> Tensor:
    return torch.randint(0, 12, (2, 8), generator=torch.Generator().manual_seed(10 * step + place()[0]))


def chunked(model: Language, step: int) -> None:
    """The loss of a large vocabulary in chunks: the head runs by itself, with a backward of its own each."""
    hidden = model(tokens(step), head=False)
    grads = []
    for chunk in hidden.detach().chunk(4, dim=1):
        part = chunk.clone().requires_grad_()
        model.head(part).square().mean().backward()
        assert part.grad is not None
        grads.append(part.grad)
    hidden.backward(torch.cat(grads, dim=1))


def compared(model: nn.Module, plain: nn.Module) -> None:
    average_gradients(plain, place()[1])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(whole(ours.grad), theirs.grad)


@on_ranks(1, 2, stage=(1, 3), tied=(False, True), reshard=(True, False))
def test_a_head_that_runs_chunk_by_chunk_with_backwards_of_its_own_trains_as_the_plain_model(
    stage: int, tied: bool, reshard: bool
) -> None:
    model, plain = Language(tied=tied), Language(tied=tied)
    zhooks.attach(model, policy={**POLICY, "stage": stage, "schedule": {"reshard_after_forward": reshard}})
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, plain))
    for step in range(3):
        for one in (model, plain):
            one.zero_grad()
            chunked(one, step)
        compared(model, plain)
        ours.step()
        theirs.step()


@on_ranks(2)
def test_chunks_of_several_microbatches_add_up_to_one_reduction() -> None:
    model, plain = Language(), Language()
    attachment = zhooks.attach(model, policy=POLICY)
    recorder = Recorder()
    with attachment.observe(recorder), attachment.accumulate():
        for step in range(2):
            chunked(model, step)
    for step in range(2):
        chunked(plain, step)
    compared(model, plain)
    assert sorted(key for key, _, _ in recorder.spans("reduce")) == ["body", "embed", "head", "norm"]


@on_ranks(2)
def test_an_unsharded_head_is_gathered_once_for_all_of_its_chunks() -> None:
    model, plain = Language(), Language()
    attachment = zhooks.attach(model, policy={**POLICY, "schedule": {"reshard_after_forward": True}})
    for step in range(2):
        recorder = Recorder()
        with attachment.observe(recorder):
            attachment.unshard(model.head)
            chunked(model, step)
            attachment.reshard(model.head)
        chunked(plain, step)
        assert [key for key, _, _ in recorder.spans("gather")].count("head") == 1
    compared(model, plain)


@on_ranks(2, checkpoint=("none", "unit"))
def test_two_forwards_before_one_backward_leave_what_both_skip_without_a_gradient(checkpoint: str) -> None:
    model, plain = Language(), Language()
    zhooks.attach(model, policy={**POLICY, "activation": {"checkpoint": checkpoint}})
    for one in (model, plain):
        (one(tokens(0), head=False) - one(tokens(1), head=False)).square().sum().backward()
    compared(model, plain)
    assert model.head.weight.grad is None


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


@on_ranks(1, 2)
def test_a_model_that_takes_no_inputs_trains() -> None:
    model, plain = Own(), Own()
    zhooks.attach(model)
    for one in (model, plain):
        one().sum().backward()
    compared(model, plain)


Pair = namedtuple("Pair", ["x", "y"])
WRAPPED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda x: [x], lambda held: held[0]),
    "dict": (lambda x: {"x": x}, lambda held: held["x"]),
    "named tuple": (lambda x: Pair(x, 1), lambda held: held.x),
}


class Passing(nn.Module):
    """Takes and returns a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, held: Any) -> Any:
        wrap, unwrap = WRAPPED[self.kind]
        return wrap(torch.relu(self.linear(unwrap(held))))


@on_ranks(2, kind=tuple(WRAPPED), checkpoint=("none", "unit"))
def test_activations_travel_between_units_in_containers(kind: str, checkpoint: str) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Passing(kind) for _ in range(3)])

    model, plain = made(), made()
    policy = {"units": {"classes": ["Passing"], "min_numel": 0}, "activation": {"checkpoint": checkpoint}}
    zhooks.attach(model, policy=policy)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(place()[0]))
    wrap, unwrap = WRAPPED[kind]
    for one in (model, plain):
        unwrap(one(wrap(x))).square().sum().backward()
    compared(model, plain)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@on_ranks(2, stage=(1, 3))
def test_an_output_that_the_loss_stops_using_in_mid_run_leaves_its_unit_without_a_gradient(stage: int) -> None:
    model, plain = Two(), Two()
    zhooks.attach(model, policy={"stage": stage, "units": {"names": ["one", "other"], "min_numel": 0}})
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, plain))
    for step in range(4):
        for one in (model, plain):
            one.zero_grad(set_to_none=step % 2 == 0)
            first, second = one(torch.full((1, 8), float(place()[0] + step)))
            (first * second if step < 2 else first).sum().backward()
        compared(model, plain)
        ours.step()
        theirs.step()
    torch.testing.assert_close(copies(model.parameters()), list(plain.parameters()))
