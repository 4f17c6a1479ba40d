"""Saves in the background: a snapshot of one moment, the thread that writes it while training goes on, and what the user holds.

What the disk tier holds is kept there and read ahead in the order of the file; all else is copied once, counted as host memory
before the first copy is made, and given back as it is written.  A save that is waited for copies nothing.  The thread calls no
collective: ranks agree by files in the draft (`offload.shards.Outcomes`).
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.budget import Budget, Ranks, available, preflight
from offload.disk import Kept, KeptRange, ReadAhead
from offload.errors import BudgetError, CapabilityError, CheckpointError, TierError
from offload.events import Bus
from offload.policy import Policy
from offload.shards import Draft, FailedElsewhere, Outcomes, Record, Series, ShardWriter, manifest_of, shard_name
from offload.store import BlockRange, Store
from offload.text import Share, as_size, shown_path
from offload.tier import Tier
from offload.work import Ending
from zhooks.checkpoint.shard import FileTensor, Piece, opened
from zhooks.comm import ControlPlane
from zhooks.tensor import StoredTensor, spanned

_KEY = "checkpoint snapshot"


def host_budget(policy: Policy, store: Store | None, bus: Bus) -> Budget:
    """That of the tiers, where there are any; else what the policy leaves of host memory."""
    if store is not None:
        return store.budget
    budget = Budget({Tier.HOST: policy.budget.resolve(Tier.HOST, partial(available, Tier.HOST))})
    budget.account.bus = bus
    return budget


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """Host memory that a snapshot may take.

    Attributes:
        most: bytes by [save] snapshot; None bounds nothing.
        budget: counts it as host memory: that of the tiers, where there are any.
        ranks: that take as much of this machine's memory.
    """

    most: int | None
    budget: Budget
    ranks: Ranks

    @classmethod
    def of(cls, policy: Policy, store: Store | None, bus: Bus, alike: Ranks) -> SnapshotMemory:
        """What the policy leaves; without tiers its budget of host memory is the snapshot's alone."""
        amount = policy.save.snapshot
        most = amount.of(available(Tier.HOST)) if isinstance(amount, Share) else amount
        return cls(most, host_budget(policy, store, bus), alike)

    def take(self, nbytes: int) -> None:
        """Count so many bytes as taken.

        Raises:
            CheckpointError: it may not take so many; nothing is counted.
        """
        found = ""
        if self.most is not None and nbytes > self.most:
            found = f'[save] snapshot = "{as_size(self.most)}"'
        else:
            try:
                preflight({Tier.HOST: nbytes}, ranks=self.ranks)
                self.budget.lend(Tier.HOST, _KEY, nbytes)
            except BudgetError as error:
                found = str(error)
        if found:
            raise CheckpointError(
                f"save expected {as_size(nbytes)} of host memory per rank for a snapshot, found {found}. Save with wait=True, "
                "which needs none, or free host memory."
            )
        self.budget.account.take(Tier.HOST, _KEY, nbytes, None)

    def give(self, nbytes: int) -> None:
        """Bytes that were taken are free again; any thread."""
        self.budget.give_back(Tier.HOST, nbytes)
        self.budget.account.give(Tier.HOST, _KEY, nbytes)


