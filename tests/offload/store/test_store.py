"""The tiered store on real memory and a real file: values, versions, leases, budgets, and the memory that comes back."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.disk import Kept, KeptRange, ReadAhead, SystemIo
from offload.errors import BudgetError
from offload.store import Block, BlockRange, Lease, Mode, Store
from offload.store.store import MOVES
from offload.tier import Tier
from tests.support.inside import disk_of
from tests.support.stores import Gated, filled, open_store
from tests.support.waiting import soon

#: On a CPU host memory is the device's; False makes the store copy as it must for a GPU.
SEAMS = pytest.mark.parametrize("addresses", [None, False], ids=["direct", "copied"])
TIERS = pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.value)
KIB = 1 << 10

Make = Callable[..., Store]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    stores: list[Store] = []

    def build(addresses: bool | None = None, *, io: SystemIo | None = None, staging: int = 1 << 20, **limits: int) -> Store:
        stores.append(open_store(tmp_path, addresses, io=io, staging=staging, **limits))
        return stores[-1]

    yield build
    for store in stores:
        store.shut()


def values(block: Block) -> Tensor:
    return block.tensor().clone()


def used(store: Store) -> dict[str, int]:
    return {tier.value: store.budget.used(tier) for tier in Tier}


# --- the model: every operation in any order -----------------------------------------------------------------------------


class Played:
    """A store beside plain tensors that say what it must hold; every operation checks the values and the versions."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.blocks: dict[str, Block] = {}
        self.plain: dict[str, Tensor] = {}
        self.held: list[tuple[str, Lease]] = []
        self.kept: list[tuple[Kept, Tensor]] = []
        self.moves = [self.put, self.write, self.read, self.overwrite, self.add, self.into, self.move, self.drop]
        self.moves += [self.fetch, self.fetch, self.close, self.flush, self.finish, self.keep, self.read_kept]

    def play(self, count: int) -> None:
        for number in range(count):
            turn = self.random.choice(self.moves)
            if turn == self.put:
                self.put(f"b{number}")
            elif self.blocks:
                key = self.random.choice(list(self.blocks))
                before = self.blocks[key].version
                changed = turn(key)
                if key in self.blocks:
                    after = self.blocks[key].version
                    assert after > before if changed else after == before, (number, turn.__name__, before, after)

    def end(self) -> None:
        while self.held:
            self.close("")
        while self.kept:
            self.read_kept("")
        self.store.flush()
        for key, block in self.blocks.items():
            assert torch.equal(block.tensor(), self.plain[key])

    def is_held(self, key: str) -> bool:
        return any(other == key for other, _ in self.held)

    def fresh(self, key: str) -> Tensor:
        return torch.rand(self.plain[key].numel(), generator=torch.Generator().manual_seed(self.random.randrange(1 << 30)))

    def put(self, key: str) -> bool:
        if len(self.blocks) < 12:
            numel = self.random.choice([0, 1, 7, 1000, 70_000, 300_000])
            self.blocks[key] = self.store.put(key, numel, torch.float32, self.random.choice(list(Tier)))
            self.plain[key] = torch.zeros(numel)
        return False

    def write(self, key: str) -> bool:
        value = self.random.random()
        self.blocks[key].tensor().add_(value)
        self.plain[key].add_(value)
        return True

    def read(self, key: str) -> bool:
        assert torch.equal(self.blocks[key].tensor(), self.plain[key])
        return False

    def elsewhere(self, key: str) -> bool:
        """A lease is open on the host, where the store does not add up what the device computed."""
        return any(other == key and lease.at is Tier.HOST for other, lease in self.held)

    def overwrite(self, key: str) -> bool:
        if self.elsewhere(key) and not self.store.device.addresses_host:
            return False
        self.plain[key] = self.fresh(key)
        self.store.change(self.blocks[key], self.plain[key], add=False)
        return True

    def add(self, key: str) -> bool:
        if self.elsewhere(key) and not self.store.device.addresses_host:
            return False
        more = self.fresh(key)
        self.plain[key] = self.plain[key] + more
        self.store.change(self.blocks[key], more, add=True)
        return True

    def into(self, key: str) -> bool:
        out = self.store.device.empty(self.plain[key].numel() * 4).view(torch.float32)
        self.store.read_into(self.blocks[key], out).wait()
        assert torch.equal(out, self.plain[key])
        return False

    def move(self, key: str) -> bool:
        if self.is_held(key):
            return False
        before = self.blocks[key].version
        tier = self.random.choice(list(Tier))
        self.store.move(self.blocks[key], tier)
        assert self.blocks[key].tier is tier and self.blocks[key].version == before
        self.write(key)
        return True

    def drop(self, key: str) -> bool:
        if not self.is_held(key):
            if self.random.random() < 0.5:
                self.blocks[key].drop()
            del self.blocks[key], self.plain[key]
        return False

    def fetch(self, key: str) -> bool:
        """Fetch, perhaps write, and perhaps keep the lease for later."""
        block = self.blocks[key]
        at = self.random.choice([Tier.DEVICE, Tier.HOST])
        if self.is_held(key) and block.lease is not None:
            at = block.lease.at
        before = block.version
        lease = self.store.fetch(block, at)
        tensor = lease.wait()
        assert torch.equal(tensor, self.plain[key]) and block.version == before
        tensor.mul_(0.5)
        self.plain[key].mul_(0.5)
        if self.random.random() < 0.3:
            self.held.append((key, lease))
        else:
            self.store.close(block)
        return True

    def close(self, key: str) -> bool:
        if self.held:
            other, _ = self.held.pop(self.random.randrange(len(self.held)))
            before = self.blocks[other].version
            self.store.close(self.blocks[other])
            assert self.blocks[other].version == before
        return False

    def flush(self, key: str) -> bool:
        self.store.evict()
        return False

    def finish(self, key: str) -> bool:
        self.store.flush()
        return False

    def keep(self, key: str) -> bool:
        self.store.flush()
        kept = self.store.keep(self.blocks[key])
        if kept is not None:
            self.kept.append((kept, self.plain[key].clone()))
        return False

    def read_kept(self, key: str) -> bool:
        if self.kept:
            kept, expected = self.kept.pop(self.random.randrange(len(self.kept)))
            place = KeptRange(kept, 0, expected.numel() * 4)
            chunks = [chunk.clone() for chunk in ReadAhead([place]).chunks(place)]
            assert torch.equal(torch.cat(chunks).view(torch.float32) if chunks else expected[:0], expected)
            kept.close()
        return False


