"""LBFGS, which takes all gradients as one vector, trains on ranges of it as it does on the plain model.

pytest runs it, on one, two and four ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.values import full, sharded
from zhooks.optim import tensors_in, vectors_in

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}}
#: In fp64: dots are summed rank by rank.
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}


class Net(nn.Module):
    """A scalar, parameters of one and two dims, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 13), nn.Linear(13, 3)
        self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def attached(**policy: Any) -> tuple[nn.Module, Any]:
    model = net()
    return model, zhooks.attach(model, policy={**POLICY, **policy})


def lbfgs(model: nn.Module, search: str | None = "strong_wolfe") -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=3, line_search_fn=search)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, share: tuple[int, int] = (0, 1), weight: float = 1.0
) -> tuple[list[float], int]:
    """Losses before each step, and how often the closure was called; of one rank's share of the batch."""
    losses, calls = [], 0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64).chunk(share[1])[share[0]] for size in (6, 3))

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() * weight
            loss.backward()
            return loss.item()

        losses.append(float(optimizer.step(closure)))
    return losses, calls


def plain(steps: range, search: str | None = "strong_wolfe") -> tuple[nn.Module, torch.optim.LBFGS]:
    model = net()
    optimizer = lbfgs(model, search)
    train(model, optimizer, steps)
    return model, optimizer


def check_close(model: nn.Module, expected: nn.Module) -> None:
    exact: dict[str, Any] = {"rtol": 0.0, "atol": 0.0} if place()[1] == 1 else CLOSE
    for value, other in zip(full(model), expected.parameters(), strict=True):
        torch.testing.assert_close(value.detach(), other.detach(), **exact)


@on_ranks(1, 2, 4, stage=(0, 1, 2, 3), search=(None, "strong_wolfe"))
def test_training_equals_plain_training_with_the_same_evaluations(stage: int, search: str | None) -> None:
    model, _ = attached(stage=stage)
    found = train(model, lbfgs(model, search), range(3), place())
    expected = net()
    losses, calls = train(expected, lbfgs(expected, search), range(3))
    check_close(model, expected)
    torch.testing.assert_close(found[0], losses, **CLOSE)
    assert found[1] == calls > 6


