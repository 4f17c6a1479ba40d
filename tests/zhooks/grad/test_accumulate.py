"""``accumulate()``: backward passes add up unreduced at every stage, and one reduction follows when somebody needs it.

pytest runs it over real ranks; tests/zhooks/run/test_pipeline.py has the schedules in which the same happens by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import zhooks
from offload.errors import PolicyError
from offload.events import Recorder
from tests.support.inside import runtime_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from tests.support.unused_layer import made

POLICY: dict[str, Any] = {"units": {"min_numel": 0}}


def rows(number: int) -> Tensor:
    """The rows of all ranks for one backward."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


def backward(model: nn.Module, number: int, *, mine: bool) -> None:
    rank, world = place()
    x = rows(number).chunk(world)[rank] if mine else rows(number)
    F.mse_loss(model(x).float(), torch.ones(x.shape[0], 3)).backward()


def reductions(recorder: Recorder) -> list[str]:
    return sorted(event.key for event in recorder.events if event.kind == "begin" and event.what == "reduce")


def same_grads(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert torch.allclose(found.grad.full_tensor(), expected.grad, atol=1e-6), name


@on_ranks(1, 2)
def test_one_reduction_a_unit_follows_at_the_first_read_and_another_for_what_comes_after() -> None:
    for stage in range(4):
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=POLICY | {"stage": stage})
        recorder = Recorder()
        with attachment.observe(recorder):
            with attachment.accumulate():
                for number in range(3):
                    backward(plain, number, mine=False)
                    backward(model, number, mine=True)
                assert not reductions(recorder)
                same_grads(model, plain)
                once = reductions(recorder)
                assert len(once) == len(set(once)) and (place()[1] == 1 or once)
                backward(plain, 3, mine=False)
                backward(model, 3, mine=True)
            assert reductions(recorder) == sorted(2 * once), "the end of the block owes the rest"
            same_grads(model, plain)
            backward(plain, 4, mine=False)
            backward(model, 4, mine=True)
            assert reductions(recorder) == sorted(3 * once), "outside of it a backward reduces"
        same_grads(model, plain)
        attachment.detach()


@on_ranks(2)
def test_without_it_every_backward_reduces_where_gradients_are_partitioned() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=POLICY | {"stage": 2})
    recorder = Recorder()
    with attachment.observe(recorder), attachment.no_sync():
        for number in range(3):
            backward(model, number, mine=True)
    found = reductions(recorder)
    assert len(found) == 3 * len(set(found)) and found
    attachment.detach()


@on_ranks(2, tier=("device", "host"))
def test_the_step_and_a_clip_pay_what_is_owed(tier: str) -> None:
    for stage in (0, 3):
        plain, model = made(), made()
        place_ = {"tier": tier}
        placed = {"optimizer": place_} | ({"gradient": place_, "parameter": place_} if stage == 3 else {})
        attachment = zhooks.attach(model, policy=POLICY | {"stage": stage} | placed)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
        for clip in (False, True):
            with attachment.accumulate():
                for number in range(3):
                    backward(plain, number, mine=False)
                    backward(model, number, mine=True)
                if clip:
                    wanted, norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, model))
                    assert torch.allclose(wanted, norm, atol=1e-6)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        attachment.detach()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)


@on_ranks(2)
def test_the_sum_is_kept_in_the_dtype_of_reductions_and_lands_in_that_of_the_masters() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=POLICY | {"stage": 3, "precision": {"param": "bf16", "reduce": "fp32"}})
    with attachment.accumulate():
        for number in range(3):
            backward(model, number, mine=True)
        partials = [gradient.partial for gradient in runtime_of(attachment).reducer.gradients.values()]
        held = [partial for partial in partials if partial is not None]
        assert {partial.dtype for partial in held} == {torch.float32}
        assert sum(partial.numel() for partial in held) >= 5 * 9 + 9 + 9 * 3 + 3, "all of it, on every rank"
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}
    attachment.detach()


@on_ranks(2)
def test_a_block_left_by_an_exception_communicates_nothing_until_a_gradient_is_needed() -> None:
    plain, model = made(), made()
    attachment = zhooks.attach(model, policy=POLICY | {"stage": 3})
    recorder = Recorder()
    with attachment.observe(recorder), pytest.raises(ValueError, match="enough"), attachment.accumulate():
        backward(model, 0, mine=True)
        raise ValueError("enough")
    assert not reductions(recorder)
    model.zero_grad()
    backward(plain, 1, mine=False)
    backward(model, 1, mine=True)
    same_grads(model, plain)
    with attachment.accumulate():
        backward(model, 2, mine=True)
        for param in model.parameters():
            param.grad = None
    backward(plain, 2, mine=False)
    for param in plain.parameters():
        param.grad = None
    same_grads(model, plain)
    attachment.detach()


@on_ranks(1)
def test_updates_in_backward_and_sums_of_several_exclude_each_other() -> None:
    plain, model = made(), made()
    policy = POLICY | {"stage": 3, "optimizer": {"tier": "host", "overlap": True}}
    attachment = zhooks.attach(model, policy=policy)
    with pytest.raises(PolicyError, match="needs one backward per step"), attachment.accumulate():
        raise AssertionError("never entered")
    backward(plain, 0, mine=False)
    backward(model, 0, mine=True)
    same_grads(model, plain)
    attachment.detach()


