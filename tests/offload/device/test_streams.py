"""The order of what a device is given: `CudaDevice`, store and stash over streams on paper that note what nothing orders.

No CUDA is called: `tests/test_gpu.py` and the last tests of `test_device.py` hold the same on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.budget import Budget
from offload.device import CommContext, beside
from offload.disk import DiskFile
from offload.errors import CapabilityError, TierError
from offload.events import Bus
from offload.memory import HostPool
from offload.pages import aligned
from offload.stash import Limits, Stash
from offload.store import Block, Mode, Store
from offload.tier import Tier
from tests.support.streams import HOST, Paper, PaperDevice, PaperIo, alias

NUMEL = 1 << 18


class Machine:
    """A store on a device on paper."""

    def __init__(self, folder: Path) -> None:
        self.device = PaperDevice()
        self.paper: Paper = self.device.paper
        self.io = PaperIo(self.paper)
        host = HostPool(self.device)
        self.store = Store(self.device, host, lambda: DiskFile(folder, io=self.io), Budget({}), staging_nbytes=64 << 20)

    def filled(self, key: str, value: float, tier: Tier = Tier.DISK) -> Block:
        block = self.store.put(key, NUMEL, torch.float32, tier)
        lease = self.store.fetch(block, Tier.DEVICE, Mode.WRITE_ALL)
        values = lease.wait()
        self.written(values, value)
        block.touch()
        self.store.close(block)
        self.store.flush()
        return block

    def written(self, tensor: Tensor, value: float) -> None:
        memory = alias(tensor)
        self.paper.kernel("fill", lambda: memory.fill_(value), writes=[tensor])

    def seen(self, tensor: Tensor) -> list[float]:
        """The current stream reads the tensor; what it found is there once it has run."""
        found: list[float] = []
        memory = alias(tensor)
        self.paper.kernel("read", lambda: found.extend({float(memory.min()), float(memory.max())}), reads=[tensor])
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.io.gate.set()
    made.store.shut()
    assert made.paper.races == []
    assert made.paper.locked == {}


def in_thread(call: Callable[[], object]) -> None:
    """Do it in a thread, for a call that must come back although nothing else moves."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the call waits for something"


# --- the paper notices --------------------------------------------------------------------------------------------------


def test_the_paper_notices_what_nothing_orders() -> None:
    paper = Paper()
    tensor, side = paper.empty(64), paper.stream("side")
    paper.kernel("one", lambda: None, writes=[tensor])
    with paper.using(side):
        paper.kernel("two", lambda: None, reads=[tensor])
    assert paper.races == ["two (side) is not ordered after one (compute)"]
    event = paper.event()
    event.record(side)
    paper.compute.wait_event(event)
    paper.kernel("three", lambda: None, writes=[tensor])
    assert len(paper.races) == 1
    paper.touch("look", [tensor.numpy()], writes=False)
    assert paper.races[-1] == f"look ({HOST}) is not ordered after three (compute)"
    paper.races.clear()
    paper.compute.synchronize()
    paper.touch("look", [tensor.numpy()], writes=False)
    with paper.using(side):
        paper.kernel("four", lambda: None, reads=[tensor])
    del tensor
    assert paper.races == ["memory is freed under four (side)"]


# --- from disk to the device --------------------------------------------------------------------------------------------


def test_a_block_from_disk_arrives_while_the_stream_that_asked_for_it_is_busy(machine: Machine) -> None:
    block, paper = machine.filled("layers.3", 3.0), machine.paper
    machine.io.gate.clear()
    lease = machine.store.fetch(block, Tier.DEVICE)
    # The unit before it is computed meanwhile, and nobody asks the store for anything.
    release = paper.hold(paper.compute)
    before = paper.copies.count("h2d")
    machine.io.gate.set()
    paper.until(lambda: paper.copies.count("h2d") == before + 1)
    release()
    assert machine.seen(lease.wait()) == [3.0]
    machine.store.close(block)


def test_a_block_from_disk_comes_after_the_last_use_of_its_buffers_memory(machine: Machine) -> None:
    block, paper = machine.filled("layers.3", 3.0), machine.paper
    side = paper.stream("side")
    with paper.using(side):
        memory = machine.device.empty(block.nbytes)
        release = paper.hold(side)
        machine.written(memory, 9.0)
        del memory
        lease = machine.store.fetch(block, Tier.DEVICE)
    # Waited for on another stream than the one that the buffer was allocated on.
    values = lease.wait()
    found = machine.seen(values)
    assert found == []
    release()
    paper.until(lambda: found == [3.0])
    machine.store.close(block)


