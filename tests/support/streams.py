"""A device on paper: streams that run what was queued when they may, and note every access that nothing orders.

Tests put `Paper` under `CudaDevice` in place of CUDA's calls.  Each stream, and the host, counts its work; a clock says of each
how much of it is over for certain (events and host waits carry clocks), and two accesses to the same bytes of which one writes
must be ordered by them: a race is a line in ``races``, whether or not the bytes came out right this time.  Freed memory is used
again as CUDA's caching allocator does: on the stream that allocated it, with nobody waiting for any other.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offload.device.cuda import CudaCalls, CudaDevice
from offload.disk import Bytes, SystemIo
from offload.pages import aligned, over

Clock = dict[str, int]
HOST = "host"
FAULT = 700


@dataclass(eq=False)
class Work:
    """One entry of a stream's queue."""

    run: Callable[[], object]
    ready: Callable[[], bool]
    clock: Clock
    over: bool = False
    over_ns: int = 0


@dataclass(eq=False)
class Stream:
    paper: Paper
    name: str
    queue: deque[Work] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)

    def wait_event(self, event: Event) -> None:
        self.paper.check_fault()
        with self.paper.change:
            work = event.work
            if work is not None:
                _join(self.clock, work.clock)
                self.paper.push(self, lambda: None, lambda: work.over)

    def synchronize(self) -> None:
        event = Event(self.paper)
        event.record(self)
        event.synchronize()


