"""Owns the words of a trace: the kinds of rows, the categories of bytes, and how a placement is written and read.

The recorder writes rows in these words and every report reads them. It never touches a file and needs only the standard
library.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from offload.errors import ZhooksError

__all__ = [
    "BEFORE_STACK", "CATEGORIES", "MOVES", "NO_PLACE", "PLACES", "QUEUED", "TIERS", "Row", "RowKind", "TraceError", "place_of",
    "placed", "placement",
]  # fmt: skip

#: What bytes are held for; every byte the ledger knows is in exactly one.
CATEGORIES = ("parameter", "gradient", "optimizer", "activation", "communication", "temporary", "other")
#: Where they are held.
TIERS = ("device", "host", "disk")
#: (category, tier) by number, tier by tier: what columns and levels call a place.
PLACES = tuple((category, tier) for tier in TIERS for category in CATEGORIES)
#: The number in their stead of a row that says nothing of what is held.
NO_PLACE = -1
#: Spans that move bytes, as whoever follows a run shows their rates.
MOVES = ("gather", "gather activation", "reduce", "copy h2d", "copy d2h", "disk read", "disk write", "stash", "unstash")
#: Before the name of a span of the host's side: when it queued what a device's stream does at another time.
QUEUED = "queued "
#: Parts a key of level "stack": "blocks.0 <- model.py:31:forward <- train.py:12:main", innermost first.
BEFORE_STACK = " <- "


class TraceError(ZhooksError, ValueError):
    """A trace, a snapshot or another recorded file that is not as it should be; one line: file, expected, found, remedy."""


class RowKind(IntEnum):
    """What a row says.

    BEGIN and END bound a span (END closes the innermost open BEGIN of the same what and key), INSTANT is a point, COUNTER
    states that the level of (what, key) is now ``nbytes``. ALLOC and FREE say that one storage, numbered by ``ident``, is held
    for (what, key) from now on, or no longer; a storage that changes its category is freed and allocated again at one time.
    SPAN is a whole span of a device's stream, from ``time_ns`` on for ``ident`` nanoseconds (a point where that is 0), on the
    lane whose number is ``thread``; it is written when the device has come to its end.
    """

    BEGIN = 0
    END = 1
    INSTANT = 2
    COUNTER = 3
    ALLOC = 4
    FREE = 5
    SPAN = 6


class Row(NamedTuple):
    """One fact, as the recorder keeps it; bytes, nanoseconds of the monotonic clock, small numbers for thread and storage."""

    kind: int
    what: str
    key: str
    nbytes: int
    time_ns: int
    thread: int = 0
    ident: int = 0


_NUMBERS = {f"{category} on {tier}": number for number, (category, tier) in enumerate(PLACES)}


def placed(category: str, tier: str) -> str:
    """The ``what`` of rows that say how much is held: "parameter on host"."""
    what = f"{category} on {tier}"
    assert what in _NUMBERS, f"{what}: not one of the categories and tiers"
    return what


def placement(what: str) -> tuple[str, str] | None:
    """(category, tier) of such a ``what``; None for everything else."""
    number = _NUMBERS.get(what)
    return None if number is None else PLACES[number]


def place_of(what: str) -> int:
    """The number in `PLACES` of such a ``what``; `NO_PLACE` for everything else."""
    return _NUMBERS.get(what, NO_PLACE)
