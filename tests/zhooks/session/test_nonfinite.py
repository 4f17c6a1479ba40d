"""An inf or a nan is named with the rank and the place it came from, before a step; scalers and finite runs see nothing of it.

pytest runs it, on real ranks. The oracle is the same run with ``nonfinite = "ignore"``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from tests.support.on_ranks import on_ranks, place
from tests.support.resuming import Run, batch
from tests.support.slow import slow
from tests.support.values import full, same, sharded

#: Of a loss whose gradients overflow at the scales used here, the first times.
LARGE = 256.0


def policy(stage: int, look: str = "name", **more: Any) -> dict[str, Any]:
    return {"stage": stage, "units": {"min_numel": 0}, "resilience": {"nonfinite": look}, **more}


def backward(run: Run, given: Tensor) -> None:
    run.model(given).square().mean().backward()


def spoiled(rank: int) -> Tensor:
    given = batch(9)
    if place()[0] == rank:
        given[0, 0] = float("nan")
    return given


@on_ranks(1, 2, 3, stage=(0, 3))
def test_a_batch_with_a_nan_on_one_rank_is_named_on_all_and_the_step_can_be_left_out(stage: int) -> None:
    _, world = place()
    run = Run(policy(stage))
    run.train(range(2))
    before = run.everything()
    state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in run.model.buffers()]
    backward(run, spoiled(world - 1))
    with pytest.raises(zhooks.NonFiniteError) as told:
        run.optimizer.step()
    words = str(told.value)
    assert words.startswith("AdamW.step in step 2 expected finite gradients, found an inf or a nan")
    assert f"the first appeared in forward, in the model's input on rank {world - 1}" in words
    assert f"Not finite before the mean over the ranks: rank {world - 1} (the gradient of " in words
    with pytest.raises(zhooks.NonFiniteError, match=r"^AdamW\.step in step 2 expected finite gradients"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    with torch.no_grad():
        for buffer, kept in zip(run.model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(run.everything(), before, strict=True))
    run.train(range(2, 4))
    run.attachment.detach()
    plain = Run(policy(stage, "ignore"))
    plain.train(range(4))
    assert plain.losses == run.losses
    plain.attachment.detach()


class Faulty(nn.Module):
    """Makes an inf in forward, or a nan in backward, on one rank."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = nn.Linear(6, 6), where

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.inner(value)
        if place()[0] == 1 and self.where == "forward":
            return made + float("inf")
        if place()[0] == 1 and self.where == "backward":
            made.register_hook(lambda grad: grad * float("nan"))
        return made


