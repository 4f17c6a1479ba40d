"""Parameters that are updated whole lie on any tier between steps, and train as plain ones do.

pytest runs it, on one, two and four ranks.
"""

from __future__ import annotations

import copy
import errno
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from offload.disk import SystemIo
from offload.events import Recorder
from tests.support.inside import break_disk, store_of
from tests.support.matrix_optimizers import MATRIX_OPTIMIZERS, Shampoo, batch, net, train
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.plain_matrices import check_equal, check_states, plain
from tests.support.slow import slow
from tests.support.values import full
from zhooks.optim import OwnedStates, tensors_in
from zhooks.tensor import StoredTensor

CELLS = ("parameter", "gradient", "optimizer")


def policy(tier: str, **more: Any) -> dict[str, Any]:
    return {"units": {"min_numel": 0}, "comm": {"timeout_s": 60}, **{cell: {"tier": tier} for cell in CELLS}, **more}


@on_ranks(1, 2, 4, tier=("host", "disk"), kind=("muon", "adafactor", "shampoo", *slow("soap", "muon_with_adam")))
def test_training_over_tiers_equals_plain_training_bit_for_bit(tier: str, kind: str) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = MATRIX_OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(6))
    expected, other = plain(kind, range(6))
    check_equal(model, expected)
    state = attachment.state_dict(optimizer)
    if place()[0] == 0:
        check_states(state["optimizer"], other)
    attachment.detach()
    check_equal(model, expected)
    check_states(optimizer.state_dict(), other)
    train(model, optimizer, range(6, 8))
    check_equal(model, plain(kind, range(8))[0])


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    rest = [param for param in model.parameters() if param.dim() != 2]
    return [MATRIX_OPTIMIZERS["muon"](model.parameters()), torch.optim.AdamW(rest, lr=0.01)]