class Snapshot:
    """What ``tensors`` are now, to be read once and in order, on any one thread.

    What lies on the disk tier is kept there until it was read, or until ``close``, and read ahead.

    Args:
        store: where what is not in memory of its own is kept.
        memory: for copies of all else; None where nothing changes until all is read: then nothing is copied.
    Attributes:
        tensors: the same tensors of this moment; reading one gives its memory back.
        copied_nbytes: what was copied.
    Raises:
        CheckpointError: there is not enough memory for the copies; nothing is held.
    """

    def __init__(self, tensors: Sequence[FileTensor], store: Store | None, memory: SnapshotMemory | None) -> None:
        self._store, self._memory, self._held = store, memory, 0
        self._kept: dict[int, Kept | None] = {}
        self._uses: Counter[Kept] = Counter()
        self._ahead = ReadAhead([])
        self.tensors: list[FileTensor] = []
        self.copied_nbytes = 0
        with nullcontext() if memory is not None else suppress(TierError):
            # What could not be written back is in memory, and is read from there.
            if store is not None:
                store.flush()
        try:
            if memory is None:
                # Pieces in memory are made again when they are read: all at once they could take as much as the state.
                self._plan(part for tensor in tensors for part in self._placed(tensor))
                self.tensors = [FileTensor(each.entry, partial(self._read_through, each), each.key) for each in tensors]
                return
            parts = [self._placed(tensor) for tensor in tensors]
            copied = [sum(_nbytes(part) for part in each) for each in parts]
            self.copied_nbytes = sum(copied)
            memory.take(self.copied_nbytes)
            self._held = self.copied_nbytes
            self._plan(part for each in parts for part in each)
            for tensor, each, nbytes in zip(tensors, parts, copied, strict=True):
                held = _copied(each, nbytes, tensor.entry.dtype)
                self.tensors.append(FileTensor(tensor.entry, partial(self._read, held, nbytes, tensor.entry.dtype), tensor.key))
        except BaseException:
            self.close()
            raise

    def _placed(self, tensor: FileTensor) -> list[Piece | KeptRange]:
        """Its pieces in order, those on disk kept there."""
        found: list[Piece | KeptRange] = []
        for piece in tensor.pieces():
            place = self._on_disk(piece)
            last = found[-1] if found else None
            if place is not None and isinstance(last, KeptRange) and (last.kept, last.stop) == (place.kept, place.start):
                found[-1] = KeptRange(last.kept, last.start, place.stop)
            else:
                found.append(piece if place is None else place)
        return found

    def _on_disk(self, piece: Piece) -> KeptRange | None:
        if isinstance(piece, BlockRange):
            block, start, nbytes = piece.block, piece.start * piece.dtype.itemsize, piece.numel * piece.dtype.itemsize
        elif isinstance(piece, StoredTensor) and piece.is_contiguous():
            block, start, nbytes = piece.block, piece.start, spanned(piece)
        else:
            return None
        if id(block) not in self._kept:
            assert self._store is not None
            self._kept[id(block)] = self._store.keep(block)
        kept = self._kept[id(block)]
        return None if kept is None or not nbytes else KeptRange(kept, start, start + nbytes)

    def _plan(self, parts: Iterable[Piece | KeptRange]) -> None:
        """Read ahead what is on disk, in this order."""
        ranges = [part for part in parts if isinstance(part, KeptRange)]
        self._uses.update(each.kept for each in ranges)
        self._ahead = ReadAhead(ranges)

    def _from_disk(self, part: KeptRange, dtype: torch.dtype) -> Iterator[Tensor]:
        """The next part's values; a chunk is valid until the next is asked for."""
        for chunk in self._ahead.chunks(part):
            yield chunk.view(dtype)
        self._uses[part.kept] -= 1
        if not self._uses[part.kept]:
            part.kept.close()

    def _read_through(self, tensor: FileTensor) -> Iterator[Tensor]:
        for part in self._placed(tensor):
            if isinstance(part, KeptRange):
                yield from self._from_disk(part, tensor.entry.dtype)
            else:
                yield opened(part)

    def _read(self, parts: list[Tensor | KeptRange], nbytes: int, dtype: torch.dtype) -> Iterator[Tensor]:
        parts.reverse()
        while parts:
            part = parts.pop()
            if isinstance(part, Tensor):
                yield part
                # Its memory must not live until the next was read.
                del part
                continue
            yield from self._from_disk(part, dtype)
        self._give(nbytes)

    def _give(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._memory is not None:
            self._memory.give(nbytes)

    def hand_over(self) -> None:
        """From now on another thread reads it, whatever this one does, and whoever wants its memory waits for that."""
        if self._memory is not None:
            self._memory.budget.hand_over(Tier.HOST)

    def close(self) -> None:
        """Nothing more is read; idempotent, on the thread that reads."""
        self.tensors = []
        self._ahead.close()
        for kept in self._kept.values():
            if kept is not None:
                kept.close()
        if self._held:
            self._give(self._held)


def _copied(parts: Sequence[Piece | KeptRange], nbytes: int, dtype: torch.dtype) -> list[Tensor | KeptRange]:
    """Each in one piece of host memory, or where it is kept."""
    memory, at, held = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu"), 0, list[Tensor | KeptRange]()
    for part in parts:
        if isinstance(part, KeptRange):
            held.append(part)
            continue
        values = opened(part).detach().resolve_conj().resolve_neg().reshape(-1)
        copy = memory[at : at + values.numel()]
        copy.copy_(values)
        held.append(copy)
        at += values.numel()
    return held


def _nbytes(part: Piece | KeptRange) -> int:
    """Of what is to be copied."""
    if isinstance(part, KeptRange):
        return 0
    return (part.numel if isinstance(part, BlockRange) else part.numel()) * part.dtype.itemsize


# Writing a file, and committing all ranks'.


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


def write_file(
    writer: ShardWriter, tensors: Sequence[FileTensor], bus: Bus, note: Callable[[int], None] = lambda nbytes: None
) -> Record:
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
    """This rank's part of one save: a file that is begun, and from ``go`` on written by a thread of its own.

    Args:
        ranks: says what failed as other steps do; its collectives are not called here.
        snapshot: closed at the end.
        patience_s: how long a rank may write nothing before others give it up.
    Attributes:
        total: bytes of the file; ``written`` is how many of them were handed to the system.
        error: why there is no checkpoint; None until the end, and where there is one.
    Raises:
        CheckpointError, OSError: the file cannot be begun; nothing is left of it but the snapshot.
    """

    def __init__(self, ranks: ControlPlane, commit: Commit, snapshot: Snapshot, patience_s: float) -> None:
        super().__init__()
        self._ranks, self._commit, self._snapshot, self._pid = ranks, commit, snapshot, os.getpid()
        self.error: Exception | None = None
        self.written, draft = 0, commit.draft
        self.target = draft.target
        self._folder = draft.folder()
        try:
            path = draft.path(shard_name(ranks.rank))
            self._outcomes = Outcomes(self._folder, draft.token, ranks.rank, ranks.size, str(draft.target), patience_s)
            # Made now, while every rank can still hear that there is no file to be had.
            self._writer = ShardWriter(path, [each.entry for each in snapshot.tensors], self._folder.fd)
        except BaseException:
            self._folder.close()
            raise
        self.total = self._writer.nbytes
        self._gate, self._cancelled = threading.Event(), False
        # No daemon: the end of the program waits for it.  It waits until every rank has one.
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

    def reason(self) -> str:
        """The error, as other ranks are told; "" where there is none."""
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

    def _run(self) -> None:
        self._gate.wait()
        if self._cancelled:
            self._writer.abort()
            self._folder.close()
            self._snapshot.close()
            self.end()
            return
        bus, name = self._commit.bus, self.target.name
        bus.begin("save", name)
        try:
            self._write()
            if not self._ranks.first:
                if self.error is None:
                    self._outcomes.committed()
            else:
                try:
                    self._commit(self._outcomes.collect())
                except BaseException:
                    self._commit.draft.discard()
                    raise
        except Exception as error:
            if self.error is None or isinstance(self.error, FailedElsewhere):
                self.error = error
        finally:
            bus.end("save", name, self.written)
            self._snapshot.close()
            self._folder.close()
            self._commit.draft.close()
            self.end()

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

    def _note(self, nbytes: int) -> None:
        self.written += nbytes
        self._commit.bus.counter("saved", self.target.name, self.written)


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of this rank's file: written, and in all."""

    written: int
    total: int


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
            _unheard.discard(self._writing)
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
            _unheard.discard(writing)
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
            warnings.warn(f"nothing was committed: {writing.reason()}", RuntimeWarning, stacklevel=1)
