"""Owns the way between one value and its text: sizes, durations, shares of what is free, TOML values, values shown in errors.

The policy's modules and ``zprof`` call it. It never reads a file and never knows which key a value belongs to.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from offload.errors import PolicyError

__all__ = [
    "UNITS",
    "Share",
    "as_dollars",
    "as_duration",
    "as_moment",
    "as_size",
    "counted",
    "format_amount",
    "format_size",
    "one_line",
    "parse_amount",
    "parse_duration",
    "parse_size",
    "plural",
    "shown",
    "shown_path",
    "toml_key",
    "toml_value",
]

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
#: Sizes stay within a signed 64-bit integer, as every allocator and file interface below does.
MAX_SIZE_NBYTES = (1 << 63) - 1

_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,400})?)\s*%", re.ASCII)
_DECIMAL_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
#: Nanoseconds of each unit of time, the largest first.
_TIME_UNITS = {"h": 3600 * 10**9, "min": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_TIME = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([a-z]*)\s*", re.ASCII)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of what is free when it is asked for; ``fraction`` is from 0 to 1, written "80%" in a file."""

    fraction: float

    def of(self, nbytes: int) -> int:
        """The share of ``nbytes``, a fraction of a byte rounded down."""
        return int(Fraction(self.fraction) * nbytes)

    def __str__(self) -> str:
        # Decimal of the shortest text that is this float: 0.07 is 7 %, not 7.000000000000001 %.
        percent = (Decimal(repr(self.fraction)) * 100).normalize()
        return f"{percent:f}%"


def parse_size(value: object) -> int:
    """Bytes meant by an int or by text such as "20 GiB", "1.5 GB" or "4096"; a fraction of a byte is rounded down.

    Raises:
        PolicyError: neither, negative, or beyond 2**63 - 1 bytes.
    """
    nbytes: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        scale = _SIZE_UNITS.get(match[2].lower())
        nbytes = None if scale is None else int(Fraction(match[1]) * scale)
    if nbytes is None or not 0 <= nbytes <= MAX_SIZE_NBYTES:
        raise PolicyError(f'expected bytes or a size like "20 GiB" (units KB to TB, KiB to TiB), found {shown(value)}')
    return nbytes


def format_size(nbytes: int) -> str:
    """Text that `parse_size` reads back to exactly ``nbytes``, in the largest binary unit that divides it."""
    for unit, name in UNITS:
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def as_size(nbytes: int) -> str:
    """``nbytes`` for a reader: three digits in a unit that suits, exact where that is a whole number."""
    for unit, name in UNITS:
        if abs(nbytes) >= unit:
            value = nbytes / unit
            return f"{nbytes // unit if nbytes % unit == 0 else f'{value:.3g}' if value < 999.5 else f'{value:.0f}'} {name}"
    return f"{nbytes} B"


def as_enough(nbytes: int) -> str:
    """As `as_size`, but never less than ``nbytes``: for a limit that shall hold them."""
    unit, name = next(((unit, name) for unit, name in UNITS if nbytes >= unit), (1, "B"))
    return f"{-(-nbytes * 100 // unit) / 100:g} {name}" if unit > 1 else f"{nbytes} B"


