"""A value that was put away: its copy, where the copy lies, and what is left when nobody refers to it any more.

``stash.py`` makes them and moves what they hold; autograd keeps a ``Saved``, and a copy lives as long as one of it does.  It
never moves data and never gives memory back itself.

Note: [Freed when dropped]
    Finalizers run anywhere, on any thread, inside any call, so that of a copy only leaves a ``Note``; the stash reads it at its
    next call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.store import Allocation
from offload.work import DONE, HostWork

__all__ = ["START", "Copy", "Note", "Saved", "extent_of"]

#: Copies start on this many bytes, so that kernels find one aligned as they found the original.
START = 64


class Copy:
    """One range of one storage: still in its own memory (``source``), under way, or away."""

    __slots__ = (
        "__weakref__", "_notes", "address", "arriving", "away", "back", "data", "key", "leaving", "lost", "nbytes", "number",
        "reads", "saves", "source", "start", "storage", "version",
    )  # fmt: skip

    def __init__(self, key: str, number: int, tensor: Tensor, span: tuple[int, int], notes: deque[Note]) -> None:
        storage = tensor.untyped_storage()
        self.key, self.number, self.start, self.nbytes = key, number, span[0], span[1] - span[0]
        self.address, self.data, self.version = int(storage._cdata), storage.data_ptr(), int(tensor._version)
        self.storage = StorageWeakRef(storage)
        self.source: Tensor | None = _bytes_of(storage, span[0], self.nbytes)
        self.away: Allocation | None = None
        self.back: Allocation | None = None
        self.leaving: HostWork = DONE
        self.arriving: HostWork = DONE
        #: Why its values are gone, in words: an error would keep the frames it passed through alive.
        self.lost: str | None = None
        self.saves = self.reads = 0
        self._notes = notes

    def holds(self, tensor: Tensor, span: tuple[int, int]) -> bool:
        """These bytes of the tensor's storage, unchanged, lie in this copy."""
        return (
            self.version == tensor._version
            and self.start <= span[0]
            and span[1] <= self.start + self.nbytes
            and self.data == tensor.untyped_storage().data_ptr()
            and self.lost is None
        )

    def __del__(self) -> None:
        kept = self.nbytes if self.source is not None else 0
        allocations = tuple(allocation for allocation in (self.away, self.back) if allocation is not None)
        self._notes.append(Note(self.number, self.address, kept, (self.leaving, self.arriving), allocations))


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A tensor that was put: its copy and its geometry in it, and what shows whether it was changed since.

    Attributes:
        probe: an empty tensor that shares the original's version counter.
        offset: bytes from the start of the copy.
    """

    copy: Copy
    probe: Tensor
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """A copy that nobody refers to any more, and what it left."""

    number: int
    address: int
    kept: int
    works: tuple[HostWork, HostWork]
    allocations: tuple[Allocation, ...]


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a strided tensor spans: (start, stop)."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if tensor.is_contiguous():
        return int(first * size), int((first + tensor.numel()) * size)
    if tensor.numel() == 0:
        return int(first * size), int(first * size)
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first * size), int((first + last + 1) * size)


def _bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> Tensor:
    """A range of a storage as 1-D uint8, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
