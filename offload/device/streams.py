"""Orders work between the streams of a device; on a CPU nothing is queued, and there is nothing to order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.device.cuda import CudaCalls
from offload.device.virtual import VirtualCalls
from offload.virtual import NAME, running


@contextmanager
def beside(device: torch.device, lane: str, calls: CudaCalls | None = None) -> Iterator[Callable[[Tensor], None]]:
    """What is issued inside runs after what the current stream has queued, and after what is waited for inside, for which the
    current stream itself does not wait.  Nothing on a CPU.

    Tensors used inside must outlive a later wait of the current stream for what was started; what others may free before that
    is given to the function that is yielded.
    Args:
        lane: what shares a stream, one a device: things of one lane run in the order in which they were issued.
        calls: the streams of a device on paper, in tests.
    """
    calls = calls or calls_of(device)
    if calls is None:
        yield _ignore
        return
    event, side = calls.event(), calls.side(lane)
    event.record(calls.current())
    side.wait_event(event)
    with calls.using(side):
        yield partial(_keep, calls, side)


def _keep(calls: CudaCalls, side: Any, tensor: Tensor) -> None:
    if calls.here(tensor):
        calls.keep(tensor, side)


def _ignore(tensor: Tensor) -> None:
    return None


@functools.cache
def _cuda_calls(device: torch.device) -> CudaCalls:
    return CudaCalls(device)


def calls_of(device: torch.device) -> CudaCalls | None:
    """The streams of ``device``; None where nothing is queued."""
    if device.type == NAME:
        return VirtualCalls(running()) if running().costs.accelerated else None
    return _cuda_calls(device) if device.type == "cuda" else None


def lane_of(device: torch.device) -> int:
    """What orders work on ``device`` now: a number of its current stream, 0 where nothing is queued."""
    calls = calls_of(device)
    return 0 if calls is None else calls.number(calls.current())


class OneStream:
    """Brings work that several streams give rise to under one of them: the first, until `end`.

    Note: [One stream a backward]
        Autograd runs each node of the graph on the stream of its forward, so gradients of a model that runs on several streams
        arrive on several. What is done with them jointly is ordered by the one stream it all runs on: it waits for each
        arrival, and keeps the memory that another stream allocated. Whoever ends it waits for that stream.
    """

    def __init__(self, calls: CudaCalls | None) -> None:
        self._calls = calls
        self._stream: Any = None

    def work(self, given: Iterable[Tensor | None] = ()) -> AbstractContextManager[None]:
        """What is queued inside runs under the one stream, after what the current one has queued; ``given`` are tensors that
        it uses, whoever allocated them. Nothing on a CPU."""
        return _NOTHING if self._calls is None else self._brought(self._calls, given)

    def end(self, left: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """As `work`, and the last of it: the current stream then goes on after it, and may use what ``left`` names."""
        return _NOTHING if self._calls is None else self._ended(self._calls, left)

    @contextmanager
    def _brought(self, calls: CudaCalls, given: Iterable[Tensor | None]) -> Iterator[None]:
        current = calls.current()
        self._stream = current if self._stream is None else self._stream
        if current == self._stream:
            yield
            return
        _order(calls, self._stream, current)
        for tensor in given:
            if tensor is not None:
                calls.keep(tensor, self._stream)
        with calls.using(self._stream):
            yield

    @contextmanager
    def _ended(self, calls: CudaCalls, left: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        current = calls.current()
        try:
            with self._brought(calls, ()):
                yield
        finally:
            stream, self._stream = self._stream, None
            if stream != current:
                _order(calls, current, stream)
                for tensor in left():
                    calls.keep(tensor, current)


def one_stream(device: torch.device) -> OneStream:
    """The `OneStream` for work on ``device``."""
    return OneStream(calls_of(device))


_NOTHING: AbstractContextManager[None] = nullcontext()


def _order(calls: CudaCalls, stream: Any, after: Any) -> None:
    """What ``stream`` is given from now on runs after what ``after`` has been given."""
    event = calls.event()
    event.record(after)
    stream.wait_event(event)
