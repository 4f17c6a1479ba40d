"""Owns the compiled half of the allocator's model that decides: rounding, best fit, splits, what is given back, and the run.

`replay` imports this module when a replay runs, and calls `run` until it has taken every event. It never allocates an array:
`run` returns early where the caller must first grow them. The rules are those of pytorch's c10/cuda/CUDACachingAllocator.cpp
(torch 2.13), written anew over the arrays of `replay_blocks`; each function names the one it models.

Note: [What the model leaves out]
    Memory other processes and cuBLAS take from the device; pages the driver adds; free-memory callbacks; captures in progress
    (a private pool gives nothing back, as while its graphs live). An event says when a block that another stream still used
    became free; where the model runs out of memory before, it waits for it, as torch does. Garbage collection happens only
    under a limit, as torch's does only under a memory fraction.
"""

# What numpy calls Any here, numba compiles as int64.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from offload.allocator.replay_blocks import (
    ACTIVE,
    ACTIVE_BYTES,
    ADDRESS,
    ALLOC,
    BASE,
    BIN_ACTIVE,
    BIN_RESERVED,
    BLOCK_WIDTH,
    BORN,
    DIVISIONS,
    EMPTY,
    EXPANDABLE,
    FAILED,
    FREE_BYTES,
    GC_THRESHOLD,
    LANE,
    LANES,
    LARGE,
    LIMIT,
    LOGGED,
    MAX_ROUNDING,
    MAX_SPLIT,
    NEXT,
    PEAK_ACTIVE,
    PEAK_ACTIVE_AT,
    PEAK_RESERVED,
    PEAK_RESERVED_AT,
    PENDING,
    PENDING_BYTES,
    PENDINGS,
    POINTS,
    PREVIOUS,
    PRIVATE,
    RELEASABLE,
    RELEASE,
    REQUEST,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVED,
    RETRIES,
    SEARCHES,
    SIZE,
    SLOT,
    SMALL,
    SPARES,
    STATE,
    UNMAPPED,
    WORST,
    WORST_AT,
    Bytes,
    Cells,
    Lanes,
    Table,
    ask_device,
    compiled,
    free,
    insert,
    new_block,
    place,
    release_at,
    remove_at,
    splice,
    unmap,
)

__all__ = ["rounded", "run"]

_MIN_BLOCK = 512
_SMALL_SIZE = 1 << 20


@compiled
def rounded(m: Cells, size: int) -> int:
    """The block size for a request (round_size)."""
    if size < _MIN_BLOCK:
        return _MIN_BLOCK
    power = 0
    while size >> (power + 1):
        power += 1
    count = m[DIVISIONS + min(max(power - 20, 0), 15)]
    if count > 1 and size > _MIN_BLOCK * count:
        if size == 1 << power:
            return size
        step = (1 << power) // count
        return (size + step - 1) // step * step
    return (size + _MIN_BLOCK - 1) // _MIN_BLOCK * _MIN_BLOCK


@compiled
def _reach(m: Cells, s: Table, block: int) -> int:
    """How large a block could become where it lies at the end of what is mapped."""
    following = m[block + NEXT]
    more = m[following + SIZE] if following >= 0 and m[following + STATE] == UNMAPPED else 0
    return m[block + SIZE] + more


@compiled
def _best_fit(m: Cells, s: Table, lane: int, pool: int, size: int) -> int:
    """The block the pool has for a request, taken out of it (get_free_block); -1 where there is none."""
    if m[GC_THRESHOLD]:
        m[SEARCHES + pool] += 1
    at = place(m, s, pool, lane, size, 0)
    if at >= m[pool] or m[s[pool, at] + LANE] != lane:
        return -1
    if m[EXPANDABLE]:
        following = at + 1
        while (
            following < m[pool]
            and m[s[pool, following] + LANE] == lane
            and _reach(m, s, s[pool, following]) < _reach(m, s, s[pool, at])
        ):
            at = following
            following += 1
    held, split = m[s[pool, at] + SIZE], m[MAX_SPLIT]
    # torch holds the blocks of expandable segments to this as well (pytorch 193400).
    if (size < split <= held) or (size >= split and held >= size + m[MAX_ROUNDING]):
        return -1
    return remove_at(m, s, pool, at)


@compiled
def _is_whole(m: Cells, s: Table, block: int) -> bool:
    return m[block + PREVIOUS] < 0 and m[block + NEXT] < 0


