"""What each rank of an axis waits in, in memory that they share: so all of them know when each waits for another.

``shared_memory.py`` writes and looks here while it waits for long.  It owns the proof that nobody can go on; it moves no
message, and never waits.

Note: [Deadlock]
    Ranks that wait in different calls over different channels, such as one in save and the others in a gather, see of each
    other only that nothing comes.  So a rank that waits notes it here, and from time to time that it has looked again at all
    that could be read or written, and found nothing.  Where every rank waits, none has moved anything since another looked,
    and each has looked twice in that time, the second look began after all of them stood still: what it did not find nobody
    will write.  A rank that is stopped, or busy elsewhere, does not look, and nothing follows.  States and looks are aligned
    64-bit words of one writer each, whose stores are ordered (see Note [Ring]): who sees a look sees every move before it.
"""

from __future__ import annotations

import mmap

import numpy as np

from zhooks.comm import Call, by_rank
from zhooks.cpu_transport.shared_memory_ring import as_label, label_text
from zhooks.layout import Axis

__all__ = ["WaitBoard"]

_ROW = 512
_LABEL_AT, _LABEL_BYTES = 64, _ROW - 64
#: Looks after which a rank has begun one since it was seen: the first of them may have begun before.
_LOOKS = 2


class WaitBoard:
    """A row for each rank of ``axis``: its state, odd while it waits and another after every move, its looks, and its call."""

    @staticmethod
    def nbytes(world: int) -> int:
        return world * _ROW

    def __init__(self, memory: mmap.mmap, offset: int, axis: Axis) -> None:
        self.axis = axis
        view = memoryview(memory)
        starts = [offset + rank * _ROW for rank in range(axis.world)]
        self._words = [np.frombuffer(memory, dtype=np.int64, count=2, offset=start) for start in starts]
        self._calls = [view[start + _LABEL_AT : start + _ROW] for start in starts]
        self._mine, self._waits = self._words[axis.rank], False
        #: States, then looks, of all ranks when this rank saw all of them wait.
        self._seen: tuple[list[int], list[int]] | None = None

    def look(self, call: Call) -> bool:
        """This rank waits in ``call`` and has just found nothing to read or to write: whether that will never change."""
        if not self._waits:
            self._waits = True
            label = as_label(call.words, _LABEL_BYTES)
            self._calls[self.axis.rank][: len(label)] = label
            self._mine[0] += 1
        self._mine[1] += 1
        looks = self._column(1)
        # After the looks: a move before one of them shows in the states.
        states = self._column(0)
        if self._seen is not None and self._seen[0] == states:
            return all(now - then >= _LOOKS for now, then in zip(looks, self._seen[1], strict=True))
        # Here after the states: what is counted from now on began when all ranks were known to wait.
        self._seen = (states, self._column(1)) if all(state % 2 for state in states) else None
        return False

    def moved(self) -> None:
        """This rank has read or written something, or waits no more."""
        if self._waits:
            self._waits = False
            self._mine[0] += 1

    def describe(self) -> str:
        """The call of each rank, in words; where all wait."""
        return by_rank({rank: f'"{label_text(call)}"' for rank, call in zip(self.axis.ranks, self._calls, strict=True)})

    def _column(self, place: int) -> list[int]:
        return [int(words[place]) for words in self._words]
