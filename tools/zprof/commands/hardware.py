"""Owns ``zprof hardware``: the hardware profiles that are shipped, and any profile checked and shown.

`zprof.cli` hangs the group in. It never measures (``zprof bench --profile`` does) and never needs torch.
"""

from __future__ import annotations

import json

import click

from offload.hardware import Hardware, names

__all__ = ["hardware"]

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


@click.group()
def hardware() -> None:
    """List, check and show hardware profiles."""


@hardware.command("list")
@AS_JSON
def listed(as_json: bool) -> None:
    """List the shipped profiles."""
    profiles = [Hardware.of(name) for name in names()]
    if as_json:
        click.echo(json.dumps({"version": 1, "profiles": {each.name: each.title for each in profiles}}, indent=2))
        return
    width = max(len(each.name) for each in profiles)
    for each in profiles:
        click.echo(f"{each.name:<{width}}  {each.title}")


@hardware.command()
@click.argument("name")
@AS_JSON
def show(name: str, as_json: bool) -> None:
    """Check the profile NAME, a shipped one or a file, and print every key with its source."""
    found = Hardware.of(name)
    click.echo(json.dumps(found.values(), indent=2) if as_json else found.text(), nl=as_json)
