"""Collectives of the accelerator: waiting for one orders streams and does not hold the host; DDP and FSDP2 train on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.on_ranks import on_accelerators, place
from tests.support.schedules import SCHEDULES, native, schedule


def here(*values: float) -> Tensor:
    return torch.tensor(values, device="accel")


@on_accelerators(2)
def test_waiting_for_a_collective_does_not_hold_the_host() -> None:
    rank, _ = place()
    native().reset_host_waits()
    x = here(1.0, 2.0) * (rank + 1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    y = x + 1
    assert native().host_waits() == {}
    assert y.tolist() == [4.0, 7.0]


def collectives(rank: int, world: int) -> dict[str, Tensor]:
    """What each collective that zhooks and FSDP2 use leaves on this rank."""
    own = here(*(float(10 * rank + place) for place in range(4)))
    found: dict[str, Tensor] = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        found[f"all_reduce {op}"] = x = own.clone()
        dist.all_reduce(x, op)
        found[f"reduce_scatter {op}"] = torch.empty(2, device="accel")
        dist.reduce_scatter_tensor(found[f"reduce_scatter {op}"], own, op)
    found["all_gather"] = torch.empty(4 * world, device="accel")
    dist.all_gather_into_tensor(found["all_gather"], own)
    gathered = [torch.empty(4, device="accel") for _ in range(world)]
    dist.all_gather(gathered, own)
    found["all_gather of a list"] = torch.stack(gathered)
    found["reduce_scatter of a list"] = torch.empty(2, device="accel")
    dist.reduce_scatter(found["reduce_scatter of a list"], [own[:2], own[2:]])
    found["broadcast"] = x = own.clone()
    dist.broadcast(x, 1)
    found["reduce"] = x = own.clone()
    dist.reduce(x, 0)
    found["all_to_all"] = torch.empty(4, device="accel")
    dist.all_to_all_single(found["all_to_all"], own)
    parts = [torch.empty(length, device="accel") for length in ((1, 2) if rank == 0 else (3, 2))]
    sent = [own[:1], own[1:4]] if rank == 0 else [own[:2], own[2:]]
    dist.all_to_all(parts, sent)
    found["all_to_all of a list"] = torch.cat(parts)
    rooted = [torch.empty(4, device="accel") for _ in range(world)] if rank == 0 else None
    dist.gather(own, rooted)
    found["gather"] = torch.stack(rooted) if rooted is not None else own
    found["scatter"] = torch.empty(2, device="accel")
    dist.scatter(found["scatter"], [own[:2], own[2:]] if rank == 0 else None)
    found["received"] = torch.empty(4, device="accel")
    exchange = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, found["received"], 1 - rank)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    one, two = own.clone(), own * 2
    with dist.distributed_c10d._coalescing_manager(device=torch.device("accel", rank), async_ops=True) as together:
        dist.all_reduce(one)
        dist.all_reduce(two)
    together.wait()
    found["coalesced"] = torch.stack([one, two])
    return found


@on_accelerators(2)
def test_every_collective_gives_what_it_should_under_every_schedule() -> None:
    rank, world = place()
    a, b = torch.arange(4.0), torch.arange(10.0, 14.0)
    expected: dict[str, Tensor] = {}
    reductions = {dist.ReduceOp.SUM: a + b, dist.ReduceOp.AVG: (a + b) / 2, dist.ReduceOp.MAX: b, dist.ReduceOp.MIN: a}
    for op, value in reductions.items():
        expected[f"all_reduce {op}"] = value
        expected[f"reduce_scatter {op}"] = value.chunk(2)[rank]
    expected |= {
        "all_gather": torch.cat([a, b]), "all_gather of a list": torch.stack([a, b]),
        "reduce_scatter of a list": (a + b).chunk(2)[rank], "broadcast": b, "reduce": a + b if rank == 0 else b,
        "all_to_all": torch.cat([a.chunk(2)[rank], b.chunk(2)[rank]]),
        "all_to_all of a list": torch.tensor([0.0, 10.0, 11.0]) if rank == 0 else torch.tensor([1.0, 2.0, 3.0, 12.0, 13.0]),
        "gather": torch.stack([a, b]) if rank == 0 else b, "scatter": a.chunk(2)[rank],
        "received": b if rank == 0 else a, "coalesced": torch.stack([a + b, 2 * (a + b)]),
    }  # fmt: skip
    for mode, seed in SCHEDULES:
        with schedule(mode, seed + rank), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # names of 2.8 that later releases have renamed
            found = {name: value.tolist() for name, value in collectives(rank, world).items()}
        wrong = {name: (found[name], value.tolist()) for name, value in expected.items() if found[name] != value.tolist()}
        assert not wrong and found.keys() == expected.keys(), (mode, seed, wrong)


@on_accelerators(2)
def test_two_groups_may_be_used_in_another_order_on_each_rank() -> None:
    rank, _ = place()
    groups = [dist.new_group(backend="accel") for _ in range(2)]
    for mode, seed in SCHEDULES:
        with schedule(mode, seed):
            values = [here(1.0), here(2.0)]
            order = (0, 1) if rank == 0 else (1, 0)
            works = [dist.all_reduce(values[place], group=groups[place], async_op=True) for place in order]
            for work in works:
                assert work is not None
                work.wait()
            assert [value.item() for value in values] == [2.0, 4.0]


@on_accelerators(2)
def test_a_collective_runs_although_its_host_is_elsewhere() -> None:
    # Rank 0 goes to a barrier on the CPU and never waits for its device; rank 1 needs rank 0's share.
    rank, _ = place()
    cpu = dist.new_group(backend="gloo")
    x = here(float(rank + 1))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    if rank == 1:
        assert x.item() == 3.0
    dist.barrier(cpu)
    assert x.item() == 3.0


@on_accelerators(2)
def test_a_collective_that_was_begun_under_hooks_of_autograd_may_be_the_last_to_hold_memory_of_theirs() -> None:
    # Gloo's work keeps the hooks of the thread that begins it; here nobody else does when it ends.
    rank, _ = place()
    cpu = dist.new_group(backend="gloo")
    with schedule("eager", 0):
        x = here(float(rank + 1))
        if rank == 1:
            dist.barrier(cpu)
        pack = partial(lambda kept, tensor: tensor, here(1.0, 2.0))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            work = dist.all_reduce(x, async_op=True)
        del pack
        if rank == 0:
            dist.barrier(cpu)
        assert work is not None
        work.wait()
        assert x.item() == 3.0


@on_accelerators(2)
def test_an_input_that_is_overwritten_before_its_collective_is_over_is_an_error() -> None:
    rank, _ = place()
    cpu, group = dist.new_group(backend="gloo"), dist.new_group(backend="accel")
    with schedule("eager", 0):
        x = here(float(rank + 1))
        if rank == 1:
            dist.barrier(cpu)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        if rank == 0:
            x.fill_(7.0)
            dist.barrier(cpu)
        torch.accelerator.synchronize()
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="an input of allreduce was overwritten before that was over"):
                work.wait()
        else:
            work.wait()
            assert x.item() == 3.0


@pytest.mark.slow
@on_accelerators(2)
def test_a_collective_that_never_ends_is_an_error_after_its_limit_and_the_host_learns_late() -> None:
    rank, _ = place()
    group = dist.new_group(backend="accel", timeout=timedelta(seconds=10))
    here(1.0).item()
    if rank == 0:
        native().hang_collective_in(1)
    x = here(1.0)
    dist.all_reduce(x, group=group)  # returns: nobody has waited yet
    torch.accelerator.synchronize()
    with pytest.raises(dist.DistBackendError, match=r"(?i)timed out"):
        dist.all_reduce(here(1.0), group=group)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))  # noqa: E731
    return nn.Sequential(*[make() for _ in range(3)])


def batches() -> Tensor:
    return torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))


def plainly() -> list[Tensor]:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for batch in batches():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def trained(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    rank, world = place()
    model = wrap(blocks().to("accel"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for batch in batches():
        model(batch.chunk(world)[rank].to("accel")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)


def by_fsdp(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


@on_accelerators(2, peer=("ddp", "fsdp"))
def test_ddp_and_fsdp2_train_as_plain_under_every_schedule(peer: str) -> None:
    rank, _ = place()
    expected, first = plainly(), None
    for mode, seed in SCHEDULES:
        with schedule(mode, seed + rank):
            model = trained({"ddp": by_ddp, "fsdp": by_fsdp}[peer])
            found = [whole(p).cpu() for p in model.parameters()]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), (mode, seed)


def whole(p: Tensor) -> Tensor:
    found: Tensor = p.full_tensor() if hasattr(p, "full_tensor") else p
    return found.detach()
