"""Owns one recording: takes the runtime's events and the samplers' answers, and hands them to the trace as rows.

``zprof.record``, ``zprof run`` and ``attachment.observe`` start one. It never decides what is measured, and nothing that
happens to it reaches the training loop: a full disk ends the recording, not the run.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from offload.events import FAILED, VERB, Event, Kind, TimeMark, leave
from offload.events import listen as listen_everywhere
from zprof.clock import now_ns, wall_ns
from zprof.recording import queue
from zprof.recording.chosen import AUTO, Choice
from zprof.recording.lanes import LANES, Lanes, here
from zprof.recording.queue import Queue
from zprof.recording.sampling import Sampling
from zprof.recording.schedule import DEFAULT, Schedule
from zprof.recording.sources import Sources
from zprof.recording.storages import Held, Storages
from zprof.recording.surroundings import device, header, ranks
from zprof.rows import RowKind, TraceError

if TYPE_CHECKING:
    from zprof.recording.sampler import Sampler
    from zprof.trace.writer import Writer

__all__ = ["LEVELS", "Children", "Level", "Recorder", "leave_inherited", "ranks"]

Level = Literal["events", "alloc", "stack", "ops"]
#: What is recorded of the processes that the recorded one starts.
Children = Literal["off", "memory"]
#: From the cheapest: the runtime's own events; every storage; every storage with the stack that made it. "ops" is "alloc" with
#: the operators of some steps.
LEVELS: tuple[Level, ...] = ("events", "alloc", "stack", "ops")

#: What is recorded is in the file after this long at the latest.
FLUSH_NS = 1_000_000_000
CHUNK = 4096

#: Part -> what is not recorded without it.
LACKING = {
    "tracker": "storages are",
    "allocator_history": "the history of the device's allocator is",
    "optimizer_steps": "steps of optimizers are",
    "computing": "what steps compute is",
    "operators": "operators are",
}

_KINDS = {"begin": int(RowKind.BEGIN), "end": int(RowKind.END), "instant": int(RowKind.INSTANT)}
_COUNTER, _ALLOC, _FREE = int(RowKind.COUNTER), int(RowKind.ALLOC), int(RowKind.FREE)
_SPAN = int(RowKind.SPAN)


class Part(Protocol):
    """Something that records while the recorder does, e.g. the tracker of every storage."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Records into one file: attach it to a run with ``attachment.observe``, or use ``zprof.record``.

    If it is still open when the program ends, it is closed then. A process forked from this one records nothing.

    Args:
        path: the trace; "{rank}" becomes this process's rank.
        level: "events" costs the least and covers what zhooks places; "alloc" covers every torch storage; "stack" also the
            lines that allocated them; "ops" is "alloc" plus the operators of some steps. "auto" is "events" if zhooks is
            attached before the first step, else "alloc".
        interval_s: seconds between samples of memory, allocator and GPUs.
        nvml: "auto" samples GPUs if NVML, AMD SMI or Level Zero works, "on" requires one of them, "off" uses none.
        force: overwrite an existing file.
        children: "memory" samples the processes that this one starts, from outside; "off" does not.
        ops_steps: at level "ops", the steps whose operators are recorded: "10:13" for 10, 11 and 12, "3:6,100:103", or "all".
        ops_stack: at level "ops", also the lines that called them, which is expensive.
    Raises:
        ValueError: an argument is not one of those.
        TraceError: the file exists already or cannot be created.  CapabilityError: ``nvml="on"`` and none of them works.
    """

    #: The program is recorded from its start.
    whole: ClassVar[bool] = False

    def __init__(
        self,
        path: str | Path,
        *,
        level: Level | Literal["auto"] = "events",
        interval_s: float = 0.1,
        nvml: str = "auto",
        force: bool = False,
        children: Children = "memory",
        ops_steps: str | None = None,
        ops_stack: bool = False,
    ) -> None:
        if level not in (AUTO, *LEVELS):
            raise ValueError(f"level: expected {AUTO} or one of {', '.join(LEVELS)}, found {level!r}")
        if not 0.001 <= interval_s <= 3600:
            raise ValueError(f"interval_s: expected 0.001 to 3600 seconds, found {interval_s!r}")
        if children not in ("off", "memory"):
            raise ValueError(f"children: expected off or memory, found {children!r}")
        if level != "ops" and (ops_steps is not None or ops_stack):
            raise ValueError(f'level: expected "ops" with ops_steps or ops_stack, found {level!r}')
        try:
            self.schedule = Schedule.of(DEFAULT if ops_steps is None else ops_steps, stack=ops_stack)
        except ValueError as error:
            raise ValueError(f"ops_steps: {error}") from None
        self.rank, self.world = ranks()
        self.path = Path(str(path).replace("{rank}", str(self.rank)))
        self.level: Level = "alloc" if level == AUTO else level
        self._choice = Choice(level == AUTO, self.note)
        self.storages = Storages(self.row, self._moved)
        self._sources = Sources(self._counted)
        self._lanes = Lanes(self._queued, self._done, lambda body: self.note(LANES, body))
        self._interval_ns, self._nvml, self._force = int(interval_s * 1e9), nvml, force
        self._children = children
        self._queue = Queue()
        self._append = self._queue.put
        self._sampling = Sampling(self._warn)
        self._parts: list[Part] = []
        #: What follows storages, and what counts FLOPs, while they do.
        self.tracker: Any = None
        self.computing: Any = None
        self._undo: list[Callable[[], None]] = []
        self._life = threading.RLock()
        self._stopped = threading.Event()
        self._written_ns = self._sampled_ns = self._samples = 0
        self._pid = os.getpid()
        self._noted: dict[str, str] = {}
        self._device: str | None = None
        self._zhooks = False
        self._ended = False
        #: The trace's header says so, which with the process tells this recording from all others; 0 before.
        self.began_ns = 0
        #: Rows are taken: between ``start`` and ``close``, in this process only.
        self.open = False
        #: Events carry the device's marks.
        self.keeps_time = True

    # What is recorded.

    def on_event(self, event: Event) -> None:
        """Take one event of the runtime."""
        if not self.open:
            self._start_late(event)
            return
        kind = event.kind
        if event.what == VERB and self.tracker is not None:
            self.tracker.heard(kind, event.key)
        if self._choice.open and event.what not in (VERB, FAILED):
            self._leave_storages()
        if kind == "hold":
            self.storages.hold(event.what, event.key, event.subject)
        elif kind == "counter":
            self._sources.state(event.subject, event.what, event.key, event.nbytes, event.time_ns)
        elif event.what in ("policy", "activation"):
            # From here on zhooks says itself what it gathers, reduces and waits for, by unit.
            self._zhooks = True
            if event.key != self._noted.get(event.what):
                self._noted[event.what] = event.key
                self.note(event.what, {"text": event.key})
        elif event.mark is not None:
            self._lanes.take(event)
        else:
            self._append(_KINDS[kind], event.what, event.key, event.nbytes, event.time_ns, 0)

    def row(self, kind: int, what: str, key: str, nbytes: int, ident: int = 0) -> None:
        """Record one row that happens now."""
        if self.open:
            self._append(kind, what, key, nbytes, now_ns(), ident)

    def span(self, kind: Kind, what: str, key: str, nbytes: int = 0, mark: TimeMark | None = None) -> None:
        """A span of zprof's own begins or ends: now, or where the device comes to ``mark``."""
        if not self.open:
            return
        if mark is None or (kind == "end" and not self._lanes.begun(what, key)):
            self.row(_KINDS[kind], what, key, nbytes)
        else:
            self._lanes.take(Event(kind, what, key, nbytes, now_ns(), None, mark))

    def _queued(self, kind: int, what: str, key: str, nbytes: int, time_ns: int) -> None:
        self._append(kind, what, key, nbytes, time_ns, 0)

    def _done(self, what: str, key: str, nbytes: int, begin_ns: int, length_ns: int, lane: int) -> None:
        if self.open:
            self._append(_SPAN, what, key, nbytes, begin_ns, length_ns, lane)

    def _moved(self, before: Held, after: Held, ident: int) -> None:
        """A storage is held for something else: freed and allocated at one time, which is how readers know it."""
        if self.open:
            time_ns = now_ns()
            self._append(_FREE, *before, time_ns, ident)
            self._append(_ALLOC, *after, time_ns, ident)

    def _counted(self, what: str, key: str, level: int, time_ns: int) -> None:
        self._append(_COUNTER, what, key, level, time_ns, 0)

    def note(self, name: str, body: Mapping[str, object]) -> None:
        """Record a note: a small map of plain values."""
        with self._queue.alone() as writer:
            if writer is not None and self.open:
                self._write(writer)
                writer.note(name, body)
            elif self.open and self._queue.late:
                self._warn(f"writing takes too long; note {name} is not in the trace")

    def add_sampler(self, sampler: Sampler) -> None:
        """Read ``sampler`` at every interval, and close it at the end."""
        self._sampling.add(sampler)

    # Its life.

    def start(self) -> Recorder:
        """Create the file, and start to sample and record; calling it again changes nothing.

        Raises:
            TraceError: as above, or it was closed.  Any other error is raised too, and leaves nothing behind, not even a file.
        """
        with self._life:
            if self._ended:
                raise TraceError(f"{self.path}: expected a new recorder, found one that was closed; make another")
            if not self.open:
                try:
                    self._begin()
                except BaseException:
                    self._abandon()
                    raise
        return self

    def _begin(self) -> None:
        from zprof.trace.tail import Tail
        from zprof.trace.writer import Writer

        self._pid = os.getpid()
        self._stopped.clear()
        children = _loader_workers if self._children == "memory" else None
        self._sampling.open(resident=self.level != "events", nvml=self._nvml, children=children)
        # Of readers that know no operators, which are in notes beside.
        about = header(self.rank, self.world, "alloc" if self.level == "ops" else self.level, whole=self.whole)
        self._queue.writer = Writer(self.path, about, force=self._force)
        self.began_ns = about.mono_ns
        with suppress(OSError, ValueError):  # Without it a kill loses what was not written yet.
            self._queue.tail = Tail(self.path, about)
        self._written_ns = now_ns()
        self.open = True
        _recording.add(self)
        self._note_samplers()
        self._choice.begin(about)
        self._sample()
        if self.level != "events":
            self._start_part("zprof.recording.tracker")
            self._start_part("zprof.recording.allocator_history")
        self._watch_steps()
        if self.level == "ops":
            self._start_part("zprof.recording.operators")
        self._queue.thread = threading.Thread(target=self._run, name="zprof", daemon=True)
        self._queue.thread.start()
        atexit.register(self.close)

    def _abandon(self) -> None:
        """What was begun is taken back; samplers that were given stay for another try."""
        self.open = False
        self._stop()
        self._sampling.close_own()
        writer, self._queue.writer, self._queue.thread = self._queue.writer, None, None
        self._queue.clear()
        self.storages.forget()
        self._queue.end_tail()
        if writer is not None:
            writer.close("start failed", 1)
            with suppress(OSError):
                self.path.unlink()

    def listen(self) -> Recorder:
        """Start, and receive events of every attachment of this process, including later ones."""
        self.start()
        try:
            listen_everywhere(self)
        except BaseException:
            self.close(reason="start failed", exit=1)
            raise
        return self

    def close(self, reason: str = "", exit: int = 0) -> None:
        """End the recording; what was recorded is in the file.  Any thread may call it, and again without effect."""
        if os.getpid() != self._pid:
            return
        with self._life:
            # Not ``open``: a close that was interrupted goes on where it was.
            if self._queue.writer is None or self._ended:
                return
            leave(self)
            self._stop()
            self._quietly(self._lanes.finish)
            self._sample()
            # Again, for what was lost or dropped on the way.
            self._note_samplers()
            self.open = False
            self.storages.forget()
            with self._queue.alone() as writer:
                if writer is not None:
                    self._write(writer)
                    writer.note("clock", {"mono_ns": now_ns(), "wall_ns": wall_ns()})
                    writer.close(reason, exit)
            self._ended = True
            if writer is not None:
                self._queue.end_tail()
            else:
                # The tail stays: the newest rows are read from it.
                self._warn(f"writing takes too long; the trace has no end and lacks at least {len(self._queue):,} rows")
            self._sampling.close()
            atexit.unregister(self.close)

    def _stop(self) -> None:
        """Take hooks and parts away and end the thread; what one of them raises keeps no other."""
        while self._undo:
            self._quietly(self._undo.pop())
        self._choice.open = False
        while self._parts:
            self._quietly(self._parts.pop().close)
        self._stopped.set()
        self._queue.wake.set()
        thread = self._queue.thread
        if thread is not None and thread.ident not in (None, threading.get_ident()):
            thread.join(queue.LONGEST_WAIT_S)

    def _quietly(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._warn(f"ended with {type(error).__name__}: {error}; the trace is complete")

    def _warn(self, what: str) -> None:
        # A filter that makes warnings errors must not reach the training loop from here.
        with suppress(Warning):
            warnings.warn(f"{self.path}: {what}", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        code = error.code if isinstance(error, SystemExit) else error
        self.close(reason="" if kind is None else kind.__name__, exit=code if isinstance(code, int) else int(code is not None))

    def _start_late(self, event: Event) -> None:
        """Handed to ``observe`` without ``start``: the first event starts it, and is recorded."""
        if self._ended or os.getpid() != self._pid:
            return
        with self._life:  # Another thread may be starting it just now.
            if self._queue.writer is None and not self._ended:
                self.start()
        if self.open:
            self.on_event(event)

    def _leave_storages(self) -> None:
        """The runtime is there before the first step."""
        with self._life:
            if self.open and self._choice.attached(self._queue, self._stop_parts):
                self.level = "events"

    def _stop_parts(self) -> None:
        while self._parts:
            part = self._parts.pop()
            if hasattr(part, "leave"):
                self._undo.append(part.leave())
            else:
                self._quietly(part.close)
        self.storages.forget()
        self._sampling.leave_resident()

    def _start_part(self, module: str) -> None:
        from importlib import import_module

        try:
            part: Part = import_module(module).open_part(self)
            part.start()
        except Exception as error:
            self._lacks(module.rpartition(".")[2], f"{type(error).__name__}: {error}")
        else:
            self._parts.append(part)
            if module.endswith(".tracker"):
                self.tracker = part

    def thread_number(self, ident: int) -> int:
        """The number that rows of a thread have; -1 where it has put none."""
        return self._queue.number_of(ident)

    def _lacks(self, part: str, why: str) -> None:
        """A part cannot record, for this torch lacks what it takes: said once, and the others go on."""
        version = getattr(sys.modules.get("torch"), "__version__", "?")
        said = f"not with torch {version}: {why}"
        if part == "tracker":
            self.note("storages", {"why": said})
        if part == "operators" and self.tracker is not None:
            # It waits for them to say when it may begin.
            self.tracker.resume()
        self.note("lacking", {"what": f"{LACKING[part]} not recorded", "why": said})
        self._warn(f"{LACKING[part]} not recorded, {said}; training goes on")

    def _watch_steps(self) -> None:
        """Nothing where torch was not loaded yet."""
        if "torch" in sys.modules:
            try:
                from zprof.recording.optimizer_steps import watch_steps

                self._undo.extend(watch_steps(self._step, lambda: self.open))
                if self._choice.open:
                    self._undo.append(self._choice.watch_steps())
            except Exception as error:
                self._lacks("optimizer_steps", f"{type(error).__name__}: {error}")
            self._watch_collectives()
            self._watch_loaders()
            try:
                from zprof.recording.computing import Computing

                computing = Computing(self.note)
                computing.start()
                self._undo.append(computing.close)
                self.computing = computing
            except Exception as error:
                self._lacks("computing", f"{type(error).__name__}: {error}")

    def _step(self, kind: Kind, key: str) -> None:
        self.span(kind, "step", key, mark=here())

    def _watch_collectives(self) -> None:
        """Those of torch.distributed; nothing where this torch was built without."""
        def failed(why: str) -> None:
            self.note("collectives", {"why": why})
            self._warn(f"torch.distributed's collectives are not recorded: {why}")

        try:
            from torch import distributed

            if not distributed.is_available():
                return
            from zprof.recording.collectives import Listener, watch_collectives

            wanted, seen = (lambda: self.open and not self._zhooks), (lambda: self.note("collectives", {"why": ""}))
            self._undo.append(watch_collectives(Listener(self.span, wanted, seen, failed, self._lanes.untimed)))
        except Exception as error:
            failed(f"{type(error).__name__}: {error}")

    def _watch_loaders(self) -> None:
        """Waits for torch's DataLoader."""
        def failed(why: str) -> None:
            self.note("loaders", {"why": why})
            self._warn(f"waits for data loaders are not recorded: {why}")

        try:
            from zprof.recording.loaders import LOADERS, LoaderListener, watch_loaders

            listener = LoaderListener(self.row, lambda: self.open, lambda body: self.note(LOADERS, body), failed)
            self._undo.append(watch_loaders(listener))
        except Exception as error:
            failed(f"{type(error).__name__}: {error}")

    def _sample(self) -> None:
        with suppress(MemoryError):  # a script's want of memory is what the trace is to show, not to end by
            self._sampling.sample(self._sampled)
        found = device()
        if found is not None and found != self._device:
            # Now, not at the end: of a run that is killed readers must know that it computed on a GPU, and on which.
            self._device = found
            self.note("device", {"device": found})
            self._note_samplers()
        with suppress(MemoryError):  # the rows that are written before a note wait
            for name, body in self._sampling.news():
                self.note(name, body)
        self._sampled_ns = now_ns()
        self._sources.bury(self._sampled_ns)

    def _sampled(self, what: str, key: str, value: int) -> None:
        self._samples += 1
        self._append(_COUNTER, what, key, value, now_ns(), 0)

    @property
    def rows_of_script(self) -> int:
        """Rows so far that say what the script does, samples not counted: no more of them, and nothing is seen to be done."""
        return self._queue.put_so_far - self._samples

    def _note_samplers(self) -> None:
        for name, body in self._sampling.notes():
            self.note(name, body)

    # Writing.

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                due_ns = min(self._sampled_ns + self._interval_ns, self._written_ns + FLUSH_NS)
                self._queue.wake.wait(max(0, due_ns - now_ns()) / 1e9)
                self._queue.wake.clear()
                if now_ns() - self._sampled_ns >= self._interval_ns:
                    self._sample()
                if len(self._queue) >= min(CHUNK, queue.MOST_WAITING) or now_ns() - self._written_ns >= FLUSH_NS:
                    self._flush_in_time()
        except Exception as error:
            # Whatever it was: rows that nobody writes must not pile up.
            self.open = False
            self._queue.clear()
            self._warn(f"recording stopped, training goes on: {type(error).__name__}: {error}")

    def _flush_in_time(self) -> None:
        try:
            self.flush()
        except MemoryError:
            # The script may have some again in a moment, and its trace is to show the want: the rows wait.
            self._written_ns = now_ns()
            if len(self._queue) > queue.MOST_WAITING:
                raise

    def flush(self) -> None:
        """Write buffered rows to the file."""
        with self._queue.alone() as writer:
            if writer is not None:
                self._write(writer)

    def _write(self, writer: Writer) -> None:
        self._queue.write(writer)
        self._written_ns = now_ns()


def _loader_workers() -> Mapping[int, str]:
    """Those that are known: pid -> name."""
    module = sys.modules.get("zprof.recording.loaders")
    return {} if module is None else module.worker_names()


_recording: weakref.WeakSet[Recorder] = weakref.WeakSet()
#: In a fork: its parent's.
_inherited: list[Recorder] = []


def _forget_in_child() -> None:
    """A forked child (a loader's worker) records nothing: the file and the thread are its parent's."""
    for recorder in tuple(_recording):
        recorder.open = False
        recorder._queue.forget()
        recorder.storages.forget()
        _inherited.append(recorder)
    _recording.clear()


def leave_inherited() -> None:
    """In a fork that gets a recording of its own: take out what its parent's has hung into torch.

    Not when it forks: locks may be held then by threads that are not in the fork.
    """
    while _inherited:
        recorder = _inherited.pop()
        while recorder._undo:
            recorder._quietly(recorder._undo.pop())


os.register_at_fork(after_in_child=_forget_in_child)
