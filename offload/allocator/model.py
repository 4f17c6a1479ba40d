"""torch's CUDA caching allocator in plain Python: recorded allocations replayed under other settings or limits.

Source: the rules of pytorch's c10/cuda/CUDACachingAllocator.cpp (Native::DeviceCachingAllocator, torch 2.13), written anew;
names in parentheses are of its functions.

Note: [What the model leaves out]
    Memory other processes and cuBLAS take from the device; pages the driver adds; free-memory callbacks; captures in progress
    (a private pool gives nothing back, as while its graphs live). An event says when a block that another stream still used
    became free; where the model runs out of memory before, it waits for it, as torch does. Garbage collection happens only
    under a limit, as torch's does only under a memory fraction. Addresses only grow, as if the device never gave one twice; a
    fit between equal sizes is then the oldest segment's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from offload.allocator.facts import Block, Events, Failure, Level, Replayed, Segment
from offload.allocator.settings import DEFAULTS, MIB, UNBOUNDED, Settings

__all__ = ["ALLOC", "EMPTY", "RELEASE", "REQUEST", "replay"]

#: What an event asks for: REQUEST is a free while another stream still uses the block, EMPTY is torch.cuda.empty_cache().
ALLOC, RELEASE, REQUEST, EMPTY = range(4)
_FIRST_ADDRESS = 1 << 40
#: Address space of an expandable segment where no limit says how large the device is.
_SPACE = 1 << 40
_SLACK = 1 << 26
_FAILURES = 64
_MIN_BLOCK = 512
_SMALL_SIZE = MIB
_ROUND_LARGE = 2 * MIB
#: What the log says.
_SEGMENT_ALLOC, _SEGMENT_FREE, _SEGMENT_MAP, _SEGMENT_UNMAP = range(4)


def replay(
    events: Events,
    settings: Settings = DEFAULTS,
    *,
    limit: int | None = None,
    points: int = 1000,
    each: bool = False,
) -> Replayed:
    """Run ``events`` through the model; about 100,000 events a second.

    Args:
        limit: bytes the allocator may reserve; a request that then fails is noted, and the run goes on without it.
        points: at most so many levels over the run.
        each: also keep the reserved bytes and the address of every event.
    """
    model = _Allocator(settings, limit, events)
    times = events.time_ns.tolist()
    every = max(1, -(-len(events) // max(1, points - 1)))
    slots: dict[int, _Range] = {}
    failures: list[Failure] = []
    levels: list[Level] = []
    peaks: list[tuple[int, int]] = []
    reserved: list[int] = []
    addresses: list[int] = []
    failed = most_reserved = most_allocated = 0
    # Of each the most, and the event after which it was reached first.
    peak_reserved, peak_allocated, worst = (0, -1), (0, -1), (0, -1)
    rows = zip(*(column.tolist() for column in (events.action, events.slot, events.nbytes, events.lane)), strict=True)
    for event, (action, slot, nbytes, lane) in enumerate(rows):
        model.event, address = event, -1
        if action == EMPTY:
            model.release_all()
        elif action == ALLOC:
            made = model.allocate(nbytes, lane)
            if made is None:
                slots.pop(slot, None)
                failed += 1
                if failed <= _FAILURES:
                    failures.append(Failure(nbytes, model.level(times[event])))
            else:
                slots[slot], made.slot, address = made, slot, made.address
        # One that was waited for is free already, and may be another's by now.
        elif (held := slots.get(slot)) is not None and held.slot == slot:
            address = held.address
            if action == REQUEST:
                model.free_later(held)
            else:
                del slots[slot]
                model.free(held)
        most_reserved, most_allocated = max(most_reserved, model.reserved), max(most_allocated, model.allocated)
        if model.reserved > peak_reserved[0]:
            peak_reserved = (model.reserved, event)
        if model.allocated > peak_allocated[0]:
            peak_allocated = (model.allocated, event)
        if model.unused - model.releasable > worst[0]:
            worst = (model.unused - model.releasable, event)
        if each:
            reserved.append(model.reserved)
            addresses.append(address)
        if (event + 1) % every == 0 or event + 1 == len(events):
            levels.append(model.level(times[event]))
            peaks.append((most_reserved, most_allocated))
            most_reserved = most_allocated = 0
    return Replayed(
        settings=settings,
        limit=limit,
        peak_reserved=peak_reserved[0],
        peak_reserved_event=peak_reserved[1],
        peak_allocated=peak_allocated[0],
        peak_allocated_event=peak_allocated[1],
        worst_event=worst[1],
        worst_stuck=worst[0],
        retries=model.retries,
        failed=failed,
        failures=tuple(failures),
        points=tuple(levels),
        peaks=np.asarray(peaks, np.int64).reshape(-1, 2),
        segments=tuple(model.segments(events)),
        log=np.asarray(model.log, np.int64).reshape(-1, 5),
        reserved=np.asarray(reserved, np.int64),
        addresses=np.asarray(addresses, np.int64),
    )


_FREE, _ACTIVE, _PENDING, _UNMAPPED = "inactive", "active_allocated", "active_awaiting_free", "unmapped"


class _Range:
    """A block, or the unmapped end of an expandable segment; those of one segment are chained by address.

    Attributes:
        slot: whose it is, by the events' number; -1 of none.
        base: where its segment starts.
        born: its pool's count of searches when it became free.
    """

    __slots__ = ("address", "base", "born", "lane", "next", "previous", "requested", "size", "slot", "small", "state")

    def __init__(self, address: int, size: int, lane: int, small: bool, base: int) -> None:
        self.address, self.size, self.lane, self.small, self.base = address, size, lane, small, base
        self.state, self.requested, self.slot, self.born = _ACTIVE, 0, -1, 0
        self.previous: _Range | None = None
        self.next: _Range | None = None

    @property
    def whole(self) -> bool:
        """It is all of its segment."""
        return self.previous is None and self.next is None

    @property
    def reach(self) -> int:
        """How large it could become where it lies at the end of what is mapped."""
        after = self.next
        return self.size + (after.size if after is not None and after.state == _UNMAPPED else 0)

    def chain(self, before: _Range | None, after: _Range | None) -> None:
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self

    def split(self, size: int) -> _Range:
        """Cut it to ``size``; what follows, in no set yet."""
        rest = _Range(self.address + size, self.size - size, self.lane, self.small, self.base)
        rest.chain(self, self.next)
        self.size = size
        return rest


class _Allocator:
    """The allocator of one device at one moment.

    Attributes:
        used: blocks that are allocated, or freed while another stream uses them.
        allocated, pending, unused: the bytes of these and of free blocks; ``releasable`` of them would go back to the device.
        event: whose turn it is, for the log.
    """

    def __init__(self, settings: Settings, limit: int | None, events: Events) -> None:
        self._settings, self._limit, self._expandable = settings, limit, settings.expandable_segments
        self._private = [lane.pool != (0, 0) for lane in events.lanes]
        self._collect_above = int(settings.garbage_collection_threshold * limit) if limit else 0
        # torch reserves addresses for 1 1/8 of the device; the limit is all that is known of it.
        self._space = limit + limit // 8 + _SLACK if limit else max(_SPACE, 2 * int(events.nbytes.max(initial=0)))
        self._next = _FIRST_ADDRESS
        # By "small" and lane: free blocks as (size, address, block), so that the first that is large enough is the best fit.
        self._free = {small: [list[tuple[int, int, _Range]]() for _ in events.lanes] for small in (True, False)}
        self._unmapped = {small: [list[tuple[int, _Range]]() for _ in events.lanes] for small in (True, False)}
        self._searches = {True: 0, False: 0}
        self.used: dict[_Range, None] = {}
        self.reserved = self.allocated = self.pending = self.unused = self.releasable = 0
        self.retries = self.event = 0
        self.log: list[tuple[int, int, int, int, int]] = []

    def level(self, time_ns: int) -> Level:
        largest = max((pool[-1][0] for lanes in self._free.values() for pool in lanes if pool), default=0)
        levels = (self.reserved, self.allocated, self.pending, self.unused, self.releasable, largest)
        return Level(self.event, time_ns, *levels)

    # Requests.

    def allocate(self, nbytes: int, lane: int) -> _Range | None:
        """The block a request gets, by whatever it takes (malloc, alloc_found_block); None where torch would raise."""
        size = self._settings.rounded(nbytes)
        small = size <= _SMALL_SIZE
        block = self._best_fit(size, small, lane)
        if block is None and self._collect_above:
            self._collect_garbage()
        if block is None:
            block = self._ask_device(size, small, lane)
        if block is None and self._release_enough(size, small, lane):
            block = self._ask_device(size, small, lane)
        if block is None:
            self.release_all()
            self.retries += 1
            block = self._ask_device(size, small, lane)
        if block is None:
            return None
        remainder = block.size - size
        if small or self._expandable:
            worth = remainder >= _MIN_BLOCK
        else:
            worth = size < self._settings.max_split_size and remainder > _SMALL_SIZE
        if worth:
            self._put(block.split(size))
        block.state, block.requested = _ACTIVE, nbytes
        self.allocated += block.size
        self.used[block] = None
        return block

    def free_later(self, block: _Range) -> None:
        """Another stream still uses it."""
        if block.state == _ACTIVE:
            block.state = _PENDING
            self.allocated -= block.size
            self.pending += block.size

    def free(self, block: _Range) -> None:
        """A block goes back to its pool and merges with its free neighbours (free_block)."""
        if block.state == _PENDING:
            self.pending -= block.size
        else:
            self.allocated -= block.size
        del self.used[block]
        block.requested, block.slot = 0, -1
        self._merge(block, _FREE)
        self._put(block)

    def _best_fit(self, size: int, small: bool, lane: int) -> _Range | None:
        """What the pool has for a request, taken out of it (get_free_block)."""
        if self._collect_above:
            self._searches[small] += 1
        pool = self._free[small][lane]
        at = bisect_left(pool, (size,))
        if at == len(pool):
            return None
        if self._expandable:
            while at + 1 < len(pool) and pool[at + 1][2].reach < pool[at][2].reach:
                at += 1
        held, split = pool[at][0], self._settings.max_split_size
        # torch holds the blocks of expandable segments to this as well (pytorch 193400).
        if size < split <= held or (size >= split and held >= size + self._settings.max_non_split_rounding):
            return None
        return self._take(pool[at][2])

    # Sets.

    def _releasable(self, block: _Range) -> int:
        """Bytes of a free block that would go back to the device: the whole segment, or whole pages of an expandable one."""
        if self._private[block.lane]:
            return 0
        if self._expandable:
            page, offset = self._page(block.small), block.address - block.base
            return max(0, (offset + block.size) // page - (offset + page - 1) // page) * page
        return block.size if block.whole else 0

    def _put(self, block: _Range) -> None:
        """A free block enters its pool."""
        insort(self._free[block.small][block.lane], (block.size, block.address, block))
        block.state, block.born = _FREE, self._searches[block.small]
        self.unused += block.size
        self.releasable += self._releasable(block)

    def _take(self, block: _Range) -> _Range:
        """And leaves it."""
        pool = self._free[block.small][block.lane]
        del pool[bisect_left(pool, (block.size, block.address))]
        self.unused -= block.size
        self.releasable -= self._releasable(block)
        return block

    def _put_unmapped(self, hole: _Range) -> None:
        insort(self._unmapped[hole.small][hole.lane], (hole.address, hole))
        hole.state = _UNMAPPED

    def _take_unmapped(self, hole: _Range) -> None:
        holes = self._unmapped[hole.small][hole.lane]
        del holes[bisect_left(holes, (hole.address,))]

    def _merge(self, into: _Range, state: str) -> None:
        """Let ``into``, which stands in no set, take over its neighbours in ``state`` (try_merge_blocks)."""
        for other in (into.previous, into.next):
            if other is None or other.state != state:
                continue
            if state == _FREE:
                self._take(other)
            else:
                self._take_unmapped(other)
            if other is into.previous:
                into.address = other.address
                into.chain(other.previous, into.next)
            else:
                into.chain(into.previous, other.next)
            into.size += other.size

    # Memory from the device.

    def _page(self, small: bool) -> int:
        return _ROUND_LARGE if small else self._settings.large_segment_size

    def _fits(self, nbytes: int) -> bool:
        return not self._limit or self.reserved + nbytes <= self._limit

    def _note(self, action: int, address: int, size: int, lane: int) -> None:
        self.reserved += size if action in (_SEGMENT_ALLOC, _SEGMENT_MAP) else -size
        self.log.append((self.event, action, address, size, lane))

    def _ask_device(self, size: int, small: bool, lane: int) -> _Range | None:
        """Memory that is not reserved yet (alloc_block); None where the device has none left."""
        if self._expandable:
            return self._expand(size, small, lane)
        asked = self._settings.segment_nbytes(size)
        if not self._fits(asked):
            return None
        block = _Range(self._next, asked, lane, small, 0)
        self._next += -(-asked // _ROUND_LARGE) * _ROUND_LARGE
        self._note(_SEGMENT_ALLOC, block.address, asked, lane)
        return block

    def _expand(self, size: int, small: bool, lane: int) -> _Range | None:
        """A block of an expandable segment that grew for it (try_allocate_expandable_block); None where it cannot."""
        block = next((first for first in self._grown(small, lane) if self._span(first, size) >= size), None)
        if block is None:
            page = self._page(small)
            block = _Range(self._next, -(-self._space // page) * page, lane, small, self._next)
            self._next += block.size
            self._put_unmapped(block)
        if block.state == _UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        return self._take(block)

    def _grown(self, small: bool, lane: int) -> Iterator[_Range]:
        """Where expandable segments may grow: an unmapped range, from the free block before it if there is one."""
        for _, hole in self._unmapped[small][lane]:
            before = hole.previous
            yield before if before is not None and before.state == _FREE else hole

    def _span(self, first: _Range, size: int) -> int:
        """Bytes from ``first`` on that nothing uses, as far as ``size`` needs them."""
        span = 0
        following: _Range | None = first
        while span < size and following is not None and following.state in (_FREE, _UNMAPPED):
            span += following.size
            following = following.next
        return span

    def _map(self, hole: _Range, size: int) -> bool:
        """Back the start of an unmapped range with pages (map_block); False where the device has none left."""
        page = self._page(hole.small)
        mapped = -(-size // page) * page
        if not self._fits(mapped):
            return False
        self._take_unmapped(hole)
        address = hole.address
        if mapped < hole.size:
            self._put_unmapped(hole.split(mapped))
        self._merge(hole, _FREE)
        self._put(hole)
        self._note(_SEGMENT_MAP, address, mapped, hole.lane)
        return True

    # Memory back to the device.

    def _release(self, block: _Range) -> int:
        """Give a whole segment back (release_block); its bytes."""
        self._take(block)
        self._note(_SEGMENT_FREE, block.address, block.size, block.lane)
        return block.size

    def _unmap(self, block: _Range) -> None:
        """Give the whole pages inside a free block back (unmap_block), and the address range with the last of them."""
        base, page, end = block.base, self._page(block.small), block.address + block.size
        first = base + -(-(block.address - base) // page) * page
        last = base + (end - base) // page * page
        if first >= last:
            return
        self._take(block)
        hole = block
        if first > block.address:
            hole = block.split(first - block.address)
            self._put(block)
        if end > last:
            self._put(hole.split(last - first))
        hole.state = _UNMAPPED
        self._merge(hole, _UNMAPPED)
        self._note(_SEGMENT_UNMAP, first, last - first, block.lane)
        if not hole.whole:
            self._put_unmapped(hole)

    def _whole(self, small: bool) -> list[_Range]:
        """Free segments that may go back, in the order of their pool."""
        shared = (pool for lane, pool in enumerate(self._free[small]) if not self._private[lane])
        return [block for pool in shared for _, _, block in pool if block.whole]

    def _collect_garbage(self) -> None:
        """Give back large segments that were searched past more often than others (garbage_collect_cached_blocks)."""
        target, done = self.reserved - self._collect_above, 0
        while not self._expandable and done < target and (left := self._whole(False)):
            ages = [self._searches[False] - block.born for block in left]
            for block, age in zip(left, ages, strict=True):
                if age >= sum(ages) / len(ages):
                    done += self._release(block)

    def _release_enough(self, size: int, small: bool, lane: int) -> bool:
        """Give back oversize blocks until one request fits (release_available_cached_blocks)."""
        split = self._settings.max_split_size
        if split == UNBOUNDED or self._expandable:
            return False
        wanted, total = max(size, split), 0
        pool = self._free[small][lane]
        at = bisect_left(pool, (wanted,))
        if at < len(pool):
            block = pool[at][2]
            # torch asserts nothing here; a part of a larger segment cannot be given back alone.
            return block.whole and self._release(block) > 0
        for held, _, block in reversed(list(pool)):
            if total >= wanted or held < split:
                break
            total += self._release(block) if block.whole else 0
        return total >= wanted

    def release_all(self) -> None:
        """Wait for other streams, then give back every free segment and page (release_cached_blocks)."""
        if self.pending:
            for block in [block for block in self.used if block.state == _PENDING]:
                self.free(block)
        for small in (False, True):
            if not self._expandable:
                for block in self._whole(small):
                    self._release(block)
                continue
            shared = [pool for lane, pool in enumerate(self._free[small]) if not self._private[lane]]
            for block in [block for pool in shared for _, _, block in pool]:
                self._unmap(block)

    # What is there.

    def segments(self, events: Events) -> Iterator[Segment]:
        """As a snapshot shows them: an expandable segment is one for each mapped range."""
        blocks = [*self.used, *(block for lanes in self._free.values() for pool in lanes for _, _, block in pool)]
        held: list[Block] = []
        for block in sorted(blocks, key=lambda block: block.address):
            held.append(Block(block.address, block.size, block.requested, block.state))
            if block.next is None or block.next.state == _UNMAPPED:
                lane = events.lanes[block.lane]
                yield Segment(
                    device=events.device,
                    address=held[0].address,
                    total_size=sum(one.size for one in held),
                    stream=lane.stream,
                    large=not block.small,
                    pool=lane.pool,
                    expandable=self._expandable,
                    blocks=tuple(held),
                )
                held = []
