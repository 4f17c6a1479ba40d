"""Training over tiers: whatever rests on the host or on disk, the numbers are those of a model that never left the device.

pytest runs it on one rank and on two; on one, plain PyTorch is the reference, on two the device tier is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zhooks
from tests.support.inside import flats_of, has_store, numel_of, range_of, store_of, tier_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from tests.support.tiers import AWAY, TIERS, Loop, adamw, loss_of, policy, run, step, three_steps
from tests.support.values import copies, grad_of, same, sharded
from tests.support.zoo import ZOO


def check(loop: Loop, tier: str, stage: int = 3, **options: Any) -> None:
    """The loop leaves the same result and the same bits as it does without tiers."""
    wanted = run(loop, None if place()[1] == 1 else policy("device", stage), **options)
    found = run(loop, policy(tier, stage), **options)
    assert found[0] == wanted[0]
    assert same(found[1], wanted[1])


# ---- the same bits --------------------------------------------------------------------------------------------------


@on_ranks(1, 2, tier=AWAY, name=("gpt", "tied", *slow("mixture", "lstm")))
def test_losses_and_parameters_are_those_of_the_device_tier(tier: str, name: str) -> None:
    wanted = run(three_steps(name), policy("device"), name)
    for ahead in (0, 1, 4):
        chosen = policy(tier, schedule={"prefetch": ahead})
        found = run(three_steps(name), chosen, name)
        assert found[0] == wanted[0] and same(found[1], wanted[1]), f"prefetch {ahead}"


@on_ranks(1, 2, tier=AWAY, param=("bf16", *slow("fp16")))
def test_masters_apart_from_their_copies_train_as_on_the_device(tier: str, param: str) -> None:
    precision = {"param": param, "output": "fp32"}
    for stage in (3, 0):
        one, two = (run(three_steps("gpt"), policy(each, stage, precision=precision), "gpt") for each in ("device", tier))
        assert one[0] == two[0] and same(one[1], two[1])


@on_ranks(1, 2, tier=AWAY)
def test_gradients_accumulate_over_backwards_and_under_no_sync(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
        losses = []
        for number in range(6):
            quiet = attachment is not None and number % 3 == 0
            if quiet and attachment is not None:
                with attachment.no_sync():
                    loss = loss_of(model, number)
                    loss.backward()
            else:
                loss = loss_of(model, number)
                loss.backward()
            losses.append(loss.item())
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    for stage in (3, 0):
        check(loop, tier, stage)


@on_ranks(2, ahead=(0, 1, 4), param=(None, "bf16"))
def test_the_host_memory_that_attach_and_the_first_step_ask_for_is_enough_however_far_ahead_units_are_gathered(
    ahead: int, param: str | None
) -> None:
    """What is fetched ahead, or gathered for ``resident``, gives way to what is needed now."""

    def within(nbytes: str) -> dict[str, Any]:
        chosen = policy("disk", schedule={"prefetch": ahead}, budget={"host": nbytes})
        return chosen if param is None else chosen | {"precision": {"param": param, "output": "fp32"}}

    def enough(refused: pytest.ExceptionInfo[zhooks.BudgetError]) -> str:
        found = re.search(r"Raise it to at least ([\d.]+ KiB)", str(refused.value))
        assert found is not None
        return found[1]

    def build() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))

    def training(first: Callable[[zhooks.Attachment, torch.optim.Optimizer], None]) -> Loop:
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
            assert attachment is not None
            losses = []
            for number in range(3):
                for half in range(2):
                    loss = model(torch.full((2, 64), number + half / 2)).square().mean()
                    loss.backward()
                    losses.append(loss.item())
                if number == 0:
                    first(attachment, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad(), attachment.resident():
                    losses.append(model(torch.ones(1, 64)).sum().item())
            return losses

        return train

    def refused_at_first(attachment: zhooks.Attachment, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(zhooks.BudgetError, match="in the update of one unit") as refused:
            optimizer.step()
        attachment.apply(within(enough(refused)))

    ample = run(training(lambda *_: None), within("1 MiB"), build=build)
    with pytest.raises(zhooks.BudgetError) as refused:
        zhooks.attach(build(), policy=within("0.1 KiB"))
    found = run(training(refused_at_first), within(enough(refused)), build=build)
    assert found[0] == ample[0] and same(found[1], ample[1])


# ---- what parameters say ------------------------------------------------------------------------------------------------


@on_ranks(1, 2, tier=tuple(TIERS))
def test_parameters_keep_shape_dtype_and_compute_device_and_their_local_range_tells_the_truth(tier: str) -> None:
    plain, model = ZOO["gpt"].build(7), ZOO["gpt"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model)
    step(model, optimizer, 0, "gpt")
    loss_of(model, 1, "gpt").backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        states = [value for value in optimizer.state[mine].values() if value.dim()]
        for tensor in (mine, mine.grad, *states):
            assert isinstance(tensor, zhooks.ShardedTensor)
            assert tensor.shape == theirs.shape and tensor.dtype == theirs.dtype and tensor.device == theirs.device
            local = tensor.to_local()
            assert local.dim() == 1 and local.dtype == theirs.dtype and local.device.type == "cpu"
            assert local.numel() == numel_of(tensor)
            assert torch.equal(local, range_of(tensor, tensor.full_tensor()))
        assert tuple(tier_of(each) for each in (mine, grad_of(mine), states[0])) == TIERS[tier]
    attachment.detach()


@on_ranks(1, 2, tier=AWAY)
def test_a_local_range_on_disk_is_a_copy_and_elsewhere_the_memory_itself(tier: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    param = next(p for p in model.parameters() if sharded(p).to_local().numel())
    before = sharded(param).to_local().clone()
    with torch.no_grad():
        sharded(param).to_local().add_(1.0)
    expected = before if TIERS[tier][0] == "disk" else before + 1.0
    assert torch.equal(sharded(param).to_local(), expected)
    attachment.detach()


@on_ranks(1, 2, tier=tuple(TIERS), param=(None, "bf16"))
def test_memory_is_the_formula_to_the_byte_on_every_tier(tier: str, param: str | None) -> None:
    world = place()[1]
    for stage in (3, 0):
        model = ZOO["gpt"].build(7)
        precision = {} if param is None else {"precision": {"param": param, "output": "fp32"}}
        attachment = zhooks.attach(model, policy=policy(tier, stage, **precision))
        optimizer = adamw(model)
        step(model, optimizer, 0, "gpt")
        loss_of(model, 1, "gpt").backward()
        held = sum(flat.shard_numel for flat in flats_of(attachment))
        assert held >= sum(p.numel() for p in model.parameters()) // (world if stage else 1)
        report = attachment.memory()
        copied = 4 if param is None else 2
        wanted = {"parameter": held * copied, "gradient": held * 4, "optimizer": held * (8 if param is None else 12)}
        if tier == "device" and param and stage:
            # On the device masters are what rests, and a gather casts them on its way.
            wanted = {"parameter": held * 4, "gradient": held * 4, "optimizer": held * 8}
        if stage:
            found = {row.what: row.nbytes for row in report.rows}
            assert found == wanted, f"{tier} {param} stage {stage}"
        for row in report.rows:
            assert row.nbytes == row.formula and row.tier == TIERS[tier][("parameter", "gradient", "optimizer").index(row.what)]
        if has_store(attachment):
            store = store_of(attachment)
            store.flush()
            for where in ("host", "disk"):
                assert sum(row.nbytes for row in report.rows if row.tier == where) == store.budget.used(zhooks_tier(where))
        attachment.detach()


def zhooks_tier(name: str) -> Any:
    from offload.tier import Tier

    return Tier(name)


# ---- the user's loop ----------------------------------------------------------------------------------------------------


@on_ranks(1, 2, tier=AWAY)
def test_clipping_finds_the_norm_and_scales_gradients_where_they_rest(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> list[float]:
        norms = []
        for number in range(3):
            loss_of(model, number).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    wanted, found = run(loop, policy("device")), run(loop, policy(tier))
    assert found[0] == wanted[0] and max(found[0]) > 0.1 and same(found[1], wanted[1])


@on_ranks(1, 2, tier=AWAY)
def test_a_grad_scaler_unscales_and_skips_a_step_that_overflowed(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scales = []
        for number in range(4):
            loss = loss_of(model, number) * (float("inf") if number == 1 and place()[0] == 0 else 1.0)
            scaler.scale(loss).backward()
            if number == 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    wanted, found = run(loop, policy("device")), run(loop, policy(tier))
    assert found[0] == wanted[0] == [2.0**16, 2.0**15, 2.0**15, 2.0**15] and same(found[1], wanted[1])


def between(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> Any:
    """Evaluation, inference, reads and a deep copy between backward and step, and steps without gradients."""
    seen = []
    optimizer.step()
    for number in range(3):
        loss_of(model, number).backward()
        model.eval()
        with torch.no_grad():
            seen.append(loss_of(model, 9).item())
        with torch.inference_mode():
            seen.append(loss_of(model, 8).item())
        model.train()
        if attachment is not None:
            attachment.memory()
            attachment.state_dict(optimizer)
        copy.deepcopy(model)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 1)
    return seen


def written(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> Any:
    """Writes to parameters, to gradients and to states between steps."""
    for number in range(3):
        loss_of(model, number).backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5).clamp_(-0.2, 0.2)
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.999)
                for state in optimizer.state[param].values():
                    state.mul_(0.75)
        optimizer.zero_grad()


def frozen(model: Any, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> Any:
    """Freeze between steps, and between backward and step; unfreeze."""
    middle = list(model[2].parameters())
    losses = [step(model, optimizer, 0)]
    for param in middle:
        param.requires_grad_(False)
    losses += [step(model, optimizer, 1)]
    for param in middle:
        param.requires_grad_(True)
    losses += [step(model, optimizer, 2)]
    loss_of(model, 3).backward()
    for param in middle:
        param.requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
    return [*losses, step(model, optimizer, 4)]


def hooked(model: Any, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> Any:
    seen = []
    model[0].weight.register_hook(lambda grad: grad * 2.0)
    model[1][0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(float(param.grad.detach().abs().sum())))
    for number in range(3):
        step(model, optimizer, number)
    return len(seen)


def interrupted(model: Any, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> Any:
    """Exceptions in forward and in backward, and going on."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    losses = [step(model, optimizer, 0)]
    for register in (model[2].register_forward_hook, model[2].register_full_backward_hook):
        handle = register(fail)
        with pytest.raises(ArithmeticError):
            loss_of(model, 1).backward()
        handle.remove()
        optimizer.zero_grad()
        losses += [step(model, optimizer, 1)]
    return losses


