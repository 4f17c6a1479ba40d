"""Ranges of memory wherever they lie, as one run of bytes: what collectives send from and land in, with nothing joined before.

The transports read and write through it, in whatever chunks their messages have.  It never communicates, and never decides what
goes where.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from offload.work import Work

#: A range of fewer bytes is joined with its neighbours where every message is a call of its own.
SMALL_NBYTES = 1 << 16


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 1-D uint8.

    A tensor of at most one element counts as contiguous whatever its strides are, and may not be seen as bytes then.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class ScatteredBytes:
    """1-D contiguous tensors, in their order, as the bytes of one; of a chunk that many share one call to torch is made."""

    __slots__ = ("_bytes", "_starts", "nbytes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._bytes = [bytes_of(tensor.detach()) for tensor in tensors if tensor.numel()]
        ends = list(accumulate(tensor.numel() for tensor in self._bytes))
        self.nbytes = ends[-1] if ends else 0
        self._starts = [0, *ends[:-1]]

    @property
    def only(self) -> Tensor | None:
        """The bytes where they lie, where there is one range; else None."""
        return self._bytes[0] if len(self._bytes) == 1 else None

    def read(self, start: int, out: Tensor) -> None:
        """Copy the bytes from ``start`` on into ``out`` [1-D, uint8], all of it."""
        views = self._between(start, start + out.numel())
        if len(views) == 1:
            out.copy_(views[0])
        elif views:
            torch.cat(views, out=out)

    def write(self, start: int, data: Tensor) -> None:
        """Copy ``data`` [1-D, uint8] to the bytes from ``start`` on."""
        views = self._between(start, start + data.numel())
        if len(views) == 1:
            views[0].copy_(data)
        elif views:
            torch.split_with_sizes_copy(data, [view.numel() for view in views], out=views)

    def _between(self, start: int, stop: int) -> list[Tensor]:
        assert 0 <= start <= stop <= self.nbytes, f"bytes {start} to {stop} of {self.nbytes}"
        if start == stop:
            return []
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop) - 1
        views = self._bytes[first : last + 1]
        views[-1] = views[-1][: stop - self._starts[last]]
        views[0] = views[0][start - self._starts[first] :]
        return views


def copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Each into the one at its place, of the same length."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def messages(tensors: Sequence[Tensor]) -> Iterator[ScatteredBytes]:
    """What travels together where each message is a call of its own: a large one alone, small neighbours as one."""
    small: list[Tensor] = []
    for tensor in tensors:
        if 0 < tensor.nbytes < SMALL_NBYTES:
            small.append(tensor)
        elif tensor.nbytes:
            if small:
                yield ScatteredBytes(small)
            small = []
            yield ScatteredBytes([tensor])
    if small:
        yield ScatteredBytes(small)


class Staged:
    """An exchange some of whose messages are for several ranges: whoever waits for it copies them there."""

    __slots__ = ("_landed", "_work")

    def __init__(self, work: Work, landed: Sequence[tuple[Tensor, ScatteredBytes]]) -> None:
        self._work, self._landed = work, landed

    def wait(self) -> None:
        self._work.wait()
        landed, self._landed = self._landed, ()
        for message, ranges in landed:
            ranges.write(0, message)

    def done(self) -> bool:
        return not self._landed and self._work.done()
