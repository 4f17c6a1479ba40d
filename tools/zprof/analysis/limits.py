"""Owns what a limit says: ``device.peak=38GiB``, ``device.peak>+2%``, ``step.median_ms<-5%``, and whether a run keeps to it.

``zprof check`` and ``zprof diff`` parse their options here. It knows the measures' names and units and no run; a name or a unit
that is wrong is wrong usage, with the nearest names.
"""

from __future__ import annotations

import difflib
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import click

from offload.text import as_duration, as_size, parse_duration
from zprof.analysis.measures import MEASURES, Measure, Unit

__all__ = ["Limit", "known", "parse_change", "parse_limit", "percent", "shown", "shown_change"]

Comparison = Literal[">", ">=", "<", "<="]
#: "value": the number itself; "change": by how much it may differ from the other run; "percent": the same as a share of it.
Kind = Literal["value", "change", "percent"]

_BYTES: dict[str, float] = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": float(1 << 10), "MiB": float(1 << 20), "GiB": float(1 << 30), "TiB": float(1 << 40)}
#: Unit of a measure -> what may follow a number, and how many of the measure's own unit that is.
_SCALES: dict[Unit, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {(f"{name}/s" if name else ""): scale for name, scale in _BYTES.items()},
    # Of what `parse_duration` made of it.
    "ms": {"ms": 1},
    "%": {"": 1, "%": 1},
    "J": {"": 1, "mJ": 1e-3, "J": 1, "kJ": 1e3},
    "count": {"": 1},
}
_EXAMPLES: dict[Unit, str] = {
    "bytes": "38GiB or 512MB",
    "bytes/s": "3GiB/s",
    "ms": "120ms or 1.5s",
    "%": "40%",
    "J": "300J",
    "count": "12",
}
_AMOUNT = re.compile(r"\s*([+-]?)\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z%/]{0,8})\s*", re.ASCII)
_SIGNED = re.compile(r"\s*([+-]?)(.*)", re.ASCII | re.DOTALL)
_CHANGE = re.compile(r"\s*([A-Za-z0-9_.]{1,80})\s*(>=|<=|>|<)(.{1,64})", re.ASCII | re.DOTALL)
_LIMIT = re.compile(r"\s*([A-Za-z0-9_.]{1,80})\s*=(.{1,64})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Limit:
    """One condition that must not hold.

    Attributes:
        measure: what it is about.
        fails: the comparison that fails the run: value, change or percent ``fails`` ``amount``.
        kind: what is compared; ``amount`` is in the measure's unit, or in percent.
        text: as it was written.
    """

    measure: Measure
    fails: Comparison
    kind: Kind
    amount: float
    text: str

    def broken(self, value: float, before: float | None = None) -> bool:
        """Whether a run whose measure is ``value`` fails; ``before`` is the other run's, needed for a change."""
        found = value
        if self.kind != "value":
            assert before is not None, "a change is between two runs"
            found = value - before if self.kind == "change" else percent(before, value)
        above = {">": found > self.amount, ">=": found >= self.amount, "<": found < self.amount, "<=": found <= self.amount}
        return above[self.fails]


def percent(before: float, value: float) -> float:
    """By how many percent ``value`` is above ``before``; infinite where ``before`` is 0 and ``value`` is not."""
    if value == before:
        return 0.0
    return 100 * (value - before) / abs(before) if before else math.copysign(math.inf, value - before)


def known(name: str) -> Measure:
    """The measure of that name.

    Raises:
        click.BadParameter: there is none; the message has the nearest names.
    """
    measure = MEASURES.get(name)
    if measure is not None:
        return measure
    near = difflib.get_close_matches(name, MEASURES, n=3, cutoff=0.4)
    remedy = f"did you mean {' or '.join(near)}?" if near else "zprof check --measures lists them"
    raise click.BadParameter(f"{name}: no such measure; {remedy}")


def parse_limit(text: str, fails: Comparison) -> Limit:
    """``NAME=VALUE``, as ``zprof check`` takes it.

    Raises:
        click.BadParameter: something else, an unknown measure, or a unit that is not the measure's.
    """
    match = _LIMIT.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{_quoted(text)}: expected NAME=VALUE, e.g. device.peak=38GiB")
    measure = known(match[1])
    sign, amount, unit = _amount(text, measure, match[2])
    scale = _scale(text, measure, unit)
    return Limit(measure, fails, "value", (-amount if sign == "-" else amount) * scale, text.strip())


def parse_change(text: str) -> Limit:
    """``NAME>+2%``, ``NAME>+100MiB`` (changes, with a sign) or ``NAME>38GiB`` (the new run itself), as ``zprof diff`` takes it.

    Raises:
        click.BadParameter: something else, an unknown measure, or a unit that is not the measure's.
    """
    match = _CHANGE.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{_quoted(text)}: expected NAME>VALUE or NAME<VALUE, e.g. device.peak>+2%")
    measure = known(match[1])
    sign, amount, unit = _amount(text, measure, match[3])
    fails: Comparison = ">=" if match[2] == ">=" else "<=" if match[2] == "<=" else ">" if match[2] == ">" else "<"
    signed = -amount if sign == "-" else amount
    if sign and unit == "%":
        return Limit(measure, fails, "percent", signed, text.strip())
    if unit == "%" and measure.unit != "%":
        raise click.BadParameter(f"{_quoted(text)}: a change in percent needs a sign, e.g. {measure.name}>+{amount:g}%")
    return Limit(measure, fails, "change" if sign else "value", signed * _scale(text, measure, unit), text.strip())


def _amount(text: str, measure: Measure, said: str) -> tuple[str, float, str]:
    """The sign, the number and the unit; a time is in ms already."""
    if measure.unit == "ms" and (signed := _SIGNED.fullmatch(said)):
        with suppress(ValueError):
            return signed[1], parse_duration(signed[2], bare="ms") / 1e6, "ms"
    match = _AMOUNT.fullmatch(said)
    if match is None:
        raise click.BadParameter(f"{_quoted(text)}: expected a number such as {_EXAMPLES[measure.unit]}, found {_quoted(said)}")
    return match[1], float(match[2]), match[3]


def _scale(text: str, measure: Measure, unit: str) -> float:
    scales = _SCALES[measure.unit]
    if measure.unit in ("bytes", "bytes/s"):
        # As policies read them; elsewhere case distinguishes milli from mega.
        scales, unit = {name.lower(): scale for name, scale in scales.items()}, unit.lower()
    if unit not in scales:
        raise click.BadParameter(
            f"{_quoted(text)}: {measure.name} is in {measure.unit}, expected e.g. {_EXAMPLES[measure.unit]}, found {unit!r}"
        )
    return scales[unit]


def _quoted(text: str) -> str:
    """Words of the command line as an error may repeat them: printable, and short enough for a line."""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def shown(value: float, unit: Unit) -> str:
    """A measure for a reader."""
    if unit == "bytes":
        return as_size(round(value))
    if unit == "bytes/s":
        return f"{as_size(round(value))}/s"
    if unit == "count":
        return f"{value:.0f}"
    if unit == "ms":
        return as_duration(value * 1e6, digits=4)
    return f"{value:.4g} {unit}" if abs(value) < 1e4 else f"{value:.0f} {unit}"


def shown_change(before: float, value: float, unit: Unit) -> str:
    """By how much a measure changed, with its sign."""
    change = value - before
    return f"{'+' if change > 0 else '-' if change < 0 else ''}{shown(abs(change), unit)}"
