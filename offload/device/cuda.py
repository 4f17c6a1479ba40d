"""A CUDA device: a copy stream a direction, events, page-locking.

With ``streams.py`` the only place that touches CUDA streams and events.
"""

from __future__ import annotations

import functools
import resource
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.device.clock import StreamClock
from offload.device.cpu import Worker
from offload.device.interface import Device, Mark, failed
from offload.errors import CapabilityError
from offload.events import During, now_ns
from offload.pages import ALIGN, aligned, locked_nbytes
from offload.threads import Workers
from offload.work import HostWork

#: Registered to see whether the driver counts page-locked memory against RLIMIT_MEMLOCK.
PROBE_NBYTES = 1 << 20
_HOST_REGISTER_PORTABLE = 1
#: What unlocking answers where the address was never locked: ours to get right. Any other error is an earlier fault's.
_NOT_LOCKED = (1, 713)


class CudaCalls:
    """The calls to CUDA that `CudaDevice` makes for one device; tests put streams of their own in their place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides: dict[str, Any] = {}
        self._lanes: dict[int, tuple[str, bool]] = {}
        #: The times of the device's streams.
        self.clock = StreamClock(self)

    def stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self.device)

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
            name = next((name for name, side in self._sides.items() if side == stream), "")
            # The default stream is the one that computes unless the program says otherwise.
            others = sum(not beside for other, (_, beside) in self._lanes.items() if other)
            known = self._lanes[number] = (name or (f"compute {others + 2}" if number else "compute"), bool(name))
        return known

    def current(self) -> Any:
        """The stream that this thread queues work on."""
        return torch.cuda.current_stream(self.device)

    def number(self, stream: Any) -> int:
        """What tells a stream from others of the device."""
        return int(stream.cuda_stream)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one of this thread."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        """A new event; a host that waits for it blocks, for it must not spin on a core that another rank's update needs."""
        return torch.cuda.Event(blocking=True)

    def timed_event(self) -> Any:
        """A new event that knows how long after another one it came."""
        return torch.cuda.Event(enable_timing=True)

    def capturing(self) -> bool:
        """What this thread queues is captured into a graph, and not done now."""
        return torch.cuda.is_current_stream_capturing()

    def now_ns(self) -> int:
        """The host's clock."""
        return now_ns()

    def here(self, tensor: Tensor) -> bool:
        """The tensor lies in the device's memory."""
        return tensor.is_cuda

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the device's memory, which the current stream may use from now on."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream."""
        out.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """The tensor's memory, once freed, is not used again before what ``stream`` has queued by then."""
        tensor.record_stream(stream)

    def register(self, address: int, nbytes: int) -> int:
        """Lock host memory; CUDA's status."""
        with torch.cuda.device(self.device):
            return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock it; CUDA's status."""
        with torch.cuda.device(self.device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def error_text(self, status: int) -> str:
        """CUDA's words for a status."""
        runtime = torch.cuda.cudart()
        return str(runtime.cudaGetErrorString(runtime.cudaError(status)))

    def forget_error(self) -> None:
        """Take back the error that a failed call has left, which the next kernel anybody launches would report as its own.

        torch shows cudaHostRegister but not cudaGetLastError; the check after a launch of its own takes the error, and raises.
        """
        with suppress(RuntimeError):
            torch.empty(1, dtype=torch.float32, device=self.device).fill_(0.0)


@functools.cache
def cuda_calls(device: torch.device) -> CudaCalls:
    """Those of a device of this process."""
    return CudaCalls(device)


class _CudaCopy:
    """A copy on a copy stream, and what it must keep alive.

    Attributes:
        during: when the stream does it; None where no observer keeps time.
    """

    def __init__(
        self, device: CudaDevice, event: Any, key: str, kept: tuple[Tensor, ...], during: During | None = None
    ) -> None:
        self._device = device
        self._event = event
        self._key = key
        self._kept = kept
        self.during = during
        self.span = ("", "", 0)

    def wait(self) -> None:
        calls = self._device.calls
        current = calls.current()
        try:
            current.wait_event(self._event)
        except RuntimeError as error:
            raise failed(self._key, error) from error
        # From here on the current stream orders the device's side: it may be freed as soon as that stream allows, even
        # where another stream allocated it. The host's side is still being read or written until the event.
        kept = self._kept
        for tensor in kept:
            if calls.here(tensor):
                calls.keep(tensor, current)
        self._kept = tuple(tensor for tensor in kept if not calls.here(tensor))

    def synchronize(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise failed(self._key, error) from error
        self._kept = ()

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError:
            # A failed device answers every query with its error; `wait` and `synchronize` are where it is raised.
            return True

    def when_over(self, call: Callable[[], None]) -> None:
        if self.done():
            call()
        else:
            self._device.watch(self._event, call)


class CudaDevice(Device):
    """A CUDA device with one copy stream a direction.

    Note: [What keeps a copied tensor alive]. The caching allocator reuses freed memory in the order of the stream that
    allocated it, which knows nothing of the copy streams. Each copy therefore holds both tensors, and `_in_flight`
    holds each copy until its event has passed, so that one dropped unwaited frees nothing under a running copy.
    """

    def __init__(self, device: torch.device, calls: CudaCalls | None = None) -> None:
        super().__init__(device, addresses_host=False)
        self.calls = cuda_calls(device) if calls is None else calls
        self._to_device = self.calls.stream()
        self._to_host = self.calls.stream()
        self._worker = Worker()
        self._watch = Workers("zhooks-copied")
        self._in_flight: dict[Any, deque[_CudaCopy]] = {self._to_device: deque(), self._to_host: deque()}
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
            started = _CudaCopy(self, event, key, (out, source), during)
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

    def pin(self, memory: Tensor) -> None:
        address, nbytes = memory.data_ptr(), memory.untyped_storage().nbytes()
        assert address % ALIGN == 0 == nbytes % ALIGN, "page-locking takes whole pages"
        status = self.calls.register(address, nbytes)
        if status != 0:
            self.calls.forget_error()
            why = self.calls.error_text(status)
            soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} B"
            raise CapabilityError(
                f"device {self.device} cannot page-lock {nbytes} B of host memory ({why}): expected to stay below the limit on "
                f"locked memory (ulimit -l), found {locked_nbytes()} B locked and a limit of {found}; raise it (ulimit -l "
                f"unlimited, docker run --ulimit memlock=-1), or lower [budget] host"
            )

    def unpin(self, memory: Tensor) -> None:
        status = self.calls.unregister(memory.data_ptr())
        if status != 0:
            # After a fault every call answers with it; it was raised where a result was wanted, and this is only clean-up.
            self.calls.forget_error()
            assert status not in _NOT_LOCKED, f"device {self.device}: host memory is unlocked that was not locked ({status})"

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached, total

    def used(self) -> tuple[int, int]:
        return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)

    def pins(self) -> bool:
        return True

    def memlock_applies(self) -> bool:
        if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
            return False
        # Whoever enforces the limit must count; a driver whose registrations move neither counter does not.
        memory, before = aligned(PROBE_NBYTES), locked_nbytes()
        try:
            self.pin(memory)
        except CapabilityError:
            return True
        counted = locked_nbytes() - before >= PROBE_NBYTES
        self.unpin(memory)
        return counted

    def pci_address(self) -> str | None:
        found: Any = torch.cuda.get_device_properties(self.device)
        if not hasattr(found, "pci_bus_id"):
            return None
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

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


def after(event: Any, call: Callable[[], None]) -> None:
    """What a thread that watches does: wait for the event, and go on with ``call``."""
    with suppress(RuntimeError):
        # A failed device: whoever continues hears of it from the copy.
        event.synchronize()
    call()
