"""What the store holds on the way: how much waits to be written back, what is reserved and unused, when memory is returned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offload.errors import TierError
from offload.events import Bus, Recorder
from offload.store import Block, BlockRange, Mode, Store
from offload.store.block import owner_of
from offload.tier import Tier
from offload.work import DONE
from tests.support.inside import disk_of
from tests.support.stores import Gated, filled, open_store

Make = Callable[..., Store]


@pytest.fixture
def io() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def make(tmp_path: Path, io: Gated) -> Iterator[Make]:
    stores: list[Store] = []

    def build(addresses: bool | None = None, *, staging: int = 1 << 20) -> Store:
        stores.append(open_store(tmp_path, addresses, io=io, staging=staging))
        return stores[-1]

    yield build
    io.gate.set()
    for store in stores:
        store.shut()


def has_lease(block: Block) -> bool:
    return block.lease is not None


def change_and_close(store: Store, block: Block, at: Tier) -> None:
    store.fetch(block, at).wait().add_(1)
    store.close(block)


@pytest.mark.parametrize("limit", [8000, 9100, 11_999])
def test_a_fetch_waits_for_write_backs_only_where_the_staging_limit_would_be_passed(make: Make, io: Gated, limit: int) -> None:
    store = make(staging=limit)
    first, second, third = (filled(store, key, 1000, Tier.DISK) for key in "abc")
    io.gate.clear()
    change_and_close(store, first, Tier.HOST)
    store.fetch(second, Tier.HOST).wait()
    assert store.staged == 8000 and has_lease(first)
    threading.Timer(0.05, io.gate.set).start()
    store.fetch(third, Tier.HOST).wait()
    assert io.gate.is_set() and not has_lease(first) and store.staged == 8000
    store.close(second)
    store.close(third)
    assert torch.equal(first.tensor(), torch.full((1000,), 2.0))


def test_a_fetch_to_the_device_waits_for_what_is_written_back_from_there(make: Make, io: Gated) -> None:
    store = make(False, staging=8000)
    first = filled(store, "first", 1000, Tier.DISK)
    small, large = filled(store, "small", 1000, Tier.HOST), filled(store, "large", 1001, Tier.HOST)
    io.gate.clear()
    change_and_close(store, first, Tier.DEVICE)
    store.fetch(small, Tier.DEVICE).wait()
    assert store.staged_on_device == 8000 and has_lease(first)
    threading.Timer(0.05, io.gate.set).start()
    store.fetch(large, Tier.DEVICE).wait()
    assert io.gate.is_set() and not has_lease(first) and store.staged_on_device == 8004
    store.close(small)
    store.close(large)


def test_what_is_used_unused_and_rounded_is_what_is_reserved(make: Make) -> None:
    store = make()
    assert store.unused == store.rounded == {Tier.HOST: 0, Tier.DISK: 0}
    filled(store, "host", 1000, Tier.HOST)
    filled(store, "disk", 1000, Tier.DISK)
    reserved = {Tier.HOST: store.host.reserved, Tier.DISK: disk_of(store).reserved}
    for tier, nbytes in reserved.items():
        assert nbytes >= 4000
        assert store.budget.used(tier) + store.rounded[tier] + store.unused[tier] == nbytes


def test_other_limits_hold_before_and_after_the_file_is_opened(make: Make) -> None:
    store = make()
    store.change_limits({Tier.HOST: 50_000, Tier.DISK: 60_000})
    assert store.host.limit == store.budget.limit(Tier.HOST) == 50_000
    filled(store, "b", 1000, Tier.DISK)
    store.change_limits({Tier.DISK: 70_000})
    assert disk_of(store).limit == store.budget.limit(Tier.DISK) == 70_000 and store.host.limit is None


def test_values_are_read_into_other_memory_in_its_dtype(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK, 2.0)
    same, other = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
    store.read_into(block, same).synchronize()
    assert not has_lease(block) and torch.equal(same, torch.full((1000,), 2.0))
    store.read_into(block, other).synchronize()
    assert torch.equal(other, torch.full((1000,), 2.0, dtype=torch.float64))


def test_the_heap_is_returned_whenever_so_much_has_passed_and_not_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    returned: list[bool] = []
    monkeypatch.setattr(store.host, "release_heap", lambda: returned.append(True))
    store.passed(100, limit=100)
    assert not returned, "without a disk nothing passes through"
    filled(store, "b", 300_000, Tier.DISK)
    assert not returned, "little has passed"
    store.passed(1 << 30)
    store.passed(99, limit=100)
    assert len(returned) == 1
    store.passed(1, limit=100)
    assert len(returned) == 2


def test_before_the_end_what_was_opened_is_written_back_and_later_changes_stay_in_memory(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    block.tensor().add_(1)
    store.unwind()
    assert not has_lease(block) and store.staged == 0
    block.tensor().add_(1)
    store.evict()
    assert has_lease(block) and torch.equal(block.tensor(), torch.full((1000,), 3.0))


def test_the_owner_of_a_range_is_its_block_and_of_a_tensor_its_storage(make: Make) -> None:
    block, tensor = filled(make(), "b", 1000, Tier.HOST), torch.zeros(10)
    assert owner_of(BlockRange(block, 10, 5)) == owner_of(block) == (id(block), 4000)
    assert owner_of(tensor[2:5]) == owner_of(tensor) and owner_of(tensor)[1] == 40


class Held:
    """Work that is over when somebody has waited for it; ``fails`` is what it met with."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.over, self.fails = False, fails

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        if self.fails is not None:
            raise self.fails

    wait = synchronize

    def when_over(self, call: object) -> None:
        raise AssertionError("nobody asked to hear of it")


@pytest.mark.parametrize(("listens", "there", "names"), [(True, False, ["b", "b"]), (True, True, []), (False, False, [])])
def test_observers_hear_of_a_wait_for_values_that_are_not_there(
    make: Make, listens: bool, there: bool, names: list[str]
) -> None:
    store, bus, recorder = make(), Bus(), Recorder()
    if listens:
        bus.attach(recorder)
    block = filled(store, "b", 1000, Tier.DISK)
    lease = store.fetch(block, Tier.HOST)
    lease.arrive(DONE if there else Held(), bus)
    lease.wait()
    assert [event.key for event in recorder.events if event.what == "wait fetch"] == names
    assert [event.kind for event in recorder.events if event.what == "wait fetch"] == ["begin", "end"][: len(names)]


def test_what_another_thread_failed_to_change_is_not_written_back(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    lease = store.fetch(block, Tier.HOST)
    lease.wait().add_(1)
    lease.lend(Held(TierError("the other thread failed")))
    store.close(block)
    store.flush()
    assert torch.equal(block.tensor(), torch.ones(1000))


def test_a_write_back_that_cannot_begin_leaves_the_values_open(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    with monkeypatch.context() as patch:
        patch.setattr(disk_of(store), "write", _refuse)
        store.fetch(block, Tier.HOST, Mode.UPDATE).wait().add_(1)
        with pytest.raises(TierError, match="no writes today"):
            store.close(block)
    store.flush()
    assert not has_lease(block) and torch.equal(block.tensor(), torch.full((1000,), 2.0))


def _refuse(*_: object, **__: object) -> None:
    raise TierError("no writes today")
