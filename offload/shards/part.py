"""Some ranges of the bytes of a shard file that lies elsewhere, in memory: filled in order, compared with checksums on the way.

``zhooks/checkpoint/peer_files.py`` fills it with what another rank sends, and ``ShardReader`` reads it like a file.  It knows
bytes and checksums, and never who sends them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

__all__ = ["Part"]

#: No dtype is wider.
_ALIGN = 64


class Part:
    """Ranges of a file of ``nbytes`` bytes, in order and apart, as memory of their own.

    Args:
        digests: of runs of bytes that lie within one range each, by start and stop, in order, what their checksum must be;
            ``write`` compares it as they come.
    Attributes:
        nbytes: of the file, all of it.
        ranges: what is here.
    """

    def __init__(
        self, nbytes: int, ranges: Sequence[tuple[int, int]], digests: Mapping[tuple[int, int], str] | None = None
    ) -> None:
        self.nbytes, self.ranges = nbytes, tuple(ranges)
        self._places: list[int] = []
        held = 0
        for start, stop in ranges:
            # As the file itself has it, so that what is aligned there is here.
            held += (start - held) % _ALIGN
            self._places.append(held)
            held += stop - start
        # Small pages: it is written once and soon given back, and large ones took longer to be had than to be filled.
        self._memory = torch.empty(held, dtype=torch.uint8, device="cpu")
        self._left = sorted((digests or {}).items(), reverse=True)
        self._state = xxhash.xxh3_64()
        self._wrong = False

    @property
    def wrong(self) -> bool:
        """Some run came with another checksum, or has not come."""
        return self._wrong or bool(self._left)

    def has(self, start: int, stop: int) -> bool:
        """All of these bytes are in it, one after the other."""
        at = self._at(start)
        return at >= 0 and self.ranges[at][1] >= stop

    def bytes(self, start: int, stop: int) -> Tensor:
        """uint8, the memory itself, of bytes that it ``has``."""
        at = self._at(start)
        assert self.has(start, stop), f"bytes {start} to {stop} of {self.ranges}"
        begin = self._places[at] + start - self.ranges[at][0]
        return self._memory[begin : begin + stop - start]

    def write(self, start: int, data: Tensor) -> None:
        """Take the next bytes, which begin at ``start``: 1-D uint8."""
        stop = start + data.numel()
        self.bytes(start, stop).copy_(data)
        while self._left and self._left[-1][0][0] < stop:
            (first, last), digest = self._left[-1]
            self._state.update(data[max(first - start, 0) : last - start].numpy().data)
            if last > stop:
                return
            self._wrong = self._wrong or self._state.hexdigest() != digest
            self._left.pop()
            self._state.reset()

    def _at(self, start: int) -> int:
        return bisect_right(self.ranges, (start, sys.maxsize)) - 1
