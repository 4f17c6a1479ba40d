"""Times of streams: what a mark says, of streams on paper whose clock a test moves, and of a GPU's beside torch.profiler's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload.device import bus_of, open_device
from offload.events import CAPTURED, HERE, Bus, During, Event, KnownTime, Recorder, TimeMark
from offload.pages import aligned
from offload.work import DONE, all_of, during, then
from tests.support.on_gpus import module, on_gpus
from tests.support.streams import Paper, PaperDevice

MS = 1_000_000
#: What milliseconds in 32 bits, and rounding, may take away.
NEAR = 200

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.profiler, the host's clock, graphs"),
]


def listening(paper: Paper, *, keeps_time: bool = True) -> tuple[Bus, Recorder]:
    bus, recorder = Bus(paper.now_ns, paper.clock), Recorder(keeps_time=keeps_time)
    bus.attach(recorder)
    return bus, recorder


def time_of(mark: TimeMark | During | None) -> int:
    assert mark is not None and not isinstance(mark, During)
    found = mark.time_ns()
    assert found is not None, f"the time of a mark on {mark.lane} is not known yet"
    return found


def test_a_mark_has_the_time_at_which_its_stream_came_to_it_and_none_before() -> None:
    paper = Paper()
    paper.clock.mark()
    release = paper.hold(paper.compute)
    mark, queued_ns = paper.clock.mark(), paper.host_ns
    paper.host_ns += 5 * MS
    assert mark.time_ns() is None and not mark.lost
    release()
    paper.host_ns += 3 * MS
    assert time_of(mark) == pytest.approx(queued_ns + 5 * MS, abs=NEAR)
    assert (mark.lane, mark.beside) == ("compute", False)


def test_two_marks_around_a_wait_are_as_far_apart_as_the_stream_stood_still() -> None:
    paper = Paper()
    other = paper.stream("other")
    release = paper.hold(other)
    over = paper.event()
    over.record(other)
    before = paper.clock.mark()
    paper.compute.wait_event(over)
    after = paper.clock.mark()
    paper.host_ns += 40 * MS
    assert time_of(before) == pytest.approx(paper.host_ns - 40 * MS, abs=NEAR) and after.time_ns() is None
    release()
    assert time_of(after) - time_of(before) == pytest.approx(40 * MS, abs=NEAR)


def test_only_the_first_mark_waits_and_events_are_used_again() -> None:
    paper = Paper()
    time_of(paper.clock.mark())
    waits, made = paper.waits, paper.timed
    for _ in range(5000):
        paper.host_ns += MS // 10
        begin, end = paper.clock.mark(), paper.clock.mark()
        assert time_of(end) >= time_of(begin)
    assert paper.waits == waits
    assert paper.timed - made < 10


def test_a_time_once_known_stays_when_its_event_is_used_for_another_mark() -> None:
    paper = Paper()
    first = paper.clock.mark()
    known = time_of(first)
    paper.host_ns += 7 * MS
    assert time_of(paper.clock.mark()) == pytest.approx(known + 7 * MS, abs=NEAR)
    assert time_of(first) == known


@pytest.mark.parametrize("pace", [1 + 5e-5, 1 - 5e-5], ids=["fast", "slow"])
def test_a_device_whose_clock_drifts_stays_on_the_hosts(pace: float) -> None:
    paper = Paper()
    paper.pace = pace
    worst = 0
    for _ in range(600):
        paper.host_ns += 100 * MS
        worst = max(worst, abs(time_of(paper.clock.mark()) - paper.host_ns))
    # Over the minute it has drifted by 3 ms, within the first second by 50 us.
    assert worst < 60_000


@pytest.mark.parametrize("pace", [1 + 5e-5, 1 - 5e-5], ids=["fast", "slow"])
def test_what_a_stream_does_stays_in_order_while_the_clock_is_set_right(pace: float) -> None:
    paper = Paper()
    paper.pace = pace
    times = []
    for _ in range(3000):
        paper.host_ns += 10 * MS
        for _ in range(3):
            paper.host_ns += 1000
            times.append(time_of(paper.clock.mark()))
    assert times == sorted(times)
    lengths = [end - begin for begin, end in zip(times[1::3], times[2::3], strict=True)]
    assert max(abs(length - 1000) for length in lengths) < 2 * NEAR


def test_a_device_that_was_idle_for_long_is_on_the_hosts_clock_again_at_once() -> None:
    paper = Paper()
    paper.pace = 1 + 5e-5
    time_of(paper.clock.mark())
    paper.host_ns += 1_200_000 * MS
    time_of(paper.clock.mark())
    paper.host_ns += 2000 * MS
    assert time_of(paper.clock.mark()) == pytest.approx(paper.host_ns, abs=120_000)


def test_a_base_that_is_held_up_behind_other_work_moves_no_time() -> None:
    paper = Paper()
    time_of(paper.clock.mark())
    paper.host_ns += 1100 * MS
    release = paper.hold(paper.side("clock"))
    mark, at_ns = paper.clock.mark(), paper.host_ns
    assert mark.time_ns() is None, "its base has not passed"
    paper.host_ns += 30 * MS
    release()
    assert time_of(mark) == pytest.approx(at_ns, abs=NEAR)
    assert time_of(paper.clock.mark()) == pytest.approx(paper.host_ns, abs=NEAR)


def test_a_host_that_is_held_up_while_it_makes_a_base_moves_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = Paper()
    time_of(paper.clock.mark())
    paper.host_ns += 1100 * MS
    record = type(paper.event()).record

    def late(event: Any, stream: Any) -> None:
        record(event, stream)
        paper.host_ns += 20 * MS if stream is paper.side("clock") else 0

    monkeypatch.setattr(type(paper.event()), "record", late)
    mark = paper.clock.mark()
    assert time_of(mark) == pytest.approx(paper.host_ns, abs=NEAR)


def test_a_device_that_has_failed_loses_marks_and_raises_nothing() -> None:
    paper = Paper()
    release = paper.hold(paper.compute)
    before = paper.clock.mark()
    paper.fault = True
    assert before.time_ns() is None and before.lost
    after = paper.clock.mark()
    assert after.time_ns() is None and after.lost
    release()


def test_while_a_stream_is_captured_marks_are_neither_made_nor_looked_at() -> None:
    paper = Paper()
    before = paper.clock.mark()
    made, looks = paper.timed, paper.looks
    paper.captures = True
    assert before.time_ns() is None and not before.lost
    assert paper.clock.mark().lost == CAPTURED
    assert (paper.timed, paper.looks) == (made, looks)
    paper.captures = False
    time_of(before)


def test_lanes_are_told_apart_and_those_that_compute_nothing_say_so() -> None:
    paper = Paper()
    second, side = paper.stream("second"), paper.side("gather")
    marks = [paper.clock.mark()]
    for stream in (second, side):
        with paper.using(stream):
            marks.append(paper.clock.mark())
    assert [(mark.lane, mark.beside) for mark in marks] == [("compute", False), ("compute 2", False), ("gather", True)]


def test_marks_are_made_only_while_an_observer_keeps_time() -> None:
    paper = Paper()
    bus, recorder = listening(paper, keeps_time=False)
    bus.begin("compute", "u", at=HERE)
    assert paper.timed == 0 and recorder.events[0].mark is None
    keeper = Recorder(keeps_time=True)
    bus.attach(keeper)
    assert bus.timed
    bus.end("compute", "u", at=HERE)
    bus.begin("save", "u")
    assert time_of(keeper.events[0].mark) == pytest.approx(paper.host_ns, abs=NEAR)
    assert keeper.events[1].mark is None, "what the host does itself has its time already"
    bus.detach(keeper)
    assert bus.active and not bus.timed


def test_two_observers_get_the_same_mark() -> None:
    paper = Paper()
    bus, one = listening(paper)
    two = Recorder(keeps_time=True)
    bus.attach(two)
    bus.begin("compute", "u", at=HERE)
    assert one.events[0].mark is two.events[0].mark


def copied(device: PaperDevice, nbytes: int = 64) -> tuple[Any, Any]:
    there, here = device.empty(nbytes), aligned(nbytes)
    return device.copy(there, here, "block"), here


def test_a_copy_says_when_its_stream_does_it_whenever_that_is_noticed() -> None:
    device = PaperDevice()
    paper = device.paper
    device.bus, recorder = listening(paper)
    time_of(paper.clock.mark())
    release = paper.hold(paper.compute)
    copy, _ = copied(device)
    begun_ns = paper.host_ns + 4 * MS
    paper.host_ns = begun_ns
    release()
    paper.host_ns += 50 * MS
    found = during(copy)
    assert found is not None and found.begin is not None
    assert [time_of(mark) for mark in (found.begin, found.end)] == [pytest.approx(begun_ns, abs=NEAR)] * 2
    assert found.end.lane == "copy h2d" and found.end.beside
    # Both ends are known when it begins; the host notices its end at the next copy.
    copied(device)
    assert [(event.kind, event.mark is found) for event in recorder.events[:2]] == [("begin", True), ("end", True)]
    device.close()


def test_copies_nobody_times_make_no_marks() -> None:
    device = PaperDevice()
    device.bus, _ = listening(device.paper, keeps_time=False)
    assert during(copied(device)[0]) is None and device.paper.timed == 0
    device.close()


def test_several_works_are_done_from_the_first_ones_begin_to_the_last_ones_end() -> None:
    class Known:
        def __init__(self, begin: int, end: int) -> None:
            self.during = During(KnownTime("gather", begin), KnownTime("gather", end))

        def wait(self) -> None: ...
        def synchronize(self) -> None: ...

        def done(self) -> bool:
            return True

        def when_over(self, call: Any) -> None:
            call()

    both = during(all_of([Known(1, 2), Known(2, 5)]))
    assert both is not None and (time_of(both.begin), time_of(both.end)) == (1, 5)
    assert during(all_of([DONE, Known(2, 5)])) is None and during(DONE) is None and during(all_of([])) is None
    after = during(then(Known(0, 1), lambda: Known(2, 5)))
    assert after is not None and after.begin is None and time_of(after.end) == 5


def test_a_bus_for_a_cpu_has_no_streams() -> None:
    bus, recorder = bus_of(torch.device("cpu")), Recorder(keeps_time=True)
    bus.attach(recorder)
    bus.begin("gather", "u", at=HERE)
    assert recorder.events == [Event("begin", "gather", "u", 0, recorder.events[0].time_ns)]
    assert recorder.events[0].mark is None


# --- of a device ------------------------------------------------------------------------------------------------------


@contextmanager
def heard(device: str) -> Iterator[tuple[Bus, Recorder]]:
    """The bus of the device of this process, and what is said on it."""
    bus, recorder = bus_of(torch.device(device, module(device).current_device())), Recorder(keeps_time=True)
    bus.attach(recorder)
    try:
        yield bus, recorder
    finally:
        bus.detach(recorder)


def known(recorder: Recorder) -> list[int]:
    torch.accelerator.synchronize()
    return [time_of(event.mark) for event in recorder.events]


@on_gpus()
def test_a_wait_lasts_as_long_as_the_stream_stood_still(device: str) -> None:
    with heard(device) as (bus, recorder):
        bus.instant("ready", "u", at=HERE)
        side = module(device).Stream()
        timed = [module(device).Event(enable_timing=True) for _ in range(2)]
        torch.accelerator.synchronize()
        with module(device).stream(side):
            timed[0].record()
            if device == "cuda":
                torch.cuda._sleep(1 << 28)
            else:
                # A kernel of it takes two microseconds and one for each MB.
                torch.ones(1 << 28, dtype=torch.uint8, device=device)
            timed[1].record()
        bus.begin("wait gather", "u", at=HERE)
        torch.accelerator.current_stream().wait_event(timed[1])
        bus.end("wait gather", "u", at=HERE)
        _, begin, end = known(recorder)
        assert end - begin == pytest.approx(timed[0].elapsed_time(timed[1]) * 1e6, rel=0.02)


# --- what is CUDA's own: torch.profiler's times, the host's clock, graphs ----------------------------------------------


@pytest.fixture
def cuda_bus() -> Iterator[tuple[Bus, Recorder]]:
    with heard("cuda") as found:
        yield found


class TestCuda:
    pytestmark = gpu

    def test_a_span_lasts_as_long_as_its_kernels_by_torchs_profiler(self, cuda_bus: tuple[Bus, Recorder]) -> None:
        bus, recorder = cuda_bus
        matrix = torch.randn(4096, 4096, device="cuda")
        (matrix @ matrix).sum().item()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            bus.begin("compute", "u", at=HERE)
            for _ in range(20):
                matrix @ matrix
            bus.end("compute", "u", at=HERE)
            torch.cuda.synchronize()
        begin, end = known(recorder)
        kernels = [event.time_range for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
        lasted_us = max(each.end for each in kernels) - min(each.start for each in kernels)
        assert end - begin == pytest.approx(lasted_us * 1e3, rel=0.02)

    def test_an_idle_device_comes_to_a_mark_as_the_host_makes_it(self, cuda_bus: tuple[Bus, Recorder]) -> None:
        bus, recorder = cuda_bus
        bus.instant("ready", "u", at=HERE)
        between = []
        for _ in range(30):
            torch.cuda.synchronize()
            before_ns = time.perf_counter_ns()
            bus.instant("ready", "u", at=HERE)
            torch.cuda.synchronize()
            between.append((before_ns, time.perf_counter_ns()))
            time.sleep(0.1)
        for at_ns, (before_ns, after_ns) in zip(known(recorder)[1:], between, strict=True):
            assert before_ns - 100_000 <= at_ns <= after_ns + 100_000

    def test_a_copy_lasts_as_long_as_by_torchs_profiler(self) -> None:
        device, recorder = open_device(torch.device("cuda")), Recorder(keeps_time=True)
        device.bus = bus_of(torch.device("cuda", torch.cuda.current_device()))
        device.bus.attach(recorder)
        source = aligned(1 << 28)
        device.pin(source)
        there = device.empty(1 << 28)
        device.copy(there, source, "first").synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            copy = device.copy(there, source, "block")
            copy.synchronize()
        found = during(copy)
        (by_profiler,) = [event.time_range for event in profile.events() or () if "HtoD" in event.name]
        assert found is not None
        lasted_ns = time_of(found.end) - time_of(found.begin)
        assert lasted_ns == pytest.approx((by_profiler.end - by_profiler.start) * 1e3, rel=0.02)
        device.close()
        device.unpin(source)

    def test_a_captured_stream_is_left_alone(self, cuda_bus: tuple[Bus, Recorder]) -> None:
        bus, recorder = cuda_bus
        values = torch.zeros(8, device="cuda")
        bus.instant("ready", "u", at=HERE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bus.begin("compute", "u", at=HERE)
            values += 1
            bus.end("compute", "u", at=HERE)
            assert recorder.events[0].mark is not None
            recorder.events[0].mark.time_ns()
        graph.replay()
        torch.cuda.synchronize()
        assert values.sum().item() == 8
        assert [getattr(event.mark, "lost", "") for event in recorder.events] == ["", CAPTURED, CAPTURED]
