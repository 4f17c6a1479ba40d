"""The parts of a file's tensors that lie on the disk tier: kept there as they are, and read ahead in the order of the file.

``snapshot.py`` and ``save_load.py`` place each tensor and read what is on the disk through here.  It never copies what lies in
memory, and never writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from offload.disk import Kept, KeptRange, ReadAhead
from offload.errors import TierError
from offload.store import BlockRange, Store
from zhooks.checkpoint.shard_contents import FileTensor, Piece, opened
from zhooks.tensor import StoredTensor, spanned

__all__ = ["PartsOnDisk", "read_ahead"]


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
