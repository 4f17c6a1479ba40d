"""Orders work between the streams of a device; on a CPU nothing is queued, and there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload.device.cuda import CudaCalls
from offload.device.stream_device import StreamCalls
from offload.device.torch_module import has_streams
from offload.device.virtual import VirtualCalls
from offload.events import Bus
from offload.virtual import NAME, running


@contextmanager
def beside(device: torch.device, lane: str, calls: StreamCalls | None = None) -> Iterator[None]:
    """What is issued inside runs after what the current stream has queued, and after what is waited for inside, for which the
    current stream itself does not wait.  Nothing on a CPU.

    Tensors used inside must outlive a stream's later wait for what was started; whoever lets go of them then calls `keep`.
    Args:
        lane: what shares a stream, one a device: things of one lane run in the order in which they were issued.
        calls: the streams of a device on paper, in tests.
    """
    calls = calls or calls_of(device)
    if calls is None:
        yield
        return
    event, side = calls.event(), calls.side(lane)
    event.record(calls.current())
    side.wait_event(event)
    with calls.using(side):
        yield


def keep(tensor: Tensor, calls: StreamCalls | None = None) -> None:
    """The current stream has waited for every use of ``tensor``: once that is freed, its memory is not used again before what
    this stream has been given by then, whichever stream took it."""
    calls = calls or calls_of(tensor.device)
    if calls is not None and calls.here(tensor):
        calls.keep(tensor, calls.current())


def calls_of(device: torch.device) -> StreamCalls | None:
    """The streams of ``device``; None where nothing is queued."""
    if device.type == NAME:
        return VirtualCalls(running()) if running().costs.accelerated else None
    return None if device.type == "cpu" else _calls_to(device)


@cache
def _calls_to(device: torch.device) -> StreamCalls | None:
    """Those of a device of this process."""
    if device.type == "cuda":
        return CudaCalls(device)
    return StreamCalls(device) if has_streams(device) else None


def bus_of(device: torch.device) -> Bus:
    """A bus for what runs on a device, which knows the points of its streams; of the virtual one by the machine's clocks."""
    if device.type == NAME:
        paper = VirtualCalls(running())
        return Bus(paper.now_ns, paper.clock)
    calls = calls_of(device)
    return Bus() if calls is None else Bus(streams=calls.clock)


def lane_of(device: torch.device) -> int:
    """What orders work on ``device`` now: a number of its current stream, 0 where nothing is queued."""
    calls = calls_of(device)
    return 0 if calls is None else calls.number(calls.current())


class StreamUses:
    """Which streams use memory that one of them took: they come after what filled it, and it is not used again before them.

    Note: [Units on several streams]
        Hooks gather a unit ahead, on whichever stream the unit before it runs, and free it as soon as its own forward has been
        issued.  Where that ran on another stream, the allocator must hear of it; and who finds the unit gathered by another
        stream waits for that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._calls = calls_of(device)
        self._owner: Any = None
        self._filled: Any = None
        self._others: list[Any] = []

    def taken(self) -> None:
        """The memory was taken on the current stream."""
        self._others = []
        if self._calls is not None:
            self._owner = self._filled = self._calls.current()

    def filling(self) -> None:
        """What fills the memory is queued on the current stream, or was started from it."""
        if self._calls is not None:
            self._filled = self._calls.current()

    def filled(self, tensor: Tensor) -> None:
        """The current stream has waited for what was started to fill ``tensor``, which lies in that memory, and uses it."""
        if self._calls is not None:
            current = self._calls.current()
            if current != self._filled:
                # Of one rank nothing was started that could be waited for: its values were copied there.
                _order(self._calls, current, self._filled)
            self._filled = current
            self._used(self._calls, tensor)

    def used(self, tensor: Tensor) -> None:
        """The current stream uses it, filled as it is."""
        if self._calls is not None and self._calls.current() != self._filled:
            _order(self._calls, self._calls.current(), self._filled)
            self._used(self._calls, tensor)

    def given(self) -> None:
        """It goes back to who orders its uses by the stream that took it alone, and not by an allocator."""
        for stream in self._others:
            assert self._calls is not None
            _order(self._calls, self._owner, stream)

    def _used(self, calls: StreamCalls, tensor: Tensor) -> None:
        current = calls.current()
        if current != self._owner and current not in self._others:
            calls.keep(tensor, current)
            self._others.append(current)


def _order(calls: StreamCalls, stream: Any, after: Any) -> None:
    """What ``stream`` is given from now on runs after what ``after`` has been given."""
    event = calls.event()
    event.record(after)
    stream.wait_event(event)
