"""What observers may rely on, and what the training loop may rely on whatever observers do."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import nn

import zhooks
from offload.events import Bus, Event, Recorder


class Ticks:
    """A clock that moves by one at each look."""

    def __init__(self) -> None:
        self._next = count(1)

    def __call__(self) -> int:
        return next(self._next)


class Faulty:
    """Raises at every event, and counts how often it was asked."""

    def __init__(self) -> None:
        self.heard = 0

    def on_event(self, event: Event) -> None:
        self.heard += 1
        raise KeyError(event.what)


def test_an_event_is_a_frozen_slotted_fact() -> None:
    event = Event("begin", "gather", "layers.0", 64, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.nbytes = 3  # type: ignore[misc]
    assert not hasattr(event, "__dict__")
    assert event == Event("begin", "gather", "layers.0", 64, 7)


def test_a_bus_is_active_only_while_somebody_listens() -> None:
    bus, one, two = Bus(), Recorder(), Recorder()
    seen = [bus.active]
    for change, observer in ((bus.attach, one), (bus.attach, two), (bus.detach, one), (bus.detach, two)):
        change(observer)
        seen.append(bus.active)
    assert seen == [False, True, True, True, False]


def test_a_bus_nobody_listens_to_does_not_read_the_clock() -> None:
    def clock() -> int:
        raise AssertionError("the clock was read")

    bus = Bus(clock)
    bus.begin("gather", "u")
    bus.end("gather", "u")
    bus.instant("step", "u")
    bus.counter("held", "u", 3)


def test_observers_hear_every_kind_with_its_bytes_and_time() -> None:
    bus, recorder = Bus(Ticks()), Recorder()
    bus.attach(recorder)
    bus.begin("gather", "u", 8)
    bus.end("gather", "u", 8)
    bus.instant("step", "optimizer")
    bus.counter("held", "device", 32)
    assert recorder.events == [
        Event("begin", "gather", "u", 8, 1),
        Event("end", "gather", "u", 8, 2),
        Event("instant", "step", "optimizer", 0, 3),
        Event("counter", "held", "device", 32, 4),
    ]


def test_a_call_about_a_model_is_a_span_and_says_where_it_raised() -> None:
    bus, recorder = Bus(Ticks()), Recorder()
    bus.attach(recorder)
    with bus.verb("save"):
        pass
    with pytest.raises(KeyError), bus.verb("detach"):
        raise KeyError
    said = [(event.kind, event.what, event.key) for event in recorder.events]
    assert said == [
        ("begin", "attachment", "save"),
        ("end", "attachment", "save"),
        ("begin", "attachment", "detach"),
        ("instant", "attachment failed", "detach"),
        ("end", "attachment", "detach"),
    ]


def test_time_never_runs_backward() -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    for _ in range(100):
        bus.instant("step", "u")
    times = [event.time_ns for event in recorder.events]
    assert times == sorted(times) and times[0] > 0


def test_an_observer_attached_twice_hears_each_event_once() -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    bus.attach(recorder)
    bus.instant("step", "u")
    assert len(recorder.events) == 1
    bus.detach(recorder)
    assert not bus.active


def test_detaching_a_stranger_changes_nothing() -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    bus.detach(Recorder())
    bus.instant("step", "u")
    assert recorder.names() == ["instant step u"]


def test_observers_are_told_apart_by_identity_not_by_equality() -> None:
    class Equal(Recorder):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    bus, one, two = Bus(), Equal(), Equal()
    bus.attach(one)
    bus.attach(two)
    bus.detach(two)
    bus.instant("step", "u")
    assert (len(one.events), len(two.events)) == (1, 0)


def test_an_observer_that_raises_is_detached_and_reported_once() -> None:
    bus, faulty = Bus(), Faulty()
    bus.attach(faulty)
    with pytest.warns(RuntimeWarning, match=r"Faulty raised KeyError: 'gather' on begin gather u; .*detached") as said:
        bus.begin("gather", "u")
        bus.end("gather", "u")
    assert (len(said), faulty.heard, bus.active) == (1, 1, False)


def test_the_warning_points_at_the_users_line() -> None:
    model = nn.Linear(2, 2)
    attachment = zhooks.attach(model)
    with pytest.warns(RuntimeWarning, match="observer Faulty raised") as said, attachment.observe(Faulty()):
        model(torch.ones(1, 2))
    attachment.detach()
    assert said[0].filename == __file__


def test_the_others_hear_the_event_that_one_observer_raised_on() -> None:
    bus, before, after = Bus(), Recorder(), Recorder()
    for observer in (before, Faulty(), after):
        bus.attach(observer)
    with warnings.catch_warnings():
        # Even where the user turned warnings into errors, which stops the loop at the user's own wish.
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"^observer Faulty raised KeyError: 'step' on instant step u; it is detached"):
            bus.instant("step", "u")
    bus.instant("step", "v")
    assert before.names() == after.names() == ["instant step u", "instant step v"]


def test_an_interrupt_in_an_observer_is_no_mistake_and_passes_through() -> None:
    class Interrupted:
        def on_event(self, event: Event) -> None:
            raise KeyboardInterrupt

    bus = Bus()
    bus.attach(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        bus.instant("step", "u")


def test_an_observer_may_detach_itself_or_attach_another_while_it_listens() -> None:
    class Once:
        def __init__(self) -> None:
            self.heard = 0

        def on_event(self, event: Event) -> None:
            self.heard += 1
            bus.detach(self)
            bus.attach(later)

    bus, once, later = Bus(), Once(), Recorder()
    bus.attach(once)
    bus.instant("step", "u")
    bus.instant("step", "v")
    assert (once.heard, later.names()) == (1, ["instant step v"])


def test_observers_come_and_go_while_other_threads_emit() -> None:
    bus, steady = Bus(), Recorder()
    bus.attach(steady)

    def emit() -> None:
        for _ in range(500):
            bus.instant("step", "u")

    def change() -> None:
        for _ in range(500):
            passing = Recorder()
            bus.attach(passing)
            bus.detach(passing)

    works: list[Callable[[], None]] = [emit, emit, change, change]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(steady.events) == 1000
    bus.detach(steady)
    assert not bus.active


def recorded(*events: tuple[str, str, str]) -> Recorder:
    bus, recorder = Bus(Ticks()), Recorder()
    bus.attach(recorder)
    for kind, what, key in events:
        getattr(bus, kind)(what, key)
    return recorder


def test_names_are_lines_in_the_order_heard() -> None:
    recorder = recorded(("begin", "gather", "a"), ("instant", "release", "b"), ("end", "gather", "a"))
    assert recorder.names() == ["begin gather a", "instant release b", "end gather a"]
    assert recorder.names("gather") == ["begin gather a", "end gather a"]
    assert recorder.names("reduce") == []


def test_spans_of_different_keys_may_overlap() -> None:
    recorder = recorded(
        ("begin", "gather", "a"), ("begin", "gather", "b"), ("end", "gather", "a"), ("end", "gather", "b")
    )
    assert recorder.spans("gather") == [("a", 1, 3), ("b", 2, 4)]


def test_spans_of_one_key_nest() -> None:
    recorder = recorded(
        ("begin", "compute", "a"), ("begin", "compute", "a"), ("end", "compute", "a"), ("end", "compute", "a")
    )
    assert recorder.spans("compute") == [("a", 1, 4), ("a", 2, 3)]


def test_spans_leave_out_what_never_ended_never_began_or_is_something_else() -> None:
    recorder = recorded(
        ("end", "gather", "a"), ("begin", "gather", "b"), ("begin", "reduce", "c"), ("instant", "gather", "b"),
        ("end", "reduce", "c"),
    )  # fmt: skip
    assert recorder.spans("gather") == []
    assert recorder.spans("reduce") == [("c", 3, 5)]


def test_a_cleared_recorder_is_empty_and_goes_on_listening() -> None:
    bus, recorder = Bus(), Recorder()
    bus.attach(recorder)
    bus.instant("step", "u")
    recorder.clear()
    assert recorder.events == []
    bus.instant("step", "v")
    assert recorder.names() == ["instant step v"]
