"""Owns the recording of a simulation: what happens on a virtual machine, by the machine's clocks, as the rows of a trace.

``zprof simulate`` hands `SimulatedRecorder.follow` to ``zhooks.simulate``. It reads no clock of this computer: what is not of
the machine is not in the trace.

Note: [Whose time]
    What the runtime says of the device comes with marks, as on CUDA, and is recorded where the streams have it: a wait is as
    long as the one that computes stands still. Operations, and collectives that are the program's own, are recorded as the
    machine gives them to its streams. Memory changes in the order of the host, as a caching allocator has it, at the time of
    the stream that computes.

Note: [From the first step on]
    What it takes to build and to attach the model is left out: where it is built (on the device, on the host, on meta) is not
    simulated. What is held by then is recorded as the first step begins.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from offload.device import VirtualCalls
from offload.events import Event, Kind, leave, listen
from offload.virtual import Access, Happening, Machine, Moment, Stream
from zprof.clock import wall_ns
from zprof.recording.lanes import LANES, Lanes
from zprof.recording.modules import Places
from zprof.recording.optimizer_steps import watch_steps
from zprof.recording.simulated_memory import SimulatedMemory
from zprof.recording.sources import Sources
from zprof.rows import RowKind
from zprof.trace.header import Header
from zprof.trace.writer import Writer

__all__ = ["NOTE", "SimulatedRecorder"]

#: The note that says what came of the simulation.
NOTE = "simulation"
#: Collectives that the runtime names, as long as it waits for them; others are the program's own, or of its control.
_COLLECTIVES = ("gather activation", "gather", "reduce")
#: Names of streams whose copies the runtime says itself.
_COPYING = ("stream ", "host copies")
_KINDS = {"begin": int(RowKind.BEGIN), "end": int(RowKind.END), "instant": int(RowKind.INSTANT)}
_SPAN = int(RowKind.SPAN)

_Row = tuple[int, str, str, int, int, int, int]


class SimulatedRecorder:
    """Records one simulation into one file.

    Args:
        path: the trace.
        hardware, kind: of the profile. world: ranks.
        argv: the command line that simulates it.
        force: write over an existing file.
    Raises:
        TraceError: the file exists already or cannot be made.
    """

    def __init__(self, path: Path, *, hardware: str, kind: str, world: int, argv: Sequence[str], force: bool = False) -> None:
        header = Header(
            rank=0,
            world=world,
            host=f"{hardware} (simulated)",
            boot="",
            pid=0,
            mono_ns=0,
            wall_ns=wall_ns(),
            level="alloc",
            device="cpu" if kind == "cpu" else hardware,
            rss_nbytes=0,
            argv=tuple(argv),
            versions={"torch": metadata.version("torch")},
            simulated=hardware,
        )
        self._path, self._writer = path, Writer(path, header, force=force)
        self._following: _Following | None = None

    @contextmanager
    def follow(self, machine: Machine) -> Iterator[None]:
        """Record what happens on the machine, inside and once a step of `stepping` has begun."""
        places = Places(lambda root: None, _raised)
        self._following = following = _Following(machine, places, self._writer)
        machine.listeners.append(following)
        places.start()
        undo = [*watch_steps(following.step, lambda: True), places.close]
        listen(following)
        try:
            yield
        finally:
            leave(following)
            for each in undo:
                each()
            machine.listeners.remove(following)

    def stepping(self, step: Callable[..., object]) -> Callable[..., object]:
        """The same step; the first call of it begins the recording, see Note: [From the first step on]."""

        @functools.wraps(step)
        def call(*args: object) -> object:
            if self._following is not None:
                self._following.begin_step()
            return step(*args)

        return call

    def close(self, found: Mapping[str, object]) -> None:
        """Write what is left, and what came of the simulation, as plain values."""
        if self._following is not None:
            self._following.flush()
        self._writer.note(NOTE, found)
        self._writer.close()

    def abandon(self) -> None:
        """The simulation failed: leave no file."""
        self._writer.close("the simulation failed", 1)
        with suppress(OSError):
            self._path.unlink()


def _raised(error: Exception) -> None:
    raise error


class _Following:
    """A machine's listener and an observer of the runtime's events: their rows."""

    keeps_time = True

    def __init__(self, machine: Machine, places: Places, writer: Writer) -> None:
        self._machine, self._writer = machine, writer
        self._memory = SimulatedMemory(machine, places, self._remember)
        self._sources = Sources(self._memory.counted)
        self._calls = VirtualCalls(machine)
        # When the host queues something is no prediction of anything else: only the streams' times are kept.
        self._lanes = Lanes(lambda *queued: None, self._done, lambda body: writer.note(LANES, body))
        self._started = False
        self._zero_ns = self._memory_ns = 0
        self._rows: list[_Row] = []
        #: Said before the first step, written as it begins.
        self._notes: dict[str, str] = {}
        self._instants: list[tuple[str, str, int]] = []
        #: What the runtime has launched and not waited for yet.
        self._under_way: Counter[tuple[str, str]] = Counter()

    def begin_step(self) -> None:
        """A step of the job begins, the first one with all that is held by then."""
        if self._started:
            # The host has waited for the one before: nothing to come begins earlier.
            self.flush(self._calls.now_ns() - self._zero_ns)
            return
        self._started, self._zero_ns = True, self._calls.now_ns()
        for name, text in self._notes.items():
            self._writer.note(name, {"text": text})
        for what, key, nbytes in self._instants:
            self._row(_KINDS["instant"], what, key, nbytes, self._zero_ns)
        self._memory.state()

    def flush(self, until_ns: int | None = None) -> None:
        """Write the rows before a time, or all, in the order of time, in which streams do not give them."""
        if until_ns is None:
            self._lanes.finish()
        rows = sorted(self._rows, key=lambda row: row[4])
        ready = rows if until_ns is None else [row for row in rows if row[4] < until_ns]
        self._rows = rows[len(ready) :]
        self._writer.rows(ready)  # type: ignore[arg-type]
        self._writer.flush()

    # What the runtime says.

    def on_event(self, event: Event) -> None:
        """Take one event of the runtime, whose clock is the machine's."""
        kind, what, key = event.kind, event.what, event.key
        if kind == "hold":
            self._memory.hold(what, key, event.subject)
        elif kind == "counter":
            self._sources.state(event.subject, what, key, event.nbytes, 0)
        elif what in ("policy", "activation"):
            self._note(what, key)
        elif event.mark is not None:
            if what in _COLLECTIVES:
                self._under_way[what, key] += 1 if kind == "begin" else -1
            self._lanes.take(event)
        elif kind == "instant" and not self._started:
            self._instants.append((what, key, event.nbytes))
        else:
            self._row(_KINDS[kind], what, key, event.nbytes, event.time_ns)

    def step(self, kind: Kind, key: str) -> None:
        """An optimizer's step begins or ends."""
        if kind == "begin":
            self._memory.step_begins()
        else:
            self._memory.step_ends()
        self._lanes.take(Event(kind, "step", key, 0, self._calls.now_ns(), None, self._calls.clock.mark()))

    def _note(self, name: str, text: str) -> None:
        if self._notes.get(name) != text:
            self._notes[name] = text
            if self._started:
                self._writer.note(name, {"text": text})

    def _done(self, what: str, key: str, nbytes: int, begin_ns: int, length_ns: int, lane: int) -> None:
        if begin_ns >= self._zero_ns:
            self._row(_SPAN, what, key, nbytes, begin_ns, lane, ident=length_ns)

    # What the machine says.

    def happened(self, happening: Happening) -> None:
        what, stream = happening.what, happening.stream
        if " " not in what:
            if what != "copy" or not stream.name.startswith(_COPYING):
                self._memory.made_by(happening)
                verb = "host operation" if stream is self._machine.host else "operation"
                self._happened(verb, _operator(what), happening)
        elif what not in ("disk read", "disk write") and not self._is_runtimes(what):
            self._happened("collective", what, happening)

    def _is_runtimes(self, what: str) -> bool:
        """It is a collective that the runtime says more about."""
        for verb in _COLLECTIVES:
            if what.startswith(f"{verb} "):
                key = what.removeprefix(f"{verb} ").removeprefix("replicas ")
                return self._under_way[verb, key] > 0
        return False

    def _happened(self, what: str, key: str, happening: Happening) -> None:
        begin_ns, end_ns = (round(time_s * 1e9) for time_s in (happening.begin, happening.end))
        lane = self._lanes.number(happening.stream.name)
        self._row(_SPAN, what, key, happening.nbytes, begin_ns, lane, ident=end_ns - begin_ns)

    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        self._memory.allocated(address, nbytes, index)

    def freed(self, address: int, nbytes: int, index: int) -> None:
        self._memory.freed(address)

    # Rows.

    def _remember(self, kind: int, what: str, key: str, nbytes: int, ident: int) -> None:
        """A row about memory; see Note: [Whose time]."""
        machine = self._machine
        if self._started:
            if machine.current.number <= 1:
                self._memory_ns = max(self._memory_ns, round(machine.come_to(machine.current) * 1e9))
            self._row(kind, what, key, nbytes, self._memory_ns, ident=ident)

    def _row(self, kind: int, what: str, key: str, nbytes: int, time_ns: int, thread: int = 0, *, ident: int = 0) -> None:
        if self._started:
            self._rows.append((kind, what, key, nbytes, max(0, time_ns - self._zero_ns), thread, ident))


def _operator(name: str) -> str:
    """The operator's name in the overload's, as "mm" in "aten.mm.default"."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else name
