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
from offload.store import Grants
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
    grants = Grants(pools)
    grant = grants.take(tier, "a", 1000, torch.float32)
    if tier is not Tier.DISK:
        assert grant.values.dtype is torch.float32 and grant.values.shape == (1000,)
    assert pools.budget.used(tier) == grants.used[tier] == grant.nbytes == 4000
    grants.free(grant)
    grants.free(grant)
    grants.free_later(grant)
    grants.sweep()
    assert pools.budget.used(tier) == grants.used[tier] == pools.host.used == pools.disk.used == 0


@TIERS
def test_what_is_refused_or_fails_is_not_charged(pools: Pools, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    grants = Grants(pools)
    with pytest.raises(BudgetError, match=f"{tier.value} tier cannot admit a "):
        grants.take(tier, "a", 10001)

    def fail(*_: object) -> None:
        raise TierError("no memory")

    for pool, verb in ((pools.device, "empty"), (pools.host, "take"), (pools.disk, "allocate")):
        monkeypatch.setattr(pool, verb, fail)
    with pytest.raises(TierError, match="no memory"):
        grants.take(tier, "a", 1000)
    assert pools.budget.used(tier) == grants.used[tier] == 0


def test_memory_that_somebody_has_a_view_of_is_given_back_when_the_view_is_gone(pools: Pools) -> None:
    grants = Grants(pools)
    grant = grants.take(Tier.HOST, "a", 1000)
    view = grant.values[10:20]
    assert grant.held
    grants.free(grant)
    grants.sweep()
    assert pools.host.used > 0 and pools.budget.used(Tier.HOST) == 1000
    del view
    grants.sweep()
    assert pools.host.used == pools.budget.used(Tier.HOST) == 0


def test_memory_that_work_uses_is_given_back_after_it_views_or_not_where_it_is_private(pools: Pools) -> None:
    grants, gate = Grants(pools), Gate()
    grant = grants.take(Tier.HOST, "a", 1000, private=True)
    view = grant.values[10:20]
    grants.free(grant, DONE, gate)
    grants.sweep()
    assert pools.host.used > 0
    gate.over = True
    grants.sweep()
    assert pools.host.used == 0 and view.numel() == 10


def test_a_tier_without_charge_admits_past_its_budget_and_keeps_nothing(pools: Pools) -> None:
    grants = Grants(pools, uncharged=Tier.DEVICE)
    grant = grants.take(Tier.DEVICE, "a", 20000)
    assert pools.budget.used(Tier.DEVICE) == 0 and grant.values.numel() == 20000
    grants.free_later(grant, Gate())
    grants.sweep()
    assert grants.used == dict.fromkeys(Tier, 0)


@TIERS
def test_nothing_takes_nothing(pools: Pools, tier: Tier) -> None:
    grants = Grants(pools)
    grant = grants.take(tier, "a", 0, torch.float32)
    assert grant.tier is tier and grant.values.numel() == 0 and pools.disk.used == 0
    grants.free(grant)
    assert pools.budget.used(tier) == 0
