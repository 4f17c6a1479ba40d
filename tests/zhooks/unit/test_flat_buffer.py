"""A rank's range of a flat buffer, wherever it is kept: what is reserved, what a gather sends, and what a write changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import open_device
from offload.disk import DiskFile
from offload.errors import ShardedOpError
from offload.events import Bus
from offload.memory import HostPool
from offload.policy import Policy, cost
from offload.store import BlockRange, Store
from offload.tier import Tier, Tiers
from zhooks.comm import DONE, Call, Work
from zhooks.layout import Axis, FlatPlan, Kind, Layout, Table, flat_layout, kind_of
from zhooks.unit import Flat, Links, Pool

CPU = torch.device("cpu")
PLACES = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
DTYPES = pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Twins:
    """Two ranks that hold the same range: whatever one of them sends, the other has sent too."""

    name, nbytes, closed = "twins", 0, False

    def __init__(self, rank: int = 1) -> None:
        self.axis = Axis("shard", (0, 1), rank)
        self.sent: list[Call] = []

    def all_gather(self, call: Call, shard: Tensor, full: Tensor, layout: Layout) -> Work:
        self.sent.append(call)
        for rank in range(2):
            local = 0
            for start, stop in layout.ranges(rank):
                full[start:stop].copy_(shard[local : local + stop - start].clone())
                local += stop - start
        return DONE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    device = open_device(CPU)
    made = Store(device, HostPool(device), lambda: DiskFile(tmp_path), Budget({}), staging_nbytes=1 << 20)
    yield made
    made.shut()


def flat_of(
    store: Store | None,
    *,
    parameter: Tier = Tier.DEVICE,
    optimizer: Tier = Tier.DEVICE,
    compute: torch.dtype = torch.float32,
    replicated: bool = False,
    resident: bool = False,
    bound: int = 1 << 20,
    numels: tuple[int, ...] = (30, 7),
) -> tuple[Flat, Twins]:
    tiers, transport = Tiers(parameter, Tier.DEVICE, optimizer), Twins()
    kind = Kind(torch.float32, compute, torch.float32, CPU, True, tiers)
    layout = flat_layout(numels, world=2, itemsize=2)
    bus = Bus()
    names, long = tuple(map(str, range(len(numels)))), len(numels) == 1 and layout.padded * kind.wide > bound
    plan = FlatPlan("u", 0, kind, names, layout, replicated, resident, long)
    links = Links(bus=bus, store=store)
    return Flat(plan, transport=transport, pool=Pool(bound, bus), links=links), transport  # type: ignore[arg-type]


def values_of(flat: Flat) -> Tensor:
    """Full values that both ranks' ranges agree with, as ``Twins`` wants them."""
    half = torch.arange(flat.layout.padded // 2, dtype=torch.float32)
    return torch.arange(flat.layout.padded, dtype=torch.float32) if not flat.sharded else half.repeat(2)


def gathered(flat: Flat) -> Tensor:
    flat.prepare()
    flat.begin_gather()
    flat.finish_gather()
    assert flat.full is not None
    return flat.full


@PLACES
@DTYPES
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("bound", [1 << 20, 64], ids=["short", "long"])
def test_a_gather_has_the_values_wherever_they_are_kept(
    store: Store, tier: Tier, compute: torch.dtype, replicated: bool, bound: int
) -> None:
    flat, transport = flat_of(
        store, parameter=tier, optimizer=tier, compute=compute, replicated=replicated, bound=bound, numels=(40,)
    )
    values = values_of(flat)
    flat.storage.reserve()
    flat.adopt(values.clone())
    assert torch.equal(gathered(flat), values.to(compute))
    assert len(transport.sent) == (0 if replicated else 1)
    assert torch.equal(flat.shard, values[: flat.shard_numel])
    flat.release()
    flat.shard.mul_(2)
    flat.written()
    assert not flat.current()
    assert torch.equal(gathered(flat), (2 * values).to(compute))


@pytest.mark.parametrize("optimizer", [Tier.DEVICE, Tier.HOST], ids=lambda tier: tier.value)
@DTYPES
def test_a_flat_that_stays_gathered_reserves_no_more_than_its_footprint_says(
    store: Store, optimizer: Tier, compute: torch.dtype
) -> None:
    flat, _ = flat_of(store, optimizer=optimizer, compute=compute, resident=True)
    flat.storage.reserve()
    flat.adopt(values_of(flat))
    gathered(flat)
    flat.release()
    assert flat.full is not None and not flat.releasable
    cells = {cell.what: cell for cell in flat.plan.footprint()}
    parameter, masters = flat.held_nbytes()
    assert parameter == cells["parameter"].nbytes == flat.plan.full_nbytes
    assert flat.storage.in_full is (compute is torch.float32)
    if compute is not torch.float32:
        assert masters == cells["optimizer"].nbytes == flat.shard_numel * 4
    on_device = optimizer is Tier.DEVICE and compute is not torch.float32
    assert flat.plan.shard_nbytes == (flat.shard_numel * 4 if on_device else 0)


@PLACES
@DTYPES
def test_what_is_kept_between_uses_is_what_the_footprint_says(store: Store, tier: Tier, compute: torch.dtype) -> None:
    flat, _ = flat_of(store, parameter=tier, optimizer=tier, compute=compute)
    flat.storage.reserve()
    parameter, _, masters = flat.plan.footprint()
    assert flat.held_nbytes()[0] == parameter.nbytes
    assert masters.nbytes in (0, flat.held_nbytes()[1])
    assert parameter.tier is tier


def test_parts_of_a_range_in_blocks_are_parts_of_the_masters(store: Store) -> None:
    flat, _ = flat_of(store, parameter=Tier.HOST, optimizer=Tier.HOST, compute=torch.bfloat16)
    flat.storage.reserve()
    flat.adopt(values_of(flat))
    part = flat.part(0)
    assert isinstance(part, BlockRange)
    assert part.block is flat.storage.at and part.block.dtype is torch.float32
    assert flat.storage.sends.dtype is torch.bfloat16


def test_a_range_that_was_laid_out_anew_refuses_a_gather(store: Store) -> None:
    flat, _ = flat_of(store, parameter=Tier.HOST, optimizer=Tier.HOST)
    flat.storage.reserve()
    flat.adopt(values_of(flat))
    flat.storage.drop()
    with pytest.raises(ShardedOpError, match="Run the forward again"):
        flat.begin_gather()


def test_what_is_lent_is_waited_for_before_it_is_read(store: Store) -> None:
    flat, _ = flat_of(store, parameter=Tier.HOST, optimizer=Tier.HOST)
    storage, over = flat.storage, []
    storage.reserve()
    flat.adopt(values_of(flat))

    def reclaim() -> None:
        over.append(storage.lent)
        storage.take_back()

    before = flat.version()
    storage.lend(reclaim)
    flat.written()
    assert flat.version() == before
    flat.shard.add_(0)
    assert over == [True] and not storage.lent


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("param", [None, "bf16"])
@pytest.mark.parametrize("off", [(), ("parameter",), ("gradient",), ("optimizer",), ("gradient", "optimizer")])
def test_a_policy_costs_what_a_flat_of_it_keeps(stage: int, param: str | None, off: tuple[str, ...]) -> None:
    if "parameter" in off and stage in (1, 2):
        pytest.skip("parameters stay on the device at these stages")
    policy = Policy.of({"stage": stage, "precision": {"param": param}, **{cell: {"tier": "host"} for cell in off}})
    table, numel, ranks = Table.of(policy.table()), 64, 4
    kind = kind_of(("weight",), torch.nn.Parameter(torch.zeros(numel)), policy, CPU)
    shard = numel // ranks if table.shards_optimizer else numel
    kept = kind.footprint(numel, shard, resident=table.keeps_gathered(kind.tiers))
    moments = {"optimizer": 8 * shard}
    spent = cost(policy, numel, ranks).cells
    assert [(cell.what, cell.tier, cell.nbytes - moments.get(cell.what, 0)) for cell in spent] == [
        (cell.what, cell.tier, cell.nbytes) for cell in kept
    ]