@SEAMS
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations_leaves_the_values_that_plain_tensors_have(make: Make, addresses: bool, seed: int) -> None:
    store = make(addresses)
    played = Played(store, seed)
    played.play(500)
    played.end()
    played.blocks.clear()
    gc.collect()
    store.flush()
    store.flush()
    assert used(store) == {"device": 0, "host": 0, "disk": 0}
    assert (store.host.used, disk_of(store).used, store.staged) == (0, 0, 0)


# --- one tier, one lease ---------------------------------------------------------------------------------------------


@SEAMS
@TIERS
def test_a_block_has_one_tier_and_is_charged_there_alone(make: Make, addresses: bool, tier: Tier) -> None:
    store = make(addresses)
    block = filled(store, "b", 1000, tier)
    assert used(store) == {other.value: 4000 if other is tier else 0 for other in Tier}
    assert isinstance(block.stored, Tensor) is (tier is not Tier.DISK)
    assert torch.equal(values(block), torch.ones(1000))


@SEAMS
@TIERS
def test_a_block_that_nobody_wrote_is_zeros(make: Make, addresses: bool, tier: Tier) -> None:
    store = make(addresses)
    dirt = store.host.take(4000, "dirt")
    dirt.fill_(255)
    store.host.give(dirt)
    for at in (Tier.DEVICE, Tier.HOST):
        block = store.put("b", 1000, torch.float32, tier)
        before = block.version
        assert torch.equal(store.fetch(block, at).wait(), torch.zeros(1000)) and block.version == before
        store.close(block)
        store.flush()
        assert torch.equal(values(block), torch.zeros(1000))
    read = store.put("b", 1000, torch.float32, tier)
    out = torch.ones(1000)
    store.read_into(read, out).wait()
    assert not out.any() and read.version == store.put("c", 1000, torch.float32, tier).version


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK], ids=lambda tier: tier.value)
def test_a_lease_is_shared_and_lasts_until_the_last_has_closed(make: Make, tier: Tier) -> None:
    store = make(False)
    block = filled(store, "b", 1000, tier)
    one, two = store.fetch(block, Tier.DEVICE), store.fetch(block, Tier.DEVICE)
    assert one is two and store.budget.used(Tier.DEVICE) == 4000
    store.close(block)
    assert torch.equal(one.wait(), torch.ones(1000))
    store.close(block)
    assert store.budget.used(Tier.DEVICE) == 0
    with pytest.raises(AssertionError, match="block b: closed more often than fetched"):
        store.close(block)