def counted(number: int, noun: str) -> str:
    """"1 unit", "1,024 units", "2 processes"; for nouns whose plural ends in s."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    """The noun for so many: "rank" or "ranks", before their names, say."""
    return noun if number == 1 else f"{noun}{'es' if noun.endswith('s') else 's'}"


def as_duration(ns: float, digits: int = 3) -> str:
    """Nanoseconds for a reader: "812 us", "3.42 ms", "1.27 s", "2 min 14 s", "3 h 5 min"; `parse_duration` reads it back.

    Args:
        digits: at most so many that say something, of what is less than a minute.
    """
    if not math.isfinite(ns):
        return f"{ns} s"
    if ns < 0:
        return f"-{as_duration(-ns, digits)}"
    rounded = float(f"{ns:.{digits}g}")
    if rounded >= _TIME_UNITS["min"]:
        seconds, minutes = round(ns / 1e9), round(ns / 60e9)
        return f"{seconds // 60} min {seconds % 60} s" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"
    unit = next((unit for unit in ("s", "ms", "us", "ns") if rounded >= _TIME_UNITS[unit]), "ns" if rounded else "ms")
    return f"{rounded / _TIME_UNITS[unit]:.{digits}g} {unit}"


def as_moment(ns: float) -> str:
    """When, in nanoseconds since something began, to the millisecond: "6.353 s", "2 min 14.250 s", "1 h 2 min 14.250 s"."""
    if ns < 0:
        return f"-{as_moment(-ns)}"
    minutes, ms = divmod(round(ns / 1e6), 60_000)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f"{hours}{f'{minutes % 60} min ' if minutes else ''}{ms / 1000:.3f} s"


def parse_duration(text: str, bare: str = "") -> float:
    """Nanoseconds meant by text such as "450ms", "1.5 s", "2 min 14 s" or "1h30min".

    Args:
        bare: the unit of a number without one; none means that it needs one.
    Raises:
        ValueError: anything else: units are h, min, s, ms, us and ns, each once and the largest first.
    """
    found: list[tuple[Fraction, str]] = []
    at = 0
    while match := _TIME.match(text.strip(), at):
        found.append((Fraction(match[1]), match[2]))
        at = match.end()
    if len(found) == 1 and not found[0][1]:
        found = [(found[0][0], bare)]
    places = [list(_TIME_UNITS).index(unit) if unit in _TIME_UNITS else -1 for _, unit in found]
    if at != len(text.strip()) or not places or -1 in places or any(b <= a for a, b in itertools.pairwise(places)):
        raise ValueError(f'expected a time such as "450ms", "1.5 s" or "2 min 14 s", found {shown(text)}')
    return float(sum(number * _TIME_UNITS[unit] for number, unit in found))


def as_dollars(price: float) -> str:
    """A price for a reader: cents, and of what is less than a dollar three digits."""
    return f"{price:,.2f} USD" if price >= 1 or not price else f"{price:.{2 - math.floor(math.log10(price))}f} USD"


def parse_amount(value: object) -> int | Share:
    """As `parse_size`, or the share that text such as "80%" means.

    Raises:
        PolicyError: neither a size nor a percentage from 0% to 100%.
    """
    if isinstance(value, Share):
        percent = value.fraction * 100
        share = value
    elif isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        percent = float(match[1])
        share = Share(float(Decimal(match[1]) / 100))
    else:
        return parse_size(value)
    if not 0 <= percent <= 100:
        raise PolicyError(f"expected a percentage from 0% to 100%, found {shown(str(value))}")
    return share


def format_amount(amount: int | Share) -> str:
    """Text that `parse_amount` reads back to an equal amount."""
    return str(amount) if isinstance(amount, Share) else format_size(amount)


def toml_value(value: object) -> str:
    """A bool, number, text, or sequence or mapping of these as TOML writes it on one line; texts must be printable."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(member) for member in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(member)}' for key, member in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def toml_key(key: str) -> str:
    """A key as TOML writes it: bare where it may be."""
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def shown(value: object) -> str:
    """A value as the file would write it, short enough for a line."""
    if isinstance(value, (str, bool, int, float, list, dict)) or value is None:
        try:
            text = json.dumps(value, ensure_ascii=True, default=str)
        except (ValueError, TypeError, RecursionError):
            text = f"a {type(value).__name__} that cannot be shown"
    else:
        text = repr(value)
    text = one_line(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown_path(path: object) -> str:
    """A path as it is written, on one line; of one that is very long both ends."""
    text = one_line(str(path)) if isinstance(path, (str, os.PathLike)) else shown(path)
    return text if len(text) <= 240 else f"{text[:80]}...{text[-157:]}"


def one_line(text: str) -> str:
    """``text`` without anything that does not print, on one line."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
