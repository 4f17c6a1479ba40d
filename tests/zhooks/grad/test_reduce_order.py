"""Ranks that use different parameters reduce in one order, and none waits for another that waits for it.

pytest runs it over real ranks; the parity matrix has the same with its mixture, whole and in pieces.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.events import Recorder
from tests.support.on_ranks import on_accelerators, on_ranks, place
from tests.support.values import grad_of, sharded

Chosen = tuple[int, ...]

#: Each expert is larger than this: it is reduced by itself, and in pieces.
BUFFER = 1024
EACH: dict[str, Any] = {"units": {"names": ["*s.?"], "min_numel": 0}}
EVERY: Chosen = (0, 1, 2)
#: What even ranks choose in a backward, and odd ones: more than may be under way, nothing, others, the same, nothing at all.
CHOSEN: tuple[tuple[Chosen, Chosen], ...] = (((), EVERY), ((1,), (2,)), (EVERY, ()), (EVERY, EVERY), ((), ()))


class Layer(nn.Module):
    """A block with experts that the caller chooses; those are parameters of the block's own unit."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(4, 24), nn.Linear(24, 4)
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(24, 24) / 9) for _ in EVERY)

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        x = torch.tanh(self.lift(x))
        for number in chosen:
            x = torch.tanh(x @ self.experts[number])
        out: Tensor = self.drop(x)
        return out


