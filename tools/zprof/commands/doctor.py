"""Owns ``zprof doctor``: a line for each thing of this machine that zhooks or zprof uses, with what to do.

`zprof.cli` hangs the command in. It imports no torch, changes nothing, and ends with 4 where something needed is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from offload.budget import Machine
from zprof.doctor.checks import FAIL, OK, WARN, Finding, host_findings, software_findings
from zprof.doctor.gpu import gpu_findings, has_gpu
from zprof.problem import CapabilityProblem

__all__ = ["doctor"]

_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}


@click.command()
@click.option("--path", type=click.Path(path_type=Path), default=Path(), help="The folder of a disk tier; by default this one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(path: Path, as_json: bool) -> None:
    """Check what will work on this machine, what will not, and what to do: versions, GPUs, memory limits, disk.

    Exit code 0, or 4 if something that zhooks needs is missing.

    \b
    For a job with a disk tier:  zprof doctor --path /scratch
    """
    findings = [*software_findings(), *gpu_findings(), *host_findings(path, Machine(), gpu=has_gpu())]
    failed = any(finding.status == FAIL for finding in findings)
    if as_json:
        import json

        click.echo(json.dumps({"ok": not failed, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        _print(findings)
    if failed:
        raise click.exceptions.Exit(CapabilityProblem.exit_code)


def _print(findings: Sequence[Finding]) -> None:
    """A line a finding, and what to do below it; colour only where a terminal shows it."""
    width = min(max(len(finding.name) for finding in findings), 32)
    for finding in findings:
        status = click.style(f"{finding.status:<4}", fg=_COLOURS[finding.status])
        click.echo(f"{status}  {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            click.echo(f"{'':4}  {'':{width}}  -> {finding.remedy}")
    count = {status: sum(finding.status == status for finding in findings) for status in (OK, WARN, FAIL)}
    click.echo(f"{count[OK]} ok, {count[WARN]} to look at, {count[FAIL]} to fix before zhooks works")
