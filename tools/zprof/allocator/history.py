"""Owns the past of a snapshot: the levels of a device's allocator over its recorded history, found by undoing it from the end.

`zprof frag` calls `history` for the worst moment and the curve. It never guesses a state: what the history does not say (the
rounding of blocks that are gone) is computed by the default rule, and nothing is known from before the first entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from offload.allocator import Level
from zprof.allocator.snapshot import ACTIVE, INACTIVE, Entry, Snapshot

__all__ = ["history"]

_POINTS = 200
#: Blocks looked at over all points; a history of many blocks gets fewer points.
_MOST_LOOKS = 4_000_000


class _Past:
    """What one device's allocator held: mapped ranges by address, and the blocks in use in them."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}
        self.used: dict[int, tuple[int, bool]] = {}
        for segment in snapshot.segments:
            if segment.device != device:
                continue
            self.map(segment.address, segment.total_size)
            for block in segment.blocks:
                if block.state != INACTIVE:
                    self.used[block.address] = (block.size, block.state == ACTIVE)

    def map(self, address: int, size: int) -> None:
        if address not in self.sizes:
            insort(self.starts, address)
        self.sizes[address] = max(size, self.sizes.get(address, 0))

    def unmap(self, address: int, size: int) -> None:
        """Take a range out of the one it lies in, which may leave a part before and one after it."""
        at = bisect_right(self.starts, address) - 1
        if at < 0 or address + size > (end := self.starts[at] + self.sizes[self.starts[at]]):
            return
        start = self.starts.pop(at)
        del self.sizes[start]
        if start < address:
            self.map(start, address - start)
        if address + size < end:
            self.map(address + size, end - address - size)

    def _joined(self, address: int, size: int) -> tuple[int, int]:
        """A mapped range with its neighbours, which were one range with it."""
        at = bisect_left(self.starts, address)
        if at and (before := self.starts[at - 1]) + self.sizes[before] == address:
            size += self.sizes.pop(self.starts.pop(at - 1))
            address = before
        if address + size in self.sizes:
            after = address + size
            self.starts.remove(after)
            size += self.sizes.pop(after)
        return address, size

    def undo(self, entry: Entry) -> None:
        rounded = max(512, -(-entry.size // 512) * 512)
        if entry.action in ("segment_alloc", "segment_map"):
            self.unmap(entry.address, entry.size)
        elif entry.action == "segment_free":
            self.map(entry.address, entry.size)
        elif entry.action == "segment_unmap":
            self.map(*self._joined(entry.address, entry.size))
        elif entry.action == "alloc":
            self.used.pop(entry.address, None)
        elif entry.action == "free_completed":
            self.used[entry.address] = (rounded, False)
        elif entry.action == "free_requested" and entry.address in self.used:
            self.used[entry.address] = (self.used[entry.address][0], True)

    def level(self, number: int, time_us: int) -> Level:
        """The sums, and the largest gap; gaps of neighbouring ranges of one expandable segment count apart."""
        blocks = sorted(self.used)
        active = sum(size for size, is_active in self.used.values() if is_active)
        pending = sum(size for size, is_active in self.used.values() if not is_active)
        free = releasable = largest = 0
        for start in self.starts:
            end, last = start + self.sizes[start], start
            inside = blocks[bisect_left(blocks, start) : bisect_left(blocks, end)]
            for address in inside:
                free += max(0, address - last)
                largest = max(largest, address - last)
                last = max(last, address + self.used[address][0])
            free += max(0, end - last)
            largest = max(largest, end - last)
            releasable += 0 if inside else end - start
        return Level(number, time_us * 1000, sum(self.sizes.values()), active, pending, free, releasable, largest)


def history(snapshot: Snapshot, device: int = 0, *, points: int = _POINTS) -> list[Level]:
    """Levels after some of a device's entries, oldest first, and always after the last.

    An expandable segment's free pages count as releasable here only where the whole mapped range is free.
    """
    entries = snapshot.traces[device] if device < len(snapshot.traces) else ()
    past = _Past(snapshot, device)
    points = max(2, min(points, _MOST_LOOKS // (len(past.used) + len(past.starts) + 1)))
    every = max(1, len(entries) // points)
    found: list[Level] = []
    for number in range(len(entries) - 1, -1, -1):
        if (len(entries) - 1 - number) % every == 0:
            found.append(past.level(number, entries[number].time_us))
        past.undo(entries[number])
    return found[::-1]
