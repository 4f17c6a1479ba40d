"""The host tier's memory: exact cuts, holes that grow together, a hard cap, and pages that are used again."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from offload.device import Device, open_device
from offload.device.cpu import CpuDevice
from offload.errors import BudgetError, CapabilityError
from offload.memory import HostPool
from offload.memory.host_tier import TRIM_STEPS, _distant_node, _prefer, _Slab
from offload.pages import ALIGN, round_up

PAGE = ALIGN
SLAB = 64 * PAGE


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device(torch.device("cpu"))
    yield opened
    opened.close()


@pytest.fixture
def pool(device: Device) -> Iterator[HostPool]:
    opened = HostPool(device, slab_nbytes=SLAB)
    yield opened
    opened.close()


def resident() -> int:
    """Bytes of this process that are mapped to real pages."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# --- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, SLAB, SLAB + 1, 5 * SLAB + 7])
def test_a_block_is_exact_aligned_and_alone_in_its_storage(pool: HostPool, nbytes: int) -> None:
    block = pool.take(nbytes, "block")
    assert (block.shape, block.dtype, block.device.type) == ((nbytes,), torch.uint8, "cpu")
    assert block.data_ptr() % PAGE == 0
    assert block.storage_offset() == 0
    assert block.untyped_storage().nbytes() == round_up(nbytes)
    assert not block._is_view()
    assert pool.used == pool.high_water == round_up(nbytes)


def test_blocks_of_one_slab_share_no_storage_and_no_byte(pool: HostPool) -> None:
    blocks = [pool.take(5000, str(index)) for index in range(4)]
    assert pool.reserved == SLAB
    assert len({block.untyped_storage()._cdata for block in blocks}) == 4
    for index, block in enumerate(blocks):
        # All of the storage, the space past the block's end included.
        torch.empty(0, dtype=torch.uint8).set_(block.untyped_storage(), 0, (8192,), (1,)).fill_(index)
    assert [bool((block == index).all()) for index, block in enumerate(blocks)] == [True] * 4


def test_a_large_block_gets_a_slab_of_exactly_its_size(pool: HostPool) -> None:
    pool.take(3 * SLAB + 1, "large")
    assert pool.reserved == 3 * SLAB + PAGE