def test_what_changed_on_the_device_is_written_to_disk_although_nobody_looks(machine: Machine) -> None:
    block, paper = machine.filled("layers.3", 3.0), machine.paper
    lease = machine.store.fetch(block, Tier.DEVICE)
    machine.written(lease.wait(), 4.0)
    block.touch()
    before = machine.io.written
    release = paper.hold(paper.compute)
    machine.written(lease.values, 5.0)
    block.touch()
    machine.store.close(block)
    assert machine.io.written == before
    release()
    paper.until(lambda: machine.io.written > before)
    machine.store.flush()
    assert bool((block.tensor() == 5.0).all())


def test_a_failed_read_reaches_whoever_waits_for_the_copy_that_was_to_follow(machine: Machine) -> None:
    block = machine.filled("layers.3", 3.0)
    machine.io.gate.clear()
    lease = machine.store.fetch(block, Tier.DEVICE)
    machine.paper.fault = True
    machine.io.gate.set()
    with pytest.raises(TierError, match=r"layers\.3|illegal memory access"):
        lease.wait()
    machine.paper.fault = False
    machine.store.close(block)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK], ids=["host", "disk"])
def test_a_gather_waits_for_what_it_sends_and_compute_does_not(machine: Machine, tier: Tier) -> None:
    block, paper = machine.filled("layers.3", 3.0, tier), machine.paper
    release = paper.hold(machine.device._to_device)
    lease = machine.store.fetch(block, Tier.DEVICE)
    full = machine.device.empty(block.nbytes).view(torch.float32)
    with beside(machine.device.device, "gather", paper):
        sent = lease.wait()
        paper.kernel("all-gather", lambda: alias(full).copy_(alias(sent)), reads=[sent], writes=[full])
        gathered = paper.event()
        gathered.record(paper.current())
    other = machine.device.empty(64)
    machine.written(other, 1)
    assert not paper.compute.queue, "compute waits for a copy that it does not use"
    release()
    paper.compute.wait_event(gathered)
    assert machine.seen(full) == [3.0]
    machine.store.close(block)


def test_a_sum_that_waits_for_its_range_holds_up_neither_compute_nor_a_gather(machine: Machine) -> None:
    paper, here = machine.paper, machine.device.device
    part, full = (machine.device.empty(256) for _ in range(2))
    machine.written(part, 1)
    reducing = paper.stream("reduce-scatter")
    release = paper.hold(reducing)
    ready = paper.event()
    ready.record(reducing)
    with beside(here, "reduce", paper):
        assert paper.current() is paper.side("reduce")
        paper.current().wait_event(ready)
        paper.kernel("sum of replicas", lambda: alias(part).mul_(2), reads=[part], writes=[part])
    with beside(here, "gather", paper):
        paper.kernel("all-gather", lambda: alias(full).fill_(3), writes=[full])
        gathered = paper.event()
        gathered.record(paper.current())
    assert gathered.query() and not paper.compute.queue, "only the sum waits"
    release()
    summed = paper.event()
    summed.record(paper.side("reduce"))
    paper.compute.wait_event(summed)
    assert machine.seen(part) == [2] and paper.races == []


def test_turns_of_fetching_changing_and_closing_are_all_ordered(machine: Machine) -> None:
    paper = machine.paper
    blocks = [machine.filled(f"b{number}", float(number), tier) for number, tier in enumerate([Tier.DISK, Tier.HOST] * 3)]
    side = paper.stream("side")
    for turn in range(3):
        release = paper.hold(paper.compute)
        leases = [machine.store.fetch(block, Tier.DEVICE) for block in blocks]
        release()
        for number, (block, lease) in enumerate(zip(blocks, leases, strict=True)):
            with paper.using(side if (turn + number) % 2 else paper.compute):
                values = lease.wait()
                machine.written(values, turn * 10.0 + number)
                block.touch()
                machine.store.close(block)
                del values
        machine.store.flush()
    for number, block in enumerate(blocks):
        assert bool((block.tensor() == 20.0 + number).all())
    assert paper.races == []


# --- activations ---------------------------------------------------------------------------------------------------------


def stash_of(machine: Machine, tier: Tier, **limits: int) -> Stash:
    return Stash(machine.store, tier, Limits(min_nbytes=0, **limits), Bus())