@on_ranks(
    1, 2,
    tiers=(("device",) * 3, ("host", "disk", "device"), *slow(("host",) * 3, ("disk",) * 3, ("device", "device", "disk"))),
    stage=(0, 3),
)  # fmt: skip
def test_a_mixed_set_with_clipping_recomputation_and_schedules_equals_the_plain_one(tiers: tuple[str, ...], stage: int) -> None:
    results: list[nn.Module] = []
    cells: dict[str, Any] = {cell: {"tier": tier} for cell, tier in zip(CELLS, tiers, strict=True)}
    if stage == 0:
        cells["parameter"] = {"tier": "device"}
    for model in (net(), net()):
        if results:
            chosen = {**policy("device"), **cells, "stage": stage, "activation": {"checkpoint": "unit"}}
            zhooks.attach(model, policy=chosen)
        optimizers = both(model)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, T_max=5) for one in optimizers]
        for step in range(4):
            model(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
        results.append(model)
    check_equal(results[1], results[0])


@on_ranks(1, 2, tier=("host", "disk"))
def test_states_lie_on_their_tier_between_steps_and_can_be_read_and_written_there(tier: str) -> None:
    model, expected = net(), net()
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer, other = (MATRIX_OPTIMIZERS["soap"](one.parameters()) for one in (model, expected))
    for steps in (range(3), range(3, 5)):
        train(model, optimizer, steps)
        train(expected, other, steps)
        for param, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            if param.dim() != 2:
                continue  # vectors have Adam's update
            states: Any = optimizer.state[param]
            assert isinstance(states, OwnedStates)
            for key in states:
                for value, plain_value in zip(tensors_in(states[key]), tensors_in(other.state[wanted][key]), strict=True):
                    assert isinstance(value, StoredTensor) and tier in repr(value)
                    assert torch.equal(value, plain_value) and value.tolist() == plain_value.tolist()
            if states.here:
                states["first"].mul_(0.5)
                states["first"][..., 0].zero_()
            other.state[wanted]["first"].mul_(0.5)
            other.state[wanted]["first"][..., 0].zero_()
    rows = [row for row in attachment.memory().rows if row.what == "optimizer"]
    stored = [value for states in optimizer.state.values() for value in tensors_in(states) if isinstance(value, StoredTensor)]
    assert [row.tier for row in rows] == [tier] and rows[0].nbytes >= sum(value.nbytes for value in stored) > 0
    kept = copy.deepcopy(optimizer.state_dict())
    assert not any(isinstance(value, StoredTensor) for value in tensors_in(kept["state"]))
    train(model, optimizer, range(5, 7))
    attachment.load_state_dict({"model": expected.state_dict()} if place()[0] == 0 else {})
    optimizer.load_state_dict(kept)
    train(model, optimizer, range(5, 7))
    train(expected, other, range(5, 7))
    check_equal(model, expected)


@on_ranks(1, 2, tier=("device", "host", "disk"), kind=("muon", "soap", *slow("shampoo")))
def test_a_run_saved_from_tiers_goes_on_bit_for_bit_on_them(tier: str, kind: str) -> None:
    # On the device alone what is updated whole is replicated, too.
    chosen = policy(tier, stage=0 if tier == "device" and kind == "soap" else 3)
    with folder() as path:
        model = net()
        attachment = zhooks.attach(model, policy=chosen)
        optimizer = MATRIX_OPTIMIZERS[kind](model.parameters())
        train(model, optimizer, range(3))
        attachment.save(path / "run", optimizer)
        again = net()
        other = zhooks.attach(again, policy=chosen)
        fresh = MATRIX_OPTIMIZERS[kind](again.parameters())
        other.load(path / "run", fresh)
        loaded = [value for states in fresh.state.values() for value in tensors_in(states)]
        assert all(isinstance(value, StoredTensor) == (tier != "device") for value in loaded)
        train(again, fresh, range(3, 6))
    check_equal(again, plain(kind, range(6))[0])


@on_ranks(1, 2)
def test_states_follow_a_policy_that_changes_their_tier_and_stage() -> None:
    model, expected = net(), net()
    attachment = zhooks.attach(model, policy=policy("device"))
    optimizer, other = (MATRIX_OPTIMIZERS["shampoo"](one.parameters()) for one in (model, expected))
    for number, (tier, stage) in enumerate((("host", 3), ("disk", 3), ("device", 0), ("disk", 2), ("device", 3))):
        if stage < 3:
            chosen = {**policy(tier, stage=stage), "parameter": {"tier": "device"}}
            chosen["gradient"] = {"tier": "device"} if stage == 0 else chosen["gradient"]
        else:
            chosen = policy(tier)
        attachment.apply(chosen)
        now = range(2 * number, 2 * number + 2)
        train(model, optimizer, now)
        train(expected, other, now)
        check_equal(model, expected)
        values = [value for states in optimizer.state.values() for value in tensors_in(states)]
        assert {isinstance(value, StoredTensor) for value in values} <= {tier != "device"}
    attachment.detach()
    check_states(optimizer.state_dict(), other)


class FailsOnOne(Shampoo):
    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if group.get("fails") and param.shape == (20, 20):
            raise ValueError("this matrix cannot be inverted")
        super()._update(param, grad, group)


@on_ranks(2, tier=("device", "host", "disk"))
def test_a_step_that_raises_on_one_owner_raises_on_all_and_leaves_values_and_states_on_their_tiers(tier: str) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = FailsOnOne(model.parameters())
    train(model, optimizer, range(2))
    before = [value.clone() for value in full(model)]
    optimizer.param_groups[0]["fails"] = True
    model(batch(2)).square().mean().backward()
    with pytest.raises(Exception, match="cannot be inverted") as raised:
        optimizer.step()
    assert "0 of 1 rounds" in "".join(raised.value.__notes__), "it says how far it had come"
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
    values = [value for states in optimizer.state.values() for value in tensors_in(states)]
    assert all(isinstance(value, StoredTensor) == (tier != "device") and bool(torch.isfinite(value).all()) for value in values)
    assert tier != "host" or store_of(attachment).staged == 0
    optimizer.param_groups[0]["fails"] = False
    train(model, optimizer, range(2, 4))
    again = torch.optim.AdamW(model.parameters())
    train(model, again, range(1))


class Unreadable(SystemIo):
    """A disk that fails at every read until it is healed."""

    broken = True

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


class Unwritable(SystemIo):
    """A disk that fails at every write until it is healed."""

    broken = True

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwritev(fd, buffers, offset)


@on_ranks(2)
def test_states_that_one_rank_cannot_read_stop_all_ranks_before_anything_is_updated() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=policy("device", optimizer={"tier": "disk"}))
    optimizer = MATRIX_OPTIMIZERS["shampoo"](model.parameters())
    train(model, optimizer, range(2))
    store, disk = store_of(attachment), Unreadable()
    store.flush()
    if place()[0] == 1:
        break_disk(store, disk)
    before = [value.clone() for value in full(model)]
    model(batch(2)).square().mean().backward()
    with pytest.raises(zhooks.TierError, match=r"Input/output error") as raised:
        optimizer.step()
    assert "0 of 1 rounds" in "".join(raised.value.__notes__)
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
    disk.broken = False
    train(model, optimizer, range(2, 4))
    check_equal(model, plain("shampoo", range(4))[0])


