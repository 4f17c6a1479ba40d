"""Clocks of a machine on paper: what overlaps, what waits, and what the host pays for."""

from __future__ import annotations

import torch

from offload.device import beside, open_device
from offload.disk import VirtualDisk
from offload.virtual import Moment, running
from tests.support.virtual import machine, on_virtual


@on_virtual()
def test_the_host_runs_ahead_of_the_stream_it_gives_operations_to() -> None:
    with machine() as made:
        x = torch.empty(8, device="virtual")
        for _ in range(4):
            x.add_(1)
        assert made.now == 1.0, "four times what issuing takes"
        assert made.current.ready == 4.25, "the first was issued after a quarter, each takes a second"


@on_virtual()
def test_without_an_accelerator_the_host_computes_itself() -> None:
    with machine(accelerated=False) as made:
        x = torch.empty(8, device="virtual")
        for _ in range(4):
            x.add_(1)
        assert made.now == 5.0 and made.current is made.host


@on_virtual()
def test_without_an_accelerator_the_program_goes_on_by_itself_after_another_thread_has_run() -> None:
    with machine(accelerated=False) as made:
        x = torch.empty(8, device="virtual")
        with made.thread("other"):
            x.add_(1)
            assert made.current is made.host is made.side("other")
        assert made.current is made.host is not made.side("other")
        x.add_(1)
        assert (made.now, made.side("other").ready) == (1.25, 1.25), "each has computed once, at the same time"


@on_virtual()
def test_streams_overlap_until_an_event_orders_them() -> None:
    with machine(issue=0.0) as made:
        x, y = torch.empty(8, device="virtual"), torch.empty(8, device="virtual")
        side = made.stream("side")
        x.add_(1)
        with made.using(side):
            y.add_(1)
        assert (made.current.ready, side.ready) == (1.0, 1.0)
        moment = made.moment(side)
        made.current.wait_event(moment)
        x.add_(y)
        assert made.current.ready == 2.0
        with made.using(side):
            y.add_(1)
            y.add_(1)
        made.current.wait_event(made.moment(side))
        assert made.current.ready == 3.0


@on_virtual()
def test_what_is_issued_beside_runs_after_the_current_stream_which_does_not_wait_for_it() -> None:
    with machine(issue=0.0) as made:
        x = torch.empty(8, device="virtual")
        x.add_(1)
        with beside(torch.device("virtual"), "lane"):
            x.add_(1)
        assert made.side("lane").ready == 2.0 and made.current.ready == 1.0


@on_virtual()
def test_a_synchronized_event_moves_the_host_s_clock_and_an_early_query_does_not() -> None:
    with machine(issue=0.0) as made:
        x = torch.empty(8, device="virtual")
        x.add_(1)
        moment = Moment(made)
        moment.record(made.current)
        assert not moment.query() and made.now == 0.0
        moment.synchronize()
        assert made.now == 1.0 and moment.query()


@on_virtual()
def test_a_copy_to_the_device_runs_beside_compute_and_is_waited_for_by_the_stream() -> None:
    with machine(issue=0.0) as made:
        device = open_device(torch.device("virtual"))
        pinned = device.map_host(4096).tensor(0, 4096)
        out = device.empty(4096)
        copy = device.copy(out, pinned, "block")
        other = torch.empty(8, device="virtual")
        for _ in range(5):
            other.add_(1)
        assert made.current.ready == 5.0 and not copy.done()
        copy.wait()
        out.add_(1)
        assert made.current.ready == 11.0 and made.now == 0.0
        copy.synchronize()
        assert made.now == 10.0 and copy.done()
        device.close()


@on_virtual()
def test_copies_of_two_directions_overlap_and_those_of_one_do_not() -> None:
    with machine(issue=0.0) as made:
        device = open_device(torch.device("virtual"))
        host = device.map_host(1 << 20)
        ins = [device.copy(device.empty(4096), host.tensor(at * 4096, 4096)) for at in range(2)]
        out = device.copy(host.tensor(8192, 4096), device.empty(4096))
        out.synchronize()
        assert made.now == 10.0
        for copy in ins:
            copy.synchronize()
        assert made.now == 20.0
        device.close()


@on_virtual()
def test_what_follows_a_copy_happens_at_its_time_and_leaves_the_host_s_clock() -> None:
    with machine(issue=0.0) as made:
        device = open_device(torch.device("virtual"))
        copy = device.copy(device.empty(4096), device.map_host(4096).tensor(0, 4096))
        seen: list[float] = []
        copy.when_over(lambda: seen.append(running().now))
        assert seen == [10.0] and made.now == 0.0
        device.close()


@on_virtual()
def test_a_device_says_what_is_free_of_the_machine_s_memory() -> None:
    with machine(memory=(1000, 2000, 3000)):
        device = open_device(torch.device("virtual"))
        kept = device.empty(400)
        assert device.memory() == (600, 1000)
        assert [bound.free for bound in device.facts.memory_bounds()] == [2000]
        del kept
        assert device.memory() == (1000, 1000)
        device.close()


@on_virtual()
def test_a_host_without_a_core_to_spare_does_the_work_of_its_threads_itself() -> None:
    for spare in (True, False):
        with machine(accelerated=False, spare_cores=spare) as made:
            beside = made.side("disk")
            made.do("disk read", beside, 7.0, 0, [])
            assert (made.now == 0.0) is spare and (beside is made.host) is not spare


@on_virtual()
def test_whoever_waits_for_the_disk_is_blocked_beside_an_accelerator_too() -> None:
    with machine(drive=100.0) as made:
        disk = VirtualDisk(made)
        disk.write(disk.allocate(4096, "block"), torch.empty(4096, device="virtual:1", dtype=torch.uint8)).wait()
        assert made.now == 100.0