@on_ranks(1, 2, tier=AWAY, loop=("between", "written", "frozen", "hooked"))
def test_an_unusual_loop_comes_out_the_same(tier: str, loop: str) -> None:
    for stage in (3, 0):
        check(globals()[loop], tier, stage)


@on_ranks(1, tier=AWAY)
def test_an_exception_in_forward_or_backward_leaves_the_next_step_right(tier: str) -> None:
    for stage in (3, 0):
        check(interrupted, tier, stage)


@on_ranks(1, 2, tier=tuple(TIERS), what=("gradient", "local"))
def test_gradients_that_the_user_kept_do_not_change(tier: str, what: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model)
    kept: list[tuple[Any, list[Tensor]]] = []
    for number in range(3):
        loss_of(model, number).backward()
        grads: Any = [param.grad for param in model.parameters()]
        wanted = copies(grads) if what == "gradient" else [grad.to_local().clone() for grad in grads]
        kept.append((grads if what == "gradient" else [grad.to_local() for grad in grads], wanted))
        del grads
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            with torch.no_grad():
                loss_of(model, 7)
    for grads, wanted in kept:
        assert same(copies(grads), wanted)
    attachment.detach()


@on_ranks(1, 2, tier=AWAY)
def test_an_adapter_over_a_frozen_model_trains_as_on_the_device(tier: str) -> None:
    from peft import LoraConfig, get_peft_model

    def build() -> nn.Module:
        torch.manual_seed(3)
        made: nn.Module = get_peft_model(ZOO["gpt"].build(7), LoraConfig(r=4, target_modules=["qkv"]))
        return made

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> list[float]:
        return [step(model, optimizer, number, "gpt") for number in range(3)]

    chosen = [run(loop, policy(each), build=build) for each in ("device", tier)]
    assert chosen[0][0] == chosen[1][0] and same(chosen[0][1], chosen[1][1])