def test_a_quarter_of_a_slab_is_large_so_that_slabs_have_no_long_unused_end(pool: HostPool) -> None:
    taken = sum(pool.take(SLAB // 2 + PAGE, str(index)).nbytes for index in range(4))
    assert pool.reserved == taken


def test_the_best_fitting_hole_is_cut(pool: HostPool) -> None:
    blocks = [pool.take(pages * PAGE, str(pages)) for pages in (5, 1, 3, 1, 4, 1)]
    where = {index: block.data_ptr() for index, block in enumerate(blocks)}
    for index in (0, 2, 4):
        pool.give(blocks[index])
    assert pool.take(3 * PAGE, "fits the second hole").data_ptr() == where[2]
    assert pool.take(4 * PAGE, "fits the third hole").data_ptr() == where[4]
    assert pool.take(2 * PAGE, "is cut from the first").data_ptr() == where[0]
    assert pool.take(3 * PAGE, "is what is left of it").data_ptr() == where[0] + 2 * PAGE
    assert pool.reserved == SLAB


def test_a_block_of_nothing_costs_nothing(pool: HostPool) -> None:
    block = pool.take(0, "an empty shard")
    assert block.shape == (0,)
    pool.give(block)
    assert pool.used == pool.reserved == 0


def test_a_block_is_no_inference_tensor_and_lies_on_the_cpu_by_any_default(pool: HostPool) -> None:
    with torch.inference_mode(), torch.device("meta"):
        block = pool.take(100, "block")
    assert not block.is_inference()
    assert block.device.type == "cpu"


# --- giving -----------------------------------------------------------------------------------------------------------


def test_a_view_of_a_block_gives_the_block_back(pool: HostPool) -> None:
    block = pool.take(4 * PAGE, "block")
    pool.give(block.view(torch.float32)[7:].view(-1, 3))
    assert pool.used == 0
    assert pool.high_water == 4 * PAGE


def test_a_block_given_twice_is_noticed_although_its_place_was_taken_again(pool: HostPool) -> None:
    stale = pool.take(PAGE, "first")
    pool.give(stale)
    fresh = pool.take(PAGE, "second")
    assert fresh.data_ptr() == stale.data_ptr()
    with pytest.raises(AssertionError, match="given back that is not taken"):
        pool.give(stale)
    assert pool.used == PAGE
    pool.give(fresh)


def test_a_stranger_is_refused(pool: HostPool, device: Device) -> None:
    other = HostPool(device, slab_nbytes=SLAB)
    for stranger in (torch.zeros(PAGE, dtype=torch.uint8), other.take(PAGE, "other")):
        with pytest.raises(AssertionError, match="given back that is not taken"):
            pool.give(stranger)
    other.close()


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_memory_that_is_used_again_faults_no_page_in(device: Device) -> None:
    pool = HostPool(device, slab_nbytes=8 << 20)
    sizes = [1 << 20, 1 << 20, 24 << 20]

    def step() -> None:
        blocks = [pool.take(nbytes, str(nbytes)).fill_(1) for nbytes in sizes]
        for block in blocks:
            pool.give(block)
        pool.trim()

    step()
    reserved, before = pool.reserved, faults()
    for _ in range(10):
        step()
    assert pool.reserved == reserved
    # Ten steps touch 66,560 pages; what remains is the interpreter's own.
    assert faults() - before < 1000
    pool.close()


def test_trim_returns_slabs_that_were_idle_for_some_steps_and_no_others(pool: HostPool) -> None:
    used, idle = pool.take(2 * SLAB, "used"), pool.take(3 * SLAB, "idle")
    kept = pool.take(PAGE, "kept")
    pool.give(idle)
    for step in range(TRIM_STEPS):
        pool.give(used)
        assert pool.trim() == 0, f"step {step}"
        used = pool.take(2 * SLAB, "used")
    assert pool.trim() == 3 * SLAB
    assert pool.reserved == 3 * SLAB
    assert pool.trim() == 0
    pool.give(kept)
    for _ in range(TRIM_STEPS):
        assert pool.trim() == 0
    assert pool.trim() == SLAB


def test_what_trim_returns_the_system_has_back(device: Device) -> None:
    pool = HostPool(device)
    before = resident()
    pool.give(pool.take(128 << 20, "large").fill_(1))
    assert resident() - before > 100 << 20
    for _ in range(TRIM_STEPS + 1):
        pool.trim()
    assert resident() - before < 28 << 20
    pool.close()


def test_untouched_memory_of_a_slab_is_not_resident(device: Device) -> None:
    before = resident()
    pool = HostPool(device, slab_nbytes=256 << 20)
    pool.take(PAGE, "small").fill_(1)
    assert resident() - before < 32 << 20
    pool.close()


# --- the cap ----------------------------------------------------------------------------------------------------------


def test_the_cap_is_hard_and_says_its_arithmetic(device: Device) -> None:
    pool = HostPool(device, limit=10 << 20, slab_nbytes=1 << 20)
    pool.take(6 << 20, "optim/layers.6")
    with pytest.raises(BudgetError) as raised:
        pool.take(5 << 20, "optim/layers.7")
    assert str(raised.value) == (
        "host tier cannot admit optim/layers.7 (5 MiB): 6.0 of 10.0 MiB in use, 1 MiB short; "
        'raise [budget] host, or set [optimizer] tier = "disk"'
    )
    assert (pool.used, pool.reserved, pool.high_water) == (6 << 20, 6 << 20, 6 << 20)
    pool.take(4 << 20, "fits exactly")
    pool.close()


def test_under_the_cap_slabs_are_as_large_as_their_blocks(device: Device) -> None:
    pool = HostPool(device, limit=SLAB + 3 * PAGE + 17, slab_nbytes=SLAB)
    pool.take(SLAB, "whole")
    pool.take(PAGE, "a")
    assert pool.reserved == SLAB + PAGE
    pool.take(2 * PAGE, "b")
    with pytest.raises(BudgetError, match=r"cannot admit c \(18 B\): .* in use, 1 B short"):
        pool.take(18, "c")
    # Of a budget bytes count, and the pages that they lie on come on top.
    pool.take(17, "c")
    assert pool.reserved == SLAB + 4 * PAGE
    pool.close()


@pytest.mark.parametrize("limit", [PAGE, 100 << 20, 1 << 30])
def test_blocks_that_a_budget_holds_are_not_refused_for_the_size_of_slabs(device: Device, limit: int) -> None:
    pool = HostPool(device, limit=limit, slab_nbytes=64 << 20)
    sizes = [17, limit * 2 // 5, limit * 2 // 5, 100]
    blocks = [pool.take(nbytes, str(nbytes)) for nbytes in sizes]
    assert pool.reserved <= limit + len(sizes) * PAGE
    for block in blocks:
        pool.give(block)
    pool.limit = 0
    with pytest.raises(BudgetError, match="short"):
        pool.take(2 * limit, "more")
    pool.close()


def test_idle_slabs_are_returned_before_the_cap_refuses(device: Device) -> None:
    pool = HostPool(device, limit=4 * SLAB, slab_nbytes=SLAB)
    blocks = [pool.take(SLAB, str(index)) for index in range(4)]
    for block in blocks[1:]:
        pool.give(block)
    del blocks[1:]
    pool.take(3 * SLAB, "large")
    assert pool.reserved == pool.used == 4 * SLAB
    pool.close()


def test_idle_slabs_stay_when_returning_them_would_not_do(device: Device) -> None:
    pool = HostPool(device, limit=4 * SLAB, slab_nbytes=SLAB)
    blocks = [pool.take(SLAB, str(index)) for index in range(4)]
    pool.give(blocks.pop())
    with pytest.raises(BudgetError, match="1 MiB"):
        pool.take(1 << 20, "large")
    assert pool.reserved == 4 * SLAB
    pool.close()


def test_at_the_cap_any_hole_will_do(device: Device) -> None:
    pool = HostPool(device, limit=SLAB, slab_nbytes=SLAB)
    pool.give(pool.take(SLAB, "large"))
    small = [pool.take(PAGE, str(index)) for index in range(SLAB // PAGE)]
    assert len({block.data_ptr() for block in small}) == SLAB // PAGE
    assert pool.reserved == pool.used == SLAB
    pool.close()


def test_at_the_cap_small_blocks_go_beside_large_ones_and_the_other_way_round(device: Device) -> None:
    pool = HostPool(device, limit=3 * SLAB, slab_nbytes=SLAB)
    large = [pool.take(SLAB, str(index)) for index in range(2)]
    pool.take(PAGE, "opens a slab for small blocks")
    pool.give(large.pop())
    pool.take(SLAB // 2, "leaves half a large slab")
    pool.take(SLAB // 2, "fills it")
    pool.take(SLAB // 2, "beside the small block")
    for index in range(SLAB // 2 // PAGE - 1):
        pool.take(PAGE, str(index))
    assert pool.used == pool.reserved == 3 * SLAB
    pool.close()
    pool = HostPool(device, limit=SLAB, slab_nbytes=SLAB)
    pool.give(pool.take(SLAB, "makes a large slab"))
    pool.take(SLAB // 2, "stays in it")
    pool.take(PAGE, "beside the large block")
    pool.close()


def test_holes_that_are_too_small_are_said_to_be(device: Device) -> None:
    pool = HostPool(device, slab_nbytes=SLAB)
    blocks = [pool.take(PAGE, str(index)) for index in range(SLAB // PAGE)]
    pool.limit = SLAB
    for block in blocks[::2]:
        pool.give(block)
    with pytest.raises(BudgetError, match=r"128\.0 of 256\.0 KiB in use, no free range is large enough in 1 slab \(256 KiB\)"):
        pool.take(2 * PAGE, "two pages")
    pool.take(PAGE, "one page")
    pool.close()


@pytest.mark.parametrize("seed", range(20))
def test_blocks_whose_sum_is_the_cap_fit_whatever_came_and_went_before(device: Device, seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice((PAGE, 3 * PAGE, random.randrange(1, SLAB), SLAB // 2 + 1, 2 * SLAB)) for _ in range(40)]
    pool = HostPool(device, limit=sum(sizes), slab_nbytes=SLAB)
    for _ in range(4):
        before = [pool.take(random.randrange(1, SLAB), "before") for _ in range(random.randrange(20))]
        random.shuffle(before)
        for block in before:
            pool.give(block)
        random.shuffle(sizes)
        blocks = [pool.take(nbytes, str(nbytes)) for nbytes in sizes]
        assert pool.used - pool.rounded == sum(sizes)
        for block in blocks:
            pool.give(block)
    pool.close()


def test_a_request_the_system_cannot_map_is_a_budget_error_and_changes_nothing(pool: HostPool) -> None:
    for nbytes in (1 << 50, 1 << 62):
        with pytest.raises(BudgetError, match=r"cannot admit absurd. Expected the system to map .* raise RLIMIT_AS"):
            pool.take(nbytes, "absurd")
    assert pool.used == pool.reserved == 0
    pool.take(PAGE, "possible")


# --- locking ----------------------------------------------------------------------------------------------------------


class Locking(CpuDevice):
    """A CPU that records what it is to lock, and can refuse as a driver does when RLIMIT_MEMLOCK is reached."""

    def __init__(self, most: int) -> None:
        super().__init__(torch.device("cpu"), addresses_host=False)
        self.most_locked = most
        self.locked: dict[int, int] = {}

    def pins(self) -> bool:
        return True

    def pin(self, memory: Tensor) -> None:
        nbytes = memory.untyped_storage().nbytes()
        if sum(self.locked.values()) + nbytes > self.most_locked:
            raise CapabilityError("device cannot page-lock: raise it (ulimit -l unlimited)")
        assert memory.data_ptr() not in self.locked, "locked twice"
        self.locked[memory.data_ptr()] = nbytes

    def unpin(self, memory: Tensor) -> None:
        del self.locked[memory.data_ptr()]


def test_each_slab_is_locked_once_and_unlocked_before_it_goes() -> None:
    device = Locking(1 << 30)
    pool = HostPool(device, slab_nbytes=SLAB)
    blocks = [pool.take(PAGE, str(index)) for index in range(8)]
    large = pool.take(2 * SLAB, "large")
    assert sorted(device.locked.values()) == [SLAB, 2 * SLAB]
    pool.give(large)
    assert len(device.locked) == 2, "idle memory stays locked"
    for _ in range(TRIM_STEPS + 1):
        pool.trim()
    assert list(device.locked.values()) == [SLAB]
    pool.close()
    assert device.locked == {}
    del blocks
    device.close()


def test_a_dropped_pool_unlocks_its_memory() -> None:
    device = Locking(1 << 30)
    pool = HostPool(device, slab_nbytes=SLAB)
    block = pool.take(PAGE, "block").fill_(9)
    del pool
    gc.collect()
    assert device.locked == {}
    assert bool((block == 9).all()), "its holder keeps the memory"
    device.close()


def test_locking_can_be_left_out() -> None:
    device = Locking(0)
    pool = HostPool(device, slab_nbytes=SLAB, pin=False)
    block = pool.take(PAGE, "block").fill_(5)
    assert device.locked == {} and bool((block == 5).all())
    pool.close()
    device.close()


def test_memory_that_cannot_be_locked_is_an_error_with_the_remedy_and_changes_nothing() -> None:
    device = Locking(SLAB)
    pool = HostPool(device, slab_nbytes=SLAB)
    pool.take(PAGE, "first")
    with pytest.raises(CapabilityError, match=r"^host tier cannot lock memory for optim/layers\.7: .*ulimit -l"):
        pool.take(SLAB, "optim/layers.7")
    assert (pool.used, pool.reserved) == (PAGE, SLAB)
    assert list(device.locked.values()) == [SLAB]
    pool.take(PAGE, "second")
    pool.close()
    device.close()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_returns_the_memory_and_leaves_what_is_still_looked_at(device: Device) -> None:
    before = resident()
    pool = HostPool(device)
    pool.take(128 << 20, "dropped").fill_(1)
    held = pool.take(1 << 20, "held").fill_(2)
    pool.close()
    assert resident() - before < 28 << 20
    assert bool((held == 2).all())
    assert (pool.used, pool.reserved) == (0, 0)
    pool.close()
    with pytest.raises(AssertionError, match="late is taken from a closed pool"):
        pool.take(1, "late")


def test_threads_never_share_a_byte(pool: HostPool) -> None:
    wrong: list[str] = []

    def work(value: int) -> None:
        for turn in range(1000):
            block = pool.take((turn * value % 16 + 1) * PAGE, str(value))
            block[:16] = value
            if block[:16].tolist() != [value] * 16:
                wrong.append(f"{value}: turn {turn}")
            pool.give(block)
            finished[value] += 1

    finished = dict.fromkeys(range(1, 7), 0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert finished == dict.fromkeys(range(1, 7), 1000), "a thread died"
    assert pool.used == 0


# --- where on the machine ---------------------------------------------------------------------------------------------


class Placed(CpuDevice):
    """A CPU that says it hangs on a PCI slot."""

    def __init__(self, place: str | None) -> None:
        super().__init__(torch.device("cpu"), addresses_host=True)
        self.place = place

    def pci_address(self) -> str | None:
        return self.place


def sysfs(root: Path, online: str, node: str) -> Path:
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/online").write_text(online + "\n")
    (root / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (root / "bus/pci/devices/0000:3b:00.0/numa_node").write_text(node + "\n")
    return root


@pytest.mark.parametrize(
    ("place", "online", "node", "expected"),
    [
        ("0000:3b:00.0", "0-1", "1", 1),
        ("0000:3b:00.0", "0,2", "0", 0),
        ("0000:3b:00.0", "0", "0", None),
        ("0000:3b:00.0", "0-1", "-1", None),
        ("0000:5e:00.0", "0-1", "1", None),
        (None, "0-1", "1", None),
    ],
    ids=["second node", "first node", "one node", "unknown node", "unknown device", "no PCI device"],
)
def test_the_node_beside_the_device_is_chosen_where_there_are_several(
    tmp_path: Path, place: str | None, online: str, node: str, expected: int | None
) -> None:
    device = Placed(place)
    assert _distant_node(device, sysfs(tmp_path, online, node)) == expected
    assert _distant_node(device, tmp_path / "missing") is None
    device.close()


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="this kernel has no NUMA nodes")
def test_the_kernel_takes_the_wish_for_a_node() -> None:
    device = Placed(None)
    slab = _Slab(0, device.map_host(4 * PAGE), 4 * PAGE, True)
    assert _prefer(slab, 0)
    start = slab.whole().data_ptr()
    numa_maps = Path("/proc/self/numa_maps")
    if numa_maps.exists():
        wishes = [line.split()[1] for line in numa_maps.read_text().splitlines() if line.startswith(f"{start:x} ")]
        assert wishes == ["prefer:0"]
    assert not _prefer(slab, 1000), "a node that is not there is no error"
    slab.memory.close()
    device.close()


# --- against a model --------------------------------------------------------------------------------------------------


class PoolAgainstModel(RuleBasedStateMachine):
    """Takes, gives and steps in any order; the model is the list of ranges that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.device = open_device(torch.device("cpu"))
        self.limit = 6 * SLAB
        self.pool = HostPool(self.device, limit=self.limit, slab_nbytes=SLAB)
        self.blocks: list[tuple[Tensor, int]] = []
        self.stamp = 0
        self.most = self.most_rounded = 0

    @rule(nbytes=st.one_of(st.integers(1, 4 * PAGE), st.integers(1, 3 * SLAB)))
    def take(self, nbytes: int) -> None:
        used = sum(round_up(block.nbytes) for block, _ in self.blocks)
        try:
            block = self.pool.take(nbytes, "block")
        except BudgetError:
            # Refused only when it does not fit, or when no run of free pages could hold it.
            assert used + round_up(nbytes) > self.limit or self.blocks
            return
        assert sum(block.nbytes for block, _ in self.blocks) + nbytes <= self.limit
        assert block.nbytes == nbytes
        assert block.data_ptr() % PAGE == 0
        self.stamp = self.stamp % 255 + 1
        self.blocks.append((block.fill_(self.stamp), self.stamp))
        self.most = max(self.most, used + round_up(nbytes))
        self.most_rounded = max(self.most_rounded, sum(round_up(block.nbytes) - block.nbytes for block, _ in self.blocks))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        block, _ = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        self.pool.give(block)

    @rule()
    def step(self) -> None:
        self.pool.trim()

    @invariant()
    def no_block_overlaps_another_or_lost_a_byte(self) -> None:
        ranges = sorted((block.data_ptr(), round_up(block.nbytes)) for block, _ in self.blocks)
        for (start, nbytes), (following, _) in pairwise(ranges):
            assert start + nbytes <= following
        for block, stamp in self.blocks:
            assert bool((block == stamp).all())

    @invariant()
    def the_books_are_right(self) -> None:
        used = sum(round_up(block.nbytes) for block, _ in self.blocks)
        assert self.pool.used == used
        assert self.pool.high_water == self.most
        assert used <= self.pool.reserved <= self.limit + self.most_rounded, "what whole pages cost comes on top"

    @invariant()
    def holes_and_blocks_tile_every_slab_and_no_two_holes_touch(self) -> None:
        holes = {start: nbytes for space in self.pool._spaces.values() for start, nbytes in space.holes()}
        held = {taken.start: taken.nbytes for taken in self.pool._taken.values()}
        tiled = 0
        for slab in self.pool._slabs.values():
            at, hole_before = slab.start, False
            while at < slab.start + slab.nbytes:
                is_hole = at in holes
                assert is_hole != (at in held)
                assert not (is_hole and hole_before)
                at += holes[at] if is_hole else held[at]
                hole_before = is_hole
            assert at == slab.start + slab.nbytes
            tiled += slab.nbytes
        assert tiled == sum(holes.values()) + sum(held.values()), "no hole is of a slab that was returned"

    def teardown(self) -> None:
        for block, _ in self.blocks:
            self.pool.give(block)
        self.blocks.clear()
        assert self.pool.used == 0
        assert not any(slab.used for slab in self.pool._slabs.values())
        self.pool.close()
        self.device.close()


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
