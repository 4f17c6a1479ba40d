"""fp16 under the policy's loss scale: an ordinary loop does what a plain one with torch.amp.GradScaler does, bit for bit.

pytest runs it on ranks over Gloo; the oracle is plain PyTorch in one process.  It never looks at a clock.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zhooks
from offload.policy import Precision
from tests.support.on_ranks import on_accelerators, on_ranks, place
from tests.support.scaling_model import HOT, adamw, attached, batch, build, loss_of
from tests.support.schedules import SCHEDULES, native, schedule
from tests.support.slow import slow
from tests.support.values import copies, grad_of, same
from zhooks.grad.scaling import LossScale

STEPS = 14


def plain_run(world: int, lose: Callable[[int, int], float] = lambda number, rank: 1.0) -> tuple[Any, ...]:
    """fp32 masters computed in fp16 under a GradScaler, all ranks' shares one after the other, clipped."""
    model = build()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=HOT["initial_scale"], growth_interval=HOT["growth_interval"])
    scales = []
    for number in range(STEPS):
        for rank in range(world):
            inputs, wanted = batch(number, rank)
            halves = {name: p.half() for name, p in model.named_parameters()}
            loss = (functional_call(model, halves, (inputs.half(),)).float() - wanted).square().mean() * lose(number, rank)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad = grad_of(p).div_(world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, copies(model.parameters()), [float(optimizer.state[p]["step"]) for p in model.parameters()]


def policy_run(lose: Callable[[int, int], float] = lambda number, rank: 1.0, **more: Any) -> tuple[Any, ...]:
    rank, _ = place()
    model, attachment = attached(HOT, **more)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scales = []
    for number in range(STEPS):
        (loss_of(model, number, rank) * lose(number, rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        scales.append(attachment.loss_scale)
    steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    assert attachment.session.steps.count == STEPS, "a step that was skipped has been taken"
    out = scales, copies(model.parameters()), steps, attachment.overflows
    attachment.detach()
    return out


@pytest.mark.slow
@on_ranks(1, 2, stage=(1, 2))
def test_stages_that_replicate_parameters_step_as_the_others_do(stage: int) -> None:
    test_scales_skipped_steps_and_parameters_are_those_of_a_plain_grad_scaler.job(stage)


@on_ranks(1, 2, stage=(0, 3))
def test_scales_skipped_steps_and_parameters_are_those_of_a_plain_grad_scaler(stage: int) -> None:
    _, world = place()
    wanted, found = plain_run(world), policy_run(stage=stage)
    assert found[0] == wanted[0]
    assert min(found[2]) == max(found[2]) == wanted[2][0] < STEPS - 2
    assert len(found[3]) == STEPS - wanted[2][0]
    if world == 1:
        assert same(found[1], wanted[1])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[1], wanted[1], strict=True))


@on_ranks(2, tier=("host", *slow("disk")))
def test_every_tier_skips_and_steps_with_the_same_bits(tier: str) -> None:
    cell = {"tier": tier}
    wanted = policy_run()
    for kernel in ("torch", "numba") if tier == "host" else ("torch",):
        cells: dict[str, Any] = {"parameter": cell, "gradient": cell, "optimizer": {"tier": tier, "kernel": kernel}}
        found = policy_run(**cells)
        assert found[0] == wanted[0] and found[2:] == wanted[2:], kernel
        close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[1], wanted[1], strict=True))
        assert close and (kernel == "numba" or same(found[1], wanted[1]))


@on_ranks(2, precision=("fp32", "fp16"))
def test_an_overflow_in_one_ranks_share_skips_the_step_everywhere_and_is_named(precision: str) -> None:
    rank, _ = place()
    model, attachment = attached({"param": "fp16", "loss_scale": "dynamic", "initial_scale": 256, "reduce": precision})
    optimizer, heard = adamw(model), zhooks.Recorder()
    attachment.observe(heard)
    hooked: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append("post"))
    for number in range(3):
        before = copies(model.parameters())
        lost = math.inf if number == 1 and rank == 1 else 1.0
        (loss_of(model, number, rank) * lost).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same(copies(model.parameters()), before) is (number == 1)
    assert hooked == ["post"] * 2 and attachment.loss_scale == 128.0
    (only,) = attachment.overflows
    units = dict(only.parameters)
    assert (only.step, only.scale) == (1, 256.0) and len(only.parameters) == 7
    assert any(parameter == "gain" for parameter in (name for _, name in only.parameters)) and len(units) > 1
    said = [event.key for event in heard.events if event.what == "overflow"]
    assert len(said) == len(units) and all("at step 1, scale 256" in key for key in said)
    assert "Last overflow in step 1 at scale 256" in attachment.describe()