@compiled
def _collect_garbage(m: Cells, s: Table, event: int) -> None:
    """Give back large segments that were searched past more often than others (garbage_collect_cached_blocks)."""
    if m[EXPANDABLE] or m[RESERVED] <= m[GC_THRESHOLD]:
        return
    target = m[RESERVED] - m[GC_THRESHOLD]
    ages, count, reclaimed = 0, 0, 0
    for at in range(m[LARGE]):
        block = s[LARGE, at]
        if _is_whole(m, s, block) and not m[PRIVATE + m[block + LANE]]:
            ages += m[SEARCHES + LARGE] - m[block + BORN]
            count += 1
    freed = True
    while reclaimed < target and freed and count > 0:
        threshold, freed, at = ages / count, False, 0
        while at < m[LARGE]:
            block = s[LARGE, at]
            age = m[SEARCHES + LARGE] - m[block + BORN]
            if _is_whole(m, s, block) and not m[PRIVATE + m[block + LANE]] and age >= threshold:
                freed = True
                ages -= age
                count -= 1
                reclaimed += release_at(m, s, event, LARGE, at)
            else:
                at += 1


@compiled
def _release_enough(m: Cells, s: Table, event: int, lane: int, pool: int, size: int) -> bool:
    """Give back oversize blocks until one request fits (release_available_cached_blocks)."""
    split = m[MAX_SPLIT]
    if split >= 1 << 62 or m[EXPANDABLE]:
        return False
    wanted = max(size, split)
    at = place(m, s, pool, lane, wanted, 0)
    if at < m[pool] and m[s[pool, at] + LANE] == lane:
        # torch asserts nothing here; a part of a larger segment cannot be given back alone.
        if not _is_whole(m, s, s[pool, at]):
            return False
        release_at(m, s, event, pool, at)
        return True
    total = 0
    while total < wanted and at > 0:
        at -= 1
        block = s[pool, at]
        if m[block + LANE] != lane or m[block + SIZE] < split:
            break
        if _is_whole(m, s, block):
            total += release_at(m, s, event, pool, at)
    return total >= wanted


@compiled
def _release_all(m: Cells, s: Table, event: int) -> None:
    """Wait for other streams, then give back every free segment and page (release_cached_blocks)."""
    if m[PENDINGS] > 0:
        for block in range(PRIVATE + m[LANES], len(m), BLOCK_WIDTH):
            if m[block + STATE] == PENDING:
                free(m, s, block)
    for pool in (LARGE, SMALL):
        if m[EXPANDABLE]:
            for block in s[pool, : m[pool]].copy():
                if not m[PRIVATE + m[block + LANE]]:
                    unmap(m, s, event, block)
            continue
        at = 0
        while at < m[pool]:
            block = s[pool, at]
            if _is_whole(m, s, block) and not m[PRIVATE + m[block + LANE]]:
                release_at(m, s, event, pool, at)
            else:
                at += 1


@compiled
def _find(m: Cells, s: Table, event: int, lane: int, pool: int, size: int) -> int:
    """A block at least as large as the request, by whatever it takes (malloc); -1 where torch would raise."""
    block = _best_fit(m, s, lane, pool, size)
    if block < 0 and m[GC_THRESHOLD] and m[LIMIT]:
        _collect_garbage(m, s, event)
    if block < 0:
        block = ask_device(m, s, event, lane, pool, size)
    if block < 0 and _release_enough(m, s, event, lane, pool, size):
        block = ask_device(m, s, event, lane, pool, size)
    if block < 0:
        _release_all(m, s, event)
        m[RETRIES] += 1
        block = ask_device(m, s, event, lane, pool, size)
    return block


@compiled
def _allocate(m: Cells, s: Table, event: int, lane: int, asked: int) -> int:
    """The block a request gets, split where the remainder is worth it (alloc_found_block); -1 where it fails."""
    size = rounded(m, asked)
    pool = SMALL if size <= _SMALL_SIZE else LARGE
    block = _find(m, s, event, lane, pool, size)
    if block < 0:
        return -1
    remainder = m[block + SIZE] - size
    if (remainder >= _MIN_BLOCK) if pool == SMALL or m[EXPANDABLE] else (size < m[MAX_SPLIT] and remainder > _SMALL_SIZE):
        other = new_block(m, s, lane, pool, m[block + ADDRESS] + size, remainder, m[block + BASE])
        splice(m, s, other, block, m[block + NEXT])
        m[block + SIZE] = size
        insert(m, s, pool, other)
    m[block + STATE] = ACTIVE
    m[block + REQUESTED] = asked
    m[ACTIVE_BYTES] += m[block + SIZE]
    m[REQUESTED_BYTES] += asked
    return block


