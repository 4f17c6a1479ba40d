"""Owns the values of options that several commands take: times, and steps of a run.

Commands give what it returns to click as the callback of an option. It never knows what a command does with a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import click

from offload.text import parse_duration

__all__ = ["at_step", "seconds"]

_STEP = re.compile(r"step:(\d{1,9})", re.ASCII)


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
