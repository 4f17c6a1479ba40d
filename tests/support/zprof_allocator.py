"""Owns a second model of torch's caching allocator, as plain as it can be, for the tests to hold the compiled one against.

`tests/zprof/test_replay.py` runs both over the same events. It scans lists where the other keeps sorted arrays, and shares no
code with it but the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.allocator import UNBOUNDED, Settings

SMALL = 1 << 20
MIB = 1 << 20


@dataclass(eq=False)
class Piece:
    address: int
    size: int
    state: str = "free"
    slot: int = -1
    born: int = 0


@dataclass(eq=False)
class Area:
    """A segment, or the address range of an expandable one."""

    lane: int
    small: bool
    page: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def base(self) -> int:
        return self.pieces[0].address

    def tidy(self) -> None:
        """Join neighbours that are both free, or both unmapped; the one freed last decides the age."""
        joined: list[Piece] = []
        for piece in self.pieces:
            if joined and piece.state in ("free", "unmapped") and joined[-1].state == piece.state:
                joined[-1].size += piece.size
                joined[-1].born = max(joined[-1].born, piece.born)
            else:
                joined.append(piece)
        self.pieces = joined


class Allocator:
    def __init__(self, settings: Settings, limit: int | None, private: set[int], first: int, space: int) -> None:
        self.settings, self.limit, self.private = settings, limit, private
        self.areas: list[Area] = []
        self.next, self.space = first, space
        self.failed = 0
        self.searches = {True: 0, False: 0}

    @property
    def reserved(self) -> int:
        return sum(piece.size for area in self.areas for piece in area.pieces if piece.state != "unmapped")

    def held(self, state: str) -> int:
        return sum(piece.size for area in self.areas for piece in area.pieces if piece.state == state)

    def find(self, slot: int) -> tuple[Area, Piece] | None:
        found = [(area, piece) for area in self.areas for piece in area.pieces if piece.slot == slot]
        return found[0] if found else None

    # --- requests

    def alloc(self, slot: int, nbytes: int, lane: int) -> int | None:
        size = self.settings.rounded(nbytes)
        small = size <= SMALL
        collects = self.settings.garbage_collection_threshold and self.limit
        self.searches[small] += bool(collects)
        found = self.fit(size, small, lane)
        if found is None and collects:
            self.collect()
        if found is None:
            found = self.more(size, small, lane)
        if found is None and self.make_room(size, small, lane):
            found = self.more(size, small, lane)
        if found is None:
            self.release()
            found = self.more(size, small, lane)
        if found is None:
            self.failed += 1
            return None
        area, piece = found
        rest = piece.size - size
        if small or self.settings.expandable_segments:
            split = rest >= 512
        else:
            split = size < self.settings.max_split_size and rest > SMALL
        if split:
            tail = Piece(piece.address + size, rest, born=self.searches[small])
            area.pieces.insert(area.pieces.index(piece) + 1, tail)
            piece.size = size
        piece.state, piece.slot = "active", slot
        return piece.address

    def request_free(self, slot: int) -> None:
        if (found := self.find(slot)) and found[1].state == "active":
            found[1].state = "pending"

    def free(self, slot: int) -> None:
        if found := self.find(slot):
            self.let_go(*found)

    def let_go(self, area: Area, piece: Piece) -> None:
        piece.state, piece.slot, piece.born = "free", -1, self.searches[area.small]
        area.tidy()

    # --- where it comes from

    def fit(self, size: int, small: bool, lane: int) -> tuple[Area, Piece] | None:
        free = [
            (area, piece)
            for area in self.areas
            if area.small == small and area.lane == lane
            for piece in area.pieces
            if piece.state == "free" and piece.size >= size
        ]
        free.sort(key=lambda found: (found[1].size, found[1].address))
        if not free:
            return None
        chosen = free[0]
        if self.settings.expandable_segments:
            for other in free[1:]:
                if self.reach(*other) >= self.reach(*chosen):
                    break
                chosen = other
        split = self.settings.max_split_size
        if size < split <= chosen[1].size:
            return None
        if size >= split and chosen[1].size >= size + self.settings.max_non_split_rounding:
            return None
        return chosen

    def reach(self, area: Area, piece: Piece) -> int:
        at = area.pieces.index(piece) + 1
        beyond = area.pieces[at] if at < len(area.pieces) else None
        return piece.size + (beyond.size if beyond and beyond.state == "unmapped" else 0)

    def more(self, size: int, small: bool, lane: int) -> tuple[Area, Piece] | None:
        if self.settings.expandable_segments:
            return self.expand(size, small, lane)
        asked = self.settings.segment_nbytes(size)
        if self.limit and self.reserved + asked > self.limit:
            return None
        area = Area(lane, small, 0, [Piece(self.next, asked, born=self.searches[small])])
        self.next += -(-asked // (2 * MIB)) * 2 * MIB
        self.areas.append(area)
        return area, area.pieces[0]

    def expand(self, size: int, small: bool, lane: int) -> tuple[Area, Piece] | None:
        page = 2 * MIB if small else self.settings.large_segment_size
        area, piece = self.room(size, small, lane) or self.new_area(small, lane, page)
        at = piece.address
        while True:
            piece = next(other for other in area.pieces if other.address <= at < other.address + other.size)
            if piece.state == "free" and piece.size >= size:
                return area, piece
            hole = piece if piece.state == "unmapped" else area.pieces[area.pieces.index(piece) + 1]
            have = 0 if piece is hole else piece.size
            mapped = -(-min(size - have, hole.size) // page) * page
            if self.limit and self.reserved + mapped > self.limit:
                return None
            if mapped < hole.size:
                area.pieces.insert(area.pieces.index(hole) + 1, Piece(hole.address + mapped, hole.size - mapped, "unmapped"))
                hole.size = mapped
            hole.state, hole.born = "free", self.searches[small]
            area.tidy()

    def room(self, size: int, small: bool, lane: int) -> tuple[Area, Piece] | None:
        for area in sorted((a for a in self.areas if a.small == small and a.lane == lane), key=lambda a: a.base):
            for at, piece in enumerate(area.pieces):
                if piece.state != "unmapped":
                    continue
                start = at - 1 if at and area.pieces[at - 1].state == "free" else at
                total = 0
                for other in area.pieces[start:]:
                    if other.state not in ("free", "unmapped") or total >= size:
                        break
                    total += other.size
                if total >= size:
                    return area, area.pieces[start]
        return None

    def new_area(self, small: bool, lane: int, page: int) -> tuple[Area, Piece]:
        space = -(-self.space // page) * page
        area = Area(lane, small, page, [Piece(self.next, space, "unmapped")])
        self.next += space
        self.areas.append(area)
        return area, area.pieces[0]

    # --- what goes back

    def whole(self, small: bool, *, lane: int | None = None) -> list[Area]:
        """Segments without a block in use, in the order of their pool."""
        areas = [
            area
            for area in self.areas
            if area.small == small and not area.page and len(area.pieces) == 1 and area.pieces[0].state == "free"
        ]
        areas = [area for area in areas if area.lane == lane or (lane is None and area.lane not in self.private)]
        return sorted(areas, key=lambda area: (area.lane, area.pieces[0].size, area.base))

    def collect(self) -> None:
        assert self.limit
        goal = int(self.settings.garbage_collection_threshold * self.limit)
        if self.settings.expandable_segments or self.reserved <= goal:
            return
        target, done = self.reserved - goal, 0
        while done < target and (left := self.whole(False)):
            ages = [self.searches[False] - area.pieces[0].born for area in left]
            for area, age in zip(left, ages, strict=True):
                if age >= sum(ages) / len(ages):
                    done += area.pieces[0].size
                    self.areas.remove(area)

    def make_room(self, size: int, small: bool, lane: int) -> bool:
        split = self.settings.max_split_size
        if split == UNBOUNDED or self.settings.expandable_segments:
            return False
        wanted, total = max(size, split), 0
        areas = self.whole(small, lane=lane)
        larger = [area for area in areas if area.pieces[0].size >= wanted]
        if larger:
            self.areas.remove(larger[0])
            return True
        for area in reversed(areas):
            if total >= wanted or area.pieces[0].size < split:
                break
            total += area.pieces[0].size
            self.areas.remove(area)
        return total >= wanted

    def release(self) -> None:
        for area in self.areas:
            for piece in list(area.pieces):
                if piece.state == "pending":
                    self.let_go(area, piece)
        for area in list(self.areas):
            if area.lane in self.private:
                continue
            if not area.page:
                if all(piece.state == "free" for piece in area.pieces):
                    self.areas.remove(area)
                continue
            pages: list[Piece] = []
            # An address range that was never backed by a page stays for the next attempt.
            had = any(piece.state == "free" for piece in area.pieces)
            for piece in area.pieces:
                pages += self.unmapped(area, piece) if piece.state == "free" else [piece]
            area.pieces = pages
            area.tidy()
            if had and all(piece.state == "unmapped" for piece in area.pieces):
                self.areas.remove(area)

    def unmapped(self, area: Area, piece: Piece) -> list[Piece]:
        begin = area.base + -(-(piece.address - area.base) // area.page) * area.page
        end = area.base + (piece.address + piece.size - area.base) // area.page * area.page
        if begin >= end:
            return [piece]
        parts = [
            Piece(piece.address, begin - piece.address, "free", born=piece.born),
            Piece(begin, end - begin, "unmapped"),
            Piece(end, piece.address + piece.size - end, "free", born=piece.born),
        ]
        return [part for part in parts if part.size]