@compiled
def _largest(m: Cells, s: Table) -> int:
    largest = 0
    for pool in (SMALL, LARGE):
        for at in range(m[pool]):
            largest = max(largest, m[s[pool, at] + SIZE])
    return largest


@compiled
def _write_levels(m: Cells, s: Table, table: Table, row: int, column: int) -> None:
    table[row, column] = m[RESERVED]
    table[row, column + 1] = m[ACTIVE_BYTES]
    table[row, column + 2] = m[PENDING_BYTES]
    table[row, column + 3] = m[FREE_BYTES]
    table[row, column + 4] = m[RELEASABLE]
    table[row, column + 5] = _largest(m, s)


@compiled
def _note_peaks(m: Cells, event: int) -> None:
    m[BIN_RESERVED] = max(m[BIN_RESERVED], m[RESERVED])
    m[BIN_ACTIVE] = max(m[BIN_ACTIVE], m[ACTIVE_BYTES])
    if m[RESERVED] > m[PEAK_RESERVED]:
        m[PEAK_RESERVED], m[PEAK_RESERVED_AT] = m[RESERVED], event
    if m[ACTIVE_BYTES] > m[PEAK_ACTIVE]:
        m[PEAK_ACTIVE], m[PEAK_ACTIVE_AT] = m[ACTIVE_BYTES], event
    if m[FREE_BYTES] - m[RELEASABLE] > m[WORST]:
        m[WORST], m[WORST_AT] = m[FREE_BYTES] - m[RELEASABLE], event


@compiled
def _step(m: Cells, s: Table, slots: Cells, event: int, action: int, slot: int, size: int, lane: int) -> int:
    """One event; the address it concerns, -1 for none, -2 for a request that failed."""
    if action == EMPTY:
        _release_all(m, s, event)
        return -1
    if action == ALLOC:
        block = _allocate(m, s, event, lane, size)
        slots[slot] = block
        if block < 0:
            return -2
        m[block + SLOT] = slot
        return m[block + ADDRESS]
    block = slots[slot]
    # A block that was waited for is free already, and may be another's by now.
    if block < 0 or m[block + SLOT] != slot:
        return -1
    address = m[block + ADDRESS]
    if action == RELEASE:
        slots[slot] = -1
        free(m, s, block)
    elif action == REQUEST and m[block + STATE] == ACTIVE:
        m[block + STATE] = PENDING
        m[ACTIVE_BYTES] -= m[block + SIZE]
        m[PENDING_BYTES] += m[block + SIZE]
        m[PENDINGS] += 1
    return address


@compiled
def run(
    m: Cells,
    s: Table,
    slots: Cells,
    failures: Table,
    points: Table,
    action: Bytes,
    slot: Cells,
    size: Cells,
    lane: Lanes,
    reserved: Cells,
    addresses: Cells,
    start: int,
    every: int,
) -> int:
    """Take events from ``start`` on; the number of the first that was not taken, because an array must grow first.

    Args:
        slots: the block of each allocation; -1 before, after, and where it failed.
        failures, points: take rows of levels.
        reserved, addresses: where not empty, take the reserved bytes after each event, and the address it concerned.
        every: a point is written after so many events, and after the last.
    """
    for event in range(start, len(action)):
        most_free = m[SMALL] + m[LARGE] + m[PENDINGS]
        if m[SPARES] < 2 * most_free + 8 or s.shape[1] - m[LOGGED] < most_free + 8:
            return event
        address = _step(m, s, slots, event, action[event], slot[event], size[event], lane[event])
        if address == -2:
            if m[FAILED] < len(failures):
                failures[m[FAILED], 0] = event
                failures[m[FAILED], 1] = size[event]
                _write_levels(m, s, failures, m[FAILED], 2)
            m[FAILED] += 1
        _note_peaks(m, event)
        if len(reserved):
            reserved[event] = m[RESERVED]
            addresses[event] = max(address, -1)
        if (event + 1) % every == 0 or event + 1 == len(action):
            points[m[POINTS], 0] = event
            points[m[POINTS], 7] = m[BIN_RESERVED]
            points[m[POINTS], 8] = m[BIN_ACTIVE]
            _write_levels(m, s, points, m[POINTS], 1)
            m[POINTS] += 1
            m[BIN_RESERVED] = 0
            m[BIN_ACTIVE] = 0
    return len(action)
