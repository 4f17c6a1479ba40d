"""Optimizers that need whole matrices train as plain ones do, each matrix on the one rank that owns it.

pytest runs it, on one, two and four ranks.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, batch, net, train
from tests.support.on_ranks import on_ranks, place
from tests.support.plain_matrices import check_equal, check_states, plain
from tests.support.torches import Muon
from tests.support.values import full
from zhooks.optim import OwnedStates, tensors_in

POLICY: dict[str, Any] = {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}}


def attached(kind: str, **policy: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = net()
    attachment = zhooks.attach(model, policy={**POLICY, **policy})
    return model, attachment, MATRIX_OPTIMIZERS[kind](model.parameters())


@on_ranks(1, 2, 4, stage=(0, 1, 2, 3), kind=tuple(MATRIX_OPTIMIZERS))
def test_training_equals_plain_training_bit_for_bit(stage: int, kind: str) -> None:
    model, attachment, optimizer = attached(kind, stage=stage)
    train(model, optimizer, range(6))
    expected, other = plain(kind, range(6))
    check_equal(model, expected)
    for group, wanted in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert group.get("count") == wanted.get("count")
    assert getattr(optimizer, "steps", None) == getattr(other, "steps", None)
    state = attachment.state_dict(optimizer)
    if place()[0] == 0:
        check_states(state["optimizer"], other)


@on_ranks(2, 4, kind=("muon", "shampoo"))
def test_states_are_whole_on_one_rank_and_nowhere_else(kind: str) -> None:
    rank, world = place()
    model, _, optimizer = attached(kind)
    train(model, optimizer, range(2))
    _, expected = plain(kind, range(2))
    owners = []
    for param in optimizer.param_groups[0]["params"]:
        states: Any = optimizer.state[param]
        assert isinstance(states, OwnedStates) and states.here == (states.owner == rank)
        assert bool(states) == states.here and f"rank {states.owner}" in repr(states)
        owners.append(states.owner)
        if not states.here:
            with pytest.raises(zhooks.ShardedOpError, match=f"on its owner, rank {states.owner}"):
                states["momentum_buffer"]
    assert set(owners) == set(range(world))
    held = torch.tensor(sum(value.nbytes for states in optimizer.state.values() for value in tensors_in(states)))
    dist.all_reduce(held)
    assert held.item() == sum(value.nbytes for states in expected.state.values() for value in tensors_in(states))


@on_ranks(2)
def test_the_largest_share_of_equal_matrices_is_one_rank_of_many() -> None:
    _, world = place()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(8)])
    attachment = zhooks.attach(model, policy=POLICY)
    optimizer = Muon(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    held = sum(value.nbytes for states in optimizer.state.values() for value in tensors_in(states))
    assert held == 8 * 16 * 16 * 4 // world
    assert sum(row.nbytes for row in attachment.memory().rows if row.what == "optimizer") == held


@on_ranks(2, 4)
def test_a_full_state_is_loaded_by_the_attachment_and_by_the_optimizer_itself() -> None:
    rank, _ = place()
    expected, other = plain("adafactor", range(3))
    for loads in ("attachment", "optimizer"):
        model, attachment, optimizer = attached("adafactor")
        state = {"model": expected.state_dict(), "optimizer": other.state_dict()}
        if loads == "attachment":
            attachment.load_state_dict(copy.deepcopy(state) if rank == 0 else {}, optimizer)
        else:
            attachment.load_state_dict({"model": state["model"]} if rank == 0 else {})
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        train(model, optimizer, range(3, 5))
        check_equal(model, plain("adafactor", range(5))[0])


@on_ranks(2)
def test_a_state_dict_kept_in_memory_is_loaded_again_and_no_file_is_made_of_it() -> None:
    model, attachment, optimizer = attached("muon")
    train(model, optimizer, range(2))
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    train(model, optimizer, range(2, 5))
    check_equal(model, plain("muon", range(5))[0])
    with pytest.raises(zhooks.ShardedOpError, match=r"attachment\.save"):
        torch.save(optimizer.state_dict(), io.BytesIO())
    attachment.detach()


@on_ranks(2)
def test_detach_leaves_the_plain_optimizer_with_all_its_states() -> None:
    model, attachment, optimizer = attached("shampoo")
    train(model, optimizer, range(3))
    attachment.detach()
    _, other = plain("shampoo", range(3))
    check_states(optimizer.state_dict(), other)
    train(model, optimizer, range(3, 5))
    check_equal(model, plain("shampoo", range(5))[0])
    attachment = zhooks.attach(model, optimizer, policy=POLICY)
    train(model, optimizer, range(5, 7))
    check_equal(model, plain("shampoo", range(7))[0])


@on_ranks(2)
def test_another_stage_and_frozen_parameters_keep_states_and_values() -> None:
    model, attachment, optimizer = attached("muon")
    expected = net()
    other = MATRIX_OPTIMIZERS["muon"](expected.parameters())
    steps = iter(range(100))

    def both() -> None:
        now = [next(steps), next(steps)]
        train(model, optimizer, now)
        train(expected, other, now)
        check_equal(model, expected)

    both()
    for stage in (0, 3):
        attachment.apply({**POLICY, "stage": stage})
        both()
    for trained in (False, True):
        for one in (model, expected):
            one[2].weight.requires_grad_(trained)  # type: ignore[index]
        both()


@on_ranks(2, 4, transport=("p2p", "stock"), buffer=("256MiB", "2KiB"))
def test_any_transport_and_rounds_of_any_size_come_to_the_same(transport: str, buffer: str) -> None:
    comm = {**POLICY["comm"], "transport": transport, "buffer": buffer}
    model, _, optimizer = attached("soap", comm=comm)
    train(model, optimizer, range(4))
    check_equal(model, plain("soap", range(4))[0])


@on_ranks(4)
def test_replicas_of_a_hybrid_mesh_have_an_owner_each() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    attachment = zhooks.attach(model, policy=POLICY, mesh=mesh)
    optimizer = MATRIX_OPTIMIZERS["adafactor"](model.parameters())
    train(model, optimizer, range(3))
    expected, other = plain("adafactor", range(3))
    check_equal(model, expected)
    state = attachment.state_dict(optimizer)
    if place()[0] == 0:
        check_states(state["optimizer"], other)
    attachment.load_state_dict(state, optimizer)
    train(model, optimizer, range(3, 5))
    check_equal(model, plain("adafactor", range(5))[0])


@on_ranks(2)
def test_accumulated_scaled_gradients_in_16_bits_give_what_plain_training_in_them_gives() -> None:
    results = []
    for world_of_one in (True, False):
        model = net()
        if not world_of_one:
            zhooks.attach(model, policy={**POLICY, "precision": {"param": "bf16", "reduce": "fp32", "output": "fp32"}})
        optimizer = MATRIX_OPTIMIZERS["muon"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(3):
            for micro in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=world_of_one):
                    out = model(batch(2 * step + micro))
                scaler.scale(out.float().square().mean() / 2).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(model)
    for value, other in zip(full(results[1]), results[0].parameters(), strict=True):
        torch.testing.assert_close(value, other.detach(), rtol=0.0, atol=2e-3)


class KeepsGradients(torch.optim.Optimizer):
    """Steps along rows of this gradient and the last, which it keeps as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                last = self.state[param].get("last", param.grad)
                param.sub_(0.01 * (param.grad + last) / param.grad.norm(dim=-1, keepdim=True))
                self.state[param]["last"] = param.grad


