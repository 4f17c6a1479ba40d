"""Owns the values of options that several commands take: times, steps of a run, and numbers of parameters.

Commands give what it returns to click as the callback of an option. It never knows what a command does with a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

import click

from offload.text import parse_duration

__all__ = ["at_step", "count", "seconds"]

_STEP = re.compile(r"step:(\d{1,9})", re.ASCII)
_COUNT = re.compile(r"(\d[\d_,]{0,30}(?:\.\d{1,9})?)\s*([kmbt]?)", re.ASCII | re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST_NUMEL = 10**15


def count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number of parameters as people say it: 7B, 350M, 1_000_000."""
    if value is None:
        return None
    match = _COUNT.fullmatch(value.strip())
    numel = int(Fraction(re.sub("[_,]", "", match[1])) * _SCALES[match[2].lower()]) if match else 0
    if not 0 < numel <= _MOST_NUMEL:
        raise click.BadParameter(f"{value!r}: expected a number of parameters such as 7B, 350M or 124_000_000")
    return numel


def seconds(
    least_s: float, most_s: float, expected: str, *, bare: str = "s"
) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """A callback for times from ``least_s`` to ``most_s``, which ``expected`` says in words; None where none was given.

    Args:
        bare: the unit of a number without one; none means that it needs one.
    """

    def parsed(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        found = 0.0
        with suppress(ValueError):
            found = parse_duration(value, bare=bare) / 1e9
        if not least_s <= found <= most_s:
            raise click.BadParameter(f"{value!r}: expected {expected}")
        return found

    return parsed


def at_step(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A callback for a moment of a run: the step's number; None for the peak of the whole run."""
    if value == "peak":
        return None
    found = _STEP.fullmatch(value)
    if not found:
        raise click.BadParameter(f"{value!r}: expected peak, or step:N such as step:0")
    return int(found[1])
