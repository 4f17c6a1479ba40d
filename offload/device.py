"""The seam to the compute device: asynchronous copies, page-locking, free memory and where the device sits.

``host.py``, ``budget.py`` and the store call it; the one room of the house that touches CUDA streams and events, and on a
CPU a worker thread stands in for the copy stream.  It never decides what moves, and never keeps a tensor past its copy.
"""

from __future__ import annotations

import ctypes
import functools
import resource
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from offload.errors import CapabilityError, TierError
from offload.events import Bus
from offload.pages import ALIGN, aligned, locked_nbytes
from offload.threads import Workers, finished

__all__ = [
    "CudaCalls", "Device", "OnHost", "OneStream", "Ticket", "beside", "lane_of", "one_stream", "open_device",
    "used_by_current_stream",
]  # fmt: skip

#: Below this a copy is over before a thread would have woken.
INLINE_NBYTES = 256 << 10
#: Registered to see whether the driver counts page-locked memory against RLIMIT_MEMLOCK.
PROBE_NBYTES = 1 << 20

_HOST_REGISTER_PORTABLE = 1
#: What unlocking answers where the address was never locked: ours to get right. Any other error is an earlier fault's.
_NOT_LOCKED = (1, 713)

#: A point of a stream; None on a CPU, where nothing is queued.
Mark = Any


class Ticket(Protocol):
    """One copy under way; dropping it neither stops the copy nor frees memory the copy still uses."""

    def wait(self) -> None:
        """Order the caller's current stream after the copy; on a CPU block until it is done.

        Raises:
            TierError: the copy failed; names its key.
        """

    def synchronize(self) -> None:
        """Block until the host may use the result and the source may be given away; raises as ``wait``."""

    def done(self) -> bool:
        """Whether the copy is over, well or badly; never blocks and never raises for a failed copy."""

    def when_over(self, call: Callable[[], None]) -> None:
        """Run ``call``, which must not raise, once the copy is over, well or badly: in a thread of the device's, or here."""


class OnHost:
    """A copy whose result the host itself will use."""

    __slots__ = ("done", "wait", "when_over")

    def __init__(self, ticket: Ticket) -> None:
        self.wait, self.done, self.when_over = ticket.synchronize, ticket.done, ticket.when_over


