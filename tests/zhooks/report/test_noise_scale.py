"""``attachment.noise_scale()``: the estimates of plain gradients, and the known noise scale of a synthetic problem.

pytest runs it on ranks over Gloo, all data from fixed seeds. It trains nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zhooks
from offload.errors import CapabilityError, ShardedOpError
from offload.events import Recorder
from tests.support.on_ranks import on_ranks, place
from tests.support.unused_layer import made
from zhooks.report.noise_scale import Averages, NoiseEstimate, Pair

UNITS: dict[str, Any] = {"units": {"names": ["first", "second"], "min_numel": 0}}
ROWS = 3


def rows(number: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(97 * number + rank))


def backward(model: nn.Module, number: int, rank: int | None = None, times: float = 1.0) -> None:
    x = rows(number, place()[0] if rank is None else rank)
    (F.mse_loss(model(x).float(), torch.ones(ROWS, 3)) * times).backward()


def plain_gradient(numbers: list[int], rank: int) -> Tensor:
    """The mean gradient of some passes of one rank, fp64."""
    model = made()
    for number in numbers:
        backward(model, number, rank)
    return torch.cat([p.grad.flatten().double() / len(numbers) for p in model.parameters() if p.grad is not None])


def expected(rounds: list[list[int]], world: int) -> tuple[float, float]:
    """Means of both estimates over reductions, each of the passes listed."""
    pairs = []
    for numbers in rounds:
        sent = torch.stack([plain_gradient(numbers, rank) for rank in range(world)])
        small, large = sent.square().sum(1).mean().item(), sent.mean(0).square().sum().item()
        batch = ROWS * len(numbers)
        pairs.append(Pair(small, batch, large, batch * world))
    return sum(p.gradient_square for p in pairs) / len(pairs), sum(p.trace for p in pairs) / len(pairs)


def check(found: NoiseEstimate | None, rounds: list[list[int]], near: float = 1e-4) -> None:
    assert found is not None
    gradient, trace = expected(rounds, place()[1])
    assert found.gradient_square == pytest.approx(gradient, rel=near, abs=near * abs(trace))
    assert found.trace == pytest.approx(trace, rel=near)
    assert (found.measured, found.skipped) == (len(rounds), 0)
    assert found.batch_size == ROWS * len(rounds[-1]) * place()[1]
    assert found.noise_scale is None or found.noise_scale == pytest.approx(found.trace / found.gradient_square)


@on_ranks(2, 4, tier=("device", "host"))
def test_estimates_are_those_of_plain_gradients_at_every_stage_and_of_sums(tier: str) -> None:
    for stage in range(4):
        model = made()
        cells = {} if tier == "device" else {"gradient": {"tier": tier}, "optimizer": {"tier": tier}}
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage} | cells)
        with attachment.noise_scale(ROWS, decay=1.0) as noise:
            assert noise.estimate is None and "not measured yet" in str(noise)
            for number in range(3):
                backward(model, number)
            check(noise.estimate, [[0], [1], [2]])
            with attachment.accumulate():
                backward(model, 3, times=0.5)
                backward(model, 4, times=0.5)
            check(noise.estimate, [[0], [1], [2], [3, 4]])
        backward(model, 5)
        check(noise.estimate, [[0], [1], [2], [3, 4]])
        attachment.detach()


@on_ranks(2)
def test_no_sync_is_measured_as_it_reduces() -> None:
    for stage, rounds, times in ((1, [[0, 1, 2]], 1 / 3), (3, [[0], [1], [2]], 1.0)):
        model = made()
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage})
        with attachment.noise_scale(ROWS, decay=1.0) as noise:
            with attachment.no_sync():
                backward(model, 0, times=times)
                backward(model, 1, times=times)
            backward(model, 2, times=times)
            check(noise.estimate, rounds)
        attachment.detach()


@on_ranks(2)
def test_loss_scales_long_parameters_and_replicas_change_nothing() -> None:
    policies: list[tuple[dict[str, Any], float]] = [
        ({"precision": {"param": "fp16", "loss_scale": 512.0}}, 2e-2),
        ({"precision": {"reduce": "bf16"}}, 2e-2),
        ({"comm": {"buffer": 64}}, 1e-4),
    ]
    for policy, near in policies:
        for stage in (0, 3):
            model = made()
            attachment = zhooks.attach(model, policy=UNITS | {"stage": stage} | policy)
            with attachment.noise_scale(ROWS, decay=1.0) as noise:
                backward(model, 0)
                backward(model, 1)
                check(noise.estimate, [[0], [1]], near)
            attachment.detach()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = made()
    attachment = zhooks.attach(model, policy=UNITS, mesh=mesh)
    with attachment.noise_scale(ROWS, decay=1.0) as noise:
        backward(model, 0)
        check(noise.estimate, [[0]])
    attachment.detach()


@on_ranks(2)
def test_gradients_that_are_summed_are_measured_as_their_mean() -> None:
    """A loss that is divided by the samples of all ranks, as ``reduce = "sum"`` wants it."""
    attachment = zhooks.attach(model := made(), policy=UNITS | {"gradient": {"reduce": "sum"}})
    with attachment.noise_scale(ROWS, decay=1.0) as noise:
        for number in range(2):
            backward(model, number, times=1 / place()[1])
            model.zero_grad()
        check(noise.estimate, [[0], [1]])
    attachment.detach()


@on_ranks(4)
def test_shards_and_replicas_together_are_measured_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (0, 2):
        model = made()
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage}, mesh=mesh)
        with attachment.noise_scale(ROWS, decay=1.0) as noise:
            backward(model, 0)
            backward(model, 1)
            check(noise.estimate, [[0], [1]])
        attachment.detach()


def test_one_rank_compares_the_first_pass_of_a_step_with_all_of_them() -> None:
    for policy in ({}, {"stage": 0}, {"gradient": {"tier": "host"}, "optimizer": {"tier": "host"}}):
        model = made()
        attachment = zhooks.attach(model, policy=UNITS | policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attachment.noise_scale(ROWS, decay=1.0) as noise:
            for step in range(3):
                optimizer.zero_grad()
                for number in range(2):
                    backward(model, 2 * step + number, rank=0)
                optimizer.step()
        pairs = []
        for step in range(3):
            first, both = (plain_gradient([2 * step + n for n in range(count)], 0).square().sum().item() for count in (1, 2))
            pairs.append(Pair(first, ROWS, both, 2 * ROWS))
        found = noise.estimate
        assert found is not None and found.measured == 3 and found.batch_size == 2 * ROWS
        assert found.trace == pytest.approx(sum(p.trace for p in pairs) / 3, rel=1e-4)
        assert found.gradient_square == pytest.approx(sum(p.gradient_square for p in pairs) / 3, rel=1e-3, abs=1e-4)
        attachment.detach()


def test_one_rank_measures_nothing_of_single_passes_nor_of_gradients_that_were_there() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=UNITS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attachment.noise_scale(ROWS) as noise:
        for number in range(3):
            backward(model, number, rank=0)
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):
            backward(model, 0, rank=0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert noise.estimate is None
    assert "several backward passes" in str(noise)


@pytest.mark.slow
@on_ranks(2)
def test_a_linear_regression_has_the_noise_scale_that_its_covariance_gives() -> None:
    """Of loss (w.x - y)^2 / 2 with standard normal x and noise of deviation s, at a distance d of w from the truth in n
    dimensions: |G|^2 = d^2 and the trace is (n + 1) d^2 + n s^2."""
    n, deviation, batch, rounds = 12, 0.5, 8, 400
    rank, _ = place()
    model = nn.Linear(n, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}})
    generator = torch.Generator().manual_seed(1000 + rank)
    with attachment.noise_scale(batch, decay=1.0) as noise:
        for _ in range(rounds):
            x = torch.randn(batch, n, generator=generator)
            y = deviation * torch.randn(batch, 1, generator=generator)
            (0.5 * (model(x) - y).square().mean()).backward()
            model.zero_grad()
    distance = n * 0.25**2
    trace = (n + 1) * distance + n * deviation**2
    found = noise.estimate
    assert found is not None and found.measured == rounds and found.noise_scale is not None
    assert found.gradient_square == pytest.approx(distance, rel=0.15)
    assert found.trace == pytest.approx(trace, rel=0.05)
    assert found.noise_scale == pytest.approx(trace / distance, rel=0.15)


@on_ranks(2)
def test_reductions_of_unequal_ranks_or_of_values_that_are_not_finite_are_left_out() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=UNITS | {"stage": 1})
    with attachment.noise_scale(ROWS, decay=1.0) as noise:
        with attachment.no_sync():
            backward(model, 0)
            if place()[0] == 0:
                backward(model, 1)
        backward(model, 2)
        backward(model, 3, times=float("inf") if place()[0] else 1.0)
        torch.autograd.grad(F.mse_loss(model(rows(0, 0)), torch.ones(ROWS, 3)), [model.first.weight])
        assert [noise.estimate] == [None] and "2 left out" in str(noise)
        model.zero_grad()
        backward(model, 4)
        found = noise.estimate
    assert found is not None and (found.measured, found.skipped) == (1, 2)
    assert found.trace == pytest.approx(expected([[4]], 2)[1], rel=1e-4)


@on_ranks(2)
def test_updates_in_backward_and_recomputation_are_measured_alike() -> None:
    for policy in ({"optimizer": {"overlap": True}}, {"activation": {"checkpoint": "unit"}}):
        model = made()
        # A block, which can be recomputed; a single layer keeps its inputs alone.
        model.add_module("first", nn.Sequential(model.first))
        with warnings.catch_warnings(action="error"):
            attachment = zhooks.attach(model, policy=UNITS | policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attachment.noise_scale(ROWS, decay=1.0) as noise:
            for number in range(3):
                backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
            check(noise.estimate, [[0], [1], [2]])
        attachment.detach()


@on_ranks(1, 2)
def test_passes_that_ended_before_it_began_are_not_taken_for_none() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=UNITS | {"stage": 1})
    with attachment.accumulate():
        backward(model, 0)
        noise = attachment.noise_scale(ROWS, decay=1.0)
        backward(model, 1)
    assert [noise.estimate] == [None]
    model.zero_grad()
    with attachment.accumulate():
        backward(model, 2, times=0.5)
        backward(model, 3, times=0.5)
    if place()[1] == 2:
        found = noise.estimate
        assert found is not None and found.measured == 1
        assert found.trace == pytest.approx(expected([[2, 3]], 2)[1], rel=1e-4)
    noise.close()


@on_ranks(2)
def test_a_failed_backward_counts_with_the_gradients_it_left_and_spoils_no_later_estimate() -> None:
    model = made()
    attachment = zhooks.attach(model, policy=UNITS)
    with attachment.noise_scale(ROWS, decay=1.0) as noise:
        handle = model.first.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: 1 / 0) and None)
        with pytest.raises(ZeroDivisionError):
            backward(model, 1)
        handle.remove()
        model.zero_grad()
        left = noise.estimate
        for number in (2, 3):
            backward(model, number)
        found = noise.estimate
    assert left is not None and found is not None and (left.measured, found.measured) == (1, 3)
    assert found.trace == pytest.approx((left.trace + 2 * expected([[2], [3]], 2)[1]) / 3, rel=1e-4)


@on_ranks(2)
def test_gradients_are_the_same_to_the_bit_and_observers_hear_of_the_estimate() -> None:
    def grads(measured: bool) -> tuple[list[Tensor], Recorder]:
        model, recorder = made(), Recorder()
        attachment = zhooks.attach(model, policy=UNITS)
        with attachment.observe(recorder):
            noise = attachment.noise_scale(ROWS, decay=1.0) if measured else None
            for number in range(12):
                backward(model, number)
            if noise is not None:
                noise.close()
                noise.close()
        found = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        attachment.detach()
        return found, recorder

    (with_it, heard), (without, silent) = grads(True), grads(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    levels = [event for event in heard.events if event.what == "noise scale"]
    batches = {event.nbytes for event in heard.events if event.what == "noise scale: batch"}
    assert levels and all(event.nbytes >= 1 for event in levels) and batches == {2 * ROWS}
    assert not [event for event in silent.events if event.what.startswith("noise scale")]


@on_ranks(2)
def test_what_cannot_be_measured_is_refused_on_every_rank() -> None:
    attachment = zhooks.attach(made(), policy=UNITS)
    with pytest.raises(zhooks.ZhooksError, match=r"expected a batch_size of at least 1"):
        attachment.noise_scale(0 if place()[0] else 2)
    with pytest.raises(ShardedOpError, match="batch_size"):
        attachment.noise_scale(2 + place()[0])
    with attachment.noise_scale(2), pytest.raises(ShardedOpError, match="another handle that is open"):
        attachment.noise_scale(2)
    attachment.noise_scale(2).close()
    attachment.detach()
    with pytest.raises(zhooks.AttachError, match="noise_scale expected an attached model"):
        attachment.noise_scale(2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    attachment = zhooks.attach(made(), policy=UNITS, mesh=mesh)
    with pytest.raises(CapabilityError, match="found a mesh with tp or pp"):
        attachment.noise_scale(2)


def test_averages_are_corrected_for_what_they_lack_and_ask_for_positive_values() -> None:
    averages = Averages(0.5)
    assert [averages.estimate] == [None]
    averages.add(Pair(2.0, 1, 1.5, 2))
    first = averages.estimate
    assert first is not None and first.gradient_square == pytest.approx(1.0) and first.trace == pytest.approx(1.0)
    averages.add(Pair(2.0, 1, 2.5, 2))
    second = averages.estimate
    assert second is not None and second.noise_scale is None
    assert second.gradient_square == pytest.approx((0.5 * 1.0 + 3.0) / 1.5)
    averages.add(Pair(float("nan"), 1, 2.5, 2))
    averages.add(Pair(0.0, 1, 0.0, 2))
    last = averages.estimate
    assert last is not None and last.skipped == 2 and last.measured == 2
