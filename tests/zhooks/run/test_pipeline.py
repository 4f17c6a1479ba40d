"""Stages of torch's pipelining under ``attach``: equal to the plain model under every schedule, whatever is in flight.

pytest runs it over real ranks; tests/support/pipelines.py has the model, tests/zhooks/grad/test_accumulate.py what adds up
without a pipeline, tests/zhooks/run/test_pipeline_errors.py what goes wrong.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zhooks
from offload.events import Recorder
from tests.support.inside import comm_of, flats_of, plans_of, runtime_of
from tests.support.on_ranks import on_ranks
from tests.support.pipelines import (
    DUAL_PIPE,
    Run,
    batch_of,
    loss_of,
    mean_over,
    mesh_of,
    mine_of,
    parts,
    share,
)
from tests.support.slow import slow
from tests.support.torches import not_with_2_8
from zhooks.plan.budget import device_floor

# Each has several micro-batches, and a change of momentum shows from the second on.
STEPS = 4


def trained(pp: int, schedule: str, policy: dict[str, Any], *, steps: int = STEPS, **more: Any) -> None:
    run = Run(pp, schedule, policy, **more)
    for number in range(steps):
        run.step(number)
    run.close()


@pytest.mark.slow
@on_ranks(4, schedule=("interleaved", "gpipe", "1f1b"))
def test_two_stages_over_two_data_ranks_train_as_the_plain_model(schedule: str) -> None:
    trained(2, schedule, {"stage": 3})


@on_ranks(4, stage=(0, *slow(1), 2))
def test_every_stage_of_zero_trains_as_the_plain_model(stage: int) -> None:
    trained(2, "1f1b", {"stage": stage})


@on_ranks(2, schedule=(*slow("gpipe", "1f1b"), "interleaved", "bfs"))
def test_stages_of_one_rank_each_train_as_the_plain_model(schedule: str) -> None:
    trained(2, schedule, {"stage": 3}, steps=4)
    trained(2, schedule, {"stage": 1}, steps=4)


@pytest.mark.slow
@on_ranks(2, 4, schedule=("gpipe", "1f1b", "interleaved", "bfs"), stage=(0, 1, 2, 3), limit_s=300.0)
def test_every_schedule_and_every_stage_of_zero(schedule: str, stage: int) -> None:
    trained(2, schedule, {"stage": stage})


@pytest.mark.slow
@on_ranks(4, schedule=("gpipe", "1f1b", "interleaved"), limit_s=300.0)
def test_four_stages_deep(schedule: str) -> None:
    trained(4, schedule, {"stage": 3}, microbatches=8, blocks=8)


@on_ranks(4, stage=(*slow(0), 3))
def test_weight_gradients_that_are_put_off_are_those_of_the_plain_model(stage: int) -> None:
    trained(2, "zero-bubble", {"stage": stage}, steps=2)


@pytest.mark.slow
@on_ranks(2, 4, schedule=("zero-bubble", "zbv", DUAL_PIPE), stage=(0, 1, 2, 3), limit_s=300.0)
def test_every_zero_bubble_schedule_and_every_stage_of_zero(schedule: str, stage: int) -> None:
    trained(2, schedule, {"stage": stage})


IN_FLIGHT: dict[str, dict[str, Any]] = {
    "recomputed": {"activation": {"checkpoint": "unit"}},
    "stashed": {"activation": {"tier": "host", "min_bytes": 0}},
    "both": {"activation": {"checkpoint": "unit", "tier": "disk", "min_bytes": 0}},
    "states": {"optimizer": {"tier": "host"}, "gradient": {"tier": "host"}, "parameter": {"tier": "disk"}},
    "kept": {"schedule": {"reshard_after_forward": False}},
}


@on_ranks(2, what=(*slow("recomputed", "stashed"), "both", *slow("states", "kept")))
def test_activations_and_tiers_are_right_with_several_microbatches_in_flight(what: str) -> None:
    trained(2, "interleaved", {"stage": 3, **IN_FLIGHT[what]}, steps=3)


@pytest.mark.slow
@on_ranks(4, schedule=("gpipe", "1f1b"), what=tuple(IN_FLIGHT), limit_s=300.0)
def test_activations_and_tiers_are_right_over_data_ranks(schedule: str, what: str) -> None:
    for stage in (2, 3):
        placed = IN_FLIGHT[what]
        if stage == 2 and "parameter" in placed:
            placed = {key: value for key, value in placed.items() if key != "parameter"}
        trained(2, schedule, {"stage": stage, **placed})


def counted(run: Run, what: str, number: int) -> Counter[str]:
    """How often each unit of this rank did ``what`` in one step."""
    recorders = [Recorder() for _ in run.attachments]
    with ExitStack() as stack:
        for attachment, recorder in zip(run.attachments, recorders, strict=True):
            stack.enter_context(attachment.observe(recorder))
        run.step(number)
    return Counter(
        f"{at} {event.key}"
        for at, recorder in enumerate(recorders)
        for event in recorder.events
        if event.kind == "begin" and event.what == what
    )


@on_ranks(4, schedule=(*slow("1f1b"), "interleaved"), stage=(3, *slow(0, 2)))
def test_a_unit_is_reduced_once_a_step_whatever_the_number_of_microbatches(schedule: str, stage: int) -> None:
    run = Run(2, schedule, {"stage": stage})
    for number in range(3):
        assert set(counted(run, "reduce", number).values()) == {1}
    run.close()


@on_ranks(4)
def test_units_kept_until_backward_are_gathered_once_a_step() -> None:
    run = Run(2, "gpipe", {"stage": 3, "schedule": {"reshard_after_forward": False}})
    run.step(0)
    for number in range(1, 3):
        assert set(counted(run, "gather", number).values()) == {1}
    assert not any(flat.full is not None for flat in flats_of(run.attachments[0])), "released at the end"
    run.close()


@pytest.mark.slow
@not_with_2_8("its schedules have no eval")
@on_ranks(4)
def test_evaluation_between_steps_changes_nothing() -> None:
    run = Run(2, "1f1b", {"stage": 3})
    run.step(0)
    inputs, targets = share(run.mesh, batch_of(100))
    losses: list[Tensor] = []
    given: dict[str, Any] = {"target": targets, "losses": losses} if run.pipe.last else {}
    out = run.pipe.schedule.eval(*((inputs,) if run.pipe.first else ()), **given)
    if run.pipe.last:
        with torch.no_grad():
            expected = run.plain.model(inputs)
        assert out is not None and torch.allclose(out, expected, atol=1e-5)
        assert mean_over(run.mesh, torch.stack(losses).mean()) > 0
    for number in range(1, 4):
        run.step(number)
    run.close()


@on_ranks(2)
def test_one_optimizer_steps_the_stages_of_two_attachments_over_tiers() -> None:
    trained(2, "interleaved", {"stage": 3, "optimizer": {"tier": "host", "kernel": "numba"}}, steps=3)


@on_ranks(4, schedule=("1f1b", *slow("interleaved")))
def test_a_clip_is_by_the_norm_of_the_whole_model(schedule: str) -> None:
    run = Run(2, schedule, {"stage": 3})
    params = [param for part in run.mine.values() for param in part.parameters()]
    for number in range(3):
        run.pipe.step(number)
        found = torch.nn.utils.clip_grad_norm_(params, 0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
        inputs, targets = batch_of(number)
        loss_of(run.plain.model(inputs), targets).backward()
        expected = torch.nn.utils.clip_grad_norm_(run.plain.model.parameters(), 0.5)
        run.plain.optimizer.step()
        run.plain.optimizer.zero_grad()
        assert expected > 0.5
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
    run.close()


@on_ranks(4)
def test_a_slice_of_the_mesh_stands_for_the_mesh() -> None:
    mesh = mesh_of(2, 2)
    (part,) = mine_of(mesh, parts(2)).values()
    attachment = zhooks.attach(part, mesh=mesh["dp"], policy={"stage": 3})
    assert comm_of(attachment).world.axis.ranks == ((0, 1) if dist.get_rank() < 2 else (2, 3))
    attachment.detach()


@on_ranks(4)
def test_a_budget_of_the_device_counts_the_sum_that_microbatches_leave() -> None:
    mesh, model = mesh_of(2, 2), nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    policy: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}}
    attachment = zhooks.attach(model, mesh=mesh, policy=policy)
    few, all_of_them = (device_floor(attachment.policy, plans_of(attachment), whole_sums=whole) for whole in (False, True))
    attachment.detach()
    assert all_of_them >= few + 4 * 64 * 64 * 4
    with pytest.raises(zhooks.BudgetError, match=r"\[budget\] device is too small. Expected memory for what is stored there"):
        zhooks.attach(model, mesh=mesh, policy=policy | {"budget": {"device": f"{(few + all_of_them) // 2} B"}})
    zhooks.attach(model, mesh=mesh, policy=policy | {"budget": {"device": f"{2 * all_of_them} B"}}).detach()


@pytest.mark.parametrize("precision", [{}, {"reduce": "bf16"}, {"param": "fp16", "loss_scale": "dynamic"}])
def test_of_one_data_rank_the_sum_is_counted_where_there_is_one(precision: dict[str, Any]) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 0}, "precision": precision})
    with attachment.accumulate():
        model(torch.ones(2, 64)).float().sum().backward()
        gradients = runtime_of(attachment).reducer.gradients.values()
        held = sum(gradient.partial.nbytes for gradient in gradients if gradient.partial is not None)
        report = attachment.memory()
    few, whole = (device_floor(attachment.policy, plans_of(attachment), whole_sums=whole) for whole in (False, True))
    resting = sum(2 * 4 * param.numel() for param in model.parameters())
    assert bool(held) is bool(precision) and whole >= resting + held and whole >= few
    assert report.transient["partial gradients"] <= report.bounds["partial gradients"]
    attachment.detach()
