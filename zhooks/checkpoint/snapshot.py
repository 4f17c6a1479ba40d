"""The values of one moment, for a file: what the disk tier holds is kept there, and read ahead in the order of the file.

``save_load.py`` writes them at once, and copies nothing.  ``background.py`` takes a `Snapshot` between two steps and writes it
on another thread while training goes on: all else than what is on disk is copied once.  Copies are charged before the first is
made and given back as they are written; nothing here writes or communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.budget import Budget, Ranks, available, preflight
from offload.disk import Kept, KeptRange, ReadAhead
from offload.errors import BudgetError, CheckpointError, TierError
from offload.events import Bus
from offload.policy import Policy
from offload.store import BlockRange, Store
from offload.text import Share, as_size
from offload.tier import Tier
from zhooks.checkpoint.shard_contents import FileTensor, Piece, opened
from zhooks.tensor import StoredTensor, spanned

__all__ = ["PartsOnDisk", "Snapshot", "SnapshotMemory", "host_budget", "read_ahead"]

_KEY = "checkpoint snapshot"


class PartsOnDisk:
    """What lies on the disk tier of the tensors that were placed; kept from then until it was read, or until ``close``.

    Args:
        store: where what is not in memory of its own is kept.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._kept: dict[int, Kept | None] = {}
        self._uses: Counter[Kept] = Counter()
        self._ahead = ReadAhead([])

    def flush(self) -> None:
        """What was opened on demand is where it is stored again.

        Raises:
            TierError: it could not be written back; it is in memory, and is read from there.
        """
        if self._store is not None:
            self._store.flush()

    def placed(self, tensor: FileTensor) -> list[Piece | KeptRange]:
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
            block, start, nbytes = piece._block, piece._start, spanned(piece)
        else:
            return None
        if id(block) not in self._kept:
            assert self._store is not None
            self._kept[id(block)] = self._store.keep(block)
        kept = self._kept[id(block)]
        return None if kept is None or not nbytes else KeptRange(kept, start, start + nbytes)

    def plan(self, ranges: Sequence[KeptRange]) -> None:
        """All that will be read, in order."""
        self._uses.update(each.kept for each in ranges)
        self._ahead = ReadAhead(ranges)

    def read(self, part: KeptRange, dtype: torch.dtype) -> Iterator[Tensor]:
        """The next part's values; a chunk is valid until the next is asked for."""
        for chunk in self._ahead.chunks(part):
            yield chunk.view(dtype)
        self._uses[part.kept] -= 1
        if not self._uses[part.kept]:
            part.kept.close()

    def close(self) -> None:
        """Nothing more is read; idempotent, on the thread that reads."""
        self._ahead.close()
        for kept in self._kept.values():
            if kept is not None:
                kept.close()


def read_ahead(tensors: Sequence[FileTensor], disk: PartsOnDisk) -> list[FileTensor]:
    """The same tensors, to be read once and in order, while nothing changes: what lies on disk is read ahead."""
    with suppress(TierError):
        disk.flush()
    # Pieces in memory are made again when they are read: all at once they could take as much as the state.
    disk.plan([part for tensor in tensors for part in disk.placed(tensor) if isinstance(part, KeptRange)])
    return [FileTensor(tensor.entry, partial(_pieces, tensor, disk), tensor.key) for tensor in tensors]


def _pieces(tensor: FileTensor, disk: PartsOnDisk) -> Iterable[Tensor]:
    for part in disk.placed(tensor):
        if isinstance(part, KeptRange):
            yield from disk.read(part, tensor.entry.dtype)
        else:
            yield opened(part)


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
        free = partial(available, Tier.HOST)
        amount = policy.save.snapshot
        most = amount.of(free()) if isinstance(amount, Share) else amount
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

    def hand_over(self) -> None:
        """From now on another thread gives them back, and whoever wants them waits for it."""
        self.budget.hand_over(Tier.HOST)

    def give(self, nbytes: int) -> None:
        """Bytes that were taken are free again; any thread."""
        self.budget.give_back(Tier.HOST, nbytes)
        self.budget.account.give(Tier.HOST, _KEY, nbytes)


_Part = Tensor | KeptRange


class Snapshot:
    """What ``tensors`` are now, to be read once and in order, on any one thread.

    Args:
        store: where what is not in memory of its own is kept.
    Attributes:
        tensors: the same tensors of this moment; reading one gives its memory back.
        copied_nbytes: what was copied.
        kept_nbytes: what is read from where it lies on disk.
    Raises:
        CheckpointError: there is not enough memory for the copies; nothing is held.
    """

    def __init__(self, tensors: Sequence[FileTensor], store: Store | None, memory: SnapshotMemory) -> None:
        self._memory, self._held = memory, 0
        self._disk = PartsOnDisk(store)
        self._disk.flush()
        try:
            parts = [self._disk.placed(tensor) for tensor in tensors]
            copied = [sum(_nbytes(part) for part in each if not isinstance(part, KeptRange)) for each in parts]
            self.copied_nbytes = sum(copied)
            on_disk = [part for each in parts for part in each if isinstance(part, KeptRange)]
            self.kept_nbytes = sum(map(len, on_disk))
            memory.take(self.copied_nbytes)
            self._held = self.copied_nbytes
            self._disk.plan(on_disk)
            self.tensors: list[FileTensor] = []
            for tensor, each, nbytes in zip(tensors, parts, copied, strict=True):
                held = self._copied(each, nbytes, tensor.entry.dtype)
                self.tensors.append(FileTensor(tensor.entry, self._once(held, nbytes, tensor.entry.dtype), tensor.key))
        except BaseException:
            self.close()
            raise

    def _copied(self, parts: Sequence[Piece | KeptRange], nbytes: int, dtype: torch.dtype) -> list[_Part]:
        """Each in one piece of host memory, or where it is kept."""
        memory, at, held = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu"), 0, list[_Part]()
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

    def _once(self, parts: list[_Part], nbytes: int, dtype: torch.dtype) -> Callable[[], Iterable[Piece]]:
        return partial(self._read, parts, nbytes, dtype)

    def _read(self, parts: list[_Part], nbytes: int, dtype: torch.dtype) -> Iterator[Tensor]:
        parts.reverse()
        while parts:
            part = parts.pop()
            if isinstance(part, Tensor):
                yield part
                # Its memory must not live until the next was read.
                del part
                continue
            yield from self._disk.read(part, dtype)
        self._held -= nbytes
        self._memory.give(nbytes)

    def hand_over(self) -> None:
        """From now on another thread reads it, whatever this one does."""
        self._memory.hand_over()

    def close(self) -> None:
        """Nothing more is read; idempotent, on the thread that reads."""
        self.tensors = []
        self._disk.close()
        held, self._held = self._held, 0
        if held:
            self._memory.give(held)


def _nbytes(part: Piece | KeptRange) -> int:
    assert not isinstance(part, KeptRange)
    return part.numel * part.dtype.itemsize if isinstance(part, BlockRange) else part.numel() * part.dtype.itemsize
