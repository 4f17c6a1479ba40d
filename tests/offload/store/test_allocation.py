"""Memory of a tier: charged while it is taken, and given back when nothing moves there and nobody has a view of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offload.budget import Budget
from offload.device import Device, open_device
from offload.disk import DiskFile
from offload.errors import BudgetError, TierError
from offload.memory import HostPool
from offload.store import Allocation, Allocator
from offload.tier import Tier
from offload.work import DONE

TIERS = pytest.mark.parametrize("tier", list(Tier))


@dataclass
class Pools:
    device: Device
    host: HostPool
    disk: DiskFile
    budget: Budget


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    device = open_device(torch.device("cpu"), addresses_host=False)
    made = Pools(device, HostPool(device), DiskFile(tmp_path), Budget(dict.fromkeys(Tier, 10000)))
    yield made
    made.disk.close()
    made.host.close()
    device.close()


class Gate:
    """Work that is over when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over

    synchronize = wait

    def when_over(self, call: object) -> None:
        raise AssertionError("nobody asked to hear of it")


@TIERS
def test_memory_is_charged_from_take_to_free_and_freed_once(pools: Pools, tier: Tier) -> None:
    allocations = Allocator(pools)
    allocation = allocations.take(tier, "a", 1000, torch.float32)
    if tier is not Tier.DISK:
        assert allocation.values.dtype is torch.float32 and allocation.values.shape == (1000,)
    assert pools.budget.used(tier) == allocations.used[tier] == allocation.nbytes == 4000
    allocations.free(allocation)
    allocations.free(allocation)
    allocations.free_later(allocation)
    allocations.sweep()
    assert pools.budget.used(tier) == allocations.used[tier] == pools.host.used == pools.disk.used == 0


@TIERS
def test_what_is_refused_or_fails_is_not_charged(pools: Pools, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = Allocator(pools)
    with pytest.raises(BudgetError, match=f"{tier.value} tier cannot admit a "):
        allocations.take(tier, "a", 10001)

    def fail(*_: object) -> None:
        raise TierError("no memory")

    for pool, verb in ((pools.device, "empty"), (pools.host, "take"), (pools.disk, "allocate")):
        monkeypatch.setattr(pool, verb, fail)
    with pytest.raises(TierError, match="no memory"):
        allocations.take(tier, "a", 1000)
    assert pools.budget.used(tier) == allocations.used[tier] == 0


def test_memory_that_somebody_has_a_view_of_is_given_back_when_the_view_is_gone(pools: Pools) -> None:
    allocations = Allocator(pools)
    allocation = allocations.take(Tier.HOST, "a", 1000)
    view = allocation.values[10:20]
    assert allocation.held
    allocations.free(allocation)
    allocations.sweep()
    assert pools.host.used > 0 and pools.budget.used(Tier.HOST) == 1000
    del view
    allocations.sweep()
    assert pools.host.used == pools.budget.used(Tier.HOST) == 0


def test_memory_that_work_uses_is_given_back_after_it_views_or_not_where_it_is_private(pools: Pools) -> None:
    allocations, gate = Allocator(pools), Gate()
    allocation = allocations.take(Tier.HOST, "a", 1000, private=True)
    view = allocation.values[10:20]
    allocations.free(allocation, DONE, gate)
    allocations.sweep()
    assert pools.host.used > 0
    gate.over = True
    allocations.sweep()
    assert pools.host.used == 0 and view.numel() == 10


def test_a_tier_without_charge_admits_past_its_budget_and_keeps_nothing(pools: Pools) -> None:
    allocations = Allocator(pools, uncharged=Tier.DEVICE)
    allocation = allocations.take(Tier.DEVICE, "a", 20000)
    assert pools.budget.used(Tier.DEVICE) == 0 and allocation.values.numel() == 20000
    allocations.free_later(allocation, Gate())
    allocations.sweep()
    assert allocations.used == dict.fromkeys(Tier, 0)


class Ending(Gate):
    """Work that is over when somebody has waited for it."""

    def synchronize(self) -> None:
        self.over = True


def test_waiting_for_the_oldest_says_whether_there_was_something_to_wait_for(pools: Pools) -> None:
    allocations = Allocator(pools)
    assert not allocations.wait_for_oldest()
    allocations.free(allocations.take(Tier.HOST, "a", 1000), Ending())
    assert not allocations.sweep() and allocations.used[Tier.HOST] == 1000
    assert allocations.wait_for_oldest() and not allocations.wait_for_oldest()
    assert allocations.sweep() and allocations.used[Tier.HOST] == 0


@TIERS
def test_nothing_takes_nothing(pools: Pools, tier: Tier) -> None:
    allocations = Allocator(pools)
    allocation = allocations.take(tier, "a", 0, torch.float32)
    assert allocation.tier is tier and allocation.values.numel() == 0 and pools.disk.used == 0
    allocations.free(allocation)
    assert pools.budget.used(tier) == 0


class Collected(Gate):
    """Work that is asked whether it is over while the garbage collector finds what somebody has dropped."""

    def __init__(self, allocator: Allocator, dropped: Iterator[Allocation]) -> None:
        super().__init__()
        self._allocator, self._dropped = allocator, dropped

    def done(self) -> bool:
        for allocation in self._dropped:
            self._allocator.free_later(allocation)
        return self.over


def test_what_is_dropped_while_somebody_waits_or_sweeps_is_given_back_by_the_next_sweep(pools: Pools) -> None:
    allocator = Allocator(pools)
    taken = [allocator.take(Tier.HOST, "k", 1000) for _ in range(4)]
    ended, under_way = Collected(allocator, iter(taken[2:3])), Collected(allocator, iter(taken[3:]))
    ended.over = True
    allocator.free_later(taken[0], ended)
    assert not allocator.wait_for_oldest()
    assert allocator.sweep() and allocator.used[Tier.HOST] == 2000
    allocator.free_later(taken[1], under_way)
    under_way.over = True
    # One is given back and one is added: there was something all the same.
    assert allocator.sweep() and allocator.used[Tier.HOST] == 1000
    assert allocator.sweep() and not allocator.sweep()
