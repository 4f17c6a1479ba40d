"""Owns the level of a recording for which none was named: every storage, unless zhooks is attached before the first step.

The recorder asks it at the first event of the runtime. It begins the file anew at level "events", with what a recording at that
level would have had by then, and never leaves a file of two levels.

Note: [Which level is chosen]
    It begins as "alloc", from torch's import on, for what a plain script does shows at no other level. Where `zhooks.attach`
    comes before any optimizer has stepped, the runtime says itself what it places: the rows of storages are taken out, and the
    recording is one of level "events", which costs the steps nothing. After a step it stays "alloc", and loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zprof.recording.resident import ResidentSampler
from zprof.rows import Row, RowKind, TraceError

if TYPE_CHECKING:
    from zprof.recording.queue import Queue
    from zprof.trace.header import Header

__all__ = ["AUTO", "CHOSEN", "Choice"]

#: In place of a level: none is named.
AUTO: Literal["auto"] = "auto"
#: The note that says which level was chosen, and why; absent where one was named.
CHOSEN = "level"
#: What is recorded before the first step is small; a file larger than this stays as it is.
_MOST_NBYTES = 64 << 20
_STORAGES = (int(RowKind.ALLOC), int(RowKind.FREE))
#: Notes of the parts that only run at the levels that see every storage.
_NOTES = (CHOSEN, "storages", "lacking", "snapshot", "snapshot failed")


class Choice:
    """The choice of one recording.

    Args:
        open: no level was named; false once it is made.
        note: writes a note of the recording.
    """

    def __init__(self, open: bool, note: Callable[[str, Mapping[str, object]], None]) -> None:
        self.open = open
        self._note = note
        self._header: Header | None = None

    def begin(self, header: Header) -> None:
        """The file has been begun with ``header``."""
        self._header = header
        if self.open:
            self._note(CHOSEN, {"level": header.level, "why": "zhooks was not attached before the first step"})

    def watch_steps(self) -> Callable[[], None]:
        """The first step of any optimizer makes the choice; what is returned takes that back."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.open = False

        # Not taken back by itself: torch is going through the hooks while it is called.
        remove: Callable[[], None] = register_optimizer_step_post_hook(stepped).remove
        return remove

    def attached(self, queue: Queue, stop: Callable[[], None]) -> bool:
        """The runtime is there: whether the level is "events" from here on.

        Args:
            stop: ends what records storages.
        """
        if not self.open or self._header is None:
            return False
        self.open = False
        header = replace(self._header, level="events")
        try:
            if not _begin_anew(queue, header, stop):
                return False
        except Exception as error:
            # As much as there is: readers of it know that storages were followed until now.
            self._note("storages", {"why": f"zhooks was attached ({type(error).__name__}: {error})"})
            return False
        self._note(CHOSEN, {"level": header.level, "why": "zhooks was attached before the first step"})
        return True


def _begin_anew(queue: Queue, header: Header, stop: Callable[[], None]) -> bool:
    """The file begins anew with ``header``, without rows and notes of storages; False where it stays as it is.

    Args:
        stop: ends what records storages; called once it is certain that the file can begin anew.
    Raises:
        OSError, TraceError: the new file cannot be made; the old one goes on.
    """
    from zprof.trace.tail import Tail
    from zprof.trace.writer import Writer

    with queue.alone() as writer:
        if writer is None or writer.nbytes > _MOST_NBYTES or writer.dropped_rows:
            return False
        stop()
        queue.write(writer)
        path = writer.path
        beside = Writer(path.with_name(f"{path.name}.part"), header, force=True)
        try:
            for kept in _kept(path):
                beside.note(*kept) if isinstance(kept, tuple) else beside.rows(kept)
            beside.flush()
            beside.replace(writer)
        except BaseException:
            beside.abandon()
            raise
        tail = None
        with suppress(OSError, ValueError):
            tail = Tail(path, header)
        queue.go_on(beside, tail)
    return True


def _kept(path: Path) -> Iterator[list[Row] | tuple[str, dict[str, Any]]]:
    """The rows and the notes that a recording at level "events" would have by now."""
    from zprof.trace.reader import Trace

    # Not `Trace.open`: the tail beside it is this process's own.
    trace = Trace.growing(path)
    try:
        for note in trace.notes():
            if note.name not in _NOTES:
                yield note.name, note.body
        for rows in trace.chunks():
            columns = (rows.kind, rows.what, rows.key, rows.nbytes, rows.time_ns, rows.thread, rows.ident)
            each = (Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
            named = (row._replace(what=trace.strings[row.what], key=trace.strings[row.key]) for row in each)  # type: ignore[call-overload]
            yield [row for row in named if row.kind not in _STORAGES and row.what not in ResidentSampler.WHATS]
        if trace.damage:
            raise TraceError(f"{path}: {trace.damage}")
    finally:
        trace.close()
