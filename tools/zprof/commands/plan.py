"""Owns ``zprof plan``: the policies under which a job's step is the quickest on hardware that is not there.

`zprof.cli` calls it; ``zhooks.find_policy`` searches.  It never trains, and writes nothing but the policy it was asked for.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType

import click

from offload.hardware import Hardware
from offload.text import counted, parse_size
from zprof.commands.jobs import HELP, Job, load_job, one_node
from zprof.commands.options import count
from zprof.commands.output import check_output, write_output
from zprof.commands.progress import progress
from zprof.problem import Misuse, Problem

__all__ = ["plan", "size"]


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a size such as 40GiB."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected bytes or a size such as 40GiB") from None


def _dtypes(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str] | None:
    if value is None:
        return None
    found = [each.strip() for each in value.split(",")]
    if not {*found} <= {"bf16", "fp16", "fp32"}:
        raise click.BadParameter(f"{value!r}: expected some of bf16, fp16 and fp32, the preferred one first, with commas")
    return found


@contextmanager
def _stoppable() -> Iterator[list[str]]:
    """SIGTERM ends a search as SIGINT does; the names of those that came."""
    came: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _job(job: str | None, params: int | None, config: Path | None, batch: int | None, sequence: int | None) -> Job:
    if sum(given is not None for given in (job, params, config)) != 1:
        raise Misuse("expected one of JOB, --params and --config; for 7 billion parameters: zprof plan --params 7B")
    if job is not None:
        if batch is not None or sequence is not None:
            raise Misuse("--batch, --sequence: expected --params or --config, because a JOB has a batch of its own")
        return load_job(job)
    from zprof.commands.model_jobs import job_of_config, job_of_size

    sizes = batch or 1, sequence or 2048
    return job_of_config(config, *sizes) if config is not None else job_of_size(params or 0, *sizes)


_WITHOUT_JOB = """Without JOB: --params makes a Llama-shaped model of that size, --config the causal language model of a
Hugging Face config folder; nothing is downloaded."""


@click.command(help=f"Find the policies with the fastest step of JOB, by simulation.\n\n{HELP}\n\n{_WITHOUT_JOB}")
@click.argument("job", required=False)
@click.option("--params", callback=count, metavar="COUNT", help="Plan a Llama-shaped model of about this size, e.g. 7B.")
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="DIR", help="Plan the model of this Hugging Face config folder."
)
@click.option("--batch", type=click.IntRange(1, 1 << 20), help="With --params or --config: a rank's samples per step [1].")
@click.option("--sequence", type=click.IntRange(2, 1 << 24), help="With --params or --config: tokens per sample [2048].")
@click.option("--hardware", default="h100", show_default=True, help="A profile's name or file (zprof hardware list).")
@click.option("--nodes", type=click.IntRange(1, 1 << 16), help="How many nodes; by default 1.")
@click.option("--world", type=click.IntRange(1, 1 << 20), help="How many ranks, instead of all devices of the nodes.")
@click.option("--policy", type=click.Path(), help="A policy whose other keys (units, comm and so on) are kept.")
@click.option(
    "--precision", callback=_dtypes, metavar="DTYPES", help="Allowed dtypes of [precision] param: bf16,fp16,fp32."
)
@click.option(
    "--device",
    callback=size,
    metavar="SIZE",
    help="Memory per device that may be used; by default the profile's, on a GPU less 1.5 GiB for a context and a margin.",
)
@click.option(
    "--host",
    callback=size,
    metavar="SIZE",
    help="Memory per node, for all of its ranks, also more than the profile's; by default the profile's.",
)
@click.option("--disk", callback=size, metavar="SIZE", help="Disk per node, for all of its ranks; by default the profile's.")
@click.option("--most", type=click.IntRange(1, 1000), default=16, show_default=True, help="The most simulations to run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the best one here: a policy file with reasons.")
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(
    job: str | None,
    params: int | None,
    config: Path | None,
    batch: int | None,
    sequence: int | None,
    hardware: str,
    nodes: int | None,
    world: int | None,
    policy: str | None,
    precision: list[str] | None,
    device: int | None,
    host: int | None,
    disk: int | None,
    most: int,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """See ``help``; exit code 3 if nothing fits, 1 if it was stopped: what was found by then is printed and written."""
    if nodes is not None and world is not None:
        raise Misuse("--nodes, --world: expected one of them, found both")
    if output is not None:
        check_output(output, [Path(policy)] if policy is not None else [], force=force)
    profile = Hardware.of(hardware)
    with redirect_stdout(sys.stderr), _stoppable() as stopped:
        loaded = _job(job, params, config, batch, sequence)
        ranks = world or (nodes or 1) * profile.device.count
        by_default = one_node(profile, "--nodes or --world") if nodes is None and world is None else ""
        about = f"at most {counted(most, 'simulation')}" + (f" ({by_default})" if by_default else "")
        with progress(f"searching policies for {loaded.name} on {profile.name} x {ranks}: {about}") as to:
            # Late: it brings torch along.
            import zhooks

            simulated = itertools.count(1)
            try:
                found = zhooks.find_policy(
                    loaded.build,
                    loaded.step,
                    world=ranks,
                    hardware=profile,
                    policy=policy,
                    precision=precision,
                    device=device,
                    host=host,
                    disk=disk,
                    most=most,
                    tell=lambda line: to.done(f"simulated {next(simulated)}: {line}"),
                )
            except KeyboardInterrupt:
                raise Problem(f"stopped by {stopped[0]} before any policy was found that fits") from None
    if output is not None:
        write_output(output, found.policy_text().encode())
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else str(found))
    if stopped:
        ran = counted(found.ranking.simulations, "simulation")
        click.echo(f"stopped by {stopped[0]}: these are the best of {ran}", err=True)
        raise click.exceptions.Exit(Problem.exit_code)
    if by_default and not as_json:
        click.echo(by_default)
    if precision is None and policy is None and not as_json:
        click.echo("all of them compute in the dtypes of the model's parameters; --precision bf16,fp32 tries bf16 as well")
