"""One rank on paper: clocks of its host and its streams, what its memories hold, and everybody who wants to know.

``open_device`` makes devices over the machine that `running` says is on; ``zhooks.simulate`` starts one.  Times are in
seconds since it began.  It moves nothing and computes nothing: a `Costs` says how long things take.

Note: [Clocks]
    The host issues work in the order of the program and pays ``Costs.issue`` for each operation; a stream carries out what it
    was given one after the other, and not before it was issued.  An event is a point of a stream; who waits for it goes on no
    earlier.  On a machine without an accelerator the host does everything itself.

Note: [Threads]
    What another thread would go on with once something is over (a disk's worker starting the next copy) is done at once, by the
    host's clock set to that moment, so that a run is the same every time.  That thread is a stream of its own: it comes after
    what was done when it was asked for, and after that moment, and what the first thread does later comes after neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from offload.errors import SimulationError
from offload.virtual.autocast import refuses_cuda
from offload.virtual.memory import ACCELERATOR, HOST, NAME, reach, turn_to
from offload.virtual.operations import Operation, forget
from offload.virtual.python_functions import PythonFunctions
from offload.virtual.torch_device import errors_of_backward, register

__all__ = ["Access", "Costs", "Happening", "Listener", "Machine", "Moment", "Stream", "access", "machines_on"]


class Costs(Protocol):
    """How long things take on the hardware that is meant, in seconds.

    Attributes:
        accelerated: operations run beside the host, on streams.
        issue: of the host's, for every operation.
        spare_cores: threads of the host's run beside the program.
        call: of the host's, for every function that Python calls; 0 counts none.
        memory: bytes of the accelerator, and for this rank of its host and its disk.
    """

    accelerated: bool
    issue: float
    spare_cores: bool
    call: float
    memory: tuple[int, int, int]

    def operation(self, operation: Operation, index: int) -> float:
        """One operation where its tensors lie: the accelerator's memory or the host's."""

    def copy(self, source: int | None, out: int, nbytes: int) -> float:
        """Between memories by index; None is the user's data on the real host."""

    def disk(self, verb: str, nbytes: int) -> float:
        """A "read" or a "write" of the disk's."""

    def collective(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Over these ranks; ``nbytes`` of the whole tensor, of an exchange the most that a rank sends or receives."""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of a memory that something reads or writes."""

    start: int
    stop: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that took time on a stream, or on the host (``stream`` is the machine's ``host`` then).

    Attributes:
        what: its name: of an operation torch's.
        begin, end: seconds.
        accesses: what it read and wrote.
    """

    what: str
    stream: Stream
    begin: float
    end: float
    nbytes: int
    accesses: tuple[Access, ...]


class Listener(Protocol):
    """Who follows a machine; a subclass has what it needs.  Calls come in the order in which the host issued their causes."""

    def happened(self, happening: Happening) -> None:
        """Something was given to a stream, or done by the host."""
        return None

    def recorded(self, moment: Moment, stream: Stream) -> None:
        """A moment is the point that the stream has been given work up to."""
        return None

    def awaited(self, moment: Moment, stream: Stream) -> None:
        """What the stream is given from now on comes after the moment."""
        return None

    def kept(self, access: Access, stream: Stream) -> None:
        """Memory that is freed is not used again before what the stream has been given by then."""
        return None

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        """Memory was taken by who works on the stream."""
        return None

    def freed(self, address: int, nbytes: int, index: int) -> None:
        """And was given back."""
        return None


class Stream:
    """Work in order: ``ready`` is when all of it will be over."""

    def __init__(self, machine: Machine, name: str, number: int) -> None:
        self.machine, self.name, self.number = machine, name, number
        self.ready = 0.0

    def __repr__(self) -> str:
        return f"Stream({self.name})"

    def wait_event(self, moment: Moment) -> None:
        """What comes next comes after ``moment``."""
        self.ready = max(self.ready, moment.time)
        for listener in self.machine.listeners:
            listener.awaited(moment, self)

    def synchronize(self) -> None:
        """The host goes on when all work here is over."""
        moment = Moment(self.machine)
        moment.record(self)
        moment.synchronize()


class Moment:
    """An event: a point of a stream, once it was recorded."""

    __slots__ = ("_machine", "facts", "time")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.time = 0.0
        #: What listeners note of it.
        self.facts: dict[Any, Any] = {}

    def record(self, stream: Stream) -> None:
        self.time = stream.ready if stream is not self._machine.host else self._machine.now
        for listener in self._machine.listeners:
            listener.recorded(self, stream)

    def query(self) -> bool:
        over = self.time <= self._machine.now
        if over:
            self.synchronize()  # which costs nothing: the host knows that it has come
        return over

    def synchronize(self) -> None:
        """The host goes on from here."""
        self._machine.pass_to(self.time)
        for listener in self._machine.listeners:
            listener.awaited(self, self._machine.host)


_simulating = False


@contextmanager
def machines_on() -> Iterator[None]:
    """A simulation, of one machine or of several that take turns.

    Raises:
        SimulationError: there is one around this.
    """
    global _simulating
    if _simulating:
        raise SimulationError("simulate expected one simulation at a time, found one that has not ended. End it first.")
    register()
    forget()
    _simulating = True
    try:
        with refuses_cuda():
            yield
    finally:
        _simulating = False
        turn_to(None)


class Machine:
    """The host, the streams and the memories of one rank.

    Attributes:
        accelerated: operations run beside the host.
        now: the host's clock.
        host: the thread of the host that is running, as a stream for what it does itself.
        held, peak: bytes allocated now and at most, by index of the memory.
        mapped: addresses of allocations that a tier divides among what it holds; no storage of torch's.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.listeners = costs, list[Listener]()
        self.accelerated = costs.accelerated
        self.host, self.now = Stream(self, "host", 0), 0.0
        self.held, self.peak = [0, 0], [0, 0]
        self.mapped: set[int] = set()
        self._first = self.host
        self._default = Stream(self, "compute", 1) if costs.accelerated else self._first
        self._sides: dict[str, Stream] = {}
        self._streams = 1
        self._using = threading.local()

    @contextmanager
    def on(self) -> Iterator[Machine]:
        """Everything on the virtual device inside happens here."""
        with machines_on():
            turn_to(self)
            with self.thread_of_program():
                yield self

    @contextmanager
    def thread_of_program(self) -> Iterator[None]:
        """What a thread of the program's needs beside a machine that is on; see `Turns`."""
        with errors_of_backward(), PythonFunctions():
            yield

    # Streams.

    def stream(self, name: str = "") -> Stream:
        """A new one; the host itself where it does everything."""
        if not self.costs.accelerated:
            return self._first
        self._streams += 1
        return Stream(self, name or f"stream {self._streams}", self._streams)

    def side(self, lane: str) -> Stream:
        """The one of that name, made when it is first asked for; a thread of the host's is one if it has a core to run on."""
        if not self.costs.spare_cores:
            return self.host
        if lane not in self._sides:
            self._streams += 1
            self._sides[lane] = Stream(self, lane, self._streams)
        return self._sides[lane]

    def is_side(self, stream: Stream) -> bool:
        """It is one that `side` has made."""
        return self._sides.get(stream.name) is stream

    def come_to(self, stream: Stream) -> float:
        """When what a stream is given next would begin."""
        return self.now if stream is self.host else max(self.now, stream.ready)

    def moment(self, stream: Stream) -> Moment:
        """The point that the stream has been given work up to."""
        made = Moment(self)
        made.record(stream)
        return made

    @property
    def current(self) -> Stream:
        """The one that this thread gives operations to."""
        chosen: Stream = getattr(self._using, "stream", self._default)
        return self.host if chosen is self._first else chosen

    def use(self, stream: Stream) -> None:
        """This thread gives operations to ``stream`` from now on."""
        self._using.stream = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        # What was chosen, not what that comes to now: the host may be another thread by the time it is chosen again.
        before: Stream = getattr(self._using, "stream", self._default)
        self.use(stream)
        try:
            yield
        finally:
            self.use(before)

    def order(self, stream: Stream, after: Stream) -> None:
        """What ``stream`` is given from now on comes after what ``after`` has been given."""
        stream.wait_event(self.moment(after))

    def pass_to(self, time: float) -> None:
        """The host has waited until then."""
        self.now = max(self.now, time)

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Another thread of the host's; see Note [Threads]."""
        before, host = self.now, self.host
        thread = self.side(name)
        if thread is not host:
            self.order(thread, host)
        self.host, self.now = thread, max(before, thread.ready)
        try:
            with self.using(self._default):
                yield
        finally:
            thread.ready = self.now
            self.now, self.host = before, host

    def do(self, what: str, stream: Stream, seconds: float, nbytes: int, accesses: Sequence[Access]) -> Happening:
        """Give a stream something to do; the host does what is its own at once."""
        if stream is self.host:
            begin = self.now
            self.now = end = begin + seconds
        else:
            begin = max(stream.ready, self.now)
            stream.ready = end = begin + seconds
        happening = Happening(what, stream, begin, end, nbytes, tuple(accesses))
        for listener in self.listeners:
            listener.happened(happening)
        return happening

    def communicate(
        self, kind: str, ranks: Sequence[int], nbytes: int, stream: Stream, what: str, accesses: Sequence[Access]
    ) -> Happening:
        """A collective of these ranks, at once with those of all groups beside theirs."""
        return self.do(what, stream, self.costs.collective(kind, ranks, nbytes), nbytes, accesses)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """As ``record_stream``."""
        for listener in self.listeners:
            listener.kept(access(tensor, writes=False), stream)

    # What torch's device reports.

    def ran(self, operation: Operation) -> None:
        places = {tensor.device.index for tensor in (*operation.reads, *operation.writes)}
        if len(places) > 1 and self.costs.accelerated:
            # A number of the host's is copied along with the operation, as torch has it for tensors without dimensions.
            host = [tensor for tensor in operation.reads if tensor.device.index == HOST and tensor.dim()]
            if host:
                raise SimulationError(
                    f"{operation.overload} expected all tensors in one memory, found some of the accelerator's and one of the "
                    f"host's of shape {tuple(host[0].shape)}."
                )
        index = ACCELERATOR if ACCELERATOR in places or not places else HOST
        seconds = self.costs.operation(operation, index)
        written = {(each.data_ptr(), each.nbytes) for each in operation.writes}
        accesses = [access(tensor, writes=True) for tensor in operation.writes if tensor.numel()]
        accesses += [
            access(tensor, writes=False)
            for tensor in operation.reads
            if tensor.numel() and (tensor.data_ptr(), tensor.nbytes) not in written
        ]
        nbytes = sum(each.stop - each.start for each in accesses)
        self.now += self.costs.issue
        stream = self.current if index == ACCELERATOR else self.host
        self.do(str(operation.overload), stream, seconds, nbytes, accesses)

    def copied(self, out: Tensor, source: Tensor, *, waits: bool) -> None:
        from_index = source.device.index if source.device.type == NAME else None
        accesses = [access(out, writes=True)] if out.numel() else []
        if from_index is not None and source.numel():
            accesses.append(access(source, writes=False))
        nbytes = max(out.nbytes, source.nbytes)
        seconds = self.costs.copy(from_index, out.device.index, nbytes)
        self.now += self.costs.issue
        on_device = ACCELERATOR in (from_index, out.device.index)
        stream = self.current if on_device else self.host
        self.do("copy", stream, seconds, nbytes, accesses)
        if waits and from_index != out.device.index:
            stream.synchronize()

    def allocated(self, address: int, nbytes: int, index: int) -> None:
        self.held[index] += nbytes
        self.peak[index] = max(self.peak[index], self.held[index])
        for listener in self.listeners:
            listener.allocated(address, nbytes, index, self.current if index == ACCELERATOR else self.host)

    def freed(self, address: int, nbytes: int, index: int) -> None:
        self.held[index] -= nbytes
        for listener in self.listeners:
            listener.freed(address, nbytes, index)


def access(tensor: Tensor, *, writes: bool) -> Access:
    """The bytes from a tensor's first to its last element."""
    start = tensor.data_ptr()
    return Access(start, start + reach(tensor.shape, tensor.stride()) * tensor.dtype.itemsize, writes)