@on_ranks(2)
def test_a_checkpointed_model_may_have_several_forwards_in_flight() -> None:
    for stage in (0, 3):
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=POLICY | {"stage": stage})
        for each, mine in ((plain, False), (model, True)):
            rank, world = place()
            xs = [rows(number).chunk(world)[rank] if mine else rows(number) for number in range(3)]
            outs = [torch.utils.checkpoint.checkpoint(each, x, use_reentrant=False) for x in xs]
            for out in outs:
                F.mse_loss(out, torch.ones_like(out)).backward()
        same_grads(model, plain)
        attachment.detach()


def clear(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "by hand":
        for param in model.parameters():
            param.grad = None
    elif how == "in place":
        for param in model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
    else:
        whose, to_none = how.split()
        (model if whose == "model" else optimizer).zero_grad(set_to_none=to_none == "none")


CLEARED = ("model none", "model zero", "optimizer none", "optimizer zero", "by hand", "in place")
HOST: dict[str, Any] = {"tier": "host"}
PLACED: tuple[dict[str, Any], ...] = (
    *({"stage": stage} for stage in range(4)),
    {"stage": 1, "optimizer": HOST},
    {"stage": 1, "optimizer": {"tier": "disk"}},
    {"stage": 3, "parameter": HOST, "gradient": HOST, "optimizer": HOST},
)


@on_ranks(1, 2, block=("no_sync", *slow("accumulate")))
def test_a_cleared_gradient_clears_what_was_accumulated(block: str) -> None:
    for placed in PLACED:
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=POLICY | placed)
        mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=True) for each in (model, plain))
        for number, (how, inside) in enumerate((how, inside) for how in CLEARED for inside in (False, True)):
            with getattr(attachment, block)():
                backward(model, 3 * number, mine=True)
                if inside:
                    clear(how, model, mine)
                    backward(model, 3 * number + 1, mine=True)
            backward(plain, 3 * number, mine=False)
            clear(how, plain, theirs)
            if inside:
                backward(plain, 3 * number + 1, mine=False)
            else:
                clear(how, model, mine)
            backward(model, 3 * number + 2, mine=True)
            backward(plain, 3 * number + 2, mine=False)
            same_grads(model, plain)
            mine.step()
            theirs.step()
            mine.zero_grad()
            theirs.zero_grad()
        attachment.detach()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)


@on_ranks(2, stage=(0, 1))
def test_one_rank_alone_may_drop_what_it_has_accumulated(stage: int) -> None:
    model, plain = made(), made()
    attachment = zhooks.attach(model, policy=POLICY | {"stage": stage})
    for each, mine in ((model, True), (plain, False)):
        for number in (0, 1):
            with attachment.no_sync():
                rank, _ = place()
                if mine:
                    backward(model, number, mine=True)
                    if number == 0 and rank == 1:
                        model.zero_grad()
                elif number:
                    backward(plain, 1, mine=False)
                else:
                    # Rank 1's half counts as zero.
                    (F.mse_loss(each(rows(0).chunk(2)[0]), torch.ones(2, 3)) / 2).backward()
    attachment.detach()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None)
        if found.grad is not None and expected.grad is not None:
            assert torch.allclose(found.grad, expected.grad, atol=1e-6)


@on_ranks(1, 2, stage=(0, 1, 2, 3))
def test_a_step_a_clip_and_a_read_in_no_sync_use_the_mean_of_all_ranks(stage: int) -> None:
    for use in ("step", "clip", "read", "kept"):
        plain, model = made(), made()
        attachment = zhooks.attach(model, policy=POLICY | {"stage": stage})
        mine, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, plain))
        with attachment.no_sync():
            for number in range(3):
                backward(model, number, mine=True)
                backward(plain, number, mine=False)
                kept: dict[str, Any] = {name: param.grad for name, param in model.named_parameters()}
                if use == "clip":
                    found, expected = (torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain))
                    assert torch.allclose(found, expected, atol=1e-6)
                elif use == "read":
                    same_grads(model, plain)
                mine.step()
                theirs.step()
                if use == "kept" and stage < 2:
                    for name, param in plain.named_parameters():
                        assert (kept[name] is None) == (param.grad is None)
                        if param.grad is not None:
                            assert torch.allclose(kept[name].full_tensor(), param.grad, atol=1e-6)
                if number:
                    mine.zero_grad()
                    theirs.zero_grad()
        attachment.detach()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=1e-5), use


@on_ranks(2, stage=(0, 1))
def test_a_gradient_that_was_read_in_no_sync_and_cleared_since_is_refused(stage: int) -> None:
    model: Any = made()
    attachment = zhooks.attach(model, policy=POLICY | {"stage": stage})
    with attachment.no_sync():
        backward(model, 0, mine=True)
        read = model.first.weight.grad
        model.zero_grad()
        assert model.first.weight.grad is None
        backward(model, 0, mine=True)
        with pytest.raises(zhooks.ShardedOpError, match="was cleared or set since"):
            read.full_tensor()
    attachment.detach()
