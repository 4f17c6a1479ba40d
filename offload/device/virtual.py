"""The virtual device behind the seam: the code of devices with streams over streams, events and memory on paper.

``open.py`` makes one over the machine that is on.  It has no thread: what a thread would do is done at once, at its time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.budget import Bound, Shared
from offload.budget import Machine as HostMachine
from offload.device.interface import HostMemory, Mark
from offload.device.stream_device import StreamCalls, StreamDevice, after
from offload.events import During, KnownTime
from offload.pages import round_up
from offload.text import as_size
from offload.virtual import ACCELERATOR, HOST, NAME, Happening, Machine, Moment, Stream, memory_at, take_address
from offload.work import HostWork

__all__ = ["MemoryRun", "VirtualCalls", "VirtualDevice", "VirtualTask"]


class VirtualCalls(StreamCalls):
    """What `StreamDevice` asks of torch, asked of a machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(torch.device(NAME, ACCELERATOR))
        self.machine = machine

    def stream(self) -> Stream:
        return self.machine.stream()

    def side(self, lane: str) -> Stream:
        return self.machine.side(lane)

    def lane(self, stream: Stream) -> tuple[str, bool]:
        return stream.name, self.machine.is_side(stream)

    def current(self) -> Stream:
        return self.machine.current

    def number(self, stream: Stream) -> int:
        return stream.number

    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        return self.machine.using(stream)

    def event(self) -> Moment:
        return Moment(self.machine)

    def timed_event(self) -> _Point:
        return _Point(self.machine)

    def now_ns(self) -> int:
        return in_ns(self.machine.now)

    def here(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME and tensor.device.index == ACCELERATOR

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        self.machine.keep(tensor, stream)


class _Point:
    """A point of a stream on paper, whose time is known at once; nothing is ordered by it, and nobody waits for it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.time_ns = 0

    def record(self, stream: Stream) -> None:
        self.time_ns = in_ns(self._machine.come_to(stream))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, later: _Point) -> float:
        return (later.time_ns - self.time_ns) / 1e6


def in_ns(time_s: float) -> int:
    """A machine's time as events have it."""
    return round(time_s * 1e9)


def _during(happening: Happening) -> During:
    stream = happening.stream
    beside = stream.machine.is_side(stream)
    begin, end = (KnownTime(stream.name, in_ns(time_s), beside) for time_s in (happening.begin, happening.end))
    return During(begin, end)


class VirtualDevice(StreamDevice):
    """A CUDA device on paper; where the machine has no accelerator, one that computes on its host's memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        super().__init__(torch.device(NAME, ACCELERATOR), VirtualCalls(machine))
        self.addresses_host = not machine.costs.accelerated
        self._beside = machine.side("host copies")
        self._watched: list[tuple[Moment, Any]] = []

    @property
    def facts(self) -> HostMachine:
        return _Host(self.machine)

    @property
    def host(self) -> torch.device:
        return torch.device(NAME, ACCELERATOR if self.addresses_host else HOST)

    def start(self) -> None:
        return None

    def pins(self) -> bool:
        return True

    def map_host(self, nbytes: int, *, locked: bool = False) -> HostMemory:
        return MemoryRun(self.machine, nbytes, HOST, self.host.index)

    def copy(self, out: Tensor, source: Tensor, key: str = "", *, after: Mark = None) -> HostWork:
        if self.addresses_host or not (self.calls.here(out) or self.calls.here(source)):
            return self._copy_beside(out, source, key)
        return super().copy(out, source, key, after=after)

    def _copy_beside(self, out: Tensor, source: Tensor, key: str) -> HostWork:
        """Between tensors of the host, by a thread of its own."""
        machine, stream, clock = self.machine, self._beside, self.calls.clock
        machine.order(stream, machine.host)
        begin = clock.on(stream, stream.name) if self.bus.timed else None
        with machine.using(stream), torch.no_grad(), torch.inference_mode(out.is_inference()):
            out.copy_(source)
        end = clock.on(stream, stream.name) if self.bus.timed else None
        self.bus.begin("copy h2h", key, out.nbytes, at=begin)
        self.bus.end("copy h2h", key, out.nbytes, at=end)
        return VirtualTask(machine, machine.moment(stream), "thread of host copies")

    def watch(self, event: Moment, call: Callable[[], None]) -> None:
        # The thread lets go of what it copied at the end of the copy, and the first thread has not come to that time yet.
        self._watched += [(event, one.kept) for copies in self._in_flight.values() for one in copies if one.event is event]
        with self.machine.thread("thread of copies"):
            after(event, call)

    def _reap(self) -> None:
        super()._reap()
        self._watched = [(event, kept) for event, kept in self._watched if not event.query()]

    def memory(self) -> tuple[int, int]:
        total = self.machine.costs.memory[ACCELERATOR]
        return total - self.machine.held[ACCELERATOR], total

    def used(self) -> tuple[int, int]:
        return self.machine.held[ACCELERATOR], self.machine.peak[ACCELERATOR]

    def memlock_applies(self) -> bool:
        return False


class _Host(HostMachine):
    """This rank's share of the host's memory and disk."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def memory_bounds(self, *, pinned: bool = False) -> list[Bound]:
        total = self._machine.costs.memory[HOST]
        name = f"this rank's share of the host's memory ({as_size(total)})"
        return [Bound(name, total - self._machine.held[HOST], "simulate hardware with more", Shared.PROCESS)]

    def disk_free(self, folder: Path) -> int:
        return self._machine.costs.memory[2]

    def is_memory(self, folder: Path) -> bool:
        return False


class VirtualWork:
    """Work that is over at a moment.

    Args:
        happening: what a stream was given for it, where that is one thing.
    """

    def __init__(
        self,
        machine: Machine,
        moment: Moment,
        thread: str = "thread of collectives",
        happening: Happening | None = None,
    ) -> None:
        self._machine, self._moment, self._thread, self._happening = machine, moment, thread, happening

    @property
    def during(self) -> During | None:
        """When the stream does it."""
        return None if self._happening is None else _during(self._happening)

    def wait(self) -> None:
        """The current stream goes on after it; what the host computes, the host."""
        current = self._machine.current
        if current is self._machine.host:
            self._moment.synchronize()
        else:
            current.wait_event(self._moment)

    def synchronize(self) -> None:
        self._moment.synchronize()

    def done(self) -> bool:
        return self._moment.query()

    def when_over(self, call: Callable[[], None]) -> None:
        with self._machine.thread(self._thread):
            self._moment.synchronize()
            call()


class VirtualTask(VirtualWork):
    """What a thread of the host's does: whoever waits for it is blocked, on an accelerator too."""

    def wait(self) -> None:
        self.synchronize()


class MemoryRun:
    """A run of one of the machine's memories, until it is closed.

    Args:
        memory: the one that it takes from.
        index: of its tensors: where what computes with them looks.
    """

    def __init__(self, machine: Machine, nbytes: int, memory: int, index: int) -> None:
        self._machine, self._nbytes, self._memory, self._index = machine, nbytes, memory, index
        self._address = take_address(nbytes)
        machine.mapped.add(self._address)
        machine.allocated(self._address, nbytes, memory)

    def tensor(self, start: int, nbytes: int) -> Tensor:
        return memory_at(self._address + start, round_up(nbytes), nbytes, self._index)

    def close(self) -> None:
        self._machine.freed(self._address, self._nbytes, self._memory)
        self._machine.mapped.discard(self._address)