class Event:
    def __init__(self, paper: Paper) -> None:
        self.paper = paper
        self.work: Work | None = None

    def record(self, stream: Stream) -> None:
        with self.paper.change:
            self.work = self.paper.push(stream, lambda: None, lambda: True)

    def query(self) -> bool:
        self.paper.looks += 1
        self.paper.check_fault()
        with self.paper.change:
            over = self.work is None or self.work.over
            if over and self.work is not None:
                _join(self.paper.host, self.work.clock)
            return over

    def synchronize(self) -> None:
        self.paper.waits += 1
        self.paper.until(self.query)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds in 32 bits, as CUDA says them; of events that have both passed."""
        assert self.work is not None and later.work is not None and self.query() and later.query()
        return float(np.float32((later.work.over_ns - self.work.over_ns) / 1e6))


@dataclass(frozen=True)
class _Access:
    what: str
    timeline: str
    time: int
    start: int
    stop: int
    writes: bool


class Paper(CudaCalls):
    """What CUDA is asked for, on a CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.change = threading.Condition(threading.RLock())
        self.host: Clock = {}
        self.races: list[str] = []
        #: Copies that have run, as "h2d" or "d2h".
        self.copies: list[str] = []
        self.locked: dict[int, int] = {}
        #: What cudaGetLastError would return, and whether the device has failed for good.
        self.last_error, self.fault = 0, False
        self.refuses_to_lock = 0
        #: The host's clock, which stands unless a test moves it; the device's runs so many times as fast.
        self.host_ns, self.pace = 1_000_000_000, 1.0
        #: Events made that know times, looks at events, and times that somebody waited for one.
        self.timed = self.looks = self.waits = 0
        self.captures = False
        self._streams: list[Stream] = []
        self._accesses: list[_Access] = []
        self._memory: list[Tensor] = []
        self._idle: dict[tuple[str, int], list[Tensor]] = {}
        self._kept: dict[int, set[str]] = {}
        self._here = threading.local()
        self.compute = self.stream("compute")

    # What CudaDevice calls.

    def stream(self, name: str | None = None) -> Stream:
        made = Stream(self, name or f"stream {len(self._streams)}")
        self._streams.append(made)
        return made

    def current(self) -> Stream:
        return getattr(self._here, "stream", self.compute)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def event(self) -> Event:
        return Event(self)

    def number(self, stream: Stream) -> int:
        return self._streams.index(stream)

    def timed_event(self) -> Event:
        self.check_fault()
        self.timed += 1
        return Event(self)

    def capturing(self) -> bool:
        return self.captures

    def now_ns(self) -> int:
        return self.host_ns

    def here(self, tensor: Tensor) -> bool:
        place = tensor.data_ptr()
        return any(base.data_ptr() <= place < base.data_ptr() + base.numel() for base in self._memory)

    def empty(self, nbytes: int) -> Tensor:
        with self.change:
            lane = (self.current().name, nbytes)
            idle = self._idle.setdefault(lane, [])
            base = idle.pop() if idle else aligned(nbytes)
            if not any(base is known for known in self._memory):
                self._memory.append(base)
            tensor = over(base.numpy().data, nbytes)
            weakref.finalize(tensor.untyped_storage(), self._free, base, self.current(), nbytes)
            return tensor

    def copy(self, out: Tensor, source: Tensor) -> None:
        way = "h2d" if self.here(out) else "d2h"

        target, origin = alias(out), alias(source)

        def run() -> None:
            target.copy_(origin)
            self.copies.append(way)

        torch.autograd.graph.increment_version(out)
        self.kernel(f"copy {way}", run, reads=[source], writes=[out])

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        with self.change:
            self._kept.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream.name)

    def register(self, address: int, nbytes: int) -> int:
        if self.fault or self.refuses_to_lock:
            self.last_error = FAULT if self.fault else self.refuses_to_lock
            return self.last_error
        self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        if self.fault or address not in self.locked:
            self.last_error = FAULT if self.fault else 713
            return self.last_error
        del self.locked[address]
        return 0

    def error_text(self, status: int) -> str:
        return f"error {status}"

    def forget_error(self) -> None:
        self.last_error = 0

    # What tests call.

    def kernel(
        self, what: str, run: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Queue work on the current stream."""
        self.check_fault()
        if self.last_error:
            error, self.last_error = self.last_error, 0
            raise RuntimeError(f"CUDA error: {error}")
        with self.change:
            stream = self.current()
            _join(stream.clock, self.host)
            for tensors, written in ((reads, False), (writes, True)):
                for tensor in tensors:
                    start = tensor.data_ptr()
                    self._access(what, stream.name, stream.clock, start, start + tensor.nbytes, written)
            self.push(stream, run, lambda: True)

    def hold(self, stream: Stream) -> Callable[[], None]:
        """What is queued on ``stream`` from now on waits until the answer is called."""
        gate = threading.Event()
        with self.change:
            self.push(stream, lambda: None, gate.is_set)

        def release() -> None:
            with self.change:
                gate.set()
                self._pump()

        return release

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that a stream or a thread will do."""
        with self.change:
            # Threads of ours change things beside streams too, so look now and then.
            for _ in range(1200):
                if reached():
                    return
                self.change.wait(0.05)
        raise AssertionError("it has not come about within a minute")

    def touch(self, what: str, buffers: Sequence[Bytes], *, writes: bool) -> None:
        """The host reads or writes memory."""
        with self.change:
            for buffer in buffers:
                start = buffer.ctypes.data
                self._access(what, HOST, self.host, start, start + buffer.nbytes, writes)

    def check_fault(self) -> None:
        if self.fault:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    # The machinery.

    def push(self, stream: Stream, run: Callable[[], object], ready: Callable[[], bool]) -> Work:
        _join(stream.clock, self.host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        work = Work(run, ready, dict(stream.clock))
        stream.queue.append(work)
        self._pump()
        return work

    def _pump(self) -> None:
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while stream.queue and stream.queue[0].ready():
                    work = stream.queue.popleft()
                    work.run()
                    work.run = work.ready = lambda: True
                    work.over = moved = True
                    work.over_ns = 7_000_000 + round(self.host_ns * self.pace)
        self.change.notify_all()

    def _access(self, what: str, timeline: str, clock: Clock, start: int, stop: int, writes: bool) -> None:
        clock[timeline] = clock.get(timeline, 0) + 1
        for other in self._accesses:
            apart = other.stop <= start or stop <= other.start
            if apart or not (writes or other.writes) or clock.get(other.timeline, 0) >= other.time:
                continue
            self.races.append(f"{what} ({timeline}) is not ordered after {other.what} ({other.timeline})")
        self._accesses.append(_Access(what, timeline, clock[timeline], start, stop, writes))

    def _free(self, base: Tensor, stream: Stream, nbytes: int) -> None:
        with self.change:
            start = base.data_ptr()
            kept = self._kept.pop(start, set()) - {stream.name}
            # It is handed out again in the order of its own stream, after what was queued by now on those said to use it.
            known = dict(stream.clock)
            for clock in [self.host, *(one.clock for one in self._streams if one.name in kept)]:
                _join(known, clock)
            for other in self._accesses:
                inside = other.start < start + nbytes and start < other.stop
                if inside and known.get(other.timeline, 0) < other.time:
                    self.races.append(f"memory is freed under {other.what} ({other.timeline})")
            # Here, what other streams use is never handed out again.
            if not kept:
                self._idle.setdefault((stream.name, nbytes), []).append(base)


def alias(tensor: Tensor) -> Tensor:
    """The same memory for what is queued on a stream, which keeps nothing alive that it uses."""
    assert tensor.is_contiguous()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        clock[name] = max(clock.get(name, 0), time)


class PaperDevice(CudaDevice):
    """`CudaDevice`, every line of it, over streams on paper."""

    def __init__(self) -> None:
        self.paper = Paper()
        super().__init__(torch.device("cpu"), self.paper)

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def memlock_applies(self) -> bool:
        return False

    def pci_address(self) -> str | None:
        return None


class PaperIo(SystemIo):
    """The system's file calls, with their accesses noted; reads wait for ``gate``, and ``written`` counts writes."""

    def __init__(self, paper: Paper) -> None:
        self.paper, self.gate, self.written = paper, threading.Event(), 0
        self.gate.set()

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        assert self.gate.wait(60)
        self.paper.touch("disk read", buffers, writes=True)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        self.paper.touch("disk write", buffers, writes=False)
        done = super().pwritev(fd, buffers, offset)
        with self.paper.change:
            self.written += offset > 0
            self.paper.change.notify_all()
        return done
