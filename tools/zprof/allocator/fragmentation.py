"""Owns the arithmetic of fragmentation: of each pool of an allocator what is reserved, in use, free, stuck; and what fits.

`zprof frag` calls it with the segments of a snapshot or of a replay. It never changes them, and needs only the standard
library.

Note: [Stuck and releasable]
    Free bytes are releasable where the allocator would give them back to the device before it runs out of memory: a segment
    without a block in use, or whole pages inside an expandable segment. Everything else that is free is stuck until its
    neighbours are freed, and so is all of a private pool, which gives nothing back while its graphs live. torch's
    inactive_split_bytes counts nothing in expandable segments (pytorch 159564); these figures do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from offload.allocator import Settings
from offload.text import as_size
from zprof.allocator.snapshot import ACTIVE, INACTIVE, Block, Segment

__all__ = ["Answer", "Part", "parts", "total", "would_succeed"]

SMALL_SIZE = 1 << 20
_SMALL_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one pool on one stream of one device; a total has ``large`` None.

    ``reserved`` = ``allocated`` + ``pending`` + ``releasable`` + ``stuck``. ``rounding`` is inside ``allocated``: block sizes
    less what was asked for. ``pending`` is freed, and still in use on another stream. ``largest`` is the largest free block.
    """

    device: int
    pool: tuple[int, int]
    large: bool | None
    stream: int
    segments: int
    reserved: int
    allocated: int
    pending: int
    rounding: int
    releasable: int
    stuck: int
    largest: int
    expandable: bool

    @property
    def free(self) -> int:
        """Reserved, and used by nothing."""
        return self.releasable + self.stuck

    @property
    def index(self) -> float:
        """1 - largest free block / free: 0 where one block holds all that is free, or nothing is."""
        return 1 - self.largest / self.free if self.free else 0.0


def parts(segments: Iterable[Segment], settings: Settings) -> list[Part]:
    """One part for each (device, pool, small or large, stream), in that order.

    Args:
        settings: say how large the pages of expandable segments are.
    """
    groups: dict[tuple[int, tuple[int, int], bool, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.device, segment.pool, segment.large, segment.stream), []).append(segment)
    return [_part(*key, groups[key], settings) for key in sorted(groups)]


def _part(device: int, pool: tuple[int, int], large: bool, stream: int, held: Sequence[Segment], settings: Settings) -> Part:
    blocks = [block for segment in held for block in segment.blocks]
    free = [block.size for block in blocks if block.state == INACTIVE]
    back = sum(releasable(segment, settings) for segment in held)
    in_use = [block for block in blocks if block.state == ACTIVE]
    return Part(
        device=device,
        pool=pool,
        large=large,
        stream=stream,
        segments=len(held),
        reserved=sum(segment.total_size for segment in held),
        allocated=sum(block.size for block in in_use),
        pending=sum(block.size for block in blocks if block.state not in (ACTIVE, INACTIVE)),
        rounding=sum(block.size - block.requested for block in in_use),
        releasable=back,
        stuck=sum(free) - back,
        largest=max(free, default=0),
        expandable=any(segment.expandable for segment in held),
    )


