"""A save that goes on beside training: the thread that writes this rank's file, and what the user holds of it.

``save_load.py`` starts one once every rank has its snapshot; ``session/state.py`` waits for it before the next.  The thread
calls no collective: ranks agree by files in the draft (`offload.shards.Outcomes`).  It never touches a tensor of the model's.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError, CheckpointError
from offload.events import Bus
from offload.shards import Draft, FailedElsewhere, Outcomes, Record, Series, ShardWriter, manifest_of, shard_name
from offload.text import shown_path
from offload.work import Ending
from zhooks.checkpoint.shard_contents import FileTensor
from zhooks.checkpoint.snapshot import Snapshot
from zhooks.comm import ControlPlane

__all__ = ["Commit", "Progress", "Saving", "Writing", "write_file"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of this rank's file: written, and in all."""

    written: int
    total: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What the first rank does once every file is durable."""

    draft: Draft
    about: Mapping[str, Any]
    series: Series
    bus: Bus

    def __call__(self, records: Sequence[Record]) -> None:
        """Put the folder in its place, then remove the older ones that it replaces."""
        draft, series = self.draft, self.series
        about = {**self.about, **series.about(draft.target, draft.opened_ns)}
        draft.commit({record.name: record.nbytes for record in records}, manifest_of(draft, about, records))
        # What cannot be removed is tried again by the next.
        with suppress(OSError):
            for name, nbytes in series.remove_older(draft.target):
                self.bus.instant("checkpoint removed", name, nbytes)


def write_file(writer: ShardWriter, tensors: Sequence[FileTensor], bus: Bus, note: Callable[[int], None]) -> Record:
    """All of a rank's file, durable; ``note`` hears of every tensor's bytes.  What was written goes if it fails."""
    try:
        for tensor in tensors:
            if tensor.key:
                bus.begin("save", tensor.key, tensor.entry.nbytes)
            writer.write(tensor.entry.name, tensor.chunks())
            note(tensor.entry.nbytes)
            if tensor.key:
                bus.end("save", tensor.key, tensor.entry.nbytes)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


class Writing(Ending):
    """This rank's part of one save, on a thread of its own: it begins to write at ``go``.

    Args:
        ranks: says what failed as other steps do; its collectives are not called here.
        snapshot: closed at the end.
        patience_s: how long a rank may write nothing before others give it up.
    Attributes:
        total: bytes of the file; ``written`` is how many of them were handed to the system.
        error: why there is no checkpoint; None until the end, and where there is one.
    Raises:
        CheckpointError, CapabilityError, OSError: the file cannot be begun; nothing is left of it but the snapshot.
    """

    def __init__(self, ranks: ControlPlane, commit: Commit, snapshot: Snapshot, patience_s: float) -> None:
        super().__init__()
        self._ranks, self._commit, self._snapshot, self._pid = ranks, commit, snapshot, os.getpid()
        self._gate, self._cancelled = threading.Event(), False
        self.error: Exception | None = None
        self.written, draft = 0, commit.draft
        self.target = draft.target
        self._folder = draft.folder()
        try:
            path = draft.path(shard_name(ranks.rank))
            self._outcomes = Outcomes(self._folder, draft.token, ranks.rank, ranks.size, str(draft.target), patience_s)
            # Made now, while every rank can still hear that there is no file to be had, or no thread to write it.
            self._writer = ShardWriter(path, [each.entry for each in snapshot.tensors], self._folder.fd)
        except BaseException:
            self._folder.close()
            raise
        self.total = self._writer.nbytes
        # No daemon: the end of the program waits for it.
        thread = threading.Thread(target=self._run, name="zhooks-save-file", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            self._writer.abort()
            self._folder.close()
            raise CapabilityError(
                f"Cannot save {shown_path(self.target)}. Expected a writer thread to start, found {error}. Raise ulimit -u, or "
                "save with wait=True."
            ) from error

    @property
    def here(self) -> bool:
        """This process writes; a fork of it has no such thread."""
        return os.getpid() == self._pid

    @property
    def why(self) -> str:
        """The error, as other ranks are told."""
        return "" if self.error is None else self._ranks.reason(self.error)

    def go(self) -> None:
        """Every rank is ready."""
        if not _unheard:
            # Once, however often it is asked for: the last registration counts.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        _unheard.add(self)
        self._snapshot.hand_over()
        self._gate.set()

    def cancel(self) -> None:
        """Some rank is not: nothing is written, and what was begun is gone when this returns."""
        self._cancelled = True
        self._gate.set()
        self.join()

    def heard(self) -> None:
        """Somebody was told what became of it."""
        _unheard.discard(self)

    def _run(self) -> None:
        self._gate.wait()
        try:
            if self._cancelled:
                self._writer.abort()
            else:
                self._save()
        finally:
            self._snapshot.close()
            self._folder.close()
            if not self._cancelled:
                self._commit.draft.close()
            self.end()

    def _save(self) -> None:
        bus, name = self._commit.bus, self.target.name
        bus.begin("save", name)
        try:
            self._write()
            self._agree()
        except Exception as error:
            if self.error is None or isinstance(self.error, FailedElsewhere):
                self.error = error
        finally:
            bus.end("save", name, self.written)

    def _write(self) -> None:
        """This rank's file, and what became of it for the others."""
        try:
            record = write_file(self._writer, self._snapshot.tensors, self._commit.bus, self._note)
            self.written = record.nbytes
            self._outcomes.succeeded(record)
        except Exception as error:
            self.error = error
            # Now, for other ranks may still write for long.
            self._snapshot.close()
            self._outcomes.failed(self._ranks.reason(error))

    def _agree(self) -> None:
        if not self._ranks.first:
            if self.error is None:
                self._outcomes.committed()
            return
        try:
            self._commit(self._outcomes.collect())
        except BaseException:
            self._commit.draft.discard()
            raise

    def _note(self, nbytes: int) -> None:
        self.written += nbytes
        self._commit.bus.counter("saved", self.target.name, self.written)


