"""What an extent holds, kept for one who reads it later on a thread of its own, while its block goes on in another extent.

``disk_tier.py`` makes one for whoever saves; from then until it is closed nothing is written there.  It never writes, and never
decides where a block's next values lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from offload.disk.extent import CHECK, Extent
from offload.pages import aligned
from offload.work import Ending, HostWork

__all__ = ["Kept"]

#: Read at once.
_WINDOW = 8 * CHECK


class Kept(Ending):
    """An extent's bytes as they are now; over once it is closed.

    Args:
        read: starts filling memory from an offset, as ``Disk.read``.
        release: the extent is needed no longer.
    """

    def __init__(self, extent: Extent, read: Callable[[Tensor, int], HostWork], release: Callable[[Kept], None]) -> None:
        super().__init__()
        self.extent, self._read, self._release = extent, read, release
        self._window: Tensor | None = None
        self._at = -1

    def chunks(self, start: int, stop: int) -> Iterator[Tensor]:
        """Bytes ``start`` to ``stop`` in order, uint8; a chunk is valid until the next is asked for.

        Raises:
            TierError: they cannot be read, or are not what was written.
        """
        while start < stop:
            first = start - start % _WINDOW
            end = min(first + _WINDOW, self.extent.nbytes)
            if self._window is None:
                self._window = aligned(min(_WINDOW, self.extent.nbytes))
            if self._at != first:
                # Nothing of it counts until all of it is there.
                self._at = -1
                self._read(self._window[: end - first], first).synchronize()
                self._at = first
            until = min(stop, end)
            yield self._window[start - first : until - first]
            start = until

    def close(self) -> None:
        """Idempotent; not while ``chunks`` is read."""
        if not self.done():
            self._window = None
            self._release(self)
            self.end()