def activation(machine: Machine, value: float) -> Tensor:
    tensor = machine.device.empty(4 * NUMEL).view(torch.float32)
    machine.written(tensor, value)
    return tensor


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK], ids=["host", "disk"])
def test_opening_an_activation_does_not_wait_for_the_device(machine: Machine, tier: Tier) -> None:
    stash, paper = stash_of(machine, tier), machine.paper
    saved = []
    for value in range(3):
        tensor = activation(machine, float(value))
        saved.append(stash.put(tensor))
        del tensor
    stash.flush()
    release = paper.hold(paper.compute)
    opened: list[Tensor] = []
    found: list[list[float]] = []

    def backward() -> None:
        for one in reversed(saved):
            assert one is not None
            opened.append(stash.open(one))
            found.append(machine.seen(opened[-1]))

    in_thread(backward)
    assert found == [[], [], []], "compute is held, so nothing was read yet"
    release()
    paper.until(lambda: found == [[2.0], [1.0], [0.0]])
    paper.compute.synchronize()
    opened.clear()
    saved.clear()
    stash.flush()


def test_an_activation_goes_on_to_disk_although_nobody_looks(machine: Machine) -> None:
    stash, paper = stash_of(machine, Tier.DISK), machine.paper
    assert machine.store.disk.path
    before = machine.io.written
    tensor = activation(machine, 1.0)
    saved = stash.put(tensor)
    del tensor
    paper.until(lambda: machine.io.written > before)
    assert saved is not None
    assert machine.seen(stash.open(saved)) == [1.0]
    paper.compute.synchronize()
    del saved
    stash.flush()


# --- locking -------------------------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_locked_leaves_no_error_for_the_next_kernel() -> None:
    device = PaperDevice()
    device.paper.refuses_to_lock = 2
    with pytest.raises(CapabilityError, match=r"cannot page-lock 4096 B of host memory \(error 2\).*ulimit -l"):
        device.pin(aligned(4096))
    tensor = device.empty(64)
    device.paper.kernel("next", lambda: None, writes=[tensor])
    device.close()


def test_clean_up_after_a_fault_of_the_device_raises_nothing_more() -> None:
    device = PaperDevice()
    pool = HostPool(device)
    block = pool.take(4096, "block")
    ticket = device.copy(device.empty(4096), block, "layers.3")
    assert device.paper.locked
    device.paper.fault = True
    with pytest.raises(TierError, match=r"copy of layers\.3.*illegal memory access"):
        ticket.wait()
    device.close()
    pool.close()
    assert pool.reserved == 0


def test_unlocking_what_was_never_locked_is_noticed() -> None:
    device = PaperDevice()
    with pytest.raises(AssertionError, match="not locked"):
        device.unpin(aligned(4096))
    device.close()


# --- what several streams give rise to ----------------------------------------------------------------------------------


def test_gradients_that_arrive_on_several_streams_are_added_up_reduced_and_used_in_order() -> None:
    paper = Paper()
    one, sides = CommContext[int](paper), [paper.stream("first"), paper.stream("second")]

    found: list[float] = []

    def note(memory: Tensor) -> None:
        found.append(float(memory[0]))

    def whole_pass() -> None:
        sums: list[Tensor] = []
        for number, side in enumerate(sides):
            with paper.using(side):
                made = paper.empty(64)
                memory = alias(made)
                paper.kernel("made", partial(memory.fill_, number + 1), writes=[made])
                with one.adding([made, None]):
                    sums.append(paper.empty(64))
                    paper.kernel("sum", partial(alias(sums[-1]).copy_, memory), reads=[made], writes=[sums[-1]])
                    # Another's turn may come with this one: it was filled under another stream.
                    with one.reducing():
                        paper.kernel("reduce", lambda: None, reads=sums, writes=sums)
                        one.keep(number)
                del made
        assert one.wait_for_oldest() == 0
        with one.end(lambda: sums):
            assert one.join() == [1]
            paper.kernel("land", lambda: None, writes=sums)
        for each in sums:
            paper.kernel("step", partial(note, alias(each)), reads=[each])

    release = paper.hold(sides[1])
    whole_pass()
    assert found == [], "what is summed waits for what is made"
    release()
    whole_pass()
    assert found == [1.0, 2.0] * 2
    assert paper.races == []


def test_work_under_the_stream_it_is_on_already_waits_for_nothing() -> None:
    paper = Paper()
    one = CommContext[None](paper)
    before = dict(paper.compute.clock)
    with one.adding():
        assert paper.current() is paper.compute
    assert paper.compute.clock == before
