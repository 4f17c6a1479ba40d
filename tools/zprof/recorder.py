"""Owns one recording: takes the runtime's events and the samplers' answers, and hands them to the trace as rows.

``zprof.record``, ``zprof run`` and ``attachment.observe`` start one. It never decides what is measured, and nothing that
happens to it reaches the training loop: a full disk ends the recording, not the run.

Note: [Cost of an event]
    The emitting thread makes one tuple and appends it; a thread of ours encodes and writes, at least every second, so that a
    run that is killed loses no more than that. Only where rows come faster than that thread takes them does the emitter write.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from offload.events import Event, tell_all
from offload.events import listen as listen_everywhere
from zprof.clock import now_ns, wall_ns
from zprof.rows import Row, RowKind
from zprof.storages import Storages

if TYPE_CHECKING:
    from zprof.header import Header
    from zprof.sampler import Sampler
    from zprof.writer import Writer

__all__ = ["LEVELS", "Recorder"]

Level = Literal["events", "alloc", "stack"]
#: From the cheapest: the runtime's own events; every storage; every storage with the stack that made it.
LEVELS: tuple[Level, ...] = ("events", "alloc", "stack")

#: Rows that may wait for the writing thread before the emitter writes itself.
MOST_WAITING = 1 << 18
#: What is recorded is in the file after this long at the latest.
FLUSH_NS = 1_000_000_000
CHUNK = 4096

_KINDS = {
    "begin": int(RowKind.BEGIN),
    "end": int(RowKind.END),
    "instant": int(RowKind.INSTANT),
    "counter": int(RowKind.COUNTER),
}
_COUNTER = int(RowKind.COUNTER)


class Part(Protocol):
    """Something that records while the recorder does, e.g. the tracker of every storage."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Records into one file: attach it to a run with ``attachment.observe``, or use ``zprof.record``.

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
        self.storages = Storages(self.row)
        self._interval_s, self._nvml, self._force = interval_s, nvml, force
        self._rows: list[tuple[int, str, str, int, int, int, int]] = []
        self._threads: dict[int, int] = {}
        self._samplers: list[Sampler] = []
        self._parts: list[Part] = []
        self._undo: list[Callable[[], None]] = []
        self._writer: Writer | None = None
        self._stopped = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._written_ns = 0
        self._pid = os.getpid()
        self._policy = ""
        #: Rows are taken: between ``start`` and ``close``, in this process only.
        self.open = False

    # What is recorded.

    def on_event(self, event: Event) -> None:
        """Take one event of the runtime."""
        if not self.open:
            self._start_late(event)
            return
        if event.kind == "hold":
            self.storages.hold(event.what, event.key, event.subject)
        elif event.what == "policy":
            if event.key != self._policy:
                self._policy = event.key
                self.note("policy", {"text": event.key})
        else:
            self._append(_KINDS[event.kind], event.what, event.key, event.nbytes, event.time_ns, 0)

    def row(self, kind: int, what: str, key: str, nbytes: int, ident: int = 0) -> None:
        """Record one row that happens now."""
        if self.open:
            self._append(kind, what, key, nbytes, now_ns(), ident)

    def _append(self, kind: int, what: str, key: str, nbytes: int, time_ns: int, ident: int) -> None:
        mine = threading.get_ident()
        thread = self._threads.get(mine)
        if thread is None:
            thread = self._threads[mine] = len(self._threads)
        self._rows.append((kind, what, key, nbytes, time_ns, thread, ident))
        if len(self._rows) > MOST_WAITING:
            self.flush()

    def note(self, name: str, body: Mapping[str, object]) -> None:
        """Record a note: a small map of plain values."""
        writer = self._writer
        if writer is not None and self.open:
            self.flush()
            writer.note(name, body)

    def add_sampler(self, sampler: Sampler) -> None:
        """Ask ``sampler`` at every interval, and close it at the end."""
        self._samplers.append(sampler)

    # Its life.

    def start(self) -> Recorder:
        """Begin: make the file, sample, and record. Once only."""
        from zprof.writer import Writer

        if self._writer is not None:
            return self
        self._open_samplers()
        self._writer = Writer(self.path, self._header(), force=self._force)
        self._written_ns = now_ns()
        self.open = True
        _forget_in_children(self)
        try:
            self._note_samplers()
            self._sample()
            if self.level != "events":
                self._start_part("zprof.alloc")
            self._watch_steps()
        except BaseException:
            self.close(reason="start failed", exit=1)
            raise
        self._thread = threading.Thread(target=self._run, name="zprof", daemon=True)
        self._thread.start()
        return self

    def listen(self) -> Recorder:
        """Start, and hear every attachment of this process, those made later too."""
        self.start()
        self._undo.append(listen_everywhere(self))
        return self

    def close(self, reason: str = "", exit: int = 0) -> None:
        """End the recording; what was recorded is in the file."""
        if not self.open or os.getpid() != self._pid:
            return
        while self._undo:
            self._undo.pop()()
        for part in self._parts:
            part.close()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()
        self.flush()
        # Again, for what was lost or dropped on the way.
        self._note_samplers()
        self.open = False
        self.storages.forget()
        writer = self._writer
        assert writer is not None
        writer.note("clock", {"mono_ns": now_ns(), "wall_ns": wall_ns()})
        writer.close(reason, exit)
        for sampler in self._samplers:
            sampler.close()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(reason="" if kind is None else kind.__name__, exit=0 if kind is None else 1)

    def _start_late(self, event: Event) -> None:
        """Handed to ``observe`` without ``start``: the first event starts it, and is recorded."""
        if self._writer is None and os.getpid() == self._pid:
            self.start()
            self.on_event(event)

    def _header(self) -> Header:
        from zprof.header import Header

        torch = sys.modules.get("torch")
        device = "cpu"
        if torch is not None and torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        return Header(
            rank=self.rank,
            world=self.world,
            host=socket.gethostname(),
            boot=boot_id(),
            pid=self._pid,
            mono_ns=now_ns(),
            wall_ns=wall_ns(),
            level=self.level,
            device=device,
            rss_nbytes=rss_nbytes(),
            argv=tuple(sys.argv),
            versions=versions(),
            budgets={},
        )

    # Samplers.

    def _open_samplers(self) -> None:
        from zprof.nvml import open_nvml
        from zprof.sampler import process_samplers

        self._samplers.extend(process_samplers())
        if self.level != "events":
            from zprof.resident import ResidentSampler

            self._samplers.append(ResidentSampler())
        if self._nvml != "off":
            sampler = open_nvml(required=self._nvml == "on")
            if sampler is not None:
                self._samplers.append(sampler)

    def _note_samplers(self) -> None:
        assert self._writer is not None
        for sampler in self._samplers:
            said = getattr(sampler, "note", None)
            if said is not None:
                self._writer.note(*said())

    def _sample(self) -> None:
        for sampler in tuple(self._samplers):
            for what, key, value in sampler.sample():
                self._append(_COUNTER, what, key, value, now_ns(), 0)

    def _start_part(self, module: str) -> None:
        from importlib import import_module

        part: Part = import_module(module).open_part(self)
        part.start()
        self._parts.append(part)

    def _watch_steps(self) -> None:
        """Spans of every optimizer's step, through torch's own registry; nothing where torch was not loaded yet."""
        if "torch" not in sys.modules:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.row(int(RowKind.BEGIN), "step", type(optimizer).__name__, 0)

        known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.row(int(RowKind.END), "step", type(optimizer).__name__, 0)
            if known.get(optimizer) != len(optimizer.state):
                # Its first step, or its first with more parameters, has made states that the runtime did not see.
                known[optimizer] = len(optimizer.state)
                tell_all()

        self._undo.append(register_optimizer_step_pre_hook(begin).remove)
        self._undo.append(register_optimizer_step_post_hook(end).remove)

    # Writing.

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample()
            if len(self._rows) >= CHUNK or now_ns() - self._written_ns >= FLUSH_NS:
                self.flush()

    def flush(self) -> None:
        """Write what waits."""
        writer = self._writer
        if writer is None:
            return
        with self._writing:
            # Cut, not swapped: another thread may hold the list it is about to append to.
            count = len(self._rows)
            rows = self._rows[:count]
            del self._rows[:count]
            if rows:
                writer.rows(_as_rows(rows))
                writer.flush()
            self._written_ns = now_ns()


def _as_rows(rows: list[tuple[int, str, str, int, int, int, int]]) -> Sequence[Row]:
    """The plain tuples are rows in all but name; to name a million of them would cost a second."""
    return rows  # type: ignore[return-value]


def _forget_in_children(recorder: Recorder) -> None:
    """A forked child (a loader's worker) records nothing: the file and the thread are its parent's."""
    held = weakref.ref(recorder)

    def forget() -> None:
        mine = held()
        if mine is not None:
            mine.open = False
            mine._writer = None

    os.register_at_fork(after_in_child=forget)


def ranks() -> tuple[int, int]:
    """(rank, world) as torchrun or Slurm tell them; (0, 1) without."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        mine, all_of = os.environ.get(rank, ""), os.environ.get(world, "")
        if mine.isdecimal() and all_of.isdecimal() and int(mine) < int(all_of):
            return int(mine), int(all_of)
    return 0, 1


def boot_id() -> str:
    """Tells whether two processes share a monotonic clock; empty where Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def rss_nbytes() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def versions() -> dict[str, str]:
    """What ran: python and the packages that matter, as installed."""
    found = {"python": sys.version.split()[0]}
    for name in ("zhooks", "torch", "numba", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