@on_ranks(1, 2)
def test_an_overflow_at_the_least_scale_is_an_error_and_the_run_may_go_on() -> None:
    rank, _ = place()
    rules = {"param": "fp16", "loss_scale": "dynamic", "initial_scale": 4, "min_scale": 2, "growth_interval": 1}
    model, attachment = attached(rules)
    optimizer = adamw(model)
    (loss_of(model, 0, rank) * math.inf).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert attachment.loss_scale == 2.0
    before = copies(model.parameters())
    with pytest.raises(zhooks.ScaleError, match=r"finite at min_scale, 2, found an overflow in step 1 in .* of unit"):
        (loss_of(model, 1, rank) * math.nan).backward()
    optimizer.step()
    assert same(copies(model.parameters()), before) and attachment.loss_scale == 2.0
    optimizer.zero_grad()
    loss_of(model, 2, rank).backward()
    optimizer.step()
    assert not same(copies(model.parameters()), before) and attachment.loss_scale == 4.0


@on_ranks(1, 2, stage=(1, 2))
def test_a_step_of_several_backwards_is_one_step_of_the_scale(stage: int) -> None:
    rank, _ = place()
    model, attachment = attached({"loss_scale": "dynamic", "initial_scale": 64, "growth_interval": 2}, stage=stage)
    optimizer, plain = adamw(model), build()
    reference = adamw(plain)
    scales = []
    for number in range(6):
        lost = number == 3
        for micro in range(3):
            spoilt = math.inf if lost and micro == 0 and rank == 0 else 1.0
            if micro < 2:
                with attachment.no_sync():
                    (loss_of(model, 3 * number + micro, 0) * spoilt).backward()
            else:
                (loss_of(model, 3 * number + micro, 0) * spoilt).backward()
            if not lost:
                loss_of(plain, 3 * number + micro, 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        if not lost:
            reference.step()
            reference.zero_grad(set_to_none=False)
        scales.append(attachment.loss_scale)
    assert scales == [64, 128, 128, 64, 64, 128] and [found.step for found in attachment.overflows] == [3]
    found, wanted = copies(model.parameters()), copies(plain.parameters())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


@on_ranks(2)
def test_each_optimizer_is_skipped_for_its_own_gradients_and_the_scale_moves_once() -> None:
    model, attachment = attached({"loss_scale": "dynamic", "initial_scale": 8, "growth_interval": 1})
    body = torch.optim.SGD(model.body.parameters(), lr=0.1)
    rest = torch.optim.SGD([*model.head.parameters(), model.gain], lr=0.1)
    loss_of(model, 0, 0).backward()
    body.step()
    rest.step()
    assert attachment.loss_scale == 16.0
    model.zero_grad()
    before = copies(model.parameters())
    # A penalty of one parameter alone overflows.
    (loss_of(model, 1, 0) + model.gain.sum() * math.inf).backward()
    body.step()
    rest.step()
    after = copies(model.parameters())
    assert attachment.loss_scale == 8.0 and attachment.overflows[0].parameters[0][1] == "gain"
    changed = {name for (name, _), a, b in zip(model.named_parameters(), before, after, strict=True) if not torch.equal(a, b)}
    assert changed == {f"body.{name}" for name, _ in model.body.named_parameters()}


@on_ranks(1, 2)
def test_the_scale_is_saved_loaded_and_follows_apply() -> None:
    rank, world = place()
    rules = {"loss_scale": "dynamic", "initial_scale": 64, "growth_interval": 3}
    model, attachment = attached(rules)
    optimizer = adamw(model)

    def step(number: int, spoilt: float = 1.0) -> None:
        (loss_of(model, number, rank) * spoilt).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1, math.inf)
    step(2)
    step(3)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    if world > 1:
        torch.distributed.broadcast_object_list(folder)
    attachment.save(f"{folder[0]}/saved")
    state = attachment.state_dict()
    assert (rank != 0) or state["loss_scale"] == {"scale": 32.0, "good_steps": 2, "overflows_left": 1}
    step(4)
    assert attachment.loss_scale == 64.0
    attachment.load(f"{folder[0]}/saved")
    assert attachment.loss_scale == 32.0
    step(4)
    assert attachment.loss_scale == 64.0
    attachment.load_state_dict(state)
    assert attachment.loss_scale == 32.0
    with pytest.raises(zhooks.CheckpointError, match="expected scale, good_steps and overflows_left"):
        attachment.load_state_dict({**state, "loss_scale": {"scale": "much"}})
    policy = {"units": {"min_numel": 0}, "stage": 2}
    attachment.apply({**policy, "precision": {**rules, "growth_interval": 1}})
    step(5)
    assert attachment.loss_scale == 64.0
    attachment.apply({**policy, "precision": {"loss_scale": 16}})
    step(6)
    assert attachment.loss_scale == 16.0
    attachment.apply(policy)
    step(7)
    assert not any([attachment.loss_scale, attachment.overflows[1:]])
    attachment.apply({**policy, "precision": rules})
    step(8)
    assert attachment.loss_scale == 64.0


