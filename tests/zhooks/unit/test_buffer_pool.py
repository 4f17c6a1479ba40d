"""Buffers between two uses: which ones stay idle, and what observers are told of them."""

from __future__ import annotations

import torch

from offload.events import Bus
from tests.support.held_levels import Levels
from zhooks.unit import Pool, Reserve

CPU = torch.device("cpu")


def pool_of(nbytes: int, *, bus: Bus | None = None, paged: bool = False) -> Pool:
    pool = Pool(1 << 20, Bus() if bus is None else bus)
    pool.keep(Reserve({}, frozenset(), nbytes, paged=paged), CPU)
    return pool


def test_a_buffer_on_pages_of_its_own_is_used_again_though_it_fills_no_whole_page() -> None:
    pool = pool_of(1 << 20, paged=True)
    first = pool.take(1000, torch.float32, CPU)
    where = first.data_ptr()
    pool.give(first)
    assert pool.nbytes == 4000
    del first
    assert pool.take(1000, torch.float32, CPU).data_ptr() == where
    assert pool.nbytes == 0


def gives(pool: Pool, *sizes: int) -> None:
    """All of them are in use at once, and given back in this order."""
    for buffer in [pool.take(nbytes, torch.uint8, CPU) for nbytes in sizes]:
        pool.give(buffer)


def test_of_one_buffer_of_each_size_the_oldest_goes() -> None:
    pool = pool_of(3000)
    gives(pool, 1000, 1200, 1400)
    assert pool.nbytes == 1200 + 1400
    # It is the younger of the two once it was used again.
    gives(pool, 1200)
    gives(pool, 1500)
    assert pool.nbytes == 1200 + 1500


def test_a_second_buffer_of_one_size_goes_before_the_only_one_of_another() -> None:
    pool = pool_of(4000)
    gives(pool, 2000, 900, 900, 900)
    assert pool.nbytes == 2000 + 2 * 900
    mapped = pool.take(2000, torch.uint8, CPU)
    assert pool.nbytes == 2 * 900 and mapped.nbytes == 2000


def test_what_nobody_asked_for_between_two_backwards_goes_first() -> None:
    pool = pool_of(4000)
    gives(pool, 2000)
    for _ in range(2):
        pool.step_ended()
        gives(pool, 900, 900, 900)
    assert pool.nbytes == 3 * 900


def test_layers_of_one_size_between_two_of_another_take_no_new_memory_from_step_to_step() -> None:
    pool = pool_of(4000)
    held: list[int] = []
    for _ in range(4):
        # A head, and layers of which two are gathered at once.
        head = pool.take(2000, torch.uint8, CPU)
        for _ in range(3):
            gives(pool, 900, 900)
        held.append(pool.nbytes)
        pool.give(head)
        assert pool.nbytes == 2000 + 2 * 900
        pool.step_ended()
    assert held == [2 * 900] * 4


def test_a_buffer_larger_than_all_that_may_lie_idle_makes_none_go() -> None:
    pool = pool_of(3000)
    pool.give(pool.take(1000, torch.uint8, CPU))
    pool.give(pool.take(3001, torch.uint8, CPU))
    assert pool.nbytes == 1000


def test_an_observer_that_begins_to_listen_is_told_what_lies_idle() -> None:
    bus, heard = Bus(), Levels()
    pool = pool_of(1 << 20, bus=bus, paged=True)
    pool.give(pool.take(4096, torch.uint8, CPU))
    bus.stated_by(pool.state_held)
    bus.attach(heard)
    assert heard.levels == {("communication on device", "idle buffers"): 4096}
