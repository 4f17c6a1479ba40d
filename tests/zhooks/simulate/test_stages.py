"""Pipelines in a simulation: stages that wait for each other as formulas say, peaks as real ranks have them, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zhooks
from offload.hardware import Hardware
from tests.support.on_ranks import place
from tests.support.ranks import Pool
from tests.support.slow import slow
from tests.support.storage_peak import a_cpu, peak
from tests.support.virtual import on_virtual
from zhooks.simulate import Simulation, Slowdown, simulate

WIDTH, ROWS = 4096, 4096
POLICY = {"units": {"min_numel": 0}, "stage": 1, "precision": {"param": "bf16"}}
KINDS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Layers(nn.Module):
    """Alike on every stage: what enters a product needs a gradient on the first one, too."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x + self.shift)
        return out


def job(
    kind: str, batches: int, *, width: int = WIDTH, rows: int = ROWS, dtype: Any = torch.bfloat16, device: str = "virtual"
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """``build`` and ``step`` of a pipeline of four layers a rank; interleaved a rank has two stages."""
    each = 2 if kind == "interleaved" else 1

    def build(mesh: DeviceMesh) -> tuple[Any, ...]:
        place, count = mesh["pp"].get_local_rank(), mesh["pp"].size()
        models = [Layers(4 // each, width) for _ in range(each)]
        stages = [
            PipelineStage(model, place + count * number, count * each, torch.device(device), group=mesh["pp"].get_group())
            for number, model in enumerate(models)
        ]
        given: Any = stages if each > 1 else stages[0]
        schedule = KINDS[kind](given, batches, loss_fn=lambda out, target: out.sum())
        optimizer = torch.optim.SGD([param for model in models for param in model.parameters()])
        return models, optimizer, schedule, mesh["pp"]

    def step(models: list[nn.Module], optimizer: torch.optim.Optimizer, schedule: Any, pp: DeviceMesh) -> None:
        if pp.get_local_rank() == 0:
            schedule.step(torch.ones(rows * batches, width, dtype=dtype, device=device))
        elif pp.get_local_rank() == pp.size() - 1:
            schedule.step(target=torch.ones(rows * batches, 1, device=device), losses=[])
        else:
            schedule.step()
        optimizer.zero_grad()

    return build, step


def simulated(kind: str, stages: int, batches: int, **given: Any) -> Simulation:
    hardware = Hardware.of("h100").replaced(link={"bandwidth": "3 TB/s"})
    found = simulate(
        *job(kind, batches), world=stages, mesh={"pp": stages, "shard": 1}, **{"hardware": hardware, "policy": POLICY, **given}
    )
    assert not found.races, "\n".join(map(str, found.races))
    return found


@on_virtual(kind=("gpipe", "1f1b", "interleaved"), stages=(*slow(2), 4))
def test_stages_that_are_alike_stand_still_for_the_share_that_formulas_give(kind: str, stages: int) -> None:
    found = simulated(kind, stages, 2 * stages)
    passes = 2 * stages * (2 if kind == "interleaved" else 1)
    share = (stages - 1) / (passes + stages - 1)
    # What is sent takes a little of the step, too.
    assert share * 0.97 <= found.bubble_s / found.step_s <= share * 1.12, f"{found.bubble_s / found.step_s} beside {share}"
    for one in found.stages:
        assert one.compute_s + one.bubble_s == pytest.approx(found.step_s, rel=0.06)
        assert one.step_s == found.step_s


@on_virtual()
def test_fewer_micro_batches_are_in_flight_under_1f1b_the_later_the_stage() -> None:
    everything, few = simulated("gpipe", 4, 8), simulated("1f1b", 4, 8)
    # Four inputs of products, and the shifted one of the first.
    kept = [one.device.nbytes for one in few.stages]
    assert kept == sorted(kept, reverse=True) and kept[0] < min(one.device.nbytes for one in everything.stages)
    assert few.device.nbytes == kept[0] and few.rank == 0


@on_virtual()
def test_what_stages_send_is_a_message_a_micro_batch_each_way() -> None:
    found, nbytes = simulated("1f1b", 2, 4), 4 * ROWS * WIDTH * 2
    assert [one.link_nbytes for one in found.stages] == [nbytes, nbytes]
    text, values = str(found), found.as_dict()
    assert "2 stages wait for each other" in text and "stage 1: compute" in text
    assert [one["rank"] for one in values["stages"]] == [0, 1] and values["fits"]
    assert values["joules"] == pytest.approx(sum(one["joules"] for one in values["stages"]))


@on_virtual()
def test_a_stage_is_sharded_over_its_own_ranks_whatever_the_order_of_the_axes() -> None:
    outer = simulate(*job("1f1b", 4), world=8, mesh={"pp": 2, "dp": 4}, policy={**POLICY, "stage": 3})
    inner = simulate(*job("1f1b", 4), world=8, mesh={"shard": 4, "pp": 2}, policy={**POLICY, "stage": 3})
    assert [one.rank for one in outer.stages] == [0, 4] and [one.rank for one in inner.stages] == [0, 1]
    assert outer.device.holders == inner.device.holders
    alone = simulated("1f1b", 2, 4, policy={**POLICY, "stage": 3})
    assert outer.stages[0].device.holders["parameter"] < alone.stages[0].device.holders["parameter"]
    assert not outer.races and not inner.races


@on_virtual()
def test_norms_are_those_of_all_stages_and_stages_are_divided_over_tp() -> None:
    build, _ = job("1f1b", 2, width=256, rows=64, dtype=torch.float32)

    def divided(mesh: DeviceMesh) -> tuple[Any, ...]:
        made = build(mesh)
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(made[0][0], mesh["tp"], plan)
        return made

    def step(models: list[nn.Module], optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        if pp.get_local_rank() == 0:
            schedule.step(torch.ones(128, 256, device="virtual"))
        else:
            schedule.step(target=torch.ones(128, 1, device="virtual"), losses=[])
        nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        said = torch.tensor([pp.get_local_rank() + 1, 7])
        dist.all_reduce(said, group=pp.get_group())
        assert said.tolist() == [3, 14], "values of the CPU are those of both stages"
        optimizer.step()
        optimizer.zero_grad()

    found = simulate(divided, step, world=8, mesh={"pp": 2, "dp": 2, "tp": 2}, policy={"units": {"min_numel": 0}})
    assert not found.races, "\n".join(map(str, found.races))
    assert all(one.link_nbytes > 0 for one in found.stages)


@on_virtual()
def test_stages_of_other_sizes_choose_one_policy_together() -> None:
    build, step = job("1f1b", 2, width=64, rows=8, dtype=torch.float32)

    def wider(mesh: DeviceMesh) -> tuple[Any, ...]:
        models, _, *rest = build(mesh)
        if mesh["pp"].get_local_rank() == 1:
            models[0].more = nn.Parameter(torch.zeros(1 << 22))
        return models, torch.optim.AdamW(models[0].parameters()), *rest

    def updates(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        step(models, SimpleNamespace(zero_grad=optimizer.step), schedule, pp)
        optimizer.zero_grad()

    # Half is left for activations: 42 MB do not take the 64 of the wide stage, whose states go to the host, on both.
    hardware = Hardware.of("h100").replaced(device={"memory": 84_000_000})
    found = simulate(wider, updates, world=2, mesh={"pp": 2, "shard": 1}, policy="auto", hardware=hardware)
    assert all(one.host.nbytes > 0 for one in found.stages), found


@on_virtual(world=(1, 2))
def test_a_pipeline_of_one_stage_is_simulated_as_any_model(world: int) -> None:
    build, _ = job("gpipe", 2, width=64, rows=8, dtype=torch.float32)

    def step(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        schedule.step(torch.ones(16, 64, device="virtual"), target=torch.ones(16, 1, device="virtual"), losses=[])

    found = simulate(build, step, world=world, mesh={"pp": 1, "shard": world}, policy={"units": {"min_numel": 0}})
    assert found.stages == () and found.bubble_s == 0 and found.flops > 0 and not found.races


@on_virtual()
def test_stages_that_wait_for_ever_are_named_with_what_they_wait_for() -> None:
    build, step = job("1f1b", 2, width=64, rows=8)

    def alone(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        if pp.get_local_rank() == 1:
            step(models, optimizer, schedule, pp)
        else:
            torch.ones(16, 64, device="virtual").sum()

    with pytest.raises(zhooks.SimulationError, match=r"none can continue: .*stage 1 waits for rank 0 to send a message"):
        simulate(build, alone, world=2, mesh={"pp": 2, "shard": 1}, policy=POLICY)
    assert not dist.is_initialized()
    assert simulate(build, step, world=2, mesh={"pp": 2, "shard": 1}, policy=POLICY).step_s > 0, "nothing is left behind"


@on_virtual()
def test_an_error_of_one_stage_is_the_error_of_all() -> None:
    build, step = job("1f1b", 2, width=64, rows=8)

    def fails(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        if pp.get_local_rank() == 1:
            raise KeyError("of the last stage")
        step(models, optimizer, schedule, pp)

    with pytest.raises(KeyError, match="of the last stage"):
        simulate(build, fails, world=2, mesh={"pp": 2, "shard": 1}, policy=POLICY)
    assert not dist.is_initialized()


@on_virtual()
def test_what_is_not_known_of_stages_is_refused_by_name() -> None:
    build, step = job("1f1b", 2, width=64, rows=8)
    mesh = {"pp": 2, "shard": 2}
    with pytest.raises(zhooks.SimulationError, match="expected no slow ranks on a mesh with pp"):
        simulate(build, step, world=4, mesh=mesh, policy=POLICY, slow=Slowdown([1], compute=2.0))
    with pytest.raises(zhooks.SimulationError, match="or a list of the models of this rank's stages"):
        simulate(cast(Any, lambda mesh: 1), step, world=4, mesh=mesh)

    def rings(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        dist.send(torch.empty(8, device="virtual"), 1)

    with pytest.raises(zhooks.SimulationError, match="found a send or a receive between two ranks"):
        simulate(build, rings, world=4, mesh=mesh, policy=POLICY)

    def differs(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        tensor = torch.empty(8, device="virtual")
        if pp.get_local_rank():
            dist.all_reduce(tensor, group=pp.get_group())
        else:
            dist.broadcast(tensor, 0, group=pp.get_group())

    with pytest.raises(zhooks.SimulationError, match="the same collective on every stage, found all_reduce and broadcast"):
        simulate(build, differs, world=4, mesh=mesh, policy=POLICY)

    def shapes(models: Any, optimizer: Any, schedule: Any, pp: DeviceMesh) -> None:
        other = pp.get_group()
        if pp.get_local_rank():
            dist.recv(torch.empty(8, device="virtual"), group=other, group_src=0)
        else:
            dist.send(torch.empty(9, device="virtual"), group=other, group_dst=1)

    with pytest.raises(zhooks.SimulationError, match="found 36 B on the device sent and 32 B on the device received"):
        simulate(build, shapes, world=4, mesh=mesh, policy=POLICY)


# --- beside real ranks --------------------------------------------------------------------------------------------------


def small(kind: str, device: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    return job(kind, 4, width=128, rows=64, dtype=torch.float32, device=device)


def measured(kind: str, checkpoint: str, folder: str) -> int:
    """The peak of two steps on this rank, as zprof's recorder counts storages."""
    build, step = small(kind, "cpu")
    before = peak(Path(folder) / "before.zprof", lambda: None)
    mesh = init_device_mesh("cpu", (place()[1], 1), mesh_dim_names=("pp", "shard"))
    models, optimizer, schedule, pp = build(mesh)
    policy = {"units": {"names": ["layers"]}, "activation": {"checkpoint": checkpoint}}
    attachments = [zhooks.attach(model, policy=policy, mesh=mesh) for model in models]
    for _ in range(2):
        step(models, optimizer, schedule, pp)
    found = peak(Path(folder) / "steps.zprof", lambda: [step(models, optimizer, schedule, pp) for _ in range(2)])
    for attachment in attachments:
        attachment.detach()
    return found - before


def predicted(kind: str, checkpoint: str) -> list[int]:
    policy = {"units": {"names": ["layers"]}, "activation": {"checkpoint": checkpoint}}
    mesh = {"pp": 2, "shard": 1}
    found = simulate(*small(kind, "virtual"), world=2, mesh=mesh, hardware=a_cpu(), policy=policy, steps=3)
    return [one.device.nbytes for one in found.stages]


@pytest.mark.parametrize(
    ("kind", "checkpoint"),
    [pytest.param("gpipe", "none", marks=pytest.mark.slow), ("1f1b", "unit"), ("interleaved", "none")],
)
def test_peaks_of_stages_are_what_two_ranks_of_a_cpu_hold(
    kind: str, checkpoint: str, ranks2: Pool, virtual_ranks: Pool, tmp_path: Path
) -> None:
    held = ranks2.run(f"{__name__}:measured", kind=kind, checkpoint=checkpoint, folder=str(tmp_path))
    (expected,) = virtual_ranks.run(f"{__name__}:predicted", kind=kind, checkpoint=checkpoint)
    for mine, theirs in zip(expected, held, strict=True):
        assert abs(mine - theirs) <= 4096, f"predicted {expected}, measured {held}"
