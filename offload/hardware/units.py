"""Owns the way between a figure of a hardware profile and its text: rates, FLOP/s, times and fractions of a peak.

`tables.py` checks keys by it and `hardware.py` writes files by it. It never knows a key; sizes are `offload.text`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal

from offload.text import shown

__all__ = ["as_flops", "as_rate", "as_seconds", "format_flops", "format_rate", "format_seconds", "positive"]

#: Bits and bytes differ by the case of one letter, so case counts here.
_BYTES = {"B/s": 1, "KB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12}
_RATES: Mapping[str, Decimal] = (
    {unit: Decimal(scale) for unit, scale in _BYTES.items()}
    | {f"{prefix}iB/s": Decimal(1 << shift) for prefix, shift in (("K", 10), ("M", 20), ("G", 30), ("T", 40))}
    | {unit.replace("B", "b"): Decimal(scale) / 8 for unit, scale in _BYTES.items()}
)
_FLOPS: Mapping[str, Decimal] = {
    f"{prefix}FLOP/s": Decimal(10) ** power for prefix, power in (("", 0), ("M", 6), ("G", 9), ("T", 12), ("P", 15))
}
_SECONDS: Mapping[str, Decimal] = {"ns": Decimal(10) ** -9, "us": Decimal(10) ** -6, "ms": Decimal(10) ** -3, "s": Decimal(1)}
_NUMBER = re.compile(r"(\d{1,24}(?:\.\d{1,24})?(?:[eE][+-]?\d{1,2})?)\s*([A-Za-z/]*)", re.ASCII)
#: No device of this century is above it, in bytes, FLOP or seconds; what is came from a unit written twice.
_MOST = 1e24


def as_rate(value: object) -> float:
    """Bytes a second meant by a number or by text such as "3.35 TB/s" (bytes) or "800 Gb/s" (bits).

    Raises:
        ValueError: neither, or not above 0.
    """
    return positive(_parsed(value, _RATES))


def as_flops(value: object) -> float:
    """FLOP a second meant by a number or by text such as "989.4 TFLOP/s".

    Raises:
        ValueError: neither, or not above 0.
    """
    return positive(_parsed(value, _FLOPS))


def as_seconds(value: object) -> float:
    """Seconds meant by a number or by text such as "3.4 us"; 0 is allowed.

    Raises:
        ValueError: neither, or negative.
    """
    return _parsed(value, _SECONDS)


def positive(value: object) -> float:
    """A finite number above 0."""
    number = _number(value)
    if not number > 0:
        raise ValueError("not above 0")
    return number


def format_rate(rate: float) -> str:
    """Text that `as_rate` reads back to exactly ``rate``, in bytes."""
    return _formatted(rate, {unit: Decimal(scale) for unit, scale in _BYTES.items()})


def format_flops(flops: float) -> str:
    """Text that `as_flops` reads back to exactly ``flops``."""
    return _formatted(flops, _FLOPS)


def format_seconds(seconds: float) -> str:
    """Text that `as_seconds` reads back to exactly ``seconds``."""
    return _formatted(seconds, _SECONDS)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("not a number")
    # Compared first: an integer above every float cannot be made one.
    if abs(value) > _MOST or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _parsed(value: object, units: Mapping[str, Decimal]) -> float:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is None or match[2] not in units:
            raise ValueError(f"expected a number with one of {', '.join(units)}, found {shown(value)}")
        value = float(Decimal(match[1]) * units[match[2]])
    number = _number(value)
    if number < 0:
        raise ValueError("below 0")
    return number


def _formatted(number: float, units: Mapping[str, Decimal]) -> str:
    # The shortest text that is this float, its point moved: exact, where a division would round.
    exact = Decimal(repr(number))
    unit, scale = next(iter(units.items()))
    for each, size in units.items():
        if exact >= size:
            unit, scale = each, size
    return f"{(exact / scale).normalize():f} {unit}"
