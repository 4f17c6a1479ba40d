"""Owns how a command ends badly: one line a problem on stderr, and an exit code that says of which kind.

Every command raises `Problem`. 0 is ok, 1 a problem found, 2 wrong usage, 3 a budget that does not hold, 4 something
the machine lacks. It never shows a traceback.
"""

from __future__ import annotations

import click

from offload.errors import BudgetError, CapabilityError, ZhooksError

__all__ = ["BudgetProblem", "CapabilityProblem", "Misuse", "Problem", "problem_of"]


class Problem(click.ClickException):
    """An error of the project's own, shown as it is: each line already says its file, its line and what to do."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        """Print the lines to stderr."""
        click.echo(self.message, err=True)


class Misuse(Problem):
    """What was asked cannot be meant; one line, as all problems, where click would print its usage too."""

    exit_code = 2


class BudgetProblem(Problem):
    """A budget does not hold what it should."""

    exit_code = 3


class CapabilityProblem(Problem):
    """The machine lacks what was asked for."""

    exit_code = 4


def problem_of(error: ZhooksError) -> Problem:
    """The problem an error is, with the exit code of its kind."""
    kinds: dict[type[ZhooksError], type[Problem]] = {BudgetError: BudgetProblem, CapabilityError: CapabilityProblem}
    return kinds.get(type(error), Problem)(str(error))
