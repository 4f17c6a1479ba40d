"""Memory reserved ahead: where ranges lie, whose they are, and what falls back.

pytest runs it. Training under an arena is tests/zhooks/unit/test_arena.py's.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.events import Bus, Recorder
from offload.memory import Arena, Use, grain, rounded

CPU = torch.device("cpu")
KIB = 1 << 10


def opened(nbytes: int, use: Use = Use.GATHERED, **more: Any) -> Arena:
    arena = Arena(CPU, Bus(), **more)
    arena.reserve({use: nbytes})
    return arena


def at(tensor: Tensor) -> int:
    return tensor.data_ptr()


def test_ranges_are_aligned_apart_and_each_a_storage_of_its_own() -> None:
    arena = opened(64 * KIB)
    taken = [arena.take(Use.GATHERED, nbytes) for nbytes in (1, 100, 64, 4000)]
    assert [tensor.untyped_storage().nbytes() for tensor in taken] == [64, 128, 64, 4032]
    assert all(at(tensor) % 64 == 0 for tensor in taken)
    assert [at(tensor) - at(taken[0]) for tensor in taken] == [0, 64, 192, 256]
    assert len({tensor.untyped_storage()._cdata for tensor in taken}) == 4
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    assert [set(tensor.tolist()) for tensor in taken] == [{0}, {1}, {2}, {3}]


def test_ranges_that_a_disk_fills_are_whole_pages() -> None:
    arena = opened(64 * KIB, paged=True)
    first, second = arena.take(Use.GATHERED, 5000), arena.take(Use.GATHERED, 10)
    assert at(first) % 4096 == 0 == at(second) % 4096
    assert (first.numel(), first.untyped_storage().nbytes()) == (5000, 8192)
    assert at(second) - at(first) == 8192
    beyond = arena.take(Use.GATHERED, 64 * KIB)
    assert at(beyond) % 4096 == 0
    assert arena.report().fell_back == 1


def test_a_range_is_used_again_once_nothing_refers_to_it() -> None:
    arena = opened(8 * KIB)
    whole = arena.take(Use.GATHERED, 8 * KIB)
    address = at(whole)
    assert arena.report().used == 8 * KIB
    del whole
    again = arena.take(Use.GATHERED, 8 * KIB)
    assert at(again) == address
    assert (arena.report().used, arena.report().peak, arena.report().fell_back) == (8 * KIB, 8 * KIB, 0)


@pytest.mark.parametrize("kept", ["view", "storage", "saved"])
def test_a_reference_that_somebody_kept_is_never_overwritten(kept: str) -> None:
    arena = opened(4 * KIB)
    values = arena.take(Use.GATHERED, 4 * KIB).view(torch.float32).fill_(3.0)
    holder: Any
    if kept == "view":
        holder = values[1000:].view(4, 6)
    elif kept == "storage":
        holder = values.untyped_storage()
    else:
        leaf = torch.ones(1024, requires_grad=True)
        holder = (leaf * values).sum()
    del values
    other = arena.take(Use.GATHERED, 4 * KIB).view(torch.float32).fill_(9.0)
    report = arena.report()
    assert (report.fell_back, report.fell_back_nbytes, report.used) == (1, 4 * KIB, 4 * KIB)
    if kept == "view":
        assert holder.unique().tolist() == [3.0]
    elif kept == "storage":
        assert torch.empty(0).set_(holder).unique().tolist() == [3.0]
    else:
        holder.backward()
        assert leaf.grad is not None and leaf.grad.unique().tolist() == [3.0]
    assert other.unique().tolist() == [9.0]
    del holder
    assert arena.take(Use.GATHERED, 4 * KIB).untyped_storage().resizable() is False
    assert arena.report().fell_back == 1


def test_what_does_not_fit_comes_from_the_allocator_and_is_told() -> None:
    bus, heard = Bus(), Recorder()
    arena = Arena(CPU, bus)
    arena.reserve({Use.SUMS: 1 * KIB})
    bus.attach(heard)
    inside, outside = arena.take(Use.SUMS, 1 * KIB), arena.take(Use.SUMS, 3 * KIB)
    assert outside.untyped_storage().resizable() and not inside.untyped_storage().resizable()
    assert [(e.key, e.nbytes) for e in heard.events if e.what == "arena full"] == [("partial gradients", 3 * KIB)]
    levels = [e.nbytes for e in heard.events if e.kind == "counter"]
    assert levels == [0, 0]
    report = arena.report()
    assert (report.reserved, report.used, report.unused, report.fell_back_nbytes) == (1 * KIB, 1 * KIB, 0, 3 * KIB)


def test_a_region_that_was_too_small_is_reserved_anew_as_the_step_needed_it() -> None:
    arena = opened(2 * KIB)

    def step() -> int:
        before = arena.report().fell_back
        first, second = arena.take(Use.GATHERED, 2 * KIB), arena.take(Use.GATHERED, 1 * KIB)
        del first
        third = arena.take(Use.GATHERED, 2 * KIB)
        del second, third
        arena.step_ended()
        return arena.report().fell_back - before

    assert [step(), step(), step()] == [1, 0, 0]
    assert arena.report().reserved == 3 * KIB


def test_a_region_with_ranges_out_and_one_that_a_budget_bounds_stay_as_they_are() -> None:
    arena = opened(2 * KIB)
    held = [arena.take(Use.GATHERED, 2 * KIB) for _ in range(2)]
    arena.step_ended()
    assert arena.report().reserved == 2 * KIB
    held.clear()
    arena.growing = frozenset()
    arena.step_ended()
    assert arena.report().reserved == 2 * KIB


def test_ranges_outlive_the_arena() -> None:
    arena = opened(4 * KIB)
    kept = arena.take(Use.GATHERED, 4 * KIB).fill_(5)
    arena.close()
    assert arena.report() == arena.report().__class__(0, 0, 4 * KIB, 0, 0)
    del arena
    gc.collect()
    churn = [torch.zeros(4 * KIB, dtype=torch.uint8) for _ in range(50)]
    assert kept.unique().tolist() == [5] and len(churn) == 50


def test_memory_that_the_system_refuses_is_no_error() -> None:
    bus, heard = Bus(), Recorder()
    arena = Arena(CPU, bus)
    bus.attach(heard)
    arena.reserve({Use.GATHERED: 1 << 60})
    assert [(e.key, e.nbytes) for e in heard.events if e.what == "arena refused"] == [("gathered units", 1 << 60)]
    assert arena.take(Use.GATHERED, 100).numel() == 100
    assert arena.report().fell_back == 1


def test_holes_are_joined_and_the_end_stays_near_the_most_that_was_out() -> None:
    # A region twice the most that is out holds any order of sizes that differ by up to eight times; far less is usual.
    generator = torch.Generator().manual_seed(0)
    sizes = (torch.randint(1, 9, (4000,), generator=generator) * KIB).tolist()
    lives = torch.randint(1, 12, (4000,), generator=generator).tolist()
    arena = opened(0)
    arena.growing = frozenset()
    out: list[tuple[int, Tensor]] = []
    most = 0
    for now, (nbytes, life) in enumerate(zip(sizes, lives, strict=True)):
        out = [(end, tensor) for end, tensor in out if end > now]
        out.append((now + life, arena.take(Use.GATHERED, nbytes)))
        most = max(most, sum(tensor.numel() for _, tensor in out))
    reached = arena._regions[Use.GATHERED].reached
    assert most <= reached <= 1.6 * most
    out.clear()
    arena.step_ended()
    assert arena._regions[Use.GATHERED].reached == 0


def test_many_threads_never_share_a_byte() -> None:
    arena = opened(256 * KIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = arena.take(Use.GATHERED, 3 * KIB).fill_(number)
            other = arena.take(Use.GATHERED, 1 * KIB).fill_(number + 100)
            if mine.unique().tolist() != [number] or other.unique().tolist() != [number + 100]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert (arena.report().used, arena.report().fell_back) == (0, 0)
    assert 4 * KIB <= arena.report().peak <= 6 * rounded(4 * KIB, grain(CPU)) * 2
