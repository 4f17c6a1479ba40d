"""The streams that a backward's gradients are added up and reduced on; on a CPU nothing is queued or ordered.

Note: [Streams of a backward]
    Autograd runs each node of the graph on the stream of its forward, so gradients of a model that runs on several streams
    arrive on several.  They are added up on one, that of the first: it waits for each arrival, and keeps the memory that
    another stream allocated.  Reductions have a stream of their own, on which they begin after what the adding stream has been
    given, wait for the collective, are divided, and are put where gradients are kept.  The adding stream waits for a reduction
    only when the buffers that are kept reach a bound, and at the end of the backward.

Note: [Memory of two streams]
    Both streams use what either has taken, and no allocator hears of it; an arena knows one stream, so buffers are taken on the
    adding one.  Two rules make that safe.  The reducing stream waits for the adding one whenever it is given something; and
    what a reduction uses is kept until the adding stream has waited for that reduction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from torch import Tensor

from offload.device.stream_device import StreamCalls
from offload.device.streams import _order

__all__ = ["CommContext"]

T = TypeVar("T")


class CommContext(Generic[T]):
    """The adding and the reducing stream of one device, and the reductions whose buffers are kept.

    Args:
        calls: the device's streams; None where nothing is queued.
    Attributes:
        kept: reductions that have landed for the reducing stream, but not yet for the adding one, the oldest first.
    """

    def __init__(self, calls: StreamCalls | None) -> None:
        self._calls = calls
        self.kept: deque[T] = deque()
        self._events: deque[Any] = deque()
        self._stream: Any = None
        # The reducing stream has been given something that the adding one has not waited for: a graph that is captured must
        # not wait for a stream that is no part of it.
        self._reduces = False

    @property
    def queues(self) -> bool:
        """There are streams: the host goes on before what it has queued is done."""
        return self._calls is not None

    def adding(self, given: Iterable[Tensor | None] = ()) -> AbstractContextManager[None]:
        """What is queued inside runs on the adding stream, after what the current one has queued; ``given`` are tensors that
        it uses, whoever allocated them."""
        return _NOTHING if self._calls is None else self._adding(self._calls, given)

    @contextmanager
    def _adding(self, calls: StreamCalls, given: Iterable[Tensor | None]) -> Iterator[None]:
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

    def reducing(self) -> AbstractContextManager[None]:
        """What is queued inside runs on the reducing stream, after what the current one has queued."""
        return _NOTHING if self._calls is None else self._reducing(self._calls)

    @contextmanager
    def _reducing(self, calls: StreamCalls) -> Iterator[None]:
        side, current = calls.side("reduce"), calls.current()
        _order(calls, side, current)
        self._reduces = True
        try:
            with calls.using(side):
                yield
        except BaseException:
            # What was under way inside is let go of as the error is handled.
            _order(calls, current, side)
            raise

    def taking(self) -> AbstractContextManager[Any]:
        """Memory that is taken inside is the adding stream's."""
        known = self._calls is not None and self._stream is not None
        return self._calls.using(self._stream) if known and self._calls is not None else _NOTHING

    def keep(self, reduction: T) -> None:
        """All of a reduction has been queued on the reducing stream, and the adding one has not waited for it."""
        assert self._calls is not None
        event = self._calls.event()
        event.record(self._calls.side("reduce"))
        self._events.append(event)
        self.kept.append(reduction)

    def wait_for_oldest(self) -> T:
        """The adding stream waits for the oldest reduction that is kept: nothing uses its buffers any more."""
        self._stream.wait_event(self._events.popleft())
        return self.kept.popleft()

    def catch_up(self) -> None:
        """The current stream goes on after what the reducing one has been given: somebody looks at gradients in a backward."""
        if self._calls is not None and self._reduces:
            _order(self._calls, self._calls.current(), self._calls.side("reduce"))

    def end(self, left: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
        """As ``adding``, and the last of it: the current stream then goes on after all of both streams, and may use what
        ``left`` names."""
        return _NOTHING if self._calls is None else self._ending(self._calls, left)

    @contextmanager
    def _ending(self, calls: StreamCalls, left: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        current = calls.current()
        try:
            with self._adding(calls, ()):
                yield
        finally:
            self._join(calls)
            stream, self._stream = self._stream, None
            if stream != current:
                _order(calls, current, stream)
                for tensor in left():
                    calls.keep(tensor, current)

    def join(self) -> list[T]:
        """The adding stream goes on after all that the reducing one has been given; returns the reductions that were kept."""
        return [] if self._calls is None else self._join(self._calls)

    def _join(self, calls: StreamCalls) -> list[T]:
        if self._reduces and self._stream is not None:
            _order(calls, self._stream, calls.side("reduce"))
            self._reduces = False
        kept = list(self.kept)
        self.kept.clear()
        self._events.clear()
        return kept


_NOTHING: AbstractContextManager[None] = nullcontext()
