"""Owns ``zprof simulate``: a training step on hardware that is not there, as text, as JSON, and as a trace.

`zprof.cli` hangs it in. It predicts nothing itself: ``zhooks.simulate`` does, and the recorder follows it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.text import as_size, counted
from zprof.commands.jobs import HELP, Job, load_job, one_node
from zprof.commands.progress import progress
from zprof.problem import BudgetProblem, Misuse, Problem

if TYPE_CHECKING:
    from offload.hardware import Hardware
    from offload.virtual import Machine
    from zhooks import Simulation
    from zprof.recording.simulated import SimulatedRecorder

__all__ = ["simulate"]

#: Of a step, above which something is worth a word.
_LARGE = 0.1
#: So many of what most memory is held for are named where it does not fit, each with what takes less of it.
_HOLDERS = 2
_REMEDIES = {
    "temporary and activations": '[activation] checkpoint = "unit", or a smaller batch',
    "gradient": '[gradient] tier = "host"',
    "optimizer": '[optimizer] tier = "host"',
    "parameter": '[parameter] tier = "host" under stage 3',
}
#: A trace says of no more.
_MOST_RANKS = 1 << 20
#: What of a rank may be slow.
_SLOWED = ("compute", "link", "network")
_FACTOR = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")


def _axes(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, int] | None:
    """replicate=16,shard=64."""
    if value is None:
        return None
    sizes: dict[str, int] = {}
    for part in value.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not size.isdecimal() or not int(size) or len(size) > 9 or name in sizes:
            raise click.BadParameter(f"{value!r}: expected sizes of axes such as replicate=16,shard=64")
        sizes[name] = int(size)
    return sizes


def _slowdowns(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[tuple[range, dict[str, float]]]:
    """5:compute=1.5 and 8-15:network=2: ranks, and how many times as long what takes."""
    return [_slowdown(value) for value in values]


def _slowdown(value: str) -> tuple[range, dict[str, float]]:
    ranks, _, factors = value.partition(":")
    first, dash, last = ranks.partition("-")
    found: dict[str, float] = {}
    for part in factors.split(","):
        name, _, factor = (each.strip() for each in part.partition("="))
        if name not in _SLOWED or name in found or not _FACTOR.fullmatch(factor):
            break
        found[name] = float(factor)
    else:
        numbers = [number for number in (first, last if dash else first) if re.fullmatch("[0-9]{1,9}", number)]
        if len(numbers) == 2 and int(numbers[0]) <= int(numbers[1]):
            return range(int(numbers[0]), int(numbers[1]) + 1), found
    raise click.BadParameter(
        f"{value!r}: expected ranks and how many times as long they take, such as 5:compute=1.5 or 8-15:link=2,network=2"
    )


@click.command(epilog=HELP)
@click.argument("job")
@click.option("--hardware", default="h100", show_default=True, metavar="NAME|FILE", help="A profile: zprof hardware list.")
@click.option("--nodes", type=click.IntRange(1, _MOST_RANKS), help="Number of nodes, with all of their devices; by default 1.")
@click.option("--ranks", type=click.IntRange(1, _MOST_RANKS), help="Number of ranks instead, for a fraction of a node.")
@click.option("--mesh", callback=_axes, metavar="AXES", help="Sizes of the mesh's axes, e.g. replicate=16,shard=64.")
@click.option("--policy", type=click.Path(), metavar="FILE", help="A policy file; without one, all keys have their defaults.")
@click.option("--steps", type=click.IntRange(2, 1000), default=2, show_default=True, help="Steps to simulate; the last counts.")
@click.option(
    "--slow",
    multiple=True,
    callback=_slowdowns,
    metavar="RANKS:WHAT=TIMES",
    help="Ranks that are slower by a factor, e.g. 5:compute=1.5 or 8-15:network=2; repeatable.",
)
@click.option(
    "--allocator",
    metavar="SETTINGS",
    help="Also show what torch's allocator would reserve, with settings as in PYTORCH_ALLOC_CONF; '' for its defaults.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Also write a trace.")
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing trace.")
@click.option("--races/--no-races", default=True, help="Also check for races: uses of memory that no stream or event orders.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def simulate(
    job: str,
    hardware: str,
    nodes: int | None,
    ranks: int | None,
    mesh: dict[str, int] | None,
    policy: str | None,
    steps: int,
    slow: list[tuple[range, dict[str, float]]],
    allocator: str | None,
    output: Path | None,
    force: bool,
    races: bool,
    as_json: bool,
) -> None:
    """Predict a training step of JOB on hardware you don't have: time, memory, traffic, energy and price.

    \b
    zprof simulate job.py:gpt --hardware h100 --nodes 128 --mesh replicate=16,shard=64 -o plan.zprof
    zprof report plan.zprof
    zprof diff plan.zprof run.zprof

    The trace is that of one rank, which represents all; pipelines, whose stages differ, have no trace yet. What JOB prints
    goes to stderr. Exit code 3 if the hardware does not have enough memory, 1 if there is a race.

    \b
    JSON: version job nodes simulation{} (what zhooks.simulate returns) capacity{}
    (bytes of a rank's device and host) fits trace next[]
    """
    from offload.hardware import Hardware
    from zprof.commands.output import check_output

    profile = Hardware.of(hardware)
    world = _world(profile, nodes, ranks)
    if mesh is not None and math.prod(mesh.values()) != world:
        raise Misuse(f"--mesh: expected axes whose sizes multiply to {world} ranks, found {math.prod(mesh.values())}")
    if output is not None and mesh is not None and mesh.get("pp", 1) > 1:
        raise Misuse(f"-o: expected a mesh without pp, as a trace has one rank for all, found pp={mesh['pp']}; drop one")
    if output is not None:
        inputs = [Path(each) for each in (policy, job.rpartition(":")[0] or job, hardware) if each is not None]
        check_output(output, inputs, force=force)
    most: dict[str, int] = {}
    with redirect_stdout(sys.stderr):
        found = _simulated(
            load_job(job), profile, output, force, most,
            world=world, mesh=mesh, policy=policy, steps=steps, check_races=races, slow=slow, allocator=allocator,
        )  # fmt: skip
    beside = min(world, profile.device.count)
    capacity = {"device": profile.device.memory, "host": profile.host.memory // beside}
    lacking = [
        f"{tier}: does not fit: a step holds {as_size(held)}, {profile.name} has {as_size(capacity[tier])} per rank"
        for tier, held in most.items()
        if held > capacity[tier]
    ]
    if found.reserved is not None and found.reserved.failed:
        lacking.append(
            f"allocator: does not fit: {found.reserved.failed} requests fail on a device of {as_size(found.device_memory)}"
        )
    following = list(_next(found, output, fits=not lacking))
    if as_json:
        body = {
            "version": 1,
            "job": job,
            "nodes": -(-world // profile.device.count),
            "simulation": _plain(found.as_dict()),
            "capacity": capacity,
            "fits": not lacking,
            "trace": None if output is None else str(output),
            "next": [{"do": do, "why": why} for do, why in following],
        }
        click.echo(json.dumps(body, indent=2, allow_nan=False))
    else:
        click.echo(str(found))
        if not lacking:
            held = ", ".join(f"{tier} {as_size(most[tier])} of {as_size(capacity[tier])}" for tier in capacity if tier in most)
            click.echo(f"fits on {counted(world, 'rank')} of {profile.name}, per rank: {held}")
        if nodes is None and ranks is None:
            click.echo(one_node(profile, "--nodes or --ranks"))
        click.echo("\nnext")
        for do, why in following:
            click.echo(f"{do}\n    {why}")
    for line in lacking:
        click.echo(line, err=True)
    if lacking:
        raise click.exceptions.Exit(BudgetProblem.exit_code)
    if found.races:
        raise click.exceptions.Exit(Problem.exit_code)


def _world(profile: Hardware, nodes: int | None, ranks: int | None) -> int:
    if nodes is not None and ranks is not None:
        raise Misuse("--ranks: expected --nodes or --ranks, found both")
    if nodes is not None and nodes > 1 and profile.network is None:
        raise Misuse(f"--nodes {nodes}: expected one node, because {profile.name} has no [network]; write one, or use one node")
    world = ranks or (nodes or 1) * profile.device.count
    if world > _MOST_RANKS:
        raise Misuse(f"--nodes {nodes}: expected at most {_MOST_RANKS:,} ranks, found {world:,}")
    return world


def _simulated(
    job: Job,
    profile: Hardware,
    output: Path | None,
    force: bool,
    most: dict[str, int],
    *,
    world: int,
    steps: int,
    slow: list[tuple[range, dict[str, float]]],
    **given: Any,
) -> Simulation:
    """Run it; the most that any of its steps held goes into ``most``."""
    import zhooks
    from zprof.recording.simulated_memory import Peaks

    peaks = Peaks()
    recorder: SimulatedRecorder | None = None
    if output is not None:
        from zprof.recording.simulated import SimulatedRecorder

        words = ("zprof", *sys.argv[1:])
        recorder = SimulatedRecorder(output, hardware=profile.name, kind=profile.kind, world=world, argv=words, force=force)

    @contextmanager
    def follow(machine: Machine) -> Iterator[None]:
        with ExitStack() as both:
            for each in (peaks, recorder):
                if each is not None:
                    both.enter_context(each.follow(machine))
            yield

    try:
        with _shown(job, steps, f"{profile.name} x {world}") as shown:
            step = peaks.stepping(shown.step if recorder is None else recorder.stepping(shown.step))
            found = zhooks.simulate(
                shown.build, step,
                world=world, hardware=profile, steps=steps, follow=follow,
                slow=[zhooks.Slowdown(ranks, **times) for ranks, times in slow], **given,
            )  # fmt: skip
        most.update(peaks.most)
        if recorder is not None:
            recorder.close(_plain(found.as_dict()))
    except BaseException:
        if recorder is not None:
            recorder.abandon()
        raise
    return found


@contextmanager
def _shown(job: Job, steps: int, on: str) -> Iterator[Job]:
    """The same job; how far it has come is shown."""
    begun = 0
    with progress(f"simulating {counted(steps, 'step')} of {job.name} on {on}") as to:

        @functools.wraps(job.step)
        def step(*args: Any) -> object:
            nonlocal begun
            # With ranks that are slow there is a simulation without them, too.
            begun = begun % steps + 1
            to.now(f"{job.name}: step {begun} of {steps}")
            return job.step(*args)

        yield Job(job.name, job.build, step)


def _next(found: Simulation, output: Path | None, *, fits: bool) -> Iterator[tuple[str, str]]:
    """What to look at or to try, and why."""
    if not fits:
        largest = sorted(found.device.holders, key=found.device.holders.__getitem__, reverse=True)[:_HOLDERS]
        for what in largest:
            share = f"{as_size(found.device.holders[what])} of {as_size(found.device.nbytes)} on the device are held for {what}"
            yield f"{_REMEDIES.get(what, 'smaller units')}, or more ranks", share
    elif found.exposed_s > _LARGE * found.step_s:
        share = f"{found.exposed_s / found.step_s:.0%} of the step is exposed communication"
        yield "[schedule] prefetch, more tokens per step, or --mesh replicate=..,shard=..", share
    elif found.host_s > (1 - _LARGE) * found.step_s and found.compute_s < (1 - _LARGE) * found.step_s:
        yield "more tokens per step, or torch.compile", "the host issues work no faster than the device does it"
    if output is None:
        yield "-o plan.zprof", "writes a trace, for zprof report, timeline, flamegraph, check and diff"
        return
    name = shlex.quote(str(output))
    yield f"zprof report {name}", "who held what at the peak, and what the step waited for"
    yield f"zprof timeline {name}", "streams, transfers and memory over the step"
    yield f"zprof diff {name} run.zprof", "compares the prediction with a run by zprof run --level alloc"


def _plain(value: Any) -> Any:
    """As JSON has it: what is no finite number is none."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