class Device(ABC):
    """A compute device as the store needs it.

    Attributes:
        device: with its index where it has one.
        addresses_host: compute reads HOST memory where it lies, so nothing need be copied to be used.
        bus: hears spans "copy h2d" and "copy d2h", "copy h2h" between host tensors; on CUDA one ends when it is noticed, which
            is late rather than early.
    """

    def __init__(self, device: torch.device, addresses_host: bool) -> None:
        self.device = device
        self.addresses_host = addresses_host
        self.bus = Bus()

    @abstractmethod
    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> Ticket:
        """Start ``out.copy_(source)``; same shape, dtypes may differ, and both are kept alive until it is over.

        It runs after what the caller's current stream has queued. Copies in one direction run in the order of issue;
        between directions only ``wait`` orders. Until then nobody writes either tensor, nor reads ``out``.

        Args:
            out: contiguous where it lies on the other side than ``source``; its version counts up before this returns.
            key: what errors call it.
            after: where `mark` was called it runs after that instead: for a copy that another thread starts, or one that what
                was queued since must not hold up.
        Raises:
            TierError: it could not even be started, for the device has failed.
        """

    def mark(self) -> Mark:
        """The point that the caller's current stream has been given work up to."""
        return None

    def on_host(self, tensor: Tensor) -> bool:
        """The host, and so the system's file calls, may use the tensor's memory."""
        return True

    @abstractmethod
    def start(self) -> None:
        """Start the threads that copies may need.

        Raises:
            CapabilityError: the system does not allow them; without this call it is raised by the first copy that needs one.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device, contents undefined, not an inference tensor; page aligned on a CPU."""

    def pin(self, memory: Tensor) -> None:
        """Page-lock host ``memory`` (a storage of whole pages) for this device; nothing on a CPU.

        Raises:
            CapabilityError: the driver or RLIMIT_MEMLOCK does not let it.
        """
        assert not self.pins(), "a device that pins says how"

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin` of the same storage; no copy that uses it may be under way."""
        assert not self.pins(), "a device that pins says how"

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes (free, total) of the device; what torch's allocator caches but does not use counts as free."""

    def pins(self) -> bool:
        """Whether `pin` locks anything here."""
        return False

    def memlock_applies(self) -> bool:
        """Whether what `pin` locks counts against RLIMIT_MEMLOCK; some drivers lock past it."""
        return False

    def pci_address(self) -> str | None:
        """Where sysfs has the device, e.g. "0000:3b:00.0"; None where it is no PCI device or torch does not say."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Wait for every copy; none may be started afterwards."""


def open_device(device: torch.device, *, addresses_host: bool | None = None) -> Device:
    """The `Device` for a torch device.

    Args:
        device: "cpu", or "cuda" with or without an index (the current one then).
        addresses_host: None is what is true (CPU yes, CUDA no); False on a CPU forces the copies a GPU would need.
    Raises:
        CapabilityError: neither CPU nor a CUDA that this torch can use, or CUDA told to address host memory.
    """
    if device.type == "cpu":
        return CpuDevice(torch.device("cpu"), addresses_host is not False)
    if device.type != "cuda":
        raise CapabilityError(f'device {device}: expected "cpu" or "cuda", found "{device.type}"; move the model to either')
    if not torch.cuda.is_available():
        raise CapabilityError(f"device {device}: expected a CUDA device, found none this torch can use; install a CUDA torch")
    if addresses_host:
        raise CapabilityError(f"device {device}: CUDA computes on its own memory only; leave addresses_host unset")
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index))


@contextmanager
def beside(device: torch.device, lane: str, calls: CudaCalls | None = None) -> Iterator[None]:
    """What is issued inside runs after what the current stream has queued, and after what is waited for inside, for which the
    current stream itself does not wait.  Nothing on a CPU.

    Tensors used inside must outlive a later wait of the current stream for what was started.
    Args:
        lane: what shares a stream, one a device: things of one lane run in the order in which they were issued.
        calls: the streams of a device on paper, in tests.
    """
    if calls is None and device.type != "cuda":
        yield
        return
    calls = calls or _calls(device)
    event, side = calls.event(), calls.side(lane)
    event.record(calls.current())
    side.wait_event(event)
    with calls.using(side):
        yield


@functools.cache
def _calls(device: torch.device) -> CudaCalls:
    return CudaCalls(device)


class _WorkerTicket:
    """A copy in a worker thread, or one that is already over."""

    def __init__(self, future: Future[None], key: str) -> None:
        self._future = future
        self._key = key

    def wait(self) -> None:
        try:
            self._future.result()
        except Exception as error:
            raise _failed(self._key, error) from error

    synchronize = wait

    def done(self) -> bool:
        return self._future.done()

    def when_over(self, call: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: call())


class _Worker:
    """Copies between host tensors by one thread, in the order of issue as on a stream."""

    def __init__(self) -> None:
        self._threads = Workers("zhooks-copy")
        self._issue = threading.Lock()
        self._last: Future[None] | None = None
        self._closed = False

    def start(self) -> None:
        self._threads.start()

    def copy(self, out: Tensor, source: Tensor, key: str, bus: Bus) -> Ticket:
        assert out.shape == source.shape, f"copy of {key}: {tuple(source.shape)} into {tuple(out.shape)}"
        move: Callable[[Tensor, Tensor], None] = _move if _plain(out, source) else _convert
        if bus.active:
            move = _told(bus, key, move)
        with self._issue:
            idle = self._last is None or self._last.done()
            inline = idle and out.nbytes < INLINE_NBYTES
            if not inline:
                self.start()
            if not out.is_inference():
                # Autograd must see the write now, as on a stream, and although memmove goes behind its back.
                torch.autograd.graph.increment_version(out)
            if inline:
                future: Future[None] = Future()
                finished(future, partial(move, out, source))
            else:
                future = self.submit(partial(move, out, source))
        return _WorkerTicket(future, key)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Have the thread do ``job`` after what it was given before."""
        assert not self._closed, "a copy on a device that was closed"
        future: Future[None] = Future()
        self._threads.submit(partial(finished, future, job))
        self._last = future
        return future

    def close(self) -> None:
        self._closed = True
        self._threads.stop()


class CpuDevice(Device):
    """Host memory is the device's memory; copies run in a thread so that compute goes on."""

    def __init__(self, device: torch.device, addresses_host: bool) -> None:
        super().__init__(device, addresses_host)
        self._worker = _Worker()

    def start(self) -> None:
        self._worker.start()

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> Ticket:
        assert not (out.is_cuda or source.is_cuda), f"copy of {key}: a CPU device copies between host tensors only"
        return self._worker.copy(out, source, key, self.bus)

    def empty(self, nbytes: int) -> Tensor:
        return aligned(nbytes)

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def close(self) -> None:
        self._worker.close()


class CudaCalls:
    """The calls to CUDA that `CudaDevice` makes for one device; tests put streams of their own in their place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sides: dict[str, Any] = {}

    def stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self.device)

    def side(self, lane: str) -> Any:
        """The stream of what is called ``lane``, made when it is first asked for."""
        if lane not in self._sides:
            self._sides[lane] = self.stream()
        return self._sides[lane]

    def current(self) -> Any:
        """The stream that this thread queues work on."""
        return torch.cuda.current_stream(self.device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one of this thread."""
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        """A new event; a host that waits for it blocks, for it must not spin on a core that another rank's update needs."""
        return torch.cuda.Event(blocking=True)

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
            torch.empty(1, device=self.device).fill_(0.0)


class _CudaTicket:
    """A copy on a copy stream, and what it must keep alive."""

    def __init__(self, device: CudaDevice, event: Any, key: str, kept: tuple[Tensor, ...]) -> None:
        self._device = device
        self._event = event
        self._key = key
        self._kept = kept
        self.span = ("", "", 0)

    def wait(self) -> None:
        calls = self._device.calls
        current = calls.current()
        try:
            current.wait_event(self._event)
        except RuntimeError as error:
            raise _failed(self._key, error) from error
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
            raise _failed(self._key, error) from error
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
    allocated it, which knows nothing of the copy streams. Each ticket therefore holds both tensors, and `_in_flight`
    holds each ticket until its event has passed, so that one dropped unwaited frees nothing under a running copy.
    """

    def __init__(self, device: torch.device, calls: CudaCalls | None = None) -> None:
        super().__init__(device, addresses_host=False)
        self.calls = CudaCalls(device) if calls is None else calls
        self._to_device = self.calls.stream()
        self._to_host = self.calls.stream()
        self._worker = _Worker()
        self._watch = Workers("zhooks-copied")
        self._in_flight: dict[Any, deque[_CudaTicket]] = {self._to_device: deque(), self._to_host: deque()}
        self._issue = threading.Lock()

    def start(self) -> None:
        self._watch.start()

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> Ticket:
        calls = self.calls
        here = calls.here(out)
        if not (here or calls.here(source)):
            return self._worker.copy(out, source, key, self.bus)
        assert out.shape == source.shape, f"copy of {key}: {tuple(source.shape)} into {tuple(out.shape)}"
        across = here != calls.here(source)
        # A strided host side would be staged through pageable memory that is read before the stream has filled it.
        assert not across or (out.is_contiguous() and source.is_contiguous()), f"copy of {key}: both sides are contiguous"
        stream = self._to_device if here else self._to_host
        with self._issue:
            self._reap()
            try:
                # The caller's stream may still read `out` or write `source`.
                stream.wait_event(self.mark() if after is None else after)
                with calls.using(stream), torch.inference_mode(out.is_inference()), torch.no_grad():
                    calls.copy(out, source)
                event = calls.event()
                event.record(stream)
            except RuntimeError as error:
                raise _failed(key, error) from error
            ticket = _CudaTicket(self, event, key, (out, source))
            self._in_flight[stream].append(ticket)
            ticket.span = ("copy h2d" if here else "copy d2h", key, out.nbytes)
            self.bus.begin(*ticket.span)
        return ticket

    def mark(self) -> Mark:
        event = self.calls.event()
        event.record(self.calls.current())
        return event

    def watch(self, event: Any, call: Callable[[], None]) -> None:
        """Run ``call`` in a thread of the device's once ``event`` has passed, or the device has failed."""
        self._watch.start()
        self._watch.submit(partial(_after, event, call))

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
                f"device {self.device} cannot page-lock {nbytes} B of host memory ({why}): expected room below the limit on "
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
        for tickets in self._in_flight.values():
            while tickets and tickets[0].done():
                self.bus.end(*tickets.popleft().span)


def _after(event: Any, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):
        # A failed device: whoever continues hears of it from the copy.
        event.synchronize()
    call()


def lane_of(device: torch.device) -> int:
    """What orders work on ``device`` now: the number of its current stream, 0 on a CPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


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
    return OneStream(CudaCalls(device) if device.type == "cuda" else None)


_NOTHING: AbstractContextManager[None] = nullcontext()


def _order(calls: CudaCalls, stream: Any, after: Any) -> None:
    """What ``stream`` is given from now on runs after what ``after`` has been given."""
    event = calls.event()
    event.record(after)
    stream.wait_event(event)


def used_by_current_stream(tensor: Tensor) -> None:
    """Whoever frees ``tensor``, its memory is not handed out again before what its device's current stream has queued by then.

    For memory that another stream allocated, which the caller has ordered itself after: it orders nothing.  Nothing on a CPU.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _plain(out: Tensor, source: Tensor) -> bool:
    """Whether the bytes can be moved as they lie."""
    # A subclass (fake, functional) may have no bytes to move.
    return out.dtype == source.dtype and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        for tensor in (out, source)
    )


def _move(out: Tensor, source: Tensor) -> None:
    # ctypes releases the GIL, and unlike copy_ it starts no second team of OpenMP threads beside the compute's.
    ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)


def _told(bus: Bus, key: str, move: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """``move``, with a span around it."""

    def told(out: Tensor, source: Tensor) -> None:
        bus.begin("copy h2h", key, out.nbytes)
        move(out, source)
        bus.end("copy h2h", key, out.nbytes)

    return told


def _convert(out: Tensor, source: Tensor) -> None:
    # In this order: leaving inference mode turns gradients on.
    with torch.inference_mode(out.is_inference()), torch.no_grad():
        out.copy_(source)


def _failed(key: str, error: Exception) -> TierError:
    what = f"found {type(error).__name__}: {error}"
    return TierError(f"copy of {key or 'a block'}: expected it to finish, {what}; what it was to fill is undefined")
