"""A custom autograd ``Function`` that is given a parameter itself, as fused losses are: its gradient is averaged like others.

pytest runs it on one rank and on two. The oracle is plain PyTorch on the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import hooks_left, on_ranks, place
from tests.support.values import copies


class Projection(torch.autograd.Function):
    """``x @ weight.T``, whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight[:].t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight[:], grad.t() @ x


class FusedHead(nn.Module):
    """Its own forward hands the head's weight, which may be the embedding's too, to the Function."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = Projection.apply(self.body(self.embedding(tokens)), self.head.weight)
        return logits.square().mean()


def batches(count: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(6, (8,), generator=made) for _ in range(count)]


def model(*, tied: bool) -> FusedHead:
    torch.manual_seed(0)
    return FusedHead(tied=tied)


def trained(net: nn.Module, *, micro: int, rank: int = 0, world: int = 1) -> list[Tensor]:
    """The parameters after three steps of ``micro`` backward passes each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, batch in enumerate(batches(3 * micro), 1):
        net(batch.chunk(world)[rank]).backward()
        if number % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return copies(net.parameters())


POLICIES: tuple[dict[str, Any], ...] = (
    *({"stage": stage, "units": {"min_numel": 0}} for stage in range(4)),
    {"stage": 3},
    {"stage": 3, "parameter": {"tier": "host"}, "gradient": {"tier": "host"}, "optimizer": {"tier": "host"}},
)


@on_ranks(1, 2, policy=POLICIES, tied=(False, True))
def test_its_gradient_is_averaged_and_added_to_those_of_other_uses(policy: dict[str, Any], tied: bool) -> None:
    rank, world = place()
    for micro in (1, 2):
        attached = model(tied=tied)
        zhooks.attach(attached, policy=policy)
        found = trained(attached, micro=micro, rank=rank, world=world)
        for value, other in zip(found, trained(model(tied=tied), micro=micro), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_whole_accumulation_is_reduced_once_with_it_and_a_hook_sees_the_mean() -> None:
    rank, world = place()
    attached, plain = model(tied=True), model(tied=True)
    attachment = zhooks.attach(attached, policy={"stage": 2})
    seen: list[Tensor] = []
    attached.embedding.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    with attachment.accumulate():
        for batch in batches(3):
            attached(batch.chunk(world)[rank]).backward()
    for batch in batches(3):
        plain(batch).backward()
    assert attached.embedding.weight.grad is not None and len(seen) == 1
    torch.testing.assert_close(copies([attached.embedding.weight.grad])[0], plain.embedding.weight.grad)


@on_ranks(2)
def test_what_cannot_be_averaged_is_refused_by_the_parameters_name() -> None:
    attached = model(tied=False)
    zhooks.attach(attached, policy={"stage": 3, "units": {"min_numel": 0}})
    tokens = batches(1)[0]
    with pytest.raises(zhooks.ShardedOpError, match=r"autograd\.grad with respect to head\.weight"):
        torch.autograd.grad(attached(tokens), attached.head.weight)


@on_ranks(1, 2)
def test_detach_leaves_the_parameter_without_hooks_of_ours() -> None:
    attached, plain = model(tied=True), model(tied=True)
    attachment = zhooks.attach(attached, policy={"stage": 3})
    trained(attached, micro=1)
    attachment.detach()
    trained(plain, micro=1)
    assert not hooks_left(attached)
    tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
    assert not any(getattr(param, table, None) for param in attached.parameters() for table in tables)
    attached(batches(1)[0]).backward()
    plain(batches(1)[0]).backward()
    for param, other in zip(attached.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None
        torch.testing.assert_close(param.grad, other.grad)