@on_ranks(2)
def test_states_that_one_rank_cannot_write_back_stop_all_ranks_and_are_not_lost() -> None:
    model = net()
    small = policy("device", optimizer={"tier": "disk"}, comm={"timeout_s": 60, "buffer": "2KiB"})
    attachment = zhooks.attach(model, policy=small)
    optimizer = MATRIX_OPTIMIZERS["muon"](model.parameters())
    train(model, optimizer, range(2))
    model(batch(2)).square().mean().backward()
    store, disk = store_of(attachment), Unwritable()
    store.flush()
    mine = [states for states in optimizer.state.values() if isinstance(states, OwnedStates) and states.here]
    if place()[0] == 1:
        break_disk(store, disk)
        for states in mine:
            states["momentum_buffer"].fill_(0.5)
    with pytest.raises(zhooks.TierError, match="Input/output error") as raised:
        optimizer.step()
    assert "rounds of parameters that are updated whole were complete" in "".join(raised.value.__notes__)
    disk.broken = False
    if place()[0] == 1:
        assert any(bool((states["momentum_buffer"] == 0.5).all()) for states in mine)
    train(model, optimizer, range(3, 5))


@on_ranks(1, 2)
def test_states_that_their_tier_cannot_admit_are_refused_on_every_rank_and_stay_what_they_are() -> None:
    model = net()
    values = 4 * 4 * sum(param.numel() for param in model.parameters())
    attachment = zhooks.attach(model, policy=policy("device", optimizer={"tier": "disk"}, budget={"disk": 9000}))
    assert values > 9000
    optimizer = MATRIX_OPTIMIZERS["soap"](model.parameters())
    model(batch(0)).square().mean().backward()
    before = [value.clone() for value in full(model)]
    with pytest.raises(zhooks.BudgetError, match=r"(?s)disk.*optimizer/states/") as refused:
        optimizer.step()
    assert "0 of 1 rounds of parameters that are updated whole were complete" in "".join(refused.value.__notes__)
    if place()[1] > 1:
        for value, other in zip(full(model), before, strict=True):
            torch.testing.assert_close(value, other, rtol=0, atol=0)
    else:
        assert "parameters and states of one more round may have been updated" in "".join(refused.value.__notes__)
    attachment.apply(policy("device", optimizer={"tier": "disk"}))
    train(model, optimizer, range(2))


@on_ranks(1, 2, tier=("device", "disk"))
def test_the_policy_s_loss_scale_skips_what_overflowed_and_owners_see_true_gradients(tier: str) -> None:
    precision = {"param": "fp16", "loss_scale": "dynamic", "initial_scale": 2.0**8, "hysteresis": 1, "output": "fp32"}
    model, expected = net(), net()
    attachment = zhooks.attach(model, policy=policy(tier, precision=precision))
    optimizers, others = both(model), both(expected)
    for step in range(5):
        overflows = step == 2
        loss = model(batch(step)).square().mean()
        (loss * 1e30 if overflows else loss).backward()
        before = [value.clone() for value in full(model)]
        for one in optimizers:
            one.step()
            one.zero_grad()
        if overflows:
            assert attachment.loss_scale == 2.0**7
            for value, other in zip(full(model), before, strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=0)
            continue
        expected(batch(step)).square().mean().backward()
        for one in others:
            one.step()
            one.zero_grad()
    for value, other in zip(full(model), expected.parameters(), strict=True):
        torch.testing.assert_close(value, other.detach(), rtol=0.0, atol=0.012)


@on_ranks(1, 2)
def test_updates_in_backward_leave_what_is_updated_whole_to_the_step() -> None:
    results: list[nn.Module] = []
    for model in (net(), net()):
        if results:
            zhooks.attach(model, policy=policy("host", optimizer={"tier": "host", "overlap": True, "compute": "host"}))
        optimizers = both(model)
        for step in range(4):
            model(batch(step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append(model)
    check_equal(results[1], results[0])


@on_ranks(1, 2)
def test_a_kernel_that_cannot_update_the_rest_is_refused_before_anything_is_updated() -> None:
    model = net()
    zhooks.attach(model, policy=policy("host", optimizer={"tier": "host", "compute": "host", "kernel": "numba"}))
    optimizer = MATRIX_OPTIMIZERS["muon_with_adam"](model.parameters())
    model(batch(0)).square().mean().backward()
    before = [value.clone() for value in full(model)]
    with pytest.raises(zhooks.ShardedOpError, match="found MuonWithAdam"):
        optimizer.step()
    for value, other in zip(full(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)


@on_ranks(2)
def test_small_rounds_and_no_prefetch_come_to_the_same_and_events_say_what_tiers_hold() -> None:
    chosen = policy("disk", comm={"timeout_s": 60, "buffer": "2KiB"}, schedule={"prefetch": 0})
    model = net()
    attachment = zhooks.attach(model, policy=chosen)
    optimizer = MATRIX_OPTIMIZERS["soap"](model.parameters())
    seen = Recorder()
    with attachment.observe(seen):
        train(model, optimizer, range(3))
    check_equal(model, plain("soap", range(3))[0])
    levels = {event.key: event.nbytes for event in seen.events if event.what == "optimizer on disk"}
    held = sum(row.nbytes for row in attachment.memory().rows if (row.what, row.tier) == ("optimizer", "disk"))
    assert sum(levels.values()) >= held > 0
