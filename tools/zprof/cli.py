"""Owns the ``zprof`` command line: its groups, what they share, and what happens to an error.

The console script calls `main`. It never imports torch or the runtime, and so answers at once where there is neither.
"""

from __future__ import annotations

from importlib import metadata

import click

from zprof.policy_cli import policy

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(metadata.version("zhooks"), prog_name="zprof")
def main() -> None:
    """Look into zhooks training: its policies, and where its bytes and milliseconds go."""


main.add_command(policy)
