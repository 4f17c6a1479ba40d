"""The values of one moment, for a file that is written later: what the disk tier holds is kept there, all else copied once.

``background.py`` takes one between two steps and writes it on another thread while training goes on.  Copies are charged before
the first is made and given back as they are written; it never writes and never communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.budget import Budget, Ranks, available, preflight
from offload.disk import KeptRange
from offload.errors import BudgetError, CheckpointError
from offload.events import Bus
from offload.policy import Policy
from offload.store import BlockRange, Store
from offload.text import Share, as_size
from offload.tier import Tier
from zhooks.checkpoint.parts_on_disk import PartsOnDisk
from zhooks.checkpoint.shard_contents import FileTensor, Piece, opened

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