class Inside(nn.Module):
    """Three blocks, each of which always runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in EVERY)

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x


class Branches(nn.Module):
    """Experts that are units of their own, above blocks that always run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.branches = (nn.ModuleList(nn.Linear(4, 4) for _ in range(count)) for count in (5, len(EVERY)))

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for number in chosen:
            x = x + self.branches[number](x)
        return x


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def rows(number: int, rank: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def as_plain(
    kind: type[nn.Module], policy: dict[str, Any], *, mesh: Any = None, chosen: Any = CHOSEN, device: str = "cpu"
) -> list[list[str]]:
    """Train by what is ``chosen`` and compare every gradient with a plain model's; what was reduced in each backward."""
    rank, world = place()
    plain, model = made(kind), made(kind).to(device)
    attachment = zhooks.attach(model, policy=policy, mesh=mesh)
    reduced = []
    for number, by in enumerate(chosen):
        for other in range(world):
            (plain(rows(number, other), by[other % 2]).square().mean() / world).backward()
        recorder = Recorder()
        with attachment.observe(recorder):
            model(rows(number, rank).to(device), by[rank % 2]).square().mean().backward()
        reduced.append([event.key for event in recorder.events if event.kind == "begin" and event.what == "reduce"])
        for (name, found), expected in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (found.grad is None) == (expected[1].grad is None), (number, name)
            if found.grad is not None:
                assert torch.allclose(sharded(found.grad).full_tensor().cpu(), grad_of(expected[1]), atol=1e-6), (number, name)
            found.grad = expected[1].grad = None
    attachment.detach()
    return reduced


def policies(transport: str) -> list[dict[str, Any]]:
    """Everything gathered at its use, with nothing ahead and with much; and nothing but parameters at rest on the host."""
    sharded = [{"stage": 3, "schedule": {"prefetch": prefetch, "max_reductions": most}} for prefetch, most in ((0, 2), (4, 1))]
    placed: dict[str, Any] = {"stage": 0, "parameter": {"tier": "host"}, "schedule": {"prefetch": 0}}
    return [policy | {"comm": {"transport": transport, "buffer": BUFFER}} for policy in [*sharded, placed, {"stage": 1}]]


@on_ranks(2, transport=("auto", "p2p", "stock"))
def test_ranks_that_use_other_parameters_of_a_unit_reduce_in_one_order(transport: str) -> None:
    for policy in policies(transport)[: None if transport == "auto" else 1]:
        for once in as_plain(Inside, policy | EACH):
            assert len(once) == len(set(once)), "nothing is given up that is still to come"


@on_ranks(2)
def test_ranks_that_use_other_parameters_of_the_only_unit_reduce_in_one_order() -> None:
    for policy in policies("auto")[2:]:
        as_plain(Inside, policy)


@on_ranks(2)
def test_ranks_that_use_other_units_reduce_in_one_order() -> None:
    for policy in policies("auto"):
        for once in as_plain(Branches, policy | EACH):
            assert len(once) == len(set(once)), "nothing is given up that is still to come"


@on_ranks(2)
def test_the_order_of_the_first_backward_stays_whatever_others_complete_first() -> None:
    turns: list[Chosen] = [(0, 1, 2), (2, 1, 0), (2, 1, 0)]
    first, second, third = as_plain(Branches, {"stage": 2} | EACH, chosen=[(turn, turn) for turn in turns])
    assert second == third and set(first) == set(second)


class Stem(Branches):
    """One block that always runs and needs its weights in backward, below branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.branches = self.layers[:1], self.branches[:2]

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        return super().forward(x.detach().requires_grad_(), chosen)


@on_ranks(2)
def test_a_rank_that_comes_to_the_first_unit_has_started_all_it_has_skipped() -> None:
    chosen: list[tuple[Chosen, Chosen]] = [((), (0, 1)), ((0, 1), ()), ((0,), (1,))]
    policy = {"stage": 3, "schedule": {"prefetch": 0, "max_reductions": 1}}
    as_plain(Stem, policy | EACH, chosen=chosen)


@pytest.mark.slow
@on_ranks(4)
def test_ranks_that_use_other_parameters_reduce_in_one_order_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for policy in (policies("auto")[0], policies("auto")[2]):
        as_plain(Inside, policy | EACH, mesh=mesh)


class Turned(nn.Module):
    """Parameters of one unit, in an order that turns: each in a checkpoint whose backward runs inside the other's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(24, 24) / 9) for _ in range(2))

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        x = torch.cat([x] * 6, dim=1).requires_grad_()
        for number in chosen:
            x = torch.utils.checkpoint.checkpoint(self.by, x, number, use_reentrant=True)
        return x

    def by(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(x @ self.experts[number])


@on_ranks(2)
def test_what_completes_after_it_was_given_up_is_reduced_again_and_waited_for_from_then_on() -> None:
    turns: list[Chosen] = [(1, 0), (0, 1)]
    reduced = as_plain(Turned, policies("auto")[3], chosen=[(turn, turn) for turn in turns * 3])
    assert [len(once) for once in reduced] == [3, 3, 2, 2, 2, 2], "a node in a graph that is not there yet cannot be known"


@on_accelerators(2)
def test_a_rank_that_used_all_parameters_goes_on_and_has_the_gradients_of_the_others() -> None:
    device = f"accel:{torch.accelerator.current_device_index()}"
    some: dict[str, Any] = {"comm": {"buffer": BUFFER}}
    for kind, policy in ((Inside, {"stage": 2} | EACH), (Branches, {"stage": 2} | EACH), (Turned, {"stage": 1})):
        turns: tuple[Chosen, ...] = ((1, 0), (0, 1), (0,)) if kind is Turned else (EVERY, (1,), ())
        chosen = [(one, other) for one in turns for other in turns]
        as_plain(kind, policy | some, chosen=[chosen[0], *chosen], device=device)


class Late(Turned):
    """Its parameters are used as they come, until the caller chooses checkpoints."""

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        if chosen:
            return super().forward(x, chosen)
        return torch.cat([x] * 6, dim=1) @ self.experts[0] @ self.experts[1]


@on_accelerators(2)
def test_a_rank_that_alone_reduces_a_unit_a_second_time_is_refused_on_all() -> None:
    rank, _ = place()
    device = f"accel:{torch.accelerator.current_device_index()}"
    model = made(Late).to(device)
    attachment = zhooks.attach(model, policy={"stage": 1, "comm": {"buffer": BUFFER, "timeout_s": 6}})
    for _ in range(2):
        model(rows(0, rank).to(device), ()).square().mean().backward()
    with pytest.raises(zhooks.DivergenceError, match="a backward inside its backward"):
        model(rows(0, rank).to(device), (1, 0) if rank else ()).square().mean().backward()
        attachment.state_dict()


@on_ranks(1, 2, policy=({}, {"precision": {"reduce": "bf16"}}), turn=((1, 0), (0, 1)))
def test_two_reductions_of_a_unit_in_one_backward_add_up_where_only_some_parameters_have_gradients(
    policy: dict[str, Any], turn: Chosen
) -> None:
    rank, world = place()
    plain, model = made(Turned), made(Turned)
    attachment = zhooks.attach(model, policy={"stage": 2, **policy})
    for chosen in ((0,), turn):
        for other in range(world):
            (plain(rows(1, other), chosen).square().mean() / world).backward()
        model(rows(1, rank), chosen).square().mean().backward()
    for (name, found), expected in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.allclose(found.grad.full_tensor(), expected[1].grad, atol=1e-2 if policy else 1e-6), name  # type: ignore[arg-type]
    attachment.detach()


@on_ranks(2)
def test_gradients_of_inputs_alone_reduce_nothing() -> None:
    model = made(Branches)
    attachment = zhooks.attach(model, policy=policies("auto")[0] | EACH)
    rank, _ = place()
    recorder = Recorder()
    with attachment.observe(recorder):
        for chosen in CHOSEN:
            x = rows(0, rank).requires_grad_()
            torch.autograd.grad(model(x, chosen[rank]).sum(), x)
    assert not [event for event in recorder.events if event.what == "reduce"]
    assert all(param.grad is None for param in model.parameters())
    attachment.detach()


class Nothing(nn.Module):
    """All of its parameters are without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


@on_ranks(1, 2)
def test_autograd_grad_of_parameters_without_elements_is_without_elements() -> None:
    model = Nothing()
    attachment = zhooks.attach(model)
    (grad,) = torch.autograd.grad(model(torch.ones(2)).sum(), list(model.parameters()))
    assert grad.shape == (0, 4)
    model(torch.ones(2)).sum().backward()
    assert model.none.grad is not None and model.none.grad.shape == (0, 4)
    attachment.detach()
