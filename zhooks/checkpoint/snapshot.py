"""The values of one moment, for a file that is written later: what the disk tier holds is kept there, all else copied once.

``background.py`` takes one between two steps and writes it on another thread while training goes on.  Copies are charged before
the first is made and given back as they are written; it never writes and never communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.budget import Budget, Ranks, available, preflight
from offload.disk import Kept
from offload.errors import BudgetError, CheckpointError
from offload.events import Bus
from offload.policy import Policy
from offload.store import BlockRange, Store
from offload.text import Share, as_size
from offload.tier import Tier
from zhooks.checkpoint.shard_contents import FileTensor, Piece, opened
from zhooks.tensor import StoredTensor, spanned

__all__ = ["Snapshot", "SnapshotMemory"]

_KEY = "checkpoint snapshot"


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
        budget = store.budget if store is not None else Budget({Tier.HOST: policy.budget.resolve(Tier.HOST, free)})
        if store is None:
            budget.account.bus = bus
        return cls(most, budget, alike)

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
                f"save: expected {as_size(nbytes)} of host memory a rank for a snapshot, found {found}. Save with wait=True, "
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


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """Bytes ``start`` to ``stop`` of what a block's extent held."""

    kept: Kept
    start: int
    stop: int


_Part = Tensor | _OnDisk


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
        self._uses: Counter[Kept] = Counter()
        self._kept: dict[int, Kept | None] = {}
        if store is not None:
            # What was opened on demand is where it is stored again.
            store.flush()
        self._store = store
        try:
            parts = [self._placed(tensor) for tensor in tensors]
            copied = [sum(_nbytes(part) for part in each if not isinstance(part, _OnDisk)) for each in parts]
            self.copied_nbytes = sum(copied)
            self.kept_nbytes = sum(part.stop - part.start for each in parts for part in each if isinstance(part, _OnDisk))
            memory.take(self.copied_nbytes)
            self._held = self.copied_nbytes
            self.tensors: list[FileTensor] = []
            for tensor, each, nbytes in zip(tensors, parts, copied, strict=True):
                held = self._copied(each, nbytes, tensor.entry.dtype)
                self.tensors.append(FileTensor(tensor.entry, self._once(held, nbytes, tensor.entry.dtype), tensor.key))
        except BaseException:
            self.close()
            raise

    def _placed(self, tensor: FileTensor) -> list[Piece | _OnDisk]:
        """Its pieces, those on disk kept there."""
        found: list[Piece | _OnDisk] = []
        for piece in tensor.pieces():
            place = self._on_disk(piece)
            last = found[-1] if found else None
            if place is not None and isinstance(last, _OnDisk) and (last.kept, last.stop) == (place.kept, place.start):
                found[-1] = _OnDisk(last.kept, last.start, place.stop)
                continue
            if place is not None:
                self._uses[place.kept] += 1
            found.append(piece if place is None else place)
        return found

    def _on_disk(self, piece: Piece) -> _OnDisk | None:
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
        return None if kept is None or not nbytes else _OnDisk(kept, start, start + nbytes)

    def _copied(self, parts: Sequence[Piece | _OnDisk], nbytes: int, dtype: torch.dtype) -> list[_Part]:
        """Each in one piece of host memory, or where it is kept."""
        memory, at, held = torch.empty(nbytes // dtype.itemsize, dtype=dtype), 0, list[_Part]()
        for part in parts:
            if isinstance(part, _OnDisk):
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
                continue
            for chunk in part.kept.chunks(part.start, part.stop):
                yield chunk.view(dtype)
            self._uses[part.kept] -= 1
            if not self._uses[part.kept]:
                part.kept.close()
        self._held -= nbytes
        self._memory.give(nbytes)

    def hand_over(self) -> None:
        """From now on another thread reads it, whatever this one does."""
        self._memory.hand_over()

    def close(self) -> None:
        """Nothing more is read; idempotent, on the thread that reads."""
        self.tensors = []
        for kept in self._kept.values():
            if kept is not None:
                kept.close()
        held, self._held = self._held, 0
        if held:
            self._memory.give(held)


def _nbytes(part: Piece | _OnDisk) -> int:
    assert not isinstance(part, _OnDisk)
    return part.numel * part.dtype.itemsize if isinstance(part, BlockRange) else part.numel() * part.dtype.itemsize
