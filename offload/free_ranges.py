"""Which ranges of a file, of an arena or of slabs are free: holes by offset, the best fit taken, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Space"]


class Space:
    """The free ranges of ``[start, end)``; all of it is taken or a hole, and no two holes touch.

    Attributes:
        end: where the space ends now; ``extend`` moves it.
    """

    def __init__(self, start: int) -> None:
        self.end = start
        self._starts: list[int] = []
        self._nbytes: dict[int, int] = {}
        #: (bytes, start), so that bisection finds the best fit.
        self._sizes: list[tuple[int, int]] = []

    def fit(self, nbytes: int, most: int | None = None) -> int | None:
        """The start of the smallest hole that holds ``nbytes``, the first of several; None if it has more than ``most``."""
        at = bisect_left(self._sizes, (nbytes,))
        if at == len(self._sizes) or (most is not None and self._sizes[at][0] > most):
            return None
        return self._sizes[at][1]

    def take(self, nbytes: int) -> int | None:
        """The start of a range that is no longer free: in the smallest hole that holds it; None when no hole does."""
        start = self.fit(nbytes)
        if start is not None:
            self.take_at(start, nbytes)
        return start

    def take_at(self, start: int, nbytes: int) -> None:
        """The first bytes of the hole at ``start`` are no longer free."""
        size = self._remove(start)
        if size > nbytes:
            self._insert(start + nbytes, size - nbytes)

    def place(self, nbytes: int) -> int:
        """The start of such a range; the end moves up where no hole holds it."""
        if (start := self.take(nbytes)) is None:
            self.extend(self.lacking(nbytes))
            start = self.take(nbytes)
        assert start is not None
        return start

    def give(self, start: int, nbytes: int) -> None:
        """The range is free again; it joins the holes it touches."""
        place = bisect_left(self._starts, start)
        stop = start + nbytes
        after = self._starts[place] if place < len(self._starts) else self.end
        before = self._starts[place - 1] + self._nbytes[self._starts[place - 1]] if place else start
        assert nbytes > 0 and before <= start and stop <= after, f"range {start} to {stop} is partly free already"
        if stop in self._nbytes:
            stop += self._remove(stop)
        if place and before == start:
            start = self._starts[place - 1]
            self._remove(start)
        self._insert(start, stop - start)

    def lacking(self, nbytes: int) -> int:
        """How far the end must move so that a range of ``nbytes`` fits before it; a hole at the end counts."""
        last = self._starts[-1] if self._starts else self.end
        reaches = bool(self._starts) and last + self._nbytes[last] == self.end
        return max(0, nbytes - (self._nbytes[last] if reaches else 0))

    def extend(self, nbytes: int) -> None:
        """The space has ``nbytes`` more at its end."""
        start, self.end = self.end, self.end + nbytes
        self.give(start, nbytes)

    def give_apart(self, start: int, nbytes: int) -> None:
        """A range beyond the end is free, which is no neighbour of others."""
        self._insert(start, nbytes)
        self.end = start + nbytes

    def holes(self) -> list[tuple[int, int]]:
        """The free ranges as (start, nbytes), by start."""
        return [(start, self._nbytes[start]) for start in self._starts]

    def _insert(self, start: int, nbytes: int) -> None:
        self._starts.insert(bisect_left(self._starts, start), start)
        self._nbytes[start] = nbytes
        insort(self._sizes, (nbytes, start))

    def _remove(self, start: int) -> int:
        nbytes = self._nbytes.pop(start)
        del self._starts[bisect_left(self._starts, start)], self._sizes[bisect_left(self._sizes, (nbytes, start))]
        return nbytes
