"""``attachment.reshard(mesh)``: a living model on another mesh, without disk.

pytest runs it. What follows a move is compared with what follows a load on that mesh of what was saved before it, bit for bit.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zhooks
from offload.store import Store
from offload.tier import Tier
from tests.support.inside import comm_of, store_of
from tests.support.moving import arranged
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.ranks import Pool
from tests.support.resharding import Resharded, differences
from tests.support.slow import slow

Ranks = Callable[[int], Pool]
MOVING = "tests.support.moving"
SLOW = pytest.mark.slow


def case(world: int, before: dict[str, Any], after: dict[str, Any], *marks: Any, **common: Any) -> Any:
    """Named by the pool that it asks for (tests/selection.py)."""
    return pytest.param(world, before, after, common, id=f"world{world}-{before} to {after} {common}", marks=marks)


MOVES = [
    case(2, {"stage": 3}, {"stage": 3, "replicate": 2}),
    case(2, {"stage": 1, "replicate": 2}, {"stage": 3, "tier": "host"}),
    case(2, {"stage": 0, "tier": "disk"}, {"stage": 3, "tier": "disk", "replicate": 2}, SLOW),
    case(2, {"stage": 3, "tier": "host"}, {"stage": 2, "replicate": 2}, SLOW, units=64),
    case(2, {"stage": 3}, {"stage": 0, "replicate": 2}, SLOW, kind="muon"),
    case(2, {"stage": 3, "replicate": 2}, {"stage": 1}, SLOW, kind="lbfgs"),
    case(2, {"stage": 3}, {"stage": 3, "replicate": 2}, SLOW, dtype="bfloat16", more={"optimizer": {"rounding": "stochastic"}}),
    case(2, {"stage": 3}, {"stage": 1, "replicate": 2}, SLOW, half=True),
    case(4, {"stage": 3}, {"stage": 3, "replicate": 2}, SLOW),
    case(4, {"stage": 2, "replicate": 2}, {"stage": 3}, SLOW, kind="muon"),
    case(4, {"stage": 3, "replicate": 2, "tier": "disk"}, {"stage": 3, "replicate": 4, "tier": "disk"}, SLOW, units=64),
    case(4, {"stage": 0, "replicate": 4}, {"stage": 3, "replicate": 2, "tier": "host"}, SLOW),
    case(4, {"stage": 3, "replicate": 4, "tier": "host"}, {"stage": 1, "replicate": 2}, SLOW, kind="muon"),
    case(4, {"stage": 1}, {"stage": 2, "replicate": 2}, SLOW, kind="sgd", dtype="bfloat16"),
    case(4, {"stage": 3, "tier": "host"}, {"stage": 3, "replicate": 2, "tier": "host"}, SLOW, kind="muon", units=64),
    case(4, {"stage": 3}, {"stage": 3, "replicate": 2}, SLOW, kind="lbfgs"),
]


@pytest.mark.parametrize(("world", "before", "after", "common"), MOVES)
def test_what_follows_a_move_is_what_follows_a_load_on_that_mesh(
    ranks: Ranks, world: int, before: dict[str, Any], after: dict[str, Any], common: dict[str, Any]
) -> None:
    for moved, loaded in ranks(world).run(f"{MOVING}:moved_beside_loaded", before=before, after=after, **common):
        assert moved == loaded


def test_two_ranks_that_move_there_and_back_train_as_if_they_had_stayed(ranks: Ranks, tmp_path: Path) -> None:
    # The sum of two has one order.
    moved, stayed = ranks(2).run(f"{MOVING}:there_and_back", path=tmp_path, stage=3)[0]
    assert moved == stayed


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + place()[0]))


UNITS = {"units": {"min_numel": 0}}


@on_ranks(2, stage=(0, 3))
def test_gradients_that_are_held_move_along(stage: int) -> None:
    found = []
    for moves in (True, False):
        model = net()
        attachment = zhooks.attach(model, policy=UNITS | {"stage": stage})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            with attachment.no_sync():
                model(batch(step)).square().mean().backward()
            if moves and step:
                attachment.reshard(arranged(2 // step))
            model(batch(9 + step)).square().mean().backward()
            grads = [param.grad.full_tensor() for param in model.parameters() if isinstance(param.grad, zhooks.ShardedTensor)]
            assert len(grads) == 6
            optimizer.step()
            optimizer.zero_grad()
        attachment.detach()
        found.append([*grads, *(param.detach() for param in model.parameters())])
    for moved, stayed in zip(*found, strict=True):
        torch.testing.assert_close(moved, stayed, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_parameters_groups_schedules_hooks_and_observers_are_the_same_after_a_move() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen = 0

        def on_event(self, event: object) -> None:
            self.seen += 1

    model, watching = net(), Watching()
    attachment = zhooks.attach(model, policy=UNITS | {"stage": 3})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    reduced: list[str] = []
    attachment.register_reduce_hook(after=lambda unit, _: reduced.append(unit))
    hooked: list[float] = []
    model[0].weight.register_hook(lambda grad: hooked.append(1.0))
    params, groups, lists = list(model.parameters()), optimizer.param_groups, [one["params"] for one in optimizer.param_groups]

    def step() -> None:
        model(batch(0)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()

    with attachment.observe(watching):
        step()
        attachment.reshard(arranged(2))
        assert "replicate x 2" in attachment.describe() and "shard x 1" in attachment.describe()
        seen = watching.seen
        reduced.clear(), hooked.clear()
        step()
        assert watching.seen > seen and len(reduced) == 3 and len(hooked) == 1
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert optimizer.param_groups is groups and [one["params"] for one in optimizer.param_groups] == lists
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    attachment.unshard(model[0])
    attachment.reshard(model[0])
    assert isinstance(attachment.detach()[0].weight, nn.Parameter)  # type: ignore[index]


class Odd(nn.Module):
    """Parameters above any buffer, frozen, empty, transposed, left out; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big, self.norm, self.frozen = nn.Linear(40, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.empty, self.turned = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.randn(3, 5).t())
        self.top, self.left_out = nn.Linear(64, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.left_out(self.top(self.frozen(self.norm(self.big(x)).relu()))) @ self.turned.t()
        return out


@on_ranks(2, stage=(1, 3))
def test_odd_parameters_sums_that_are_held_and_freezes_go_on_bit_for_bit_over_many_moves(stage: int) -> None:
    found = []
    for moves in (True, False):
        model = Odd()
        policy = UNITS | {"stage": stage, "units": {"min_numel": 0, "ignore": ["left_out"]}, "comm": {"buffer": 4096}}
        attachment = zhooks.attach(model, policy=policy)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizers = [torch.optim.AdamW(params[:2], lr=0.01), torch.optim.SGD(params[2:], lr=0.01, momentum=0.9)]
        losses: list[Any] = []

        def backward(step: int, model: nn.Module = model, losses: list[float] = losses) -> None:
            x = torch.randn(6, 40, generator=torch.Generator().manual_seed(step * 10 + place()[0]))
            loss = model(x).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))

        def step(number: int, optimizers: list[torch.optim.Optimizer] = optimizers) -> None:
            backward(number)
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()

        def move(replicate: int, attachment: zhooks.Attachment = attachment, moves: bool = moves) -> None:
            if moves:
                attachment.reshard(arranged(replicate))

        for number, replicate in enumerate((2, 1)):
            move(replicate)
            step(number)
        with attachment.accumulate():
            backward(7)
        backward(8)
        move(2)
        step(2)
        model.frozen.requires_grad_(True)
        step(3)
        move(1)
        step(4)
        attachment.detach()
        found.append((losses, [param.detach().clone() for param in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


# ---- what is refused


@contextmanager
def unchanged(run: Resharded, kind: type[Exception], match: str) -> Iterator[None]:
    """The block raises on every rank, and nothing was moved; the run trains on."""
    params = [param.to_local().clone() for param in run.model.parameters()]  # type: ignore[attr-defined]
    mapped = comm_of(run.attachment).nbytes
    with pytest.raises(kind, match=match):
        yield
    dist.barrier()
    now = [param.to_local() for param in run.model.parameters()]  # type: ignore[attr-defined]
    assert all(torch.equal(one, other) for one, other in zip(params, now, strict=True))
    assert comm_of(run.attachment).nbytes == mapped
    run.train(50, 1)


@on_ranks(2)
def test_a_mesh_that_cannot_be_moved_to_is_refused_on_every_rank_before_anything_is_changed() -> None:
    with folder() as path:
        run = Resharded(path, stage=3, tier="host")
        run.train(0, 1)
        rank, reshard = place()[0], run.attachment.reshard
        one, two = arranged(1), arranged(2)
        with unchanged(run, zhooks.AttachError, "the same on every rank, found axes = replicate 1 x shard 2 on rank 0"):
            reshard(two if rank else one)
        with unchanged(run, zhooks.AttachError, "the same on every rank, found axes = as they are on rank 0"):
            run.attachment.apply({"stage": 3}, mesh=two) if rank else run.attachment.apply({"stage": 3})
        with unchanged(run, zhooks.AttachError, r"mesh needs every rank of the process group .0 to 1., found ranks \[0\]"):
            reshard(DeviceMesh("cpu", [0], mesh_dim_names=("shard",)))
        with unchanged(run, zhooks.AttachError, "mesh must be a DeviceMesh, found"):
            run.attachment.apply(mesh="shard")  # type: ignore[arg-type]
        with unchanged(run, zhooks.AttachError, r"needs ranks \[\d\] on its tp axis, .*found \[0, 1\]. To change tp, save"):
            reshard(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
        with unchanged(run, zhooks.AttachError, r"needs ranks \[\d\] on its pp or ep axis"):
            reshard(init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")))
        with unchanged(run, zhooks.AttachError, r"needs ranks \[0, 1\] on its replicate and shard axes.*found \[1, 0\]"):
            reshard(DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("replicate", "shard")))
        with unchanged(run, zhooks.PolicyError, "pass the new policy"):
            run.attachment.apply()


@on_ranks(2)
def test_a_mesh_of_which_a_budget_does_not_hold_a_ranks_part_is_refused_before_anything_is_changed() -> None:
    with folder() as path:
        run = Resharded(path, stage=3, tier="host")
        run.train(0, 1)
        policy = run.attachment.policy.values()
        nbytes = sum(param.numel() * param.element_size() for param in run.model.parameters())
        # Masters and gradients alone are more; with states that were made already; what has no tier.
        for budget in ({"host": nbytes}, {"host": nbytes * 5 // 2}, {"device": 1000}):
            with unchanged(run, zhooks.BudgetError, next(iter(budget))):
                run.attachment.apply(policy | {"budget": budget}, mesh=arranged(2))


def placed_by(run: Resharded) -> tuple[int, ...]:
    """Bytes that the run has on each tier, by its store."""
    store = store_of(run.attachment)
    # From Python 3.12 on, an error that passed a context manager is in a cycle with its frames, which may hold blocks.
    gc.collect()
    store.flush()
    return tuple(store.budget.used(tier) for tier in (Tier.HOST, Tier.DISK))


@contextmanager
def no_space(nth: int) -> Iterator[None]:
    """Inside, the last rank's store takes the block of this number no more."""
    count, real = 0, Store.put

    def put(self: Store, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if place()[0] == place()[1] - 1 and count == nth:
            raise zhooks.TierError("no space")
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "put", put)
        yield


@on_ranks(2, nth=(4, *slow(9)))
def test_a_tier_that_fails_half_way_leaves_mesh_policy_and_placement_as_they_were_on_every_rank(nth: int) -> None:
    with folder() as path:
        losses: list[Any] = []
        for fails in (True, False):
            run = Resharded(path, stage=3, tier="host")
            found = run.train(0, 2)
            if fails:
                before, held = run.attachment.policy, placed_by(run)
                other = before.values() | {"optimizer": {"tier": "disk"}, "precision": {"output": "bf16"}}
                with unchanged(run, zhooks.TierError, "no space"), no_space(nth):
                    run.attachment.apply(other, mesh=arranged(2))
                assert run.attachment.policy == before and placed_by(run) == held
                assert "shard x 2" in run.attachment.describe()
            else:
                run.train(50, 1)
            found += run.train(2, 1)
            # There is room now.
            run.attachment.reshard(arranged(2))
            losses.append(found + run.train(3, 1))
            run.attachment.detach()
        assert losses[0] == losses[1]


@on_ranks(2)
def test_what_a_smaller_budget_refuses_on_the_way_has_memory_again_where_it_was() -> None:
    with folder() as path:
        losses: list[Any] = []
        for fails in (True, False):
            run = Resharded(path, stage=3, tier="host")
            found = run.train(0, 2)
            before, held = run.attachment.policy, placed_by(run)
            # It holds what shall be there, and not what is there while units move.
            narrow = before.values() | {"optimizer": {"tier": "disk"}, "budget": {"host": held[0] * 2 // 3}}
            if fails:
                with unchanged(run, zhooks.BudgetError, "host tier cannot admit"):
                    run.attachment.apply(narrow)
                assert run.attachment.policy == before and placed_by(run) == held
            else:
                run.train(50, 1)
            losses.append(found + run.train(2, 2))
            run.attachment.detach()
        assert losses[0] == losses[1]


@pytest.mark.slow
def test_four_ranks_that_move_beside_tp_train_as_if_they_had_stayed(ranks: Ranks, tmp_path: Path) -> None:
    moved, stayed = ranks(4).run(f"{MOVING}:there_and_back", path=tmp_path, stage=3, tp=2, tier="host")[0]
    assert moved == stayed


@on_ranks(2)
def test_a_model_that_is_divided_over_tp_moves_on_its_data_ranks_alone() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"2": ColwiseParallel()})
    attachment = zhooks.attach(model, policy=UNITS, mesh=mesh)
    attachment.reshard(init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("replicate", "dp", "tp")))
    with pytest.raises(zhooks.AttachError, match=r"needs ranks \[0, 1\] on its tp axis, .* save, build the model again"):
        attachment.reshard(arranged(2))
    attachment.detach()


# ---- what is beside it


@on_ranks(2)
def test_a_save_beside_training_is_of_its_own_moment_though_the_model_moves_meanwhile() -> None:
    with folder() as path:
        run = Resharded(path, stage=3, tier="disk")
        run.train(0, 2)
        saving = run.attachment.save(path / "run", run.optimizer, wait=False)
        whole = run.full()
        run.attachment.reshard(arranged(2))
        run.train(2, 1)
        saving.wait()
        run.attachment.load(path / "run", run.optimizer)
        assert not differences(run.full(), whole)
        run.attachment.detach()


@on_ranks(4, transport=("stock", *slow("shm", "p2p")))
def test_moving_to_and_fro_leaves_no_group_and_no_memory_behind(transport: str) -> None:
    model = net()
    attachment = zhooks.attach(model, policy=UNITS | {"comm": {"transport": transport}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def held() -> tuple[int, int, int]:
        dist.barrier()
        maps = Path("/proc/self/maps").read_text().count("memfd:zhooks")
        return comm_of(attachment).nbytes, maps, len(dist.distributed_c10d._world.pg_map)

    seen = []
    for replicate in (2, 1, 4, 1, 2, 1):
        mesh = arranged(replicate)
        attachment.reshard(mesh)
        model(batch(0)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
        seen.append(held())
    assert seen[1][:2] == seen[3][:2] == seen[5][:2] and seen[4][:2] == seen[0][:2]
    attachment.detach()


@on_ranks(2)
def test_memory_that_ranks_share_serves_another_axis_of_the_same_ranks_by_that_axis_name() -> None:
    model = net()
    attachment = zhooks.attach(model, policy=UNITS | {"comm": {"transport": "shm"}})
    comm = comm_of(attachment)
    nbytes = comm.nbytes
    assert comm.shard.axis.name == "shard" and nbytes
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was made anew"))
        for replicate in (2, 1, 2):
            attachment.reshard(arranged(replicate))
            over, name = (comm.replicate, "replicate") if replicate == 2 else (comm.shard, "shard")
            assert over is comm.world and over.axis.name == name and comm.nbytes == nbytes
            model(batch(0)).sum().backward()
    attachment.detach()
