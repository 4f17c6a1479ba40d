"""Calls of a program are counted, those of what stands in for a device are not, and what a simulation makes of them."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import pytest

from offload.errors import SimulationError
from offload.virtual import Calls


def inner() -> int:
    return len("abc")


def test_functions_and_built_in_ones_are_counted_while_it_is_on() -> None:
    calls = Calls()
    inner()
    with calls.on():
        for _ in range(10):
            inner()
    counted = calls.count
    inner()
    assert calls.count == counted
    # Ten of each, and what leaving the block takes.
    assert 20 <= counted <= 24


def test_what_is_apart_is_not_counted_nor_what_it_calls() -> None:
    calls = Calls(apart=(__file__,))
    with calls.on():
        for _ in range(10):
            inner()
    assert calls.count <= 4


def test_where_a_profiler_is_on_nothing_is_counted_and_it_goes_on() -> None:
    calls = Calls()
    heard: list[str] = []

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        heard.append(event)

    sys.setprofile(profiler)
    try:
        with pytest.raises(SimulationError, match=r"no profiler on this thread.* found .*profiler\."), calls.on():
            pass
        assert sys.getprofile() is profiler and heard
    finally:
        sys.setprofile(None)


def test_another_thread_is_counted_once_it_is_followed() -> None:
    counts: dict[bool, int] = {}
    calls = Calls()

    def work(follow: bool) -> None:
        if follow:
            calls.follow()
        before = calls.count
        for _ in range(1000):
            inner()
        counts[follow] = calls.count - before

    with calls.on():
        for follow in (False, True):
            thread = threading.Thread(target=work, args=(follow,))
            thread.start()
            thread.join()
    # Beside it this thread starts it and waits.
    assert counts[False] < 200 and counts[True] >= 2000
