"""A device with streams, of any type that torch knows: a copy stream a direction, events, page-locked host memory.

With ``cuda.py`` and ``streams.py`` the only place that touches streams and events.
"""

from __future__ import annotations

import functools
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.device.clock import StreamClock
from offload.device.interface import Device, HostMemory, Mark, failed
from offload.device.torch_module import function_of, module_of
from offload.errors import CapabilityError
from offload.events import During, now_ns
from offload.pages import ALIGN, locked_nbytes, over, round_up
from offload.threads import Workers
from offload.work import HostWork

#: Registered to see whether the driver counts page-locked memory against RLIMIT_MEMLOCK.
PROBE_NBYTES = 1 << 20


class StreamCalls:
    """The calls that `StreamDevice` makes for one device; tests put streams of their own in their place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides: dict[str, Any] = {}
        self._lanes: dict[int, tuple[str, bool]] = {}
        #: The times of the device's streams.
        self.clock = StreamClock(self)

    def stream(self) -> Any:
        """A new stream."""
        return torch.Stream(self.device)

    def side(self, lane: str) -> Any:
        """The stream of what is called ``lane``, made when it is first asked for."""
        if lane not in self._sides:
            self._sides[lane] = self.stream()
        return self._sides[lane]

    def lane(self, stream: Any) -> tuple[str, bool]:
        """What a stream is called, and whether it is one of `side`, which compute nothing."""
        number = self.number(stream)
        known = self._lanes.get(number)
        if known is None:
            name = next((name for name, side in self._sides.items() if self.number(side) == number), "")
            # The default stream is the one that computes unless the program says otherwise.
            others = sum(not beside for other, (_, beside) in self._lanes.items() if other)
            known = self._lanes[number] = (name or (f"compute {others + 2}" if number else "compute"), bool(name))
        return known

    def current(self) -> Any:
        """The stream that this thread queues work on."""
        current = function_of(self.device, "current_stream")
        assert current is not None, "torch.accelerator has it"
        return current(self.device)

    def number(self, stream: Any) -> int:
        """What tells a stream from others of the device."""
        return int(stream.stream_id)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one of this thread."""
        own: Callable[[Any], AbstractContextManager[Any]] | None = getattr(module_of(self.device), "stream", None)
        return self._using(stream) if own is None else own(stream)

    @contextmanager
    def _using(self, stream: Any) -> Iterator[None]:
        with torch.accelerator.device_index(self.device.index):
            before = self.current()
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def event(self) -> Any:
        """A new event; a host that waits for it blocks where the device can, for it must not spin on a core that another
        rank's update needs."""
        return torch.Event(self.device, blocking=True)

    def timed_event(self) -> Any:
        """A new event that knows how long after another one it came."""
        return torch.Event(self.device, enable_timing=True)

    def capturing(self) -> bool:
        """What this thread queues is captured into a graph, and not done now."""
        return False

    def now_ns(self) -> int:
        """The host's clock."""
        return now_ns()

    def here(self, tensor: Tensor) -> bool:
        """The tensor lies in the device's memory."""
        return tensor.device.type == self.device.type

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the device's memory, which the current stream may use from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream."""
        out.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """The tensor's memory, once freed, is not used again before what ``stream`` has queued by then."""
        tensor.record_stream(stream)


class _Copy:
    """A copy on a copy stream, and what it must keep alive.

    Attributes:
        event: passes when it is over.
        kept: tensors that stay alive until then, or until a stream orders their memory.
        during: when the stream does it; None where no observer keeps time.
    """

    def __init__(
        self, device: StreamDevice, event: Any, key: str, kept: tuple[Tensor, ...], during: During | None = None
    ) -> None:
        self._device = device
        self.event = event
        self._key = key
        self.kept = kept
        self.during = during
        self.span = ("", "", 0)

    def wait(self) -> None:
        calls = self._device.calls
        current = calls.current()
        try:
            current.wait_event(self.event)
        except RuntimeError as error:
            raise failed(self._key, error) from error
        # From here on the current stream orders the device's side: it may be freed as soon as that stream allows, even
        # where another stream allocated it. The host's side is still being read or written until the event.
        kept = self.kept
        for tensor in kept:
            if calls.here(tensor):
                calls.keep(tensor, current)
        self.kept = tuple(tensor for tensor in kept if not calls.here(tensor))

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise failed(self._key, error) from error
        self.kept = ()

    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError:
            # A failed device answers every query with its error; `wait` and `synchronize` are where it is raised.
            return True

    def when_over(self, call: Callable[[], None]) -> None:
        if self.done():
            call()
        else:
            self._device.watch(self.event, call)