@on_ranks(2)
def test_a_gradient_kept_as_a_state_keeps_its_value_and_no_other_memory() -> None:
    results = []
    for plain_model in (True, False):
        model = net()
        if not plain_model:
            zhooks.attach(model, policy=POLICY)
        optimizer = KeepsGradients([param for param in model.parameters() if param.dim() == 2], {})
        train(model, optimizer, range(4))
        results.append(model)
    check_equal(results[1], results[0])
    for value in (value for states in optimizer.state.values() for value in tensors_in(states)):
        assert value.untyped_storage().nbytes() == value.nbytes


class Coupled(torch.optim.Optimizer):
    """Divides every update by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        updates = [param.grad @ param.grad.T @ param.grad if param.dim() == 2 else param.grad for param in params]
        total = torch.stack([update.norm() for update in updates]).sum()
        for param, update in zip(params, updates, strict=True):
            param.sub_(update / total)


class Communicates(torch.optim.Optimizer):
    """Divides matrices among ranks itself, as Muon's first versions did."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                update = param.grad @ param.grad.T @ param.grad
                dist.all_reduce(update)
                param.sub_(update)


@on_ranks(2, made=(Coupled, Communicates))
def test_an_optimizer_whose_matrices_cannot_have_owners_is_refused_by_name_before_anything_changed(made: Any) -> None:
    model = net()
    zhooks.attach(model, policy=POLICY)
    optimizer = made([param for param in model.parameters() if param.dim() == 2], {})
    before = [value.clone() for value in full(model)]
    model(batch(0)).square().mean().backward()
    reason = {"Coupled": "depends on the gradients of others", "Communicates": "communicates between ranks"}[made.__name__]
    with pytest.raises(zhooks.ShardedOpError, match=rf"(?s){made.__name__}.*{reason}"):
        optimizer.step()
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


@on_ranks(2)
def test_a_gradient_that_some_ranks_alone_have_is_named() -> None:
    rank, _ = place()
    model, _, optimizer = attached("muon")
    model(batch(0)).square().mean().backward()
    if rank == 1:
        model[2].weight.grad = None  # type: ignore[index]
    with pytest.raises(zhooks.DivergenceError, match=r"gradient of 2.weight on every rank or on none"):
        optimizer.step()
    dist.barrier()
