"""Owns the recording of a simulation: what happens on a virtual machine, by the machine's clocks, as the rows of a trace.

``zprof simulate`` hands `SimulatedRecorder.follow` to ``zhooks.simulate``. It reads no clock of this computer: what is not of
the machine is not in the trace.

Note: [Two clocks]
    What the runtime says of itself (passes, waits, updates) it says while the host issues work. It is recorded at the moment at
    which what is issued next on the current stream would begin, so that a wait is as long as the device stands still.
    Transfers and operations are recorded where their streams have them. Memory changes in the order of the host, as a caching
    allocator has it, at the time of the stream that computes.

Note: [From the first step on]
    What it takes to build and to attach the model is left out: where it is built (on the device, on the host, on meta) is not
    simulated. What is held by then is recorded as the first step begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from offload.events import Event, leave, listen
from offload.virtual import Access, Happening, Machine, Moment, Stream
from zprof.clock import wall_ns
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
#: Collectives that the runtime names; others are of its control.
_COLLECTIVES = ("gather activation", "gather", "reduce")
#: Whose spans have the times of streams: the runtime says when it issued them and when it noticed their end.
_TRANSFERS = (*_COLLECTIVES, "copy h2d", "copy d2h", "copy h2h", "disk read", "disk write")
_BEGIN, _END, _INSTANT = int(RowKind.BEGIN), int(RowKind.END), int(RowKind.INSTANT)

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

    def __init__(self, machine: Machine, places: Places, writer: Writer) -> None:
        self._machine, self._writer = machine, writer
        self._memory = SimulatedMemory(machine, places, self._remember)
        self._sources = Sources(self._memory.counted)
        self._started = False
        self._zero_s, self._memory_ns = 0.0, 0
        self._rows: list[_Row] = []
        #: Said before the first step, written as it begins.
        self._notes: dict[str, str] = {}
        self._instants: list[tuple[str, str, int]] = []
        #: By verb and key: when a transfer was begun, and its bytes, below 0 once the machine was given it.
        self._begun: dict[tuple[str, str], tuple[int, int]] = {}
        self._copied: Happening | None = None
        #: When spans were begun, for none may end before.
        self._open: dict[tuple[str, str], list[int]] = {}

    def begin_step(self) -> None:
        """A step of the job begins, the first one with all that is held by then."""
        if self._started:
            # The host has waited for the one before: nothing to come begins earlier.
            self.flush(self._ns(self._machine.now))
            return
        self._started, self._zero_s = True, self._machine.now
        for name, text in self._notes.items():
            self._writer.note(name, {"text": text})
        for what, key, nbytes in self._instants:
            self._row(_INSTANT, what, key, nbytes, 0)
        self._memory.state()

    def flush(self, until_ns: int | None = None) -> None:
        """Write the rows before a time, or all, in the order of time, in which streams do not give them."""
        rows = sorted(self._rows, key=lambda row: row[4])
        ready = rows if until_ns is None else [row for row in rows if row[4] < until_ns]
        self._rows = rows[len(ready) :]
        self._writer.rows(ready)  # type: ignore[arg-type]
        self._writer.flush()

    # What the runtime says.

    def on_event(self, event: Event) -> None:
        """Take one event of the runtime; its own time is this computer's, and left aside."""
        kind, what, key = event.kind, event.what, event.key
        if kind == "hold":
            self._memory.hold(what, key, event.subject)
        elif kind == "counter":
            self._sources.state(event.subject, what, key, event.nbytes, 0)
        elif what in ("policy", "activation"):
            self._note(what, key)
        elif kind == "instant":
            if self._started:
                self._row(_INSTANT, what, key, event.nbytes, self._point_ns())
            else:
                self._instants.append((what, key, event.nbytes))
        elif what in _TRANSFERS:
            self._transfer(kind == "begin", what, key, event.nbytes)
        else:
            self._span(_BEGIN if kind == "begin" else _END, what, key, event.nbytes)

    def step(self, kind: int, what: str, key: str, nbytes: int) -> None:
        """An optimizer's step begins or ends."""
        if kind == _BEGIN:
            self._memory.step_begins()
        else:
            self._memory.step_ends()
        self._span(kind, what, key, nbytes)

    def _note(self, name: str, text: str) -> None:
        if self._notes.get(name) != text:
            self._notes[name] = text
            if self._started:
                self._writer.note(name, {"text": text})

    def _span(self, kind: int, what: str, key: str, nbytes: int) -> None:
        time_ns, begins = self._point_ns(), self._open.setdefault((what, key), [])
        if kind == _BEGIN:
            begins.append(time_ns)
        elif begins:
            # Begun on a stream that is ahead of the one it ends on.
            time_ns = max(time_ns, begins.pop())
        self._row(kind, what, key, nbytes, time_ns, self._thread())

    def _transfer(self, begins: bool, what: str, key: str, nbytes: int) -> None:
        """The runtime has begun one, or noticed its end; its times are those of the machine where it has them."""
        copied, place = self._copied, (what, key)
        if copied is not None and what.startswith("copy") and (begins or what == "copy h2h"):
            # It says so after it gave the stream the copy; between host memories when that is over.
            self._copied = None
            self._begun.pop(place, None)
            self._whole(what, key, nbytes, copied)
        elif begins:
            self._begun[place] = (self._point_ns(), nbytes)
        elif (begun := self._begun.pop(place, None)) is not None and begun[1] >= 0:
            # The machine was given nothing: there is one rank, or what is fetched is there already.
            self._row(_BEGIN, what, key, begun[1], begun[0], self._thread())
            self._row(_END, what, key, begun[1], max(begun[0], self._point_ns()), self._thread())

    # What the machine says.

    def happened(self, happening: Happening) -> None:
        what, stream = happening.what, happening.stream
        if " " not in what:
            if what == "copy" and stream.number > 1:
                self._copied = happening
                return
            self._memory.made_by(happening)
            verb = "host operation" if stream is self._machine.host else "operation"
            self._whole(verb, _operator(what), happening.nbytes, happening)
        elif what in ("disk read", "disk write"):
            self._given(what, next((key for verb, key in reversed(self._begun) if verb == what), ""), happening)
        else:
            verb = next((verb for verb in _COLLECTIVES if what.startswith(f"{verb} ")), "")
            if verb:
                self._given(verb, what.removeprefix(f"{verb} "), happening)
            else:
                self._whole("collective", what, happening.nbytes, happening)

    def recorded(self, moment: Moment, stream: Stream) -> None: ...
    def awaited(self, moment: Moment, stream: Stream) -> None: ...
    def kept(self, access: Access, stream: Stream) -> None: ...

    def allocated(self, address: int, nbytes: int, index: int, stream: Stream) -> None:
        self._memory.allocated(address, nbytes, index)

    def freed(self, address: int, nbytes: int, index: int) -> None:
        self._memory.freed(address)

    def _given(self, verb: str, key: str, happening: Happening) -> None:
        """A stream was given a transfer, or the next chunk of one: its bytes are the runtime's, said once."""
        begun = self._begun.get((verb, key))
        nbytes = happening.nbytes if begun is None else max(begun[1], 0)
        if begun is not None:
            self._begun[verb, key] = (begun[0], -1)
        self._whole(verb, key, nbytes, happening)

    def _whole(self, what: str, key: str, nbytes: int, happening: Happening) -> None:
        # Without an accelerator the host computes.
        number = happening.stream.number
        thread = number if self._machine.costs.accelerated else max(1, number)
        self._row(_BEGIN, what, key, nbytes, self._ns(happening.begin), thread)
        self._row(_END, what, key, nbytes, self._ns(happening.end), thread)

    # Times and rows.

    def _ns(self, time_s: float) -> int:
        return max(0, round((time_s - self._zero_s) * 1e9))

    def _point_ns(self) -> int:
        """When what is issued next would begin."""
        machine = self._machine
        current = machine.current
        return self._ns(machine.now if current is machine.host else max(machine.now, current.ready))

    def _thread(self) -> int:
        """The program is the thread of what computes, and of the host that issues it."""
        return max(1, self._machine.current.number)

    def _remember(self, kind: int, what: str, key: str, nbytes: int, ident: int) -> None:
        """A row about memory; see Note: [Two clocks]."""
        if self._started:
            if self._machine.current.number <= 1:
                self._memory_ns = max(self._memory_ns, self._point_ns())
            self._row(kind, what, key, nbytes, self._memory_ns, ident=ident)

    def _row(self, kind: int, what: str, key: str, nbytes: int, time_ns: int, thread: int = 1, *, ident: int = 0) -> None:
        if self._started:
            self._rows.append((kind, what, key, nbytes, time_ns, thread, ident))


def _operator(name: str) -> str:
    """The operator's name in the overload's, as "mm" in "aten.mm.default"."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else name
