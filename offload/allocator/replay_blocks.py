"""Owns the compiled half of the allocator's model that knows no policy: blocks, their sets, merges, and what the device gives.

`replay_loops` decides with these functions what happens to a request, and `replay` owns the arrays. It never
allocates an array, checks no argument, and knows no file. The rules are those of pytorch's c10/cuda/CUDACachingAllocator.cpp
(Native::DeviceCachingAllocator), written anew over arrays; each function names the one it models.

Note: [Where blocks lie]
    Two arrays hold all, because what numba compiles grows with the arrays a function takes. ``m`` is cells (counters, then the
    settings, then one flag a lane) and after them the blocks, `BLOCK_WIDTH` numbers each: a block is known by its position, and
    ``m[block + SIZE]`` is its size. The blocks of one segment are chained by address. ``s`` has in its first rows the free
    blocks of each pool in the order (lane, size, address), so that the first that is large enough is the best fit, and the
    unmapped ranges of expandable segments in the order (lane, address); then the unused positions, then the log.
    A lane is one (memory pool, stream): blocks never change lanes. Addresses only grow, as if the device never gave one twice;
    a fit between equal sizes is then the oldest segment's.
"""

# What numpy calls Any here, numba compiles as int64.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import boolean, int32, int64, njit, uint8, void
from numpy.typing import NDArray

from offload.allocator.machine_code import keeps

Cells = NDArray[np.int64]
Table = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Lanes = NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., object])

# Of a block; BASE is where its expandable segment starts, BORN the pool's count of searches when it became free.
ADDRESS, SIZE, PREVIOUS, NEXT, LANE, POOL, STATE, REQUESTED, BASE, BORN, SLOT, BLOCK_WIDTH = range(12)
# Its states.
FREE, ACTIVE, PENDING, UNMAPPED, UNUSED = range(5)
# Rows of ``s``; the first two are also the numbers of the pools. LOG: event, action, address, size, lane.
SMALL, LARGE, UNMAPPED_SMALL, UNMAPPED_LARGE, SPARES, LOG = range(6)
ROWS = LOG + 5
# What an event asks for. REQUEST: freed by the program, still in use on another stream. EMPTY: torch.cuda.empty_cache().
ALLOC, RELEASE, REQUEST, EMPTY = range(4)
# What the log says.
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(4)
# Cells of ``m``, after the lengths of the four sets and the count of unused positions; SEARCHES are two, one a pool.
RESERVED, ACTIVE_BYTES, REQUESTED_BYTES, PENDING_BYTES, FREE_BYTES, RELEASABLE, NEXT_ADDRESS, SEARCHES = range(5, 13)
LOGGED, FAILED, PENDINGS, RETRIES, POINTS, BIN_RESERVED, BIN_ACTIVE = range(14, 21)
PEAK_RESERVED, PEAK_RESERVED_AT, PEAK_ACTIVE, PEAK_ACTIVE_AT, WORST, WORST_AT = range(21, 27)
# The settings; a limit of 0 is no limit, and so is a threshold of 0. DIVISIONS are sixteen, PRIVATE one a lane.
EXPANDABLE, MAX_SPLIT, MAX_ROUNDING, LARGE_SEGMENT, LIMIT, GC_THRESHOLD, SPACE, LANES, DIVISIONS = range(27, 36)
PRIVATE = DIVISIONS + 16
# Columns of points: event, levels after it, and the peaks since the last point.
POINT_WIDTH = 9
# Columns of failures: event, bytes asked for, then reserved, active, pending, free, releasable, largest free block.
FAILURE_WIDTH = 8

_MIN_LARGE = 10 << 20
_SMALL_SEGMENT = _ROUND_LARGE = 2 << 20


#: What the names in annotations are to numba.
_TYPES = {
    "int": int64,
    "bool": boolean,
    "None": void,
    "Cells": int64[::1],
    "Table": int64[:, ::1],
    "Bytes": uint8[::1],
    "Lanes": int32[::1],
}