def releasable(segment: Segment, settings: Settings) -> int:
    """Bytes of a segment that the allocator would give back to the device before it raised."""
    if segment.pool != (0, 0):
        return 0
    if not segment.expandable:
        return segment.total_size if all(block.state == INACTIVE for block in segment.blocks) else 0
    # A mapped range starts at a page.
    page = page_nbytes(segment.large, settings)
    return sum(
        max(0, (block.address + block.size - segment.address) // page + (segment.address - block.address) // page) * page
        for block in segment.blocks
        if block.state == INACTIVE
    )


def page_nbytes(large: bool, settings: Settings) -> int:
    """How much an expandable segment grows by."""
    return settings.large_segment_size if large else _SMALL_PAGE


def total(held: Sequence[Part]) -> Part:
    """All parts as one."""
    sums = {
        each.name: sum(getattr(part, each.name) for part in held)
        for each in fields(Part)
        if each.name not in ("device", "pool", "large", "stream", "largest", "expandable")
    }
    largest = max((part.largest for part in held), default=0)
    expandable = any(part.expandable for part in held)
    return Part(device=-1, pool=(0, 0), large=None, stream=0, largest=largest, expandable=expandable, **sums)


# --- would it succeed? ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a request would succeed now; None where that depends on what the device has left, which nobody said.

    ``rounded`` is the block it would get, ``asked`` what the device would be asked for where no block fits.
    """

    nbytes: int
    succeeds: bool | None
    rounded: int
    asked: int
    reasons: tuple[str, ...]


def would_succeed(
    segments: Sequence[Segment],
    nbytes: int,
    settings: Settings,
    *,
    device_free: int | None,
    device: int = 0,
    stream: int = 0,
) -> Answer:
    """Follow a request of ``nbytes`` through the allocator as it stands.

    Args:
        device_free: bytes the device would still give this process; None where that is not known.
        stream: the current stream of whoever asks; 0 is the default one.
    """
    size = settings.rounded(nbytes)
    large = size > SMALL_SIZE
    mine = [segment for segment in segments if segment.device == device]
    pool = [
        segment for segment in mine if segment.large == large and segment.stream == stream and segment.pool == (0, 0)
    ]
    free = [block for segment in pool for block in segment.blocks if block.state == INACTIVE]
    name = f"{'large' if large else 'small'} pool of stream {stream}"
    now, later = _asked(pool, size, large, settings)
    fitting = [block for block in free if _fits(block, size, settings)]
    if fitting:
        best = min(fitting, key=lambda block: (block.size, block.address))
        reason = f"the {name} has a free block of {as_size(best.size)}, the smallest of {len(fitting)} that fit"
        return Answer(nbytes, True, size, now, (reason,))
    largest = max((block.size for block in free), default=0)
    back = sum(releasable(segment, settings) for segment in mine)
    known = "unknown" if device_free is None else as_size(device_free)
    reasons = [
        f"no free block of the {name} fits {as_size(size)}: the largest is {as_size(largest)}",
        f"the device would be asked for {as_size(now)}: it has {known} left, and {as_size(back)} of cached memory can be "
        "released",
    ]
    left = device_free or 0
    if now <= left or later <= left + back:
        return Answer(nbytes, True, size, now, tuple(reasons))
    if device_free is None:
        reasons.append(f"give --limit to say what the device has: it must have {as_size(min(now, later - back))} left")
        return Answer(nbytes, None, size, now, tuple(reasons))
    stuck, short = sum(part.stuck for part in parts(mine, settings)), as_size(later - back - left)
    reasons.append(f"{short} short, while {as_size(stuck)} of free memory is stuck between blocks in use")
    return Answer(nbytes, False, size, now, tuple(reasons))


def _asked(pool: Sequence[Segment], size: int, large: bool, settings: Settings) -> tuple[int, int]:
    """What the device is asked for where no block fits: as things stand, and after all that can be released was."""
    if not settings.expandable_segments:
        return (settings.segment_nbytes(size),) * 2
    page = page_nbytes(large, settings)
    now: list[tuple[str, int]] = []
    end = None
    for segment in sorted((segment for segment in pool if segment.expandable), key=lambda segment: segment.address):
        if end is not None:
            now.append(("unmapped", segment.address - end))
        now += [("free" if block.state == INACTIVE else "used", block.size) for block in segment.blocks]
        end = segment.address + segment.total_size
    # What lies behind the last mapped page has no end that matters.
    beyond = ("unmapped", size + page)
    return _growth([*now, beyond], size, page), _growth([*_released(now, page), beyond], size, page)


def _released(pieces: Sequence[tuple[str, int]], page: int) -> Iterator[tuple[str, int]]:
    """The pieces of an expandable segment once its whole free pages are gone."""
    at = 0
    for state, nbytes in pieces:
        begin, end = _up(at, page), (at + nbytes) // page * page
        if state == "free" and begin < end:
            yield from (("free", begin - at), ("unmapped", end - begin), ("free", at + nbytes - end))
        else:
            yield state, nbytes
        at += nbytes


def _growth(pieces: Iterable[tuple[str, int]], size: int, page: int) -> int:
    """Pages that must be mapped for ``size``, at the lowest address where it fits."""
    run: list[tuple[str, int]] = []
    for state, nbytes in pieces:
        if not nbytes:
            continue
        if state == "used":
            run = []
            continue
        run.append((state, nbytes))
        if any(kind == "unmapped" for kind, _ in run) and sum(length for _, length in run) >= size:
            break
    have = need = 0
    for state, nbytes in run:
        added = nbytes if state == "free" else min(_up(size - have, page), nbytes)
        need += added if state == "unmapped" else 0
        have += added
        if have >= size:
            break
    return need


def _fits(block: Block, size: int, settings: Settings) -> bool:
    if block.size < size:
        return False
    split = settings.max_split_size
    if size < split:
        return block.size < split
    return block.size < size + settings.max_non_split_rounding


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