class Saving:
    """A save that may still be running; ``Attachment.save`` returns it.

    Attributes:
        folder: where the checkpoint will be.
        begun_ns: when its state was taken, by the clock of its file system; on the first rank.
    """

    def __init__(self, folder: Path, ranks: ControlPlane, writing: Writing | None, begun_ns: int, nbytes: int = 0) -> None:
        self.folder, self._ranks, self._writing, self._nbytes = folder, ranks, writing, nbytes
        self.begun_ns = begun_ns
        self._concluded = writing is None
        self._failure = ""

    @property
    def done(self) -> bool:
        """Whether it has ended: the checkpoint exists, or ``wait`` raises the reason.  Never blocks."""
        return self._writing is None or self._writing.done()

    @property
    def progress(self) -> Progress:
        """The bytes of this rank's file: ``written`` and ``total``."""
        if self._writing is None:
            return Progress(self._nbytes, self._nbytes)
        return Progress(self._writing.written, self._writing.total)

    @property
    def concluded(self) -> bool:
        """Every rank knows how it ended."""
        return self._concluded

    def give_up(self) -> None:
        """Some ranks have not begun it: it ends without a checkpoint, by itself, and no rank waits for it."""
        if not self._concluded and self._writing is not None:
            self._writing.heard()
            self._concluded = True
            self._failure = (
                f"Cannot save {shown_path(self.folder)}. Expected every rank to begin it, found that some were interrupted. "
                "Save again."
            )

    def wait(self) -> None:
        """Wait until the checkpoint is complete.  Collective.

        Raises:
            CheckpointError: on every rank, naming the first that failed; nothing was committed.
        """
        writing = self._writing
        if not self._concluded and writing is not None:
            if not writing.here:
                raise CheckpointError(
                    f"Cannot save {shown_path(self.folder)}. Expected the process that saves, found a fork of it. Wait in that "
                    "process."
                )
            writing.join()
            failure = self._ranks.failed(None if isinstance(writing.error, FailedElsewhere) else writing.error)
            writing.heard()
            self._concluded = True
            if failure is not None:
                self._failure = failure[2] if self._ranks.size == 1 else f"rank {failure[0]}: {failure[2]}"
            elif writing.error is not None:
                self._failure = str(writing.error)
        if self._failure:
            raise CheckpointError(self._failure)


#: Savings that nobody was told the end of.
_unheard: set[Writing] = set()


def _at_exit() -> None:
    for writing in tuple(_unheard):
        if writing.here and writing.error is not None:
            warnings.warn(f"nothing was committed: {writing.why}", RuntimeWarning, stacklevel=1)
