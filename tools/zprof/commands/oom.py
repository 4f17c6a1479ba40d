"""Owns ``zprof oom``: why a run ran out of memory, and what would let it fit, tried in the simulator before it is offered.

`zprof.cli` calls it; `zprof.oom` explains, ``zhooks.simulate`` tries, ``zhooks.find_policy`` looks for more. It never trains.

Note: [What a trial proves]
    A simulation of the policy that failed comes first. Where it does not fail, too, what fits in the simulator says nothing
    about the run: then nothing is tried. What counts is the device's memory and the policy's own [budget].
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.text import as_duration, as_size
from zprof.commands.jobs import HELP, Job, load_job
from zprof.commands.naming import named_or_latest
from zprof.commands.plan import size
from zprof.commands.progress import progress
from zprof.problem import BudgetProblem, Misuse, Problem

if TYPE_CHECKING:
    from offload.hardware import Hardware
    from offload.policy import Policy
    from zprof.oom.explanation import Explained
    from zprof.oom.fit import Remedy

__all__ = ["oom"]

#: Of the policies that are found, how many are shown; and simulations of that search.
_SHOWN, _MOST = 3, 10


@dataclass(frozen=True, slots=True)
class _Trial:
    """A policy in the simulator.

    Attributes:
        what: to write or to do. price: what it costs, where that is known without the trial.
        tried: it was simulated. fits: it does not run out of memory there.
        why: it does not fit, or was not tried.
        device_bytes, host_bytes, step_s: peaks of a rank and the step's time; None where it was refused.
    """

    what: str
    price: str = ""
    tried: bool = True
    fits: bool = False
    why: str = ""
    device_bytes: int | None = None
    host_bytes: int | None = None
    step_s: float | None = None
    policy: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if not self.tried:
            return f"{self.what}: not tried: {self.why}"
        seen = ""
        if self.device_bytes is not None and self.step_s is not None:
            host = f", {_size(self.host_bytes)} of host" if self.host_bytes else ""
            step = as_duration(self.step_s * 1e9, digits=4)
            seen = f": {_size(self.device_bytes)} of device{host} at the peak, {step} per step"
        return f"{self.what}: {'fits' if self.fits else 'does not fit'}{seen}{f': {self.why}' if self.why else ''}"


@click.command(epilog=HELP)
@named_or_latest("run", click.Path(), several=False)
@click.option("--job", metavar="JOB", help="What was trained, as a job: simulate each change with it.")
@click.option("--hardware", metavar="NAME|FILE", help="What it ran on: a profile's name or file (zprof hardware list).")
@click.option("--policy", type=click.Path(), metavar="FILE", help="The policy it ran with, if the run does not have it.")
@click.option("--device", callback=size, metavar="SIZE", help="Memory per device; by default the run's or the profile's.")
@click.option("--host", callback=size, metavar="SIZE", help="Memory per node, for all of its ranks; by default the profile's.")
@click.option("--disk", callback=size, metavar="SIZE", help="Disk per node, for all of its ranks; by default the profile's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def oom(
    run: str,
    job: str | None,
    hardware: str | None,
    policy: str | None,
    device: int | None,
    host: int | None,
    disk: int | None,
    as_json: bool,
) -> None:
    """Explain why RUN ran out of memory, and what would have made it fit. The default is the newest run in this folder.

    \b
    zprof oom run.0.zprof
    zprof oom run.0.zprof --job job.py:gpt --hardware h100

    With a job and its hardware, it simulates the policy that failed, then each change derived from recorded bytes, then
    policies that the planner finds, and shows the peak and the time of a step. Exit code 3 if none of them fits, 1 if the
    simulation does not run out of memory as the run did.

    \b
    JSON: version run job hardware world failure{} lines[] advice[] device_bytes (the limit)
    as_it_ran{} changes[] planned[], each what price tried fits why
    device_bytes host_bytes step_s policy
    """
    if (job is None) != (hardware is None):
        raise Misuse("--job, --hardware: expected both or neither, because a job is tried on what it ran on; found one")
    given = {"--policy": policy, "--device": device, "--host": host, "--disk": disk}
    if job is None and (unused := [name for name, value in given.items() if value is not None]):
        raise Misuse(f"{unused[0]}: expected --job and --hardware too, because it only affects simulations; found neither")
    from zprof.analysis.analysis import Analysis
    from zprof.oom.case import recorded
    from zprof.oom.explanation import explained
    from zprof.trace.reader import Trace

    trace = Trace.open(Path(run))
    # A long trace of a run that did not is not read.
    found = explained(Analysis.of(trace)) if recorded(trace) is not None else None
    trace.close()
    if found is None:
        raise Problem(f"{run}: expected a run that ran out of memory, found none; zprof report says where its bytes went")
    trials = None
    if job is not None and hardware is not None:
        with redirect_stdout(sys.stderr):
            trials = _Trials(found, load_job(job), hardware, policy, device, host, disk)
            with progress(f"simulating {job} on {trials.hardware.name} x {found.world}") as to:
                trials.run(to.done)
    if as_json:
        click.echo(json.dumps(_as_json(run, job, found, trials), indent=2, allow_nan=False))
    else:
        for line in _lines(found, trials):
            click.echo(line)
    if trials is not None and trials.as_it_ran.fits:
        raise click.exceptions.Exit(Problem.exit_code)
    if trials is not None and not any(each.fits for each in (*trials.changes, *trials.planned)):
        raise click.exceptions.Exit(BudgetProblem.exit_code)


class _Trials:
    """What was tried for one run.

    Attributes:
        limit: bytes of a device.
        as_it_ran: the policy that failed. changes: those that recorded bytes suggest. planned: those of the planner.
        nothing: why the planner found none.
    """

    def __init__(
        self,
        found: Explained,
        job: Job,
        hardware: str,
        policy: str | None,
        device: int | None,
        host: int | None,
        disk: int | None,
    ) -> None:
        from offload.hardware import Hardware
        from offload.policy import Policy

        self._found, self._job, self._host, self._disk = found, job, host, disk
        self.hardware: Hardware = Hardware.of(hardware)
        # Without zhooks every rank holds everything, as at stage 0.
        self._base: Policy = Policy.of(policy if policy is not None else found.policy or {"stage": 0})
        there = self.hardware.device.memory
        if device is not None and device > there:
            raise Misuse(f"--device: expected at most the {_size(there)} that {self.hardware.name} has, found {_size(device)}")
        # Of a GPU the error says what it has; other limits are of more than the model.
        own = found.failure.limit if found.failure.kind == "cuda" else None
        self.limit = device if device is not None else min(there, own or there)
        self.as_it_ran = _Trial("as it ran")
        self.changes: list[_Trial] = []
        self.planned: list[_Trial] = []
        self.nothing = ""

    def run(self, tell: Callable[[str], None]) -> None:
        """Try all of it; ``tell`` is called with each result in a line."""
        self.as_it_ran = self._tried("as it ran", "", self._base, 1)
        tell(str(self.as_it_ran))
        if self.as_it_ran.fits:
            why = "the simulator does not run out of memory where the run did"
            self.changes = [_Trial(each.what, each.price, tried=False, why=why) for each in self._found.remedies]
            self.nothing = why
            return
        for remedy in self._found.remedies:
            self.changes.append(self._changed(remedy))
            tell(str(self.changes[-1]))
        self._plan(tell)

    def _changed(self, remedy: Remedy) -> _Trial:
        from offload.errors import PolicyError
        from offload.policy import Policy

        keys = remedy.keys
        if keys is None:
            return _Trial(remedy.what, remedy.price, tried=False, why="it is not a policy key")
        values = self._base.values()
        for table, value in keys.items():
            values[table] = {**values[table], **value} if isinstance(value, Mapping) else value
            if table == "stage":
                for cell in ("parameter", "gradient", "optimizer"):
                    values[cell].pop("partition", None)
        try:
            changed = Policy.of(values)
        except PolicyError as error:
            return _Trial(remedy.what, remedy.price, tried=False, why=str(error))
        return self._tried(remedy.what, remedy.price, changed, remedy.batches)

    def _tried(self, what: str, price: str, policy: Policy, batches: int) -> _Trial:
        import zhooks

        step = self._step(batches)
        if step is None:
            why = "the job's step has no micro_batch and accumulation with defaults that can be halved"
            return _Trial(what, price, tried=False, why=why)
        try:
            found = zhooks.simulate(
                self._job.build, step,
                world=self._found.world, hardware=self.hardware, policy=policy, check_races=False,
            )  # fmt: skip
        except (zhooks.BudgetError, zhooks.CapabilityError) as error:
            return _Trial(what, price, why=str(error), policy=policy.values())
        lacking = [f"a device has {_size(self.limit)}"] if found.device.nbytes > self.limit else []
        share = found.host_memory
        if self._host is not None:
            share = min(share, self._host // min(self._found.world, self.hardware.device.count))
        lacking += [f"a rank's share of the host is {_size(share)}"] if found.host.nbytes > share else []
        held = found.device.nbytes, found.host.nbytes, found.step_s
        return _Trial(what, price, True, not lacking, ", ".join(lacking), *held, policy.values())

    def _step(self, batches: int) -> Callable[..., object] | None:
        """The job's step with so many micro-batches in the place of one."""
        step = self._job.step
        if batches == 1:
            return step
        named = inspect.signature(step).parameters
        if not {"micro_batch", "accumulation"} <= named.keys():
            return None
        micro, times = (named[name].default for name in ("micro_batch", "accumulation"))
        if not isinstance(micro, int) or not isinstance(times, int) or micro % batches:
            return None
        return functools.partial(step, micro_batch=micro // batches, accumulation=times * batches)

    def _plan(self, tell: Callable[[str], None]) -> None:
        import zhooks

        try:
            found = zhooks.find_policy(
                self._job.build, self._job.step,
                world=self._found.world, hardware=self.hardware, policy=self._base,
                device=self.limit, host=self._host, disk=self._disk, keep=_SHOWN, most=_MOST,
                tell=lambda line: tell(f"planned: {line}"),
            )  # fmt: skip
        except zhooks.BudgetError as error:
            self.nothing = str(error)
            return
        for each in found.best:
            held = each.memory.device, each.memory.host, each.simulation.step_s
            self.planned.append(_Trial(str(each.candidate), "", True, True, "", *held, each.policy.values()))


def _lines(found: Explained, trials: _Trials | None) -> Iterator[str]:
    yield from found.lines
    if trials is None:
        yield from found.advice
        return
    yield f"simulated on {trials.hardware.name} x {found.world}, {_size(trials.limit)} per device (predicted, not measured)"
    yield f"  {trials.as_it_ran}"
    yield "what recorded bytes suggest:" if trials.changes else "recorded bytes suggest nothing"
    for each in trials.changes:
        yield f"  {each}"
        if each.fits and each.price:
            yield f"      costs: {each.price}"
    yield "what the planner finds, the quickest first:" if trials.planned else f"the planner finds nothing: {trials.nothing}"
    yield from (f"  {each}" for each in trials.planned)


def _as_json(run: str, job: str | None, found: Explained, trials: _Trials | None) -> dict[str, Any]:
    untried = [_Trial(each.what, each.price, tried=False, why="no job was given") for each in found.remedies]
    return {
        "version": 1,
        "run": run,
        "job": job,
        "hardware": None if trials is None else trials.hardware.name,
        "world": found.world,
        "failure": asdict(found.failure),
        "lines": list(found.lines),
        "advice": list(found.advice),
        "device_bytes": None if trials is None else trials.limit,
        "as_it_ran": None if trials is None else _plain(trials.as_it_ran),
        "changes": [_plain(each) for each in (untried if trials is None else trials.changes)],
        "planned": [] if trials is None else [_plain(each) for each in trials.planned],
    }


def _plain(trial: _Trial) -> Any:
    return json.loads(json.dumps(asdict(trial), default=str))


def _size(nbytes: int | None) -> str:
    return as_size(nbytes or 0)
