"""The tiered store on a disk that fails: nothing that was in memory is lost, and what was lost is named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from offload.disk import Bytes, Extent, SystemIo
from offload.disk.disk_tier import STEP
from offload.errors import BudgetError, TierError
from offload.store import Block, Store
from offload.tier import Tier
from tests.support.stores import filled, open_store

SEAMS = pytest.mark.parametrize("addresses", [None, False], ids=["direct", "copied"])


class Failing(SystemIo):
    """Raises ``code`` at reads, writes or when the file grows, while set to."""

    def __init__(self) -> None:
        self.code = errno.EIO
        self.reads = self.writes = self.growth = False

    def _fail(self, fails: bool) -> None:
        if fails:
            raise OSError(self.code, os.strerror(self.code))

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self._fail(self.reads)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self._fail(self.writes)
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._fail(self.growth)
        super().fallocate(fd, offset, nbytes)


Make = Callable[..., tuple[Store, Failing]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    stores: list[Store] = []

    def build(addresses: bool | None = None, *, staging: int = 1 << 20) -> tuple[Store, Failing]:
        io = Failing()
        stores.append(open_store(tmp_path, addresses, io=io, staging=staging))
        return stores[-1], io

    yield build
    for store in stores:
        store.shut()


def on_disk(store: Store, key: str, value: float = 1.0, numel: int = 1000) -> Block:
    return filled(store, key, numel, Tier.DISK, value)


def holds(block: Block, value: float) -> bool:
    return torch.equal(block.tensor(), torch.full((block.numel,), value))


def end(store: Store) -> None:
    """Nothing is charged but what lies on disk."""
    store.flush()
    store.flush()
    assert store.staged == store.host.used == 0 and store.budget.used(Tier.DEVICE) == 0


@SEAMS
def test_a_write_back_that_fails_loses_nothing_and_goes_through_later(make: Make, addresses: bool) -> None:
    store, io = make(addresses)
    block, other = on_disk(store, "layers.3"), on_disk(store, "layers.4")
    store.fetch(block, Tier.DEVICE).wait().add_(1.0)
    io.writes = True
    version = block.version
    store.close(block)
    for _ in range(2):
        with pytest.raises(TierError, match=r"cannot write layers\.3 .*EIO"):
            store.flush()
        assert holds(block, 2.0) and holds(other, 1.0) and block.version == version
    io.writes = False
    store.flush()
    assert block.lease is None and holds(block, 2.0) and block.version == version
    end(store)


@SEAMS
@pytest.mark.parametrize("then", ["fetched", "opened", "added", "moved"])
def test_whoever_wants_a_block_whose_write_back_failed_hears_of_it_and_may_go_on(
    make: Make, addresses: bool, then: str
) -> None:
    store, io = make(addresses)
    block = on_disk(store, "layers.3")
    store.fetch(block, Tier.DEVICE).wait().add_(1.0)
    io.writes = True
    store.close(block)
    turns: dict[str, Callable[[], object]] = {
        "fetched": lambda: store.fetch(block, Tier.DEVICE),
        "opened": block.tensor,
        "added": lambda: store.change(block, torch.zeros(1000), add=True),
        "moved": lambda: store.move(block, Tier.HOST),
    }
    with pytest.raises(TierError, match=r"layers\.3"):
        turns[then]()
    io.writes = False
    turns[then]()
    if then == "fetched":
        store.close(block)
    assert holds(block, 2.0)
    store.flush()
    assert holds(block, 2.0)


@SEAMS
def test_a_read_that_fails_names_the_block_and_is_tried_anew(make: Make, addresses: bool) -> None:
    store, io = make(addresses)
    block, other = on_disk(store, "layers.3"), on_disk(store, "layers.4", 5.0)
    io.reads = True
    out = torch.empty(1000)
    for turn in (
        block.tensor,
        lambda: store.fetch(block, Tier.DEVICE).wait(),
        lambda: store.change(block, torch.ones(1000), add=True),
        lambda: store.read_into(block, store.device.empty(4000).view(torch.float32)).wait(),
        lambda: store.move(block, Tier.HOST),
    ):
        with pytest.raises(TierError, match=r"cannot read layers\.3 .*EIO"):
            turn()
        if block.lease is not None:
            store.close(block)
        assert block.lease is None and block.tier is Tier.DISK
    io.reads = False
    assert holds(block, 1.0) and holds(other, 5.0)
    store.read_into(block, out).wait()
    assert torch.equal(out, torch.ones(1000))
    end(store)


@SEAMS
def test_a_block_fetched_ahead_in_vain_does_not_disturb_whoever_closes_it(make: Make, addresses: bool) -> None:
    store, io = make(addresses)
    block = on_disk(store, "layers.3")
    io.reads = True
    store.fetch(block, Tier.DEVICE)
    store.close(block)
    io.reads = False
    assert holds(block, 1.0)
    end(store)


@SEAMS
@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_a_damaged_block_is_named_and_the_others_are_usable(make: Make, addresses: bool, damage: str) -> None:
    store, _ = make(addresses)
    other, block = on_disk(store, "layers.3"), on_disk(store, "layers.4", 5.0)
    assert isinstance(block.stored, Extent)
    if damage == "cut":
        os.truncate(store.disk.path, block.stored.offset)
    else:
        with store.disk.path.open("r+b") as file:
            file.seek(block.stored.offset + 17)
            byte = file.read(1)[0]
            file.seek(block.stored.offset + 17)
            file.write(bytes([byte ^ 4]))
    for _ in range(2):
        with pytest.raises(TierError, match=rf"cannot read {block.key}.*the block is lost"):
            block.tensor()
    assert holds(other, 1.0)
    store.change(block, torch.full((1000,), 8.0), add=False)
    store.flush()
    assert holds(block, 8.0)
    end(store)


@SEAMS
def test_a_full_disk_refuses_a_block_and_the_store_goes_on(make: Make, addresses: bool) -> None:
    store, io = make(addresses)
    block = on_disk(store, "layers.3")
    io.code, io.growth = errno.ENOSPC, True
    with pytest.raises(BudgetError, match=r"disk tier cannot admit layers\.4"):
        store.put("layers.4", STEP, torch.float32, Tier.DISK)
    assert store.budget.used(Tier.DISK) == 4000 and holds(block, 1.0)
    with pytest.raises(BudgetError, match=r"layers\.5"):
        big = store.put("layers.5", STEP, torch.float32, Tier.DEVICE)
        store.move(big, Tier.DISK)
    assert big.tier is Tier.DEVICE
    big.drop()
    io.growth = False
    assert holds(on_disk(store, "layers.6", 3.0), 3.0)
    end(store)


@SEAMS
def test_a_full_disk_at_a_write_back_keeps_the_values_in_memory(make: Make, addresses: bool) -> None:
    store, io = make(addresses)
    blocks = [on_disk(store, f"layers.{number}", float(number)) for number in range(4)]
    io.code, io.writes = errno.ENOSPC, True
    for block in blocks:
        store.fetch(block, Tier.DEVICE).wait().add_(1.0)
    errors = 0
    for block in blocks:
        try:
            store.close(block)
        except TierError:
            errors += 1
    for _ in blocks:
        try:
            store.flush()
        except TierError as error:
            errors += 1
            assert "ENOSPC" in str(error) and "free space there" in str(error)
    assert errors
    io.writes = False
    store.flush()
    assert all(holds(block, number + 1.0) for number, block in enumerate(blocks))
    end(store)


@SEAMS
def test_back_pressure_raises_when_what_it_waits_for_has_failed(make: Make, addresses: bool) -> None:
    store, io = make(addresses, staging=8000)
    blocks = [on_disk(store, f"layers.{number}") for number in range(6)]
    io.writes = True
    with pytest.raises(TierError, match=r"cannot write layers\.\d"):
        for block in blocks:
            store.fetch(block, Tier.DEVICE).wait().add_(1.0)
            store.close(block)
    assert store.budget.used(Tier.HOST) <= 12_000
    # Another block's write-back may still be under way: it must have failed before the disk is well again.
    with pytest.raises(TierError, match=r"cannot write layers\.\d"):
        store.flush()
    io.writes = False
    store.flush()
    assert all(holds(block, 2.0) or holds(block, 1.0) for block in blocks) and holds(blocks[0], 2.0)


def test_a_vanished_folder_does_not_matter_to_an_open_file(make: Make, tmp_path: Path) -> None:
    store, _ = make()
    block = on_disk(store, "layers.3")
    path = store.disk.path
    path.unlink()
    for value in (2.0, 3.0):
        store.change(block, torch.full((1000,), value), add=False)
        store.flush()
        assert holds(block, value)
    big = on_disk(store, "layers.4", 1.0, 40 << 20)
    assert holds(big, 1.0)
    store.shut()
    assert list(tmp_path.iterdir()) == []
