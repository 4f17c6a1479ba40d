"""Owns one recording: takes the runtime's events and the samplers' answers, and hands them to the trace as rows.

``zprof.record``, ``zprof run`` and ``attachment.observe`` start one. It never decides what is measured, and nothing that
happens to it reaches the training loop: a full disk ends the recording, not the run.

Note: [Cost of an event]
    The emitting thread makes one tuple and appends it; a thread of ours encodes and writes, at least every second, so that a
    run that is killed loses no more than that. Where rows come faster than it takes them, the emitter waits for it.

Note: [Who may be inside]
    The collector runs anywhere, and with it the callbacks of storages that die: also while this very thread writes. What they
    record is appended, and never waits or writes; nobody enters the writing twice on one thread.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from offload.events import Event, leave
from offload.events import listen as listen_everywhere
from zprof.clock import now_ns, wall_ns
from zprof.recording.sampling import Sampling
from zprof.recording.sources import Sources
from zprof.recording.storages import Held, Storages
from zprof.recording.surroundings import device, header, ranks
from zprof.rows import Row, RowKind, TraceError

if TYPE_CHECKING:
    from zprof.recording.sampler import Sampler
    from zprof.trace.writer import Writer

__all__ = ["LEVELS", "Level", "Recorder", "ranks"]

Level = Literal["events", "alloc", "stack"]
#: From the cheapest: the runtime's own events; every storage; every storage with the stack that made it.
LEVELS: tuple[Level, ...] = ("events", "alloc", "stack")

#: Rows that may wait for the writing thread before the emitter waits, too.
MOST_WAITING = 1 << 18
#: What is recorded is in the file after this long at the latest.
FLUSH_NS = 1_000_000_000
CHUNK = 4096
_BEAT_S = 0.002

_KINDS = {"begin": int(RowKind.BEGIN), "end": int(RowKind.END), "instant": int(RowKind.INSTANT)}
_COUNTER, _ALLOC, _FREE = int(RowKind.COUNTER), int(RowKind.ALLOC), int(RowKind.FREE)


class Part(Protocol):
    """Something that records while the recorder does, e.g. the tracker of every storage."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Records into one file: attach it to a run with ``attachment.observe``, or use ``zprof.record``.

    What is still open when the program ends is closed then. A process forked from this one records nothing.

    Args:
        path: the trace; "{rank}" becomes this process's rank.
        level: "events" costs least and covers what zhooks places; "alloc" covers every torch storage; "stack" also says
            which lines made them.
        interval_s: seconds between samples of memory, allocator and NVML.
        nvml: "auto" samples GPUs where NVML answers, "on" insists, "off" does not ask.
        force: write over an existing file.
    Raises:
        TraceError: the file exists already or cannot be made.  CapabilityError: ``nvml="on"`` and NVML does not answer.
    """

    def __init__(
        self, path: str | Path, *, level: Level = "events", interval_s: float = 0.1, nvml: str = "auto", force: bool = False
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, found {level!r}")
        if not 0.001 <= interval_s <= 3600:
            raise ValueError(f"interval_s: expected 0.001 to 3600 seconds, found {interval_s!r}")
        self.rank, self.world = ranks()
        self.path = Path(str(path).replace("{rank}", str(self.rank)))
        self.level: Level = level
        self.storages = Storages(self.row, self._moved)
        self._sources = Sources(self._counted)
        self._interval_ns, self._nvml, self._force = int(interval_s * 1e9), nvml, force
        self._rows: list[tuple[int, str, str, int, int, int, int]] = []
        self._threads: dict[int, int] = {}
        self._numbers = count()
        self._sampling = Sampling(self._warn)
        self._parts: list[Part] = []
        self._undo: list[Callable[[], None]] = []
        self._writer: Writer | None = None
        self._life = threading.RLock()
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._inside = 0  # the thread that writes now
        self._thread: threading.Thread | None = None
        self._written_ns = self._sampled_ns = 0
        self._pid = os.getpid()
        self._noted: dict[str, str] = {}
        self._ended = False
        #: Rows are taken: between ``start`` and ``close``, in this process only.
        self.open = False

    # What is recorded.

    def on_event(self, event: Event) -> None:
        """Take one event of the runtime."""
        if not self.open:
            self._start_late(event)
            return
        kind = event.kind
        if kind == "hold":
            self.storages.hold(event.what, event.key, event.subject)
        elif kind == "counter":
            self._sources.state(event.subject, event.what, event.key, event.nbytes, event.time_ns)
        elif event.what in ("policy", "activation"):
            if event.key != self._noted.get(event.what):
                self._noted[event.what] = event.key
                self.note(event.what, {"text": event.key})
        else:
            self._append(_KINDS[kind], event.what, event.key, event.nbytes, event.time_ns, 0)

    def row(self, kind: int, what: str, key: str, nbytes: int, ident: int = 0) -> None:
        """Record one row that happens now."""
        if self.open:
            self._append(kind, what, key, nbytes, now_ns(), ident)

    def _moved(self, before: Held, after: Held, ident: int) -> None:
        """A storage is held for something else: freed and allocated at one time, which is how readers know it."""
        if self.open:
            time_ns = now_ns()
            self._append(_FREE, *before, time_ns, ident)
            self._append(_ALLOC, *after, time_ns, ident)

    def _counted(self, what: str, key: str, level: int, time_ns: int) -> None:
        self._append(_COUNTER, what, key, level, time_ns, 0)

    def _append(self, kind: int, what: str, key: str, nbytes: int, time_ns: int, ident: int) -> None:
        mine = threading.get_ident()
        thread = self._threads.get(mine)
        if thread is None:
            thread = self._threads.setdefault(mine, next(self._numbers))
        self._rows.append((kind, what, key, nbytes, time_ns, thread, ident))
        if len(self._rows) > MOST_WAITING and kind != _FREE:
            self._wait_for_writer(mine)

    def _wait_for_writer(self, mine: int) -> None:
        """Wait for the writing thread; not where that could be waiting for this one, see [Who may be inside]."""
        thread = self._thread
        if thread is None or mine in (thread.ident, self._inside):
            return
        pause = threading.Event()
        while len(self._rows) > MOST_WAITING and self.open and thread.is_alive():
            self._wake.set()
            pause.wait(_BEAT_S)

    def note(self, name: str, body: Mapping[str, object]) -> None:
        """Record a note: a small map of plain values."""
        with self._alone() as writer:
            if writer is not None and self.open:
                self._write(writer)
                writer.note(name, body)

    def add_sampler(self, sampler: Sampler) -> None:
        """Ask ``sampler`` at every interval, and close it at the end."""
        self._sampling.add(sampler)

    # Its life.

    def start(self) -> Recorder:
        """Begin: make the file, sample, and record; again changes nothing.

        Raises:
            TraceError: as above, or it was closed.  Whatever else failed; then nothing of it is left, no file either.
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
        from zprof.trace.writer import Writer

        self._pid = os.getpid()
        self._stopped.clear()
        self._sampling.open(resident=self.level != "events", nvml=self._nvml)
        self._writer = Writer(self.path, header(self.rank, self.world, self.level), force=self._force)
        self._written_ns = now_ns()
        self.open = True
        _recording.add(self)
        self._note_samplers()
        self._sample()
        if self.level != "events":
            self._start_part("zprof.recording.tracker")
            self._start_part("zprof.recording.cuda_history")
        self._watch_steps()
        self._thread = threading.Thread(target=self._run, name="zprof", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _abandon(self) -> None:
        """What was begun is taken back; samplers that were given stay for another try."""
        self.open = False
        self._stop()
        self._sampling.close_own()
        writer, self._writer, self._thread = self._writer, None, None
        self._rows.clear()
        self.storages.forget()
        if writer is not None:
            writer.close("start failed", 1)
            with suppress(OSError):
                self.path.unlink()

    def listen(self) -> Recorder:
        """Start, and hear every attachment of this process, those made later too."""
        self.start()
        try:
            listen_everywhere(self)
        except BaseException:
            self.close(reason="start failed", exit=1)
            raise
        return self

    def close(self, reason: str = "", exit: int = 0) -> None:
        """End the recording; what was recorded is in the file.  Any thread may call, again changes nothing."""
        if os.getpid() != self._pid:
            return
        with self._life:
            # Not ``open``: a close that was interrupted goes on where it was.
            if self._writer is None or self._ended:
                return
            leave(self)
            self._stop()
            self._sample()
            found = device()
            if found is not None:
                # CUDA may have been started, and the device chosen, after the header was written.
                self.note("device", {"device": found})
            # Again, for what was lost or dropped on the way.
            self._note_samplers()
            self.open = False
            self.storages.forget()
            with self._alone() as writer:
                if writer is not None:
                    self._write(writer)
                    writer.note("clock", {"mono_ns": now_ns(), "wall_ns": wall_ns()})
                    writer.close(reason, exit)
            self._ended = True
            self._sampling.close()
            atexit.unregister(self.close)

    def _stop(self) -> None:
        """Take hooks and parts away and end the thread; what one of them raises keeps no other."""
        while self._undo:
            self._quietly(self._undo.pop())
        while self._parts:
            self._quietly(self._parts.pop().close)
        self._stopped.set()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread.ident not in (None, threading.get_ident()):
            thread.join()

    def _quietly(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._warn(f"ended with {type(error).__name__}: {error}; the trace is whole")

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
        if self._writer is None and not self._ended and os.getpid() == self._pid:
            self.start()
            self.on_event(event)

    def _start_part(self, module: str) -> None:
        from importlib import import_module

        part: Part = import_module(module).open_part(self)
        part.start()
        self._parts.append(part)

    def _watch_steps(self) -> None:
        """Nothing where torch was not loaded yet."""
        if "torch" in sys.modules:
            from zprof.recording.optimizer_steps import watch_steps

            self._undo.extend(watch_steps(self.row, lambda: self.open))

    def _sample(self) -> None:
        with suppress(MemoryError):  # a script's want of memory is what the trace is to show, not to end by
            for what, key, value in self._sampling.readings():
                self._append(_COUNTER, what, key, value, now_ns(), 0)
        self._sampled_ns = now_ns()
        self._sources.bury(self._sampled_ns)

    def _note_samplers(self) -> None:
        for name, body in self._sampling.notes():
            self.note(name, body)

    # Writing.

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                due_ns = min(self._sampled_ns + self._interval_ns, self._written_ns + FLUSH_NS)
                self._wake.wait(max(0, due_ns - now_ns()) / 1e9)
                self._wake.clear()
                if now_ns() - self._sampled_ns >= self._interval_ns:
                    self._sample()
                if len(self._rows) >= min(CHUNK, MOST_WAITING) or now_ns() - self._written_ns >= FLUSH_NS:
                    self._flush_in_time()
        except Exception as error:
            # Whatever it was: rows that nobody writes must not pile up.
            self.open = False
            self._rows.clear()
            self._warn(f"recording stopped, training goes on: {type(error).__name__}: {error}")

    def _flush_in_time(self) -> None:
        try:
            self.flush()
        except MemoryError:
            # The script may have some again in a moment, and its trace is to show the want: the rows wait.
            self._written_ns = now_ns()
            if len(self._rows) > MOST_WAITING:
                raise

    def flush(self) -> None:
        """Write what waits."""
        with self._alone() as writer:
            if writer is not None:
                self._write(writer)

    @contextmanager
    def _alone(self) -> Iterator[Writer | None]:
        """The writer, for this thread only; None where there is none, or this thread is inside already."""
        mine = threading.get_ident()
        if self._writer is None or self._inside == mine:
            yield None
            return
        with self._writing:
            self._inside = mine
            try:
                yield self._writer
            finally:
                self._inside = 0

    def _write(self, writer: Writer) -> None:
        # Cut, not swapped: another thread may hold the list it is about to append to.
        length = len(self._rows)
        rows = self._rows[:length]
        if rows:
            # Not before the writer has them: for want of memory it may take none.
            writer.rows(_as_rows(rows))
            del self._rows[:length]
            writer.flush()
        self._written_ns = now_ns()


def _as_rows(rows: list[tuple[int, str, str, int, int, int, int]]) -> Sequence[Row]:
    """The plain tuples are rows in all but name; to name a million of them would cost a second."""
    return rows  # type: ignore[return-value]


_recording: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a loader's worker) records nothing: the file and the thread are its parent's."""
    for recorder in tuple(_recording):
        recorder.open = False
        recorder._writer = recorder._thread = None
        recorder._rows.clear()
        recorder.storages.forget()
    _recording.clear()


os.register_at_fork(after_in_child=_forget_in_child)