class Complex(nn.Module):
    """Complex parameters, one of which no forward uses, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 5, dtype=torch.complex128))
        self.shift, self.unused = (nn.Parameter(torch.randn(5, dtype=torch.complex128)) for _ in range(2))
        self.second = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second((x.to(torch.complex128) @ self.first + self.shift).abs())
        return out


@on_ranks(1, 2, stage=(0, 3), search=(None, "strong_wolfe"))
def test_complex_parameters_train_as_pairs_of_numbers(stage: int, search: str | None) -> None:
    torch.manual_seed(0)
    model = Complex()
    expected = copy.deepcopy(model)
    zhooks.attach(model, policy={**POLICY, "stage": stage})
    train(model, lbfgs(model, search), range(3), place())
    train(expected, lbfgs(expected, search), range(3))
    check_close(model, expected)


@on_ranks(2, 4)
def test_summed_gradients_come_with_the_sum_of_the_losses() -> None:
    model, _ = attached(gradient={"reduce": "sum"})
    train(model, lbfgs(model), range(3), place(), 1 / place()[1])
    check_close(model, plain(range(3))[0])


@on_ranks(2, 4)
def test_each_rank_keeps_its_ranges_of_the_vectors_and_no_more() -> None:
    model, attachment = attached()
    optimizer = lbfgs(model)
    train(model, optimizer, range(2), place())
    numel = sum(param.numel() for param in model.parameters())
    own = sum(sharded(param).to_local().numel() for param in model.parameters())
    held = [one for one in tensors_in(dict(optimizer.state)) if one.dim()]
    assert len(held) == len(vectors_in(held)) == 2 + 2 * 3
    assert {one.to_local().numel() for one in vectors_in(held)} == {own} and own < numel
    assert {tuple(one.shape) for one in held} == {(numel,)}
    rows = [row for row in attachment.memory().rows if row.what == "optimizer"]
    assert sum(row.nbytes for row in rows) == 8 * own * len(held)


def check_states(found: dict[int, Any], expected: torch.optim.Optimizer) -> None:
    wanted: dict[int, Any] = expected.state_dict()["state"]
    assert found.keys() == wanted.keys() and found[0].keys() == wanted[0].keys()
    for one, other in zip(tensors_in(found), tensors_in(wanted), strict=True):
        assert type(one) is Tensor
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@on_ranks(1, 2, 4)
def test_a_full_state_is_the_plain_one_and_goes_on_anywhere() -> None:
    rank = place()[0]
    model, attachment = attached()
    optimizer = lbfgs(model)
    train(model, optimizer, range(2), place())
    state = attachment.state_dict(optimizer)
    expected, wanted = plain(range(2))
    if rank == 0:
        check_states(state["optimizer"]["state"], wanted)
        other = net()
        other.load_state_dict(state["model"])
        second = lbfgs(other)
        second.load_state_dict(copy.deepcopy(state["optimizer"]))
        train(other, second, range(2, 4))
    train(expected, wanted, range(2, 4))
    again, anew = attached(stage=2)
    resumed = lbfgs(again)
    anew.load_state_dict(state, resumed)
    held = [one for one in tensors_in(dict(resumed.state)) if one.dim()]
    assert len(held) == len(vectors_in(held))
    for each, its in ((model, optimizer), (again, resumed)):
        train(each, its, range(2, 4), place())
        check_close(each, expected)
    if rank == 0:
        for value, one in zip(other.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value, one, **CLOSE)


@on_ranks(1, 2, 4, stage=(1, 3))
def test_a_checkpoint_of_shards_resumes_bit_for_bit(stage: int) -> None:
    model, attachment = attached(stage=stage)
    optimizer = lbfgs(model)
    train(model, optimizer, range(2), place())
    with folder() as at:
        attachment.save(at, optimizer)
        train(model, optimizer, range(2, 4), place())
        again, anew = attached(stage=stage)
        resumed = lbfgs(again)
        anew.load(at, resumed)
        train(again, resumed, range(2, 4), place())
        # Into an optimizer with a longer history.
        attachment.load(at, optimizer)
        train(model, optimizer, range(2, 4), place())
    for one, other in zip(full(again), full(model), strict=True):
        assert torch.equal(one, other)
    check_close(again, plain(range(4))[0])


@on_ranks(1, 2)
def test_torchs_own_state_dicts_of_full_values_are_sharded_again() -> None:
    model, _ = attached()
    expected, wanted = plain(range(2))
    model.load_state_dict(expected.state_dict())
    optimizer = lbfgs(model)
    optimizer.load_state_dict(copy.deepcopy(wanted.state_dict()))
    train(model, optimizer, range(2, 4), place())
    train(expected, wanted, range(2, 4))
    check_close(model, expected)
    held = [one for one in tensors_in(dict(optimizer.state)) if one.dim()]
    assert len(held) == len(vectors_in(held))


@on_ranks(1, 2, stage=(0, 3))
def test_states_follow_a_change_of_layout_and_are_plain_after_detach(stage: int) -> None:
    model, attachment = attached(stage=stage)
    optimizer = lbfgs(model)
    train(model, optimizer, range(1), place())
    expected, wanted = plain(range(1))
    for one in (model, expected):
        one.first.requires_grad_(False)
    train(model, optimizer, range(1, 2), place())
    train(expected, wanted, range(1, 2))
    check_close(model, expected)
    attachment.apply({**POLICY, "stage": 3 - stage})
    train(model, optimizer, range(2, 3), place())
    train(expected, wanted, range(2, 3))
    check_close(model, expected)
    attachment.detach()
    check_states(optimizer.state_dict()["state"], wanted)
    for step in (train(model, optimizer, range(3, 4)), train(expected, wanted, range(3, 4))):
        assert step[1] > 1
    for value, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other, **CLOSE)


@on_ranks(1, 2)
def test_states_from_before_attach_are_sharded() -> None:
    expected, wanted = plain(range(2))
    model, optimizer = plain(range(2))
    zhooks.attach(model, optimizer, policy=POLICY)
    train(model, optimizer, range(2, 4), place())
    train(expected, wanted, range(2, 4))
    check_close(model, expected)


@on_ranks(1, 2, where=("gradient", "optimizer"))
def test_tiers_are_refused_by_name_before_anything_changes(where: str) -> None:
    model, _ = attached(**{where: {"tier": "host"}})
    before = full(model)
    with pytest.raises(zhooks.ShardedOpError, match=r"LBFGS\.step\(closure\)"):
        train(model, lbfgs(model), range(1), place())
    assert all(map(torch.equal, before, full(model)))


@on_ranks(1, 2)
def test_a_vector_takes_elements_totals_and_borders_of_parameters_and_refuses_the_rest() -> None:
    model, _ = attached()
    (model(torch.ones(2, 6, dtype=torch.float64))).square().sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    vector: Any = torch.cat([grad.view(-1) for grad in grads])
    whole = torch.cat([sharded(grad).full_tensor().view(-1) for grad in grads])
    assert torch.equal(vector.full_tensor(), whole)
    torch.testing.assert_close(vector.dot(vector.neg()), whole.dot(-whole))
    torch.testing.assert_close(vector.abs().sum(), whole.abs().sum())
    assert torch.equal(vector.abs().max(), whole.abs().max())
    torch.testing.assert_close(vector.norm(), whole.norm())
    torch.testing.assert_close((vector * 2 - whole).full_tensor(), whole)
    first = grads[0].numel()
    assert torch.equal(vector[:first].view_as(grads[0]).full_tensor(), sharded(grads[0]).full_tensor())
    assert torch.equal(vector[first:].full_tensor(), whole[first:])
    vector.view(-1)[:first].mul_(3)
    assert torch.equal(vector.full_tensor()[:first], 3 * whole[:first])
    refused: tuple[Callable[[], Any], ...] = (
        lambda: vector[1:first], lambda: vector[::2], lambda: vector.view(1, -1), lambda: vector.sort(), lambda: vector[0],
        lambda: torch.cat([vector, torch.ones(2, dtype=torch.float64)]), lambda: vector.outer(vector), lambda: vector.cumsum(0),
        lambda: vector + vector[:first],
    )  # fmt: skip
    for number, operation in enumerate(refused):
        with pytest.raises(zhooks.ShardedOpError, match=r"in one vector|sharded tensors of the same shape"):
            operation()
            pytest.fail(f"operation {number} was not refused")


@on_ranks(2)
def test_other_parameters_beside_attached_ones_are_refused_by_name() -> None:
    model, _ = attached()
    other = nn.Parameter(torch.ones(2, dtype=torch.float64))
    other.grad = torch.ones_like(other)
    optimizer = torch.optim.LBFGS([*model.parameters(), other])

    def closure() -> float:
        loss = model(torch.ones(2, 6, dtype=torch.float64)).square().sum()
        loss.backward()
        return loss.item()

    before = full(model)
    with pytest.raises(zhooks.ShardedOpError, match=r"found a plain tensor of shape \(2,\)"):
        optimizer.step(closure)
    assert all(map(torch.equal, before, full(model)))
