"""The race detector finds what nothing orders, and says nothing of what is ordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload.disk import VirtualDisk
from offload.virtual import Machine, Races
from tests.support.virtual import machine, on_virtual


@contextmanager
def watched() -> Iterator[tuple[Machine, Races]]:
    with machine() as made:
        races = Races()
        made.listeners.append(races)
        yield made, races


def kinds(races: Races) -> list[str]:
    assert races.checked, "a check that saw nothing"
    return [race.kind for race in races.found]


def used(made: Machine, stream: Any, tensor: torch.Tensor, *, writes: bool) -> None:
    with made.using(stream):
        tensor.add_(1) if writes else tensor.sum()


@on_virtual(first=("reads", "writes"), second=("reads", "writes"), waits=(False, True))
def test_two_uses_on_two_streams_race_unless_one_waits_or_both_read(first: str, second: str, waits: bool) -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        used(made, one, x, writes=first == "writes")
        if waits:
            two.wait_event(made.moment(one))
        used(made, two, x, writes=second == "writes")
        both = {"reads": "read", "writes": "write"}
        expected = [] if waits or first == second == "reads" else [f"{both[second]} after {both[first]}"]
        assert kinds(races) == expected


@on_virtual()
def test_uses_of_other_bytes_of_one_storage_do_not_race() -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        used(made, one, x[:4], writes=True)
        used(made, two, x[4:], writes=True)
        assert kinds(races) == []
        used(made, two, x[3:5], writes=False)
        assert kinds(races) == ["read after write"]
        assert races.found[0].nbytes == 4


@on_virtual()
def test_an_event_recorded_before_the_use_orders_nothing() -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        early = made.moment(one)
        used(made, one, x, writes=True)
        two.wait_event(early)
        used(made, two, x, writes=False)
        assert kinds(races) == ["read after write"]


@on_virtual()
def test_the_host_orders_what_it_issues_after_a_synchronize() -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        used(made, one, x, writes=True)
        made.moment(one).synchronize()
        used(made, two, x, writes=True)
        assert kinds(races) == []


@on_virtual(kept=(False, True), waits=(False, True))
def test_memory_freed_under_a_use_on_another_stream_is_found_when_it_is_taken_again(kept: bool, waits: bool) -> None:
    with watched() as (made, races):
        side = made.stream("side")
        x = torch.empty(8, device="virtual")
        x.zero_()
        side.wait_event(made.moment(made.current))
        used(made, side, x, writes=False)
        if kept:
            made.keep(x, side)
        moment = made.moment(side)
        del x
        if waits:
            made.current.wait_event(moment)
        again = torch.empty(8, device="virtual")
        assert kinds(races) == ([] if kept or waits else ["freed in use"])
        del again


@on_virtual()
def test_what_a_stream_waits_for_is_over_in_memory_that_is_kept_for_it() -> None:
    with watched() as (made, races):
        filling, using = made.stream("filling"), made.stream("using")
        x = torch.empty(8, device="virtual")
        used(made, filling, x, writes=True)
        using.wait_event(made.moment(filling))
        used(made, using, x, writes=False)
        made.keep(x, using)
        del x
        torch.empty(8, device="virtual")
        assert kinds(races) == []


@on_virtual(waits=(False, True))
def test_host_memory_freed_under_a_copy_is_found_at_once(waits: bool) -> None:
    with watched() as (made, races):
        side, x = made.stream("side"), torch.empty(8, device="virtual")
        on_host = torch.empty(8, device="virtual:1")
        with made.using(side):
            on_host.copy_(x, non_blocking=True)
        if waits:
            side.synchronize()
        del on_host
        assert kinds(races) == ([] if waits else ["freed in use"])


@on_virtual(joined=(False, True))
def test_what_another_thread_has_waited_for_is_over_for_that_thread_alone(joined: bool) -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        used(made, one, x, writes=True)
        with made.thread("other"):
            made.moment(one).synchronize()
            used(made, two, x, writes=False)
            end = made.moment(made.host)
        assert kinds(races) == []
        if joined:
            end.synchronize()
        used(made, made.current, x, writes=True)
        # The read by the other thread's stream is under way either way.
        assert kinds(races) == ["write after read"] if joined else ["write after write", "write after read"]


@on_virtual(waits=(False, True))
def test_requests_of_a_disk_are_in_no_order_but_for_who_waits_for_them(waits: bool) -> None:
    with watched() as (made, races):
        disk, memory = VirtualDisk(made), torch.empty(4096, device="virtual:1", dtype=torch.uint8)
        extent, other = disk.allocate(4096, "one"), disk.allocate(4096, "other")
        write = disk.write(extent, memory)
        if waits:
            write.synchronize()
        disk.read(other, memory).synchronize()
        assert kinds(races) == ([] if waits else ["write after read"])


@on_virtual()
def test_a_finding_names_both_uses_their_streams_and_lines() -> None:
    with watched() as (made, races):
        x, one, two = torch.empty(8, device="virtual"), made.stream("one"), made.stream("two")
        used(made, one, x, writes=True)
        used(made, two, x, writes=False)
        text = str(races.found[0])
        assert "read after write, 32 B" in text and "aten.add" in text and "sum" in text
        assert "on stream one at test_races.py:" in text and "on stream two at test_races.py:" in text


@on_virtual(waits=(False, True))
def test_a_request_of_an_extent_that_another_one_still_uses_is_a_race(waits: bool) -> None:
    with watched() as (made, races):
        disk = VirtualDisk(made)
        one, other = (torch.empty(4096, device="virtual:1", dtype=torch.uint8) for _ in range(2))
        extent = disk.allocate(4096, "block")
        written = disk.write(extent, one)
        if waits:
            written.wait()
        disk.read(extent, other).wait()
        assert kinds(races) == ([] if waits else ["read after write"])
