"""Owns what a step needs at its fullest where no whole one was seen: reckoned from the moment it failed at.

`zprof.oom.case` asks it about a first step of a script without zhooks. Pure arithmetic on recorded bytes; it never guesses what
an optimizer keeps.

Note: [Three moments]
    At the end of forward all activations are there: blocks whose names differ in a number alone are taken to be alike, so
    those that have made less than the fullest will make as much. At the end of backward all gradients are there and the
    activations of one block. In the step all states are there, and no activations.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["block_of", "bytes_of", "whole_step"]

_Held = dict[tuple[str, str, str], int]


def whole_step(
    held: Mapping[tuple[str, str, str], int], tier: str, asked: int, gradients: int, states: int
) -> list[_Held]:
    """The fullest moments of the step that failed, had it gone on; see Note: [Three moments].

    Args:
        held: when it failed; activations by block.
        tier: where memory was asked for, and ``asked`` bytes of it.
        gradients, states: bytes that were still to be made.
    """
    made = {place: nbytes for place, nbytes in held.items() if place[0] in ("activation", "temporary")}
    stays = {place: nbytes for place, nbytes in held.items() if place not in made}
    activations = {place: nbytes for place, nbytes in made.items() if place[0] == "activation"}
    if not bytes_of(held, "gradient"):
        activations = _of_all_blocks(held, activations, tier)
    forward = {**stays, **activations}
    if sum(forward.values()) < sum(held.values()) + asked:
        # It failed beside temporaries, or in backward.
        forward = {**held, ("temporary", tier, "(the request)"): asked}
    last = max(activations, key=lambda place: activations[place], default=None)
    backward = _with(stays, "gradient", tier, gradients) | ({last: activations[last]} if last is not None else {})
    return [forward, backward, _with(_with(stays, "gradient", tier, gradients), "optimizer", tier, states)]


def _of_all_blocks(held: Mapping[tuple[str, str, str], int], activations: _Held, tier: str) -> _Held:
    found = dict(activations)
    most: dict[str, int] = {}
    for (_, _, key), nbytes in activations.items():
        most[_kind(key)] = max(most.get(_kind(key), 0), nbytes)
    for block in {block_of(key, set()) for key in bytes_of(held, "parameter")}:
        if _kind(block) != block:
            place = ("activation", tier, block)
            found[place] = max(found.get(place, 0), most.get(_kind(block), 0))
    return found


def _kind(block: str) -> str:
    """What blocks alike have in common: "blocks.#" of blocks.3."""
    first, _, last = block.rpartition(".")
    return f"{first}.#" if last.isdecimal() else block


def _with(held: Mapping[tuple[str, str, str], int], category: str, tier: str, nbytes: int) -> _Held:
    """So many bytes more of a category, as the parameters divide them."""
    found, sizes = dict(held), bytes_of(held, "parameter")
    whole = sum(sizes.values())
    for key, size in sizes.items():
        place = (category, tier, key)
        found[place] = found.get(place, 0) + nbytes * size // max(whole, 1)
    return found


def block_of(path: str, units: set[str]) -> str:
    """The unit that a module is in, or the outermost numbered block."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        if ".".join(parts[:count]) in units:
            return ".".join(parts[:count])
    numbered = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return path if numbered is None else ".".join(parts[: numbered + 1])


def bytes_of(held: Mapping[tuple[str, str, str], int], category: str) -> dict[str, int]:
    """Key -> bytes of a category, on all tiers."""
    found: dict[str, int] = {}
    for (what, _, key), nbytes in held.items():
        if what == category:
            found[key] = found.get(key, 0) + nbytes
    return found
