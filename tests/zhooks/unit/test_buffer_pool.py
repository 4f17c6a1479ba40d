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


def test_the_buffers_given_back_last_stay_idle_and_the_oldest_go() -> None:
    pool = pool_of(3000)
    for nbytes in (1000, 1200, 1400):
        pool.give(pool.take(nbytes, torch.uint8, CPU))
    assert pool.nbytes == 1200 + 1400
    # It is the younger of the two once it was used again.
    pool.give(pool.take(1200, torch.uint8, CPU))
    pool.give(pool.take(1500, torch.uint8, CPU))
    assert pool.nbytes == 1200 + 1500


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