@on_ranks(2, options=({}, {"fused": True}), tier=("device", "host"))
def test_what_overflowed_under_a_grad_scaler_is_named_too(options: dict[str, Any], tier: str) -> None:
    rank, world = place()
    cell = {"tier": tier}
    model, attachment = attached({}, parameter=cell, gradient=cell, optimizer=cell)
    optimizer = adamw(model, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(3):
        loss = loss_of(model, number, rank)
        if number == 1 and rank == world - 1:
            loss = loss + model.head.weight.sum() * math.nan
        before = copies(model.parameters())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same(copies(model.parameters()), before) is (number == 1)
    (only,) = attachment.overflows
    assert only.step == 1 and [name for _, name in only.parameters] == ["head.weight"]
    assert only.scale == (1.0 if options else 4.0) and scaler.get_scale() == 2.0


@pytest.mark.slow
@on_ranks(1)
def test_fp16_overfits_as_fp32_does() -> None:
    ends = []
    for precision in ({}, {"param": "fp16", "loss_scale": "dynamic", "growth_interval": 20}, {"param": "bf16"}):
        model, _ = attached(precision)
        optimizer = adamw(model)
        for _ in range(100):
            loss = loss_of(model, 0, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(loss.item())
    assert ends[0] < 0.05 and all(abs(end - ends[0]) < 0.01 for end in ends[1:]), ends


def test_outputs_are_what_a_loss_can_be_taken_of() -> None:
    """fp16 outputs become fp32, or their gradients would vanish before they are scaled; bf16 ones have the range."""
    for param, out in (("fp16", torch.float32), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model, attachment = attached({"param": param, "loss_scale": 8.0})
        assert model(batch(0, 0)[0]).dtype is out
        with torch.no_grad():
            assert model(batch(0, 0)[0]).dtype is out
        attachment.detach()


def test_a_model_that_is_fp16_itself_is_refused() -> None:
    with pytest.raises(zhooks.AttachError, match="needs fp32 parameters, found gain and 6 more in fp16"):
        attached({"loss_scale": "dynamic"}, build().half())
    model, attachment = attached({}, build().half())
    with pytest.raises(zhooks.AttachError, match="needs fp32 parameters"):
        attachment.apply({"units": {"min_numel": 0}, "precision": {"loss_scale": 8}})
    assert attachment.loss_scale is None and model(torch.ones(1, 16).half()).dtype is torch.float16
    attachment.detach()


# --- arithmetic


@pytest.mark.parametrize("seed", range(3))
def test_the_sequence_of_scales_is_that_of_grad_scaler(seed: int) -> None:
    scale = LossScale(Precision(loss_scale="dynamic", initial_scale=1024, growth_interval=4, min_scale=2.0**-60))
    value, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    torch.manual_seed(seed)
    for lost in (torch.rand(200) < 0.2).tolist():
        (scale.overflowed if lost else scale.succeeded)()
        torch._amp_update_scale_(value, tracker, torch.tensor(float(lost)), 2.0, 0.5, 4)
        assert scale.value == value.item()


def test_hysteresis_spends_overflows_before_it_backs_off_as_deepspeed_does() -> None:
    scale = LossScale(Precision(loss_scale="dynamic", initial_scale=64, growth_interval=2, hysteresis=3))
    seen = []
    for letter in "xxx.x..xx.xx":
        (scale.overflowed if letter == "x" else scale.succeeded)()
        seen.append(scale.value)
    assert seen == [64, 64, 32, 32, 16, 16, 32, 32, 32, 32, 16, 8]


def test_a_fixed_scale_never_moves_and_a_growing_one_never_leaves_fp32() -> None:
    fixed = LossScale(Precision(loss_scale=128))
    assert fixed.overflowed() and fixed.value == 128
    growing = LossScale(Precision(loss_scale="dynamic", initial_scale=2.0**126, growth_interval=1))
    for _ in range(5):
        growing.succeeded()
    assert growing.value == 2.0**127


@on_accelerators(1, 2, chosen=SCHEDULES)
def test_an_overflow_in_what_is_reduced_last_is_seen_where_gradients_add_up(chosen: tuple[str, int]) -> None:
    device = f"accel:{native().current_device()}"
    with schedule(*chosen):
        layers = [nn.Linear(8, 8) for _ in range(3)]
        nn.init.zeros_(layers[0].weight)
        net = nn.Sequential(*layers).to(device)
        policy = {"precision": {"loss_scale": 8.0}, "units": {"names": ["?"], "min_numel": 0}}
        attachment = zhooks.attach(net, policy=policy)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        before = copies(net.parameters())
        for first in (1.0, 1e38):
            # The first layer's weights are zero: its gradient alone, which is reduced last, overflows.
            net(torch.full((4, 8), first, device=device)).sum().backward()
        sgd.step()
        found = [names for overflow in attachment.overflows for names in overflow.parameters]
        assert [name for _, name in found] == ["0.weight"], found
        assert same(copies(net.parameters()), before)
        attachment.detach()