@on_ranks(2)
def test_what_came_up_inside_the_model_is_named_by_unit_and_by_pass() -> None:
    for where, expected in (("forward", "forward, in the output of unit 1"), ("backward", "backward, in the gradient of 1")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Faulty(where), nn.Linear(6, 6))
        attachment = zhooks.attach(model, policy=policy(3, units={"min_numel": 0, "names": ["0", "1", "2"]}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(0)).square().mean().backward()
        with pytest.raises(zhooks.NonFiniteError, match=f"the first appeared in {expected}") as told:
            optimizer.step()
        assert "before the mean over the ranks: rank 1 (" in str(told.value)
        attachment.detach()


@on_ranks(1, 2, tier=("device", "host", "disk"))
def test_an_update_that_spoiled_a_parameter_is_named_at_the_next_step(tier: str) -> None:
    cells: dict[str, Any] = {cell: {"tier": tier} for cell in ("parameter", "gradient", "optimizer")}
    run = Run(policy(3, **cells), kind="plain")
    run.train(range(1))
    run.optimizer.param_groups[0]["lr"] = float("inf")
    backward(run, batch(1))
    run.optimizer.step(), run.optimizer.zero_grad()
    backward(run, batch(2))
    with pytest.raises(zhooks.NonFiniteError, match=r"in step 2.* not been finite since the previous update.*: 0\.weight"):
        run.optimizer.step()
    run.attachment.detach()


@on_ranks(2, stage=(1, 3))
def test_a_micro_batch_of_a_sum_is_remembered_until_the_step(stage: int) -> None:
    run = Run(policy(stage))
    with run.attachment.no_sync():
        backward(run, spoiled(0))
    backward(run, batch(1))
    with pytest.raises(zhooks.NonFiniteError, match="in the model's input on rank 0"):
        run.optimizer.step()
    run.attachment.detach()


@on_ranks(2)
def test_gradients_that_the_loop_has_made_finite_are_stepped_with() -> None:
    run = Run(policy(3))
    backward(run, spoiled(1))
    for param in run.model.parameters():
        assert param.grad is not None
        param.grad.zero_()
    run.optimizer.step(), run.optimizer.zero_grad()
    run.train(range(1))
    run.attachment.detach()


@on_ranks(1, 2)
def test_a_grad_scaler_goes_on_skipping_steps() -> None:
    losses = []
    for look in ("name", "ignore"):
        run = Run(policy(3, look))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        for step in range(6):
            loss = LARGE * run.model(batch(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(run.optimizer), scaler.update(), run.optimizer.zero_grad()
            run.losses.append(loss.item())
        losses.append([*run.losses, scaler.get_scale()])
        run.attachment.detach()
    assert losses[0] == losses[1]
    assert losses[0][-1] < 2.0**127


@on_ranks(1, 2)
def test_a_loss_scale_of_the_policy_goes_on_skipping_steps() -> None:
    losses = []
    for look in ("name", "ignore"):
        run = Run(policy(3, look, precision={"loss_scale": "dynamic", "initial_scale": 2.0**127}))
        for step in range(5):
            loss = LARGE * run.model(batch(step)).square().mean()
            loss.backward()
            run.optimizer.step(), run.optimizer.zero_grad()
            run.losses.append(loss.item())
        assert run.attachment.overflows
        losses.append([*run.losses, run.attachment.loss_scale])
        run.attachment.detach()
    assert losses[0] == losses[1]


@on_ranks(1, 2)
def test_finite_values_whose_sum_overflows_are_stepped_with() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    attachment = zhooks.attach(model, policy=policy(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
    (model(torch.full((1, 64), 1e19)).sum() * 1e19).backward()
    optimizer.step()
    assert all(bool(value.isfinite().all()) for value in attachment.state_dict().get("model", {}).values())
    attachment.detach()


@on_ranks(2)
def test_another_optimizer_with_finite_gradients_does_not_excuse_one_without() -> None:
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    model.forward = lambda one, other: model[0](one).sum() + model[1](other).sum()
    attachment = zhooks.attach(model, policy=policy(3))
    clean, dirty = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    for _ in range(2):
        model(batch(0), spoiled(1)).backward()
        clean.step()
        with pytest.raises(zhooks.NonFiniteError, match="on rank 1"):
            dirty.step()
        clean.zero_grad(), dirty.zero_grad()
    model(batch(0), batch(1)).backward()
    clean.step(), dirty.step()
    attachment.detach()


@on_ranks(1, 2, kind=(torch.optim.SGD, *slow(torch.optim.LBFGS)))
def test_a_closure_is_judged_in_its_own_step(kind: Any) -> None:
    _, world = place()
    model = nn.Linear(6, 3)
    attachment = zhooks.attach(model, policy=policy(3))
    optimizer = kind(model.parameters(), lr=0.1)

    def closure(given: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(given).square().mean()
        loss.backward()
        return loss

    optimizer.step(lambda: closure(batch(0)))
    before = full(model)
    with pytest.raises(zhooks.NonFiniteError, match=rf"on rank {world - 1}\..*{kind.__name__}.step has ended after its first"):
        optimizer.step(lambda: closure(spoiled(world - 1)))
    assert all(torch.equal(a, sharded(b).full_tensor()) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step(lambda: closure(batch(1)))
    attachment.detach()


@on_ranks(2)
def test_ranks_that_divide_layers_between_them_all_raise() -> None:
    rank, _ = place()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    attachment = zhooks.attach(model, policy=policy(3), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = torch.ones(4, 6)
    model(given).square().mean().backward()
    if rank:
        # The gradients of one rank's part alone: a backward hook there.
        model[1].register_forward_hook(lambda module, args, made: made.register_hook(lambda grad: grad * float("nan")) and None)
    optimizer.step(), optimizer.zero_grad()
    model(given).square().mean().backward()
    with pytest.raises(zhooks.NonFiniteError, match=r"in step 1 .* on rank 1"):
        optimizer.step()
    optimizer.zero_grad()
    attachment.detach()


@on_ranks(2)
def test_it_is_switched_on_and_off_by_another_policy() -> None:
    run = Run(policy(3, "ignore"))
    run.train(range(1))
    run.attachment.apply(policy(3))
    backward(run, spoiled(0))
    before = full(run.model)
    with pytest.raises(zhooks.NonFiniteError, match=r"^AdamW\.step in step 1 expected finite gradients.* rank 0"):
        run.optimizer.step()
    assert same(full(run.model), before)
    run.attachment.apply(policy(3, "ignore"))
    run.optimizer.step()
    assert any(value.isnan().any() for value in full(run.model))
    run.attachment.detach()


@on_ranks(2)
def test_what_it_cannot_be_with_is_refused() -> None:
    with pytest.raises(zhooks.PolicyError, match=r"overlap: expected false with \[resilience\] nonfinite"):
        Run(policy(3, optimizer={"tier": "host", "overlap": True}))
    with pytest.raises(zhooks.AttachError, match=r"\[resilience\] nonfinite.* found the axis pp"):
        Run(policy(3), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "pp")))
