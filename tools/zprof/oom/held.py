"""Owns what would be held otherwise: bytes by category, tier and key, and what a change makes of them.

`zprof.oom.changes` puts changes together from these. Pure arithmetic; it knows neither policies nor traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["Held", "bytes_in", "halved", "keys", "largest_alone", "less", "moved", "partitioned"]

#: (category, tier, key) -> bytes.
Held = Mapping[tuple[str, str, str], int]


def bytes_in(held: Held, tiers: tuple[str, ...], category: str | None = None) -> int:
    """Bytes on some tiers, of one category or of all."""
    return sum(nbytes for (what, tier, _), nbytes in held.items() if tier in tiers and category in (None, what))


def keys(held: Held, category: str, tier: str) -> dict[str, int]:
    """Key -> bytes of one category on one tier."""
    return {key: nbytes for (what, at, key), nbytes in held.items() if (what, at) == (category, tier)}


def moved(
    category: str,
    now: str,
    to: str,
    stays: Mapping[str, int] | None = None,
    flying: Mapping[str, int] | None = None,
) -> Callable[[Held], Held]:
    """What is held for ``category`` goes to another tier, but for some bytes of some keys; ``flying``: bytes on the way, by
    the tier that has them."""

    def after(held: Held) -> Held:
        left: dict[tuple[str, str, str], int] = {}
        for (what, tier, key), nbytes in held.items():
            keeps = min(nbytes, (stays or {}).get(key, 0)) if what == category and tier == now else nbytes
            for place, part in (((what, tier, key), keeps), ((what, to, key), nbytes - keeps)):
                if part:
                    left[place] = left.get(place, 0) + part
        for at, nbytes in (flying or {}).items():
            left = _with_flying(left, nbytes, at, category)
        return left

    return after


def less(category: str, tier: str, by: Mapping[str, int]) -> Callable[[Held], Held]:
    """Some keys of the category hold so many bytes less."""

    def after(held: Held) -> Held:
        return {
            place: max(0, nbytes - by.get(place[2], 0)) if place[:2] == (category, tier) else nbytes
            for place, nbytes in held.items()
        }

    return after


def partitioned(cells: tuple[str, ...], world: int, flying: int) -> Callable[[Held], Held]:
    """Each rank holds its share of the cells, rounded up, and ``flying`` bytes of gathered units."""

    def after(held: Held) -> Held:
        left = {place: -(-nbytes // world) if place[0] in cells else nbytes for place, nbytes in held.items()}
        return _with_flying(left, flying)

    return after


def largest_alone(category: str, tiers: tuple[str, ...]) -> Callable[[Held], Held]:
    """Of the category only the key that holds most is left."""

    def after(held: Held) -> Held:
        mine = {place: nbytes for place, nbytes in held.items() if place[0] == category and place[1] in tiers}
        keep = max(mine, key=lambda place: mine[place]) if mine else None
        return {place: nbytes for place, nbytes in held.items() if place not in mine or place == keep}

    return after


def halved(categories: tuple[str, ...]) -> Callable[[Held], Held]:
    """Half of the categories is left."""

    def after(held: Held) -> Held:
        return {place: -(-nbytes // 2) if place[0] in categories else nbytes for place, nbytes in held.items()}

    return after


def _with_flying(
    held: dict[tuple[str, str, str], int], flying: int, tier: str = "device", of: str = "parameter"
) -> dict[tuple[str, str, str], int]:
    return {**held, ("communication", tier, f"{of} on the way"): flying} if flying else held