# ---- states in and out --------------------------------------------------------------------------------------------------


@on_ranks(1, 2, tier=AWAY)
def test_states_saved_and_loaded_over_tiers_go_on_with_the_same_bits(tier: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
        step(model, optimizer, 0)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        whole = None if attachment is None else copy.deepcopy(attachment.state_dict(optimizer))
        wanted = [step(model, optimizer, number) for number in range(1, 3)]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert [step(model, optimizer, number) for number in range(1, 3)] == wanted
        if attachment is not None and whole is not None:
            attachment.load_state_dict(whole, optimizer)
            assert [step(model, optimizer, number) for number in range(1, 3)] == wanted
        return wanted

    check(loop, tier)


@on_ranks(1, 2, tier=AWAY)
def test_an_optimizer_with_states_is_passed_to_attach_and_its_states_rest_on_their_tier(tier: str) -> None:
    losses, values = [], []
    for chosen in ("device", tier):
        model = ZOO["mlp"].build(7)
        optimizer = adamw(model)
        for number in range(2):
            ZOO["mlp"].loss(model, ZOO["mlp"].batch(number, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        attachment = zhooks.attach(model, optimizer, policy=policy(chosen))
        losses.append([step(model, optimizer, number) for number in range(2, 4)])
        found = {row.what: row.tier for row in attachment.memory().rows}
        assert found["optimizer"] == TIERS[chosen][2]
        values.append(copies(model.parameters()))
        attachment.detach()
        assert all(type(s) is Tensor for state in optimizer.state.values() for s in state.values())
        step(model, optimizer, 5)
    assert losses[0] == losses[1] and same(*values)


@on_ranks(1, 2, tier=AWAY)
def test_values_written_under_gathered_reach_every_tier(tier: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, attachment: zhooks.Attachment | None) -> list[float]:
        losses = [step(model, optimizer, 0)]
        assert attachment is not None
        with attachment.gathered(model[0].weight, write=True) as (weight,), torch.no_grad():
            weight.mul_(0.5)
        return [*losses, step(model, optimizer, 1)]

    rules: tuple[dict[str, Any], ...] = ({}, {"precision": {"param": "bf16", "output": "fp32"}})
    for precision in rules:
        one, two = (run(loop, policy(each, **precision)) for each in ("device", tier))
        assert one[0] == two[0] and same(one[1], two[1])


@on_ranks(1, 2, tier=AWAY)
def test_detach_leaves_a_plain_model_that_trains_on_and_no_file(tier: str) -> None:
    model = ZOO["mlp"].build(7)
    attachment = zhooks.attach(model, policy=policy(tier))
    optimizer = adamw(model)
    step(model, optimizer, 0)
    loss_of(model, 1).backward()
    grads = copies([param.grad for param in model.parameters()])
    path = store_of(attachment).disk.path if "disk" in TIERS[tier] else None
    assert path is None or path.exists()
    attachment.detach()
    assert path is None or not path.exists()
    assert same([param.grad for param in model.parameters() if param.grad is not None], grads)
    optimizer.step()
    copy.deepcopy(model)


@on_ranks(1, 2, tier=AWAY)
def test_attaching_under_inference_mode_trains_all_the_same(tier: str) -> None:
    values = []
    for chosen in ("device", tier):
        model = ZOO["mlp"].build(7)
        with torch.inference_mode():
            attachment = zhooks.attach(model, policy=policy(chosen))
            loss_of(model, 5)
        optimizer = adamw(model)
        for number in range(2):
            step(model, optimizer, number)
        values.append(copies(model.parameters()))
        attachment.detach()
    assert same(*values)