def compiled(function: Function) -> Function:
    """The function as machine code, for the types its annotations name.

    Compiled at import, once: left to itself numba compiles a function again for every constant that it is called with. Kept
    on disk where `machine_code` names a folder: compiling all takes eight seconds, more than most replays.
    """
    *arguments, returned = (_TYPES[name] for name in function.__annotations__.values())
    return cast(Function, njit(returned(*arguments), nogil=True, cache=keeps())(function))


# --- the sets of free blocks and unmapped ranges ------------------------------------------------------------------------


@compiled
def place(m: Cells, s: Table, which: int, lane: int, size: int, address: int) -> int:
    """The first position in a set that is not before (lane, size, address); sets of unmapped ranges ignore the size."""
    low, high = 0, m[which]
    while low < high:
        middle = (low + high) >> 1
        block = s[which, middle]
        if m[block + LANE] != lane:
            before = m[block + LANE] < lane
        elif which < UNMAPPED_SMALL and m[block + SIZE] != size:
            before = m[block + SIZE] < size
        else:
            before = m[block + ADDRESS] < address
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _page(m: Cells, s: Table, pool: int) -> int:
    return _SMALL_SEGMENT if pool == SMALL else m[LARGE_SEGMENT]


@compiled
def releasable(m: Cells, s: Table, block: int) -> int:
    """Bytes of a free block that would go back to the device: the whole segment, or whole pages of an expandable one."""
    if m[PRIVATE + m[block + LANE]]:
        return 0
    if m[EXPANDABLE]:
        page, offset = _page(m, s, m[block + POOL]), m[block + ADDRESS] - m[block + BASE]
        return max(0, (offset + m[block + SIZE]) // page - (offset + page - 1) // page) * page
    return m[block + SIZE] if m[block + PREVIOUS] < 0 and m[block + NEXT] < 0 else 0


@compiled
def insert(m: Cells, s: Table, which: int, block: int) -> None:
    """A free block enters its pool, or an unmapped range the others of its pool."""
    at = place(m, s, which, m[block + LANE], m[block + SIZE], m[block + ADDRESS])
    for position in range(m[which], at, -1):
        s[which, position] = s[which, position - 1]
    s[which, at] = block
    m[which] += 1
    if which < UNMAPPED_SMALL:
        m[block + STATE] = FREE
        m[block + BORN] = m[SEARCHES + which]
        m[FREE_BYTES] += m[block + SIZE]
        m[RELEASABLE] += releasable(m, s, block)
    else:
        m[block + STATE] = UNMAPPED


@compiled
def remove_at(m: Cells, s: Table, which: int, at: int) -> int:
    """Take out what stands at a position of a set."""
    block = s[which, at]
    m[which] -= 1
    for position in range(at, m[which]):
        s[which, position] = s[which, position + 1]
    if which < UNMAPPED_SMALL:
        m[FREE_BYTES] -= m[block + SIZE]
        m[RELEASABLE] -= releasable(m, s, block)
    return block


@compiled
def _remove(m: Cells, s: Table, which: int, block: int) -> None:
    remove_at(m, s, which, place(m, s, which, m[block + LANE], m[block + SIZE], m[block + ADDRESS]))


# --- blocks -------------------------------------------------------------------------------------------------------------


@compiled
def new_block(m: Cells, s: Table, lane: int, pool: int, address: int, size: int, base: int) -> int:
    """A position for a block that has no neighbours and stands in no set yet."""
    m[SPARES] -= 1
    block = s[SPARES, m[SPARES]]
    m[block + ADDRESS] = address
    m[block + SIZE] = size
    m[block + PREVIOUS] = -1
    m[block + NEXT] = -1
    m[block + LANE] = lane
    m[block + POOL] = pool
    m[block + STATE] = ACTIVE
    m[block + REQUESTED] = 0
    m[block + BASE] = base
    m[block + SLOT] = -1
    return block


@compiled
def drop_block(m: Cells, s: Table, block: int) -> None:
    """The position of a block that is no more may serve another."""
    m[block + STATE] = UNUSED
    s[SPARES, m[SPARES]] = block
    m[SPARES] += 1


@compiled
def splice(m: Cells, s: Table, block: int, before: int, after: int) -> None:
    """Chain a block between two others, either of which may be -1."""
    m[block + PREVIOUS] = before
    m[block + NEXT] = after
    if before >= 0:
        m[before + NEXT] = block
    if after >= 0:
        m[after + PREVIOUS] = block


@compiled
def _merge(m: Cells, s: Table, into: int, other: int, state: int) -> None:
    """Let ``into``, which stands in no set, take over a neighbour in ``state`` (try_merge_blocks)."""
    if other < 0 or m[other + STATE] != state:
        return
    _remove(m, s, m[other + POOL] + (UNMAPPED_SMALL if state == UNMAPPED else 0), other)
    if m[into + PREVIOUS] == other:
        m[into + ADDRESS] = m[other + ADDRESS]
        splice(m, s, into, m[other + PREVIOUS], m[into + NEXT])
    else:
        splice(m, s, into, m[into + PREVIOUS], m[other + NEXT])
    m[into + SIZE] += m[other + SIZE]
    drop_block(m, s, other)


@compiled
def _note(m: Cells, s: Table, event: int, action: int, address: int, size: int, lane: int) -> None:
    at = m[LOGGED]
    s[LOG, at] = event
    s[LOG + 1, at] = action
    s[LOG + 2, at] = address
    s[LOG + 3, at] = size
    s[LOG + 4, at] = lane
    m[LOGGED] += 1


@compiled
def free(m: Cells, s: Table, block: int) -> None:
    """A block goes back to its pool and merges with its free neighbours (free_block)."""
    size = m[block + SIZE]
    if m[block + STATE] == PENDING:
        m[PENDING_BYTES] -= size
        m[PENDINGS] -= 1
    else:
        m[ACTIVE_BYTES] -= size
    m[REQUESTED_BYTES] -= m[block + REQUESTED]
    m[block + REQUESTED] = 0
    m[block + SLOT] = -1
    before, after = m[block + PREVIOUS], m[block + NEXT]
    _merge(m, s, block, before, FREE)
    _merge(m, s, block, after, FREE)
    insert(m, s, m[block + POOL], block)


# --- memory from and to the device --------------------------------------------------------------------------------------


@compiled
def release_at(m: Cells, s: Table, event: int, pool: int, at: int) -> int:
    """Give a whole segment back (release_block)."""
    block = remove_at(m, s, pool, at)
    size = m[block + SIZE]
    m[RESERVED] -= size
    _note(m, s, event, SEGMENT_FREE, m[block + ADDRESS], size, m[block + LANE])
    drop_block(m, s, block)
    return size


@compiled
def _map(m: Cells, s: Table, event: int, block: int, size: int) -> bool:
    """Back the start of an unmapped range with pages (map_block); False where the device has none left."""
    pool, lane = m[block + POOL], m[block + LANE]
    page = _page(m, s, pool)
    mapped = (size + page - 1) // page * page
    if m[LIMIT] and m[RESERVED] + mapped > m[LIMIT]:
        return False
    _remove(m, s, UNMAPPED_SMALL + pool, block)
    address = m[block + ADDRESS]
    if mapped < m[block + SIZE]:
        remainder = new_block(m, s, lane, pool, address + mapped, m[block + SIZE] - mapped, m[block + BASE])
        splice(m, s, remainder, block, m[block + NEXT])
        m[block + SIZE] = mapped
        insert(m, s, UNMAPPED_SMALL + pool, remainder)
    m[block + STATE] = FREE
    before, after = m[block + PREVIOUS], m[block + NEXT]
    _merge(m, s, block, before, FREE)
    _merge(m, s, block, after, FREE)
    insert(m, s, pool, block)
    m[RESERVED] += mapped
    _note(m, s, event, SEGMENT_MAP, address, mapped, lane)
    return True


@compiled
def unmap(m: Cells, s: Table, event: int, block: int) -> None:
    """Give the whole pages inside a free block back (unmap_block), and the address range with the last of them."""
    lane, pool, base, start, size = m[block + LANE], m[block + POOL], m[block + BASE], m[block + ADDRESS], m[block + SIZE]
    page = _page(m, s, pool)
    begin = base + (start - base + page - 1) // page * page
    end = base + (start + size - base) // page * page
    if begin >= end:
        return
    _remove(m, s, pool, block)
    if begin > start:
        head = new_block(m, s, lane, pool, start, begin - start, base)
        splice(m, s, head, m[block + PREVIOUS], block)
        insert(m, s, pool, head)
    if start + size > end:
        tail = new_block(m, s, lane, pool, end, start + size - end, base)
        splice(m, s, tail, block, m[block + NEXT])
        insert(m, s, pool, tail)
    m[block + ADDRESS], m[block + SIZE], m[block + STATE] = begin, end - begin, UNMAPPED
    before, after = m[block + PREVIOUS], m[block + NEXT]
    _merge(m, s, block, before, UNMAPPED)
    _merge(m, s, block, after, UNMAPPED)
    m[RESERVED] -= end - begin
    _note(m, s, event, SEGMENT_UNMAP, begin, end - begin, lane)
    if m[block + PREVIOUS] < 0 and m[block + NEXT] < 0:
        drop_block(m, s, block)
    else:
        insert(m, s, UNMAPPED_SMALL + pool, block)


@compiled
def _expand(m: Cells, s: Table, event: int, lane: int, pool: int, size: int) -> int:
    """A block of an expandable segment that grew for it (try_allocate_expandable_block); -1 where it cannot."""
    which = UNMAPPED_SMALL + pool
    block = -1
    for at in range(place(m, s, which, lane, 0, 0), m[which]):
        first = s[which, at]
        if m[first + LANE] != lane:
            break
        if m[first + PREVIOUS] >= 0 and m[m[first + PREVIOUS] + STATE] == FREE:
            first = m[first + PREVIOUS]
        span, following = 0, first
        while span < size and following >= 0 and (m[following + STATE] == FREE or m[following + STATE] == UNMAPPED):
            span += m[following + SIZE]
            following = m[following + NEXT]
        if span >= size:
            block = first
            break
    if block < 0:
        page = _page(m, s, pool)
        space = (m[SPACE] + page - 1) // page * page
        block = new_block(m, s, lane, pool, m[NEXT_ADDRESS], space, m[NEXT_ADDRESS])
        m[NEXT_ADDRESS] += space
        insert(m, s, which, block)
    if m[block + STATE] == UNMAPPED and not _map(m, s, event, block, min(m[block + SIZE], size)):
        return -1
    while m[block + SIZE] < size:
        following = m[block + NEXT]
        if not _map(m, s, event, following, min(size - m[block + SIZE], m[following + SIZE])):
            return -1
        block = following
    _remove(m, s, pool, block)
    return block


@compiled
def ask_device(m: Cells, s: Table, event: int, lane: int, pool: int, size: int) -> int:
    """Memory that is not reserved yet (alloc_block); -1 where the device has none left."""
    if m[EXPANDABLE]:
        return _expand(m, s, event, lane, pool, size)
    if pool == SMALL:
        asked = _SMALL_SEGMENT
    elif size < _MIN_LARGE:
        asked = m[LARGE_SEGMENT]
    else:
        asked = (size + _ROUND_LARGE - 1) // _ROUND_LARGE * _ROUND_LARGE
    if m[LIMIT] and m[RESERVED] + asked > m[LIMIT]:
        return -1
    block = new_block(m, s, lane, pool, m[NEXT_ADDRESS], asked, 0)
    m[NEXT_ADDRESS] += (asked + _ROUND_LARGE - 1) // _ROUND_LARGE * _ROUND_LARGE
    m[RESERVED] += asked
    _note(m, s, event, SEGMENT_ALLOC, m[block + ADDRESS], asked, lane)
    return block
