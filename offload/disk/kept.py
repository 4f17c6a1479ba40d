"""What an extent holds, kept for one who reads it later on a thread of its own, while its block goes on in another extent.

``disk_tier.py`` makes one for whoever saves; from then until it is closed nothing is written there.  It never writes, and never
decides where a block's next values lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from offload.disk.extent import CHECK, Extent
from offload.errors import TierError
from offload.pages import aligned
from offload.work import Ending, HostWork

__all__ = ["Kept", "KeptRange", "ReadAhead"]

#: Read at once, and how many of those are in memory: one is used while the others are read, so that neither waits.
_WINDOW, _WINDOWS = 8 * CHECK, 3


class Kept(Ending):
    """An extent's bytes as they are now; over once it is closed.

    Args:
        read: starts filling memory from an offset, as ``Disk.read``.
        release: the extent is needed no longer.
    """

    def __init__(self, extent: Extent, read: Callable[[Tensor, int], HostWork], release: Callable[[Kept], None]) -> None:
        super().__init__()
        self.extent, self.read, self._release = extent, read, release

    def close(self) -> None:
        """Idempotent; not while it is read."""
        if not self.done():
            self._release(self)
            self.end()


@dataclass(frozen=True, slots=True)
class KeptRange:
    """Bytes ``start`` to ``stop`` of what an extent held."""

    kept: Kept
    start: int
    stop: int

    def windows(self) -> Iterator[KeptRange]:
        """What is read at once, in order, so that it has all of this."""
        for first in range(self.start - self.start % _WINDOW, self.stop, _WINDOW):
            yield KeptRange(self.kept, first, min(first + _WINDOW, self.kept.extent.nbytes))

    def __len__(self) -> int:
        return self.stop - self.start


class ReadAhead:
    """Kept ranges that are read once and in order, on any one thread: the next are under way while one is used.

    Args:
        ranges: all of them; none is closed before it was read.
    """

    def __init__(self, ranges: Sequence[KeptRange]) -> None:
        planned: deque[KeptRange] = deque()
        for window in (window for each in ranges for window in each.windows()):
            # Ranges that lie side by side share one.
            if not planned or planned[-1] != window:
                planned.append(window)
        self._ranges, self._planned = deque(ranges), planned
        self._nbytes = max(map(len, planned), default=0)
        self._begun: deque[tuple[KeptRange, Tensor, HostWork]] = deque()
        self._open: tuple[KeptRange, Tensor] | None = None
        self._idle: list[Tensor] = []

    def chunks(self, place: KeptRange) -> Iterator[Tensor]:
        """The bytes of ``place``, the next of the ranges, in order, uint8; a chunk is valid until the next is asked for.

        Raises:
            TierError: they cannot be read, or are not what was written.
        """
        planned = self._ranges.popleft()
        assert place == planned, f"expected {planned} to be asked for, found {place}"
        for window in place.windows():
            memory = self._opened(window)
            yield memory[max(place.start - window.start, 0) : min(place.stop, window.stop) - window.start]
        if not self._ranges:
            self.close()

    def _opened(self, window: KeptRange) -> Tensor:
        if self._open is None or self._open[0] != window:
            if self._open is not None:
                self._idle.append(self._open[1])
                self._open = None
            self._begin()
            found, memory, work = self._begun[0]
            assert found == window, f"expected {window} to be read, found {found}"
            # Nothing of it counts until all of it is there.
            work.synchronize()
            self._begun.popleft()
            self._open = window, memory
        return self._open[1]

    def _begin(self) -> None:
        """Read as far ahead as there is memory for."""
        while self._planned and len(self._begun) < _WINDOWS:
            window = self._planned[0]
            memory = self._idle.pop() if self._idle else aligned(self._nbytes)
            work = window.kept.read(memory[: len(window)], window.start)
            self._begun.append((window, memory, work))
            self._planned.popleft()

    def close(self) -> None:
        """Nothing is read any more when this returns, and its memory is free; idempotent."""
        self._planned.clear()
        for _, _, work in self._begun:
            with suppress(TierError):
                work.synchronize()
        self._begun.clear()
        self._idle.clear()
        self._open = None