def test_values_that_are_lent_are_waited_for(make: Make) -> None:
    store = make()
    block = store.put("a", 4, torch.float32, Tier.HOST)
    waited: list[str] = []

    class Work:
        def wait(self) -> None:
            waited.append("wait")
            block.stored.fill_(1.0)

        def done(self) -> bool:
            return bool(waited)

    lease = store.fetch(block, Tier.HOST)
    lease.wait()
    lease.lend(Work())
    assert torch.equal(block.tensor(), torch.ones(4))
    assert waited
    lease.take_back()
    waited.clear()
    block.tensor()
    assert not waited
    store.close(block)


def test_only_what_was_changed_is_written_back(make: Make) -> None:
    io = Gated()
    store = make(io=io)
    block = filled(store, "b", 1000, Tier.DISK)
    written = io.written
    for _ in range(3):
        store.fetch(block, Tier.HOST).wait().sum()
        store.close(block)
        values(block)
        store.flush()
    assert io.written == written
    store.fetch(block, Tier.HOST).wait().add_(1)
    store.close(block)
    store.flush()
    assert io.written == written + 1 and torch.equal(values(block), torch.full((1000,), 2.0))


def test_a_write_that_torch_does_not_see_is_written_back_when_it_is_reported(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    before = block.version
    block.tensor().data.fill_(3.0)
    block.touch()
    assert block.version > before
    store.flush()
    assert torch.equal(values(block), torch.full((1000,), 3.0))


def test_a_block_fetched_while_written_back_is_not_read_again(make: Make) -> None:
    io = Gated()
    store = make(io=io)
    block = filled(store, "b", 1000, Tier.DISK)
    first = store.fetch(block, Tier.HOST)
    first.wait().add_(1)
    io.gate.clear()
    store.close(block)
    before = block.version
    threading.Timer(0.05, io.gate.set).start()
    again = store.fetch(block, Tier.HOST)
    assert again is first and torch.equal(again.wait(), torch.full((1000,), 2.0)) and block.version == before
    again.wait().add_(1)
    assert block.version == before + 1
    store.close(block)
    store.flush()
    assert torch.equal(values(block), torch.full((1000,), 3.0)) and block.version == before + 1


@SEAMS
def test_parts_of_a_block_are_written_through(make: Make, addresses: bool) -> None:
    store = make(addresses)
    for tier in Tier:
        block = filled(store, "b", 100, tier)
        part = BlockRange(block, 10, 5)
        part.open().fill_(7.0)
        store.flush()
        expected = torch.ones(100)
        expected[10:15] = 7.0
        assert torch.equal(values(block), expected) and part.dtype == torch.float32 and part.device == store.compute


# --- what is looked at is not used again ---------------------------------------------------------------------------------


def test_a_view_of_an_opened_block_detains_its_buffer(make: Make) -> None:
    store = make()
    blocks = [filled(store, f"b{number}", 70_000, Tier.DISK, number) for number in range(6)]
    view = blocks[0].tensor()[100:200]
    for _ in range(3):
        for block in blocks[1:]:
            block.tensor().add_(0.0)
        store.flush()
    assert torch.equal(view, torch.zeros(100))
    held = store.staged
    assert held == 280_000
    del view
    store.flush()
    assert store.staged == 0


def test_a_view_counts_although_the_read_was_under_way_when_the_lease_was_made(make: Make) -> None:
    """The transfer itself refers to the buffer while it lasts; that must not hide a view taken later."""
    store = make(staging=1 << 30)
    blocks = [filled(store, f"b{number}", 2_000_000, Tier.DISK, number) for number in range(4)]
    lease = store.fetch(blocks[1], Tier.HOST)
    view = lease.wait()[:1000]
    store.close(blocks[1])
    for block in (blocks[2], blocks[3], blocks[0]):
        store.fetch(block, Tier.HOST).wait()
    assert torch.equal(view, torch.ones(1000))


@pytest.mark.parametrize("how", ["dropped", "forsaken", "moved"])
def test_a_view_of_a_block_in_host_memory_outlives_the_block(make: Make, how: str) -> None:
    store = make()
    block = filled(store, "b", 70_000, Tier.HOST, 5.0)
    view = block.tensor()[:10]
    if how == "dropped":
        block.drop()
    elif how == "moved":
        store.move(block, Tier.DISK)
    del block
    gc.collect()
    other = filled(store, "c", 70_000, Tier.HOST, 6.0)
    assert torch.equal(view, torch.full((10,), 5.0)) and store.budget.used(Tier.HOST) == 560_000
    del view
    store.flush()
    assert store.budget.used(Tier.HOST) == other.nbytes


def test_few_blocks_stay_open_that_were_opened_on_demand(make: Make) -> None:
    store = make()
    blocks = [filled(store, f"b{number}", 1000, Tier.DISK, number) for number in range(8)]
    for block in blocks:
        block.tensor().add_(1.0)
        assert sum(other.lease is not None and other.lease.write_back is None for other in blocks) <= Store.RECENT
    store.flush()
    assert all(block.lease is None for block in blocks)
    assert [values(block)[0].item() for block in blocks] == [number + 1.0 for number in range(8)]


# --- memory ----------------------------------------------------------------------------------------------------------------


@SEAMS
@TIERS
def test_memory_comes_back_when_a_block_is_dropped_or_nobody_refers_to_it(make: Make, addresses: bool, tier: Tier) -> None:
    store = make(addresses)
    for _ in range(2):
        blocks = [filled(store, f"b{number}", 1000, tier) for number in range(3)]
        blocks[0].tensor()
        blocks[1].tensor().add_(1.0)
        store.fetch(blocks[2], Tier.DEVICE)
        blocks.pop(0).drop()
        blocks.clear()
        gc.collect()

        def given_back() -> bool:
            store.flush()
            return used(store) == {"device": 0, "host": 0, "disk": 0} and store.host.used == store.staged == 0

        # A thread that has just moved something may still be letting go of it.
        assert soon(given_back)


@TIERS
def test_what_the_budget_does_not_admit_is_refused_and_changes_nothing(make: Make, tier: Tier) -> None:
    store = make(**{tier.value: 10_000})
    block = filled(store, "b", 1000, tier)
    before = used(store)
    with pytest.raises(BudgetError, match=rf"{tier.value} tier cannot admit big"):
        store.put("big", 2000, torch.float32, tier)
    assert used(store) == before and torch.equal(values(block), torch.ones(1000))
    store.put("fits", 1500, torch.float32, tier)


@pytest.mark.parametrize("start,end", sorted(MOVES, key=str), ids=lambda tier: tier.value)
@SEAMS
def test_a_block_moves_to_every_tier_and_back(make: Make, addresses: bool, start: Tier, end: Tier) -> None:
    store = make(addresses)
    block = filled(store, "b", 70_000, start, 3.0)
    version = block.version
    store.move(block, end)
    store.flush()
    assert used(store) == {tier.value: 280_000 if tier is end else 0 for tier in Tier} and block.version == version
    block.tensor().add_(1.0)
    store.move(block, start)
    store.flush()
    assert torch.equal(values(block), torch.full((70_000,), 4.0)) and block.version == version + 1
    store.flush()
    assert used(store)[start.value] == 280_000


@TIERS
def test_a_move_that_the_budget_refuses_leaves_the_block_where_it_was(make: Make, tier: Tier) -> None:
    store = make(**{tier.value: 1000})
    start = Tier.HOST if tier is not Tier.HOST else Tier.DEVICE
    block = filled(store, "b", 1000, start, 3.0)
    before = used(store)
    with pytest.raises(BudgetError, match="cannot admit b"):
        store.move(block, tier)
    assert block.tier is start and used(store) == before and torch.equal(values(block), torch.full((1000,), 3.0))


def test_staging_counts_and_a_fetch_beyond_the_budget_is_refused(make: Make) -> None:
    store = make(host=8000)
    blocks = [filled(store, f"b{number}", 1000, Tier.DISK, number) for number in range(3)]
    for block in blocks[:2]:
        store.fetch(block, Tier.HOST).wait()
    with pytest.raises(BudgetError, match="host tier cannot admit staging of b2"):
        store.fetch(blocks[2], Tier.HOST)
    assert blocks[2].lease is None and store.staged == 8000
    store.close(blocks[0])
    assert torch.equal(store.fetch(blocks[2], Tier.HOST).wait(), torch.full((1000,), 2.0))


def test_a_refused_fetch_of_a_blank_block_leaves_it_blank(make: Make) -> None:
    store = make(host=8000)
    big, blank = filled(store, "big", 1500, Tier.DISK), store.put("blank", 1000, torch.float32, Tier.DISK)
    store.fetch(big, Tier.HOST).wait()
    with pytest.raises(BudgetError, match="staging of blank"):
        blank.tensor()
    store.close(big)
    assert not values(blank).any()


def test_a_tight_budget_writes_back_what_was_opened_on_demand(make: Make) -> None:
    store = make(host=4000, staging=1 << 30)
    blocks = [filled(store, f"b{number}", 1000, Tier.DISK, number) for number in range(5)]
    for _ in range(2):
        for block in blocks:
            block.tensor().add_(1.0)
    assert store.budget.high_water(Tier.HOST) == 4000
    assert [values(block)[0].item() for block in blocks] == [number + 2.0 for number in range(5)]


def test_staging_waits_for_write_backs_rather_than_grow(make: Make) -> None:
    store = make(staging=12_000)
    blocks = [filled(store, f"b{number}", 1000, Tier.DISK, number) for number in range(30)]
    for block in blocks:
        store.fetch(block, Tier.HOST).wait().add_(1.0)
        store.close(block)
    assert store.budget.high_water(Tier.HOST) <= 12_000
    store.flush()
    assert [values(block)[0].item() for block in blocks] == [number + 1.0 for number in range(30)]


def test_a_store_that_was_shut_leaves_no_file(make: Make, tmp_path: Path) -> None:
    store = make()
    filled(store, "b", 1000, Tier.DISK)
    assert len(list(tmp_path.iterdir())) == 1
    store.shut()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_opened_by_the_first_block_that_needs_it(make: Make, tmp_path: Path) -> None:
    store = make()
    filled(store, "b", 1000, Tier.HOST)
    assert list(tmp_path.iterdir()) == []


@SEAMS
def test_values_written_under_inference_mode_are_ordinary_ones(make: Make, addresses: bool) -> None:
    store = make(addresses)
    with torch.inference_mode():
        blocks = [store.put(tier.value, 1000, torch.float32, tier) for tier in Tier]
        for block in blocks:
            block.tensor().fill_(2.0)
        store.flush()
    for block in blocks:
        tensor = block.tensor()
        assert not tensor.is_inference() and torch.equal(tensor, torch.full((1000,), 2.0))
        tensor.add_(1.0)
    store.flush()
    assert all(torch.equal(values(block), torch.full((1000,), 3.0)) for block in blocks)


# --- what a holder does with the values ----------------------------------------------------------------------------------


@SEAMS
@TIERS
def test_a_whole_write_that_raises_has_not_happened_in_a_buffer(make: Make, addresses: bool, tier: Tier) -> None:
    store = make(addresses)
    for block, value in ((filled(store, "b", 1000, tier), 1.0), (store.put("c", 1000, torch.float32, tier), 0.0)):
        before = block.version
        with pytest.raises(ArithmeticError), store.lease(block, Tier.HOST, Mode.WRITE_ALL) as written:
            direct = block.lease is not None and block.lease.direct
            if not direct:
                written.fill_(7.0)
            raise ArithmeticError
        store.flush()
        assert block.version >= before and (direct or torch.equal(values(block), torch.full((1000,), value)))
    store.flush()


def test_what_is_to_be_written_whole_is_not_read_before(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    with store.lease(block, Tier.HOST, Mode.WRITE_ALL) as written:
        with pytest.raises(AssertionError, match="read before it was written"):
            store.fetch(block, Tier.HOST, Mode.READ)
        written.fill_(3.0)
        with store.lease(block, Tier.HOST, Mode.UPDATE) as shared:
            shared[0] = 4.0
    assert float(values(block)[0]) == 4.0 and float(values(block)[1]) == 3.0


def test_a_holder_that_said_it_would_read_and_wrote_is_named(make: Make) -> None:
    store = make()
    block = filled(store, "b", 1000, Tier.DISK)
    lease = store.fetch(block, Tier.HOST, Mode.READ)
    lease.wait().fill_(3.0)
    with pytest.raises(AssertionError, match="block b: written by who said it would read"):
        store.close(block)
