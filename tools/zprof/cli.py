"""Owns the ``zprof`` command line: groups, exit codes (0 ok, 1 a problem found, 2 wrong usage) and one-line errors.

The console script calls `main`. It never imports torch or the runtime, and so answers at once where there is neither.
"""

from __future__ import annotations

from importlib import metadata

import click

from offload.errors import ZhooksError
from offload.policy import Policy

__all__ = ["main"]


class _Problem(click.ClickException):
    """An error of the project's own, shown as it is: each line already says its file, its line and the mend."""

    exit_code = 1

    def show(self, file: object = None) -> None:
        click.echo(self.message, err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metadata.version("zhooks"), prog_name="zprof")
def main() -> None:
    """Look into zhooks training: its policies, and where its bytes and milliseconds go."""


@main.group()
def policy() -> None:
    """Work on a policy file (TOML or JSON), without a model and without torch."""


@policy.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Say whether FILE is a valid policy; name every problem with its line where it is not."""
    loaded = _load(file)
    click.echo(f"{file}: ok, stage {loaded.stage}")


@policy.command()
@click.argument("file", type=click.Path())
def show(file: str) -> None:
    """Print FILE's effective table and every key, defaults included, as a policy file in TOML."""
    click.echo(_load(file).describe())


def _load(file: str) -> Policy:
    try:
        return Policy.load(file)
    except ZhooksError as error:
        raise _Problem(str(error)) from None