class StreamDevice(Device):
    """A device with one copy stream a direction.

    Note: [What keeps a copied tensor alive]. The caching allocator reuses freed memory in the order of the stream that
    allocated it, which knows nothing of the copy streams. Each copy therefore holds both tensors, and `_in_flight`
    holds each copy until its event has passed, so that one dropped unwaited frees nothing under a running copy.
    """

    def __init__(self, device: torch.device, calls: StreamCalls) -> None:
        super().__init__(device, addresses_host=False)
        self.calls = calls
        self._to_device = self.calls.stream()
        self._to_host = self.calls.stream()
        self._watch = Workers("zhooks-copied")
        self._in_flight: dict[Any, deque[_Copy]] = {self._to_device: deque(), self._to_host: deque()}
        self._issue = threading.Lock()

    def start(self) -> None:
        self._watch.start()

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        calls = self.calls
        here = calls.here(out)
        if not (here or calls.here(source)):
            return self._worker.copy(out, source, key, self.bus)
        assert out.shape == source.shape, f"copy of {key}: {tuple(source.shape)} into {tuple(out.shape)}"
        across = here != calls.here(source)
        # A strided host side would be staged through pageable memory that is read before the stream has filled it.
        assert not across or (out.is_contiguous() and source.is_contiguous()), f"copy of {key}: both sides are contiguous"
        stream, what = (self._to_device, "copy h2d") if here else (self._to_host, "copy d2h")
        with self._issue:
            self._reap()
            try:
                # The caller's stream may still read `out` or write `source`.
                stream.wait_event(self.mark() if after is None else after)
                begin = calls.clock.on(stream, what) if self.bus.timed else None
                with calls.using(stream), torch.inference_mode(out.is_inference()), torch.no_grad():
                    calls.copy(out, source)
                during = None if begin is None else During(begin, calls.clock.on(stream, what))
                event = calls.event()
                event.record(stream)
            except RuntimeError as error:
                raise failed(key, error) from error
            started = _Copy(self, event, key, (out, source), during)
            self._in_flight[stream].append(started)
            started.span = (what, key, out.nbytes)
            self.bus.begin(*started.span, at=during)
        return started

    def mark(self) -> Mark:
        event = self.calls.event()
        event.record(self.calls.current())
        return event

    def watch(self, event: Any, call: Callable[[], None]) -> None:
        """Run ``call`` in a thread of the device's once ``event`` has passed, or the device has failed."""
        self._watch.start()
        self._watch.submit(partial(after, event, call))

    def on_host(self, tensor: Tensor) -> bool:
        return not self.calls.here(tensor)

    def empty(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return self.calls.empty(nbytes)

    def pins(self) -> bool:
        return _pinned_by_torch()

    def map_host(self, nbytes: int, *, locked: bool = False) -> HostMemory:
        return _PinnedMemory(self.device, nbytes) if locked else super().map_host(nbytes)

    def pin(self, memory: Tensor) -> None:
        """`map_host` has taken it from torch's own allocator of page-locked memory."""

    def unpin(self, memory: Tensor) -> None:
        """That allocator unlocks it, or keeps it for the next one."""

    def memlock_applies(self) -> bool:
        if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
            return False
        # Whoever enforces the limit must count; a driver whose registrations move neither counter does not.
        before = locked_nbytes()
        try:
            memory = self.map_host(PROBE_NBYTES, locked=True)
            self.pin(memory.tensor(0, PROBE_NBYTES))
        except CapabilityError:
            return True
        counted = locked_nbytes() - before >= PROBE_NBYTES
        self.unpin(memory.tensor(0, PROBE_NBYTES))
        memory.close()
        return counted

    def close(self) -> None:
        for stream in self._in_flight:
            # A device that has failed has nothing under way; the fault was raised where a result was wanted.
            with suppress(RuntimeError):
                stream.synchronize()
        self._watch.stop()
        with self._issue:
            self._reap()
        self._worker.close()

    def _reap(self) -> None:
        """Let go of what finished copies kept; a stream finishes in order."""
        for copies in self._in_flight.values():
            while copies and copies[0].done():
                over = copies.popleft()
                self.bus.end(*over.span, at=over.during)


@functools.cache
def _pinned_by_torch() -> bool:
    """torch's allocator gives page-locked memory for the accelerator of this process."""
    try:
        return _pinned(1).is_pinned()
    except RuntimeError:
        return False


class _PinnedMemory:
    """Whole pages of torch's own page-locked memory.

    Its allocators round sizes up to powers of two, and most of them start on a page: only a block that does not is taken anew
    with a page more.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        try:
            block = _pinned(nbytes)
            if block.data_ptr() % ALIGN:
                block = _pinned(nbytes + ALIGN)
        except RuntimeError as error:
            raise no_lock(device, nbytes, str(error).splitlines()[0]) from error
        self._start = -block.data_ptr() % ALIGN
        self._block: Tensor | None = block

    def tensor(self, start: int, nbytes: int) -> Tensor:
        assert self._block is not None, "host memory that was closed"
        begin = self._start + start
        buffer: Any = self._block.numpy()
        return over(memoryview(buffer)[begin : begin + round_up(nbytes)], nbytes)

    def close(self) -> None:
        self._block = None


def _pinned(nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def no_lock(device: torch.device, nbytes: int, why: str) -> CapabilityError:
    """The error of host memory that cannot be page-locked."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B"
    return CapabilityError(
        f"device {device} cannot page-lock {nbytes} B of host memory ({why}). Expected to stay below the limit on "
        f"locked memory (ulimit -l), found {locked_nbytes()} B locked and a limit of {found}; raise it (ulimit -l "
        f"unlimited, docker run --ulimit memlock=-1), or lower [budget] host"
    )


def after(event: Any, call: Callable[[], None]) -> None:
    """What a thread that watches does: wait for the event, and go on with ``call``."""
    with suppress(RuntimeError):
        # A failed device: whoever continues hears of it from the copy.
        event.synchronize()
    call()
