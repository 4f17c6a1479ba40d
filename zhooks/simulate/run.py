"""``simulate``: a training step of one rank of many, on hardware that is not there.

The model is built and attached on the virtual device, under a process group on paper, and steps as it would:
the planner, the hooks, the schedule, the tiers and the streams are those of a real run.  Every other rank is taken to be what
this one is, but for those of other stages of a pipeline, of which one each is simulated beside it: they run as torch's
schedules have them, taking turns where one waits for another's messages.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from offload.allocator import Settings, parse_settings
from offload.errors import PolicyError, SimulationError, ZhooksError
from offload.events import state_all
from offload.hardware import Hardware
from offload.policy import Policy
from offload.text import as_dollars, as_duration, as_size
from offload.virtual import ACCELERATOR, HOST, Machine, Race, Races, Turns
from zhooks.attach import Attachment, attach
from zhooks.compiled import kernels_refused
from zhooks.session import abandon
from zhooks.simulate.arrangement import Arrangement, built, is_count
from zhooks.simulate.costs import HardwareCosts, Slowdown, program_calls, slowest
from zhooks.simulate.measure import Allocations, Holders, Peak, Reserved, covered
from zhooks.simulate.virtual_group import check_no_group, join_on_paper, ranks_on_paper
from zhooks.simulate.virtual_stages import stages_on_paper

__all__ = ["Simulation", "lasting", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A predicted step of one rank, after the first one, which records and plans.

    Attributes:
        hardware: the profile's name.
        world: the number of ranks.
        step_s: seconds of the step.
        compute_s: seconds in which the device computed.
        exposed_s: seconds in which gathers or reductions were in progress and the device computed nothing.
        host_s: seconds until the host had issued the step.
        device: the peak of device memory, and what held it.
        host: the peak of host memory, and what held it.
        flops: floating-point operations on this rank's device.
        link_nbytes: bytes that this rank sent over its link inside the node.
        network_nbytes: bytes that its node sent over the network, for all of its ranks.
        mfu: FLOPs per second as a share of the device's highest peak in bf16, fp16 and fp32.
        joules: energy of all devices for a step; None if the profile has no figure.
        price: price of a step on all devices; None if the profile has no figure.
        races: uses of memory that nothing orders, on the streams that CUDA would use.
        device_memory: bytes of device memory that the hardware has.
        host_memory: this rank's share of the host memory that the hardware has.
        rank: the rank whose step this is: one that represents all, or the slowest.
        waiting_s: seconds that ranks which are not slow wait for those that are.
        reserved: what torch's caching allocator would have reserved; None if that was not asked for.
        bubble_s: seconds in which the device waited for other stages of the pipeline, including the end of the step.
        stages: of a pipeline, each stage's own result, by coordinate on the ``pp`` axis.  Times, FLOPs and traffic of the
            pipeline are means over stages, peaks those of the stage that holds the most (``rank``), ``host_s`` the longest.
    """

    hardware: str
    world: int
    step_s: float
    compute_s: float
    exposed_s: float
    host_s: float
    device: Peak
    host: Peak
    flops: int
    link_nbytes: float
    network_nbytes: float
    mfu: float
    joules: float | None
    price: float | None
    races: tuple[Race, ...]
    device_memory: int
    host_memory: int
    rank: int = 0
    waiting_s: float = 0.0
    reserved: Reserved | None = None
    bubble_s: float = 0.0
    stages: tuple[Simulation, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether device and host memory suffice on every stage.  The simulation continues even if they don't."""
        if self.stages:
            return all(stage.fits for stage in self.stages)
        placed = self.reserved is None or not self.reserved.failed
        return placed and self.device.nbytes <= self.device_memory and self.host.nbytes <= self.host_memory

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second and device."""
        return self.flops / self.step_s / 1e12 if self.step_s else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        own = {"tflops": self.tflops, "fits": self.fits, "races": [str(race) for race in self.races]}
        return {**asdict(replace(self, stages=())), **own, "stages": [stage.as_dict() for stage in self.stages]}

    def __str__(self) -> str:
        lines = [
            f"{self.hardware} x {self.world}: {lasting(self.step_s)} per step (predicted, not measured)",
            f"  compute {lasting(self.compute_s)}, communication beyond it {lasting(self.exposed_s)}, "
            f"host {lasting(self.host_s)}",
            f"  {self.tflops:,.1f} TFLOP/s a device, {self.mfu:.1%} of its peak",
            f"  sent per step: {as_size(int(self.link_nbytes))} over a device's link, "
            f"{as_size(int(self.network_nbytes))} from a node",
        ]
        if self.waiting_s:
            lines.append(f"  this is rank {self.rank}, the slowest: the others wait {lasting(self.waiting_s)} for it")
        if self.stages:
            share = self.bubble_s / self.step_s if self.step_s else math.nan
            lines.append(
                f"  {len(self.stages)} stages wait for each other {lasting(self.bubble_s)} each ({share:.1%}), on average"
            )
            lines += [
                f"    stage {place}: compute {lasting(stage.compute_s)}, waits {lasting(stage.bubble_s)}, device "
                f"{as_size(stage.device.nbytes)}, host {as_size(stage.host.nbytes)}" + ("" if stage.fits else ": does not fit")
                for place, stage in enumerate(self.stages)
            ]
        places = (("device", self.device, self.device_memory), ("host", self.host, self.host_memory))
        for what, peak, there in places:
            held = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in peak.holders.items())
            lines.append(f"  {what} memory: {as_size(peak.nbytes)} at {lasting(peak.at)}" + (f" ({held})" if held else ""))
            if peak.nbytes > there:
                missing = as_size(peak.nbytes - there)
                lines.append(f"  does not fit: {missing} more than the {as_size(there)} of the {what}")
        if self.reserved is not None:
            most, stuck, failed = as_size(self.reserved.nbytes), as_size(self.reserved.stuck), self.reserved.failed
            lines.append(f"  reserved by torch's allocator: {most}, up to {stuck} of it free and stuck")
            if failed:
                lines.append(f"  does not fit: the allocator failed at {failed} requests")
        if self.joules is not None:
            lines.append(f"  {self.joules:,.0f} J per step" + ("" if self.price is None else f", {as_dollars(self.price)}"))
        lines += [f"  race: {race}" for race in self.races]
        return "\n".join(lines)


def lasting(seconds: float) -> str:
    """A predicted time for a reader, with a digit more than others: predictions are compared."""
    return as_duration(seconds * 1e9, digits=4)


def simulate(
    build: Callable[..., nn.Module | tuple[nn.Module, torch.optim.Optimizer]],
    step: Callable[..., object],
    *,
    world: int = 1,
    mesh: Mapping[str, int] | None = None,
    hardware: str | PathLike[str] | Mapping[str, Any] | Hardware = "h100",
    policy: Policy | str | Path | dict[str, Any] | None = None,
    steps: int = 2,
    check_races: bool = True,
    follow: Callable[[Machine], AbstractContextManager[object]] | None = None,
    slow: Slowdown | Sequence[Slowdown] = (),
    allocator: str | None = None,
) -> Simulation:
    """Predict a training step of ``world`` ranks on given hardware, in this process, without that hardware.

    Args:
        build: returns the model, or the model and its optimizer.  Called under ``torch.device("virtual")``, so that parameters
            take no memory.  It must return a new model each time.
        step: called once per step with what ``build`` returned: forward, backward, ``optimizer.step()``, ``zero_grad()``, on
            tensors that it creates on the device "virtual".  It must not read values (``loss.item()``).
        world: the number of ranks.
        mesh: sizes of the axes "replicate", "shard" (or "dp"), "tp" and "pp", outermost first, in any order, as
            ``init_device_mesh`` takes them; None is one shard axis over all ranks.  With "tp" or "pp" ``build`` is called with
            the ``DeviceMesh``, once for each stage, and divides the model over ``mesh["tp"]`` (``parallelize_module``), or
            returns the module, or a list of modules, of the stage at ``mesh["pp"].get_local_rank()``.  What it returns after
            the optimizer, such as a schedule of ``torch.distributed.pipelining``, is passed to ``step`` too.
        hardware: a profile's name or file (``zprof hardware list``).
        policy: as in ``attach``.
        steps: how many steps to run; the last one is returned, because the first one records and plans.
        check_races: also check that streams order all uses of memory.
        follow: called with the machine before ``build``; what it returns is entered, and left after the last step.  For
            recorders, which add themselves to the machine's listeners.  Each stage of a pipeline has a machine.
        slow: ranks that are slower than the profile says.  The slowest rank's step is then returned, and ``build`` and ``step``
            are also called for a rank that is not slow.
        allocator: settings of torch's caching allocator, as in PYTORCH_ALLOC_CONF ("" for torch's default), to find what it
            would reserve; None leaves that out.
    Returns:
        The predicted step.
    Raises:
        SimulationError: ``step`` needs data or runs nothing on the device, or a process group exists already.
        HardwareError: the profile cannot be read, or lacks a figure that is needed.
        BudgetError: the policy does not fit the hardware.
        PolicyError: ``allocator`` cannot be read.
        CapabilityError: torch has no support for devices written in Python.
    """
    if not isinstance(allocator, str | None):
        raise PolicyError(
            "simulate expected allocator to be a string as in PYTORCH_ALLOC_CONF (\"\" is torch's default), or None, found "
            f'{allocator!r}. Write allocator="expandable_segments:True", or leave it out.'
        )
    settings = None if allocator is None else parse_settings(allocator)
    profile = Hardware.of(hardware)
    if not is_count(steps) or not is_count(world):
        raise SimulationError(
            f"simulate expected at least one step of one rank, found steps = {steps!r} and world = {world!r}."
        )
    found = torch.get_default_device()
    if found.type != "cpu":
        # What attaching keeps on the real host would be made there, too.
        raise SimulationError(
            f'simulate expected the CPU as torch\'s default device, found "{found}". Call it outside of torch.device(...), or '
            'after torch.set_default_device(None); the step makes its inputs with device="virtual".'
        )
    arrangement = Arrangement.of(mesh, world)
    pace = slowest(slow, world)
    job = _Asked(build, step, policy, arrangement, steps, check_races, follow, settings)
    if arrangement.stages > 1:
        if pace is not None:
            raise SimulationError(
                "simulate expected no slow ranks on a mesh with pp, because their stage decides who waits; found some. Leave "
                "slow out, or the pp axis."
            )
        return _pipeline(job, profile)
    alike = None
    if pace is not None:
        alike = simulate(build, step, world=world, mesh=mesh, hardware=profile, policy=policy, steps=steps, check_races=False)
    costs = HardwareCosts(profile, world, pace)
    with Machine(costs).on() as machine, ranks_on_paper(world, meshed=bool(arrangement.sizes)):
        result = _run_rank(job, machine, costs)
    if pace is None or alike is None:
        return result
    # The slowest rank's step, what the others wait, and the energy of both kinds.
    compute = pace.slow * result.compute_s + (world - pace.slow) * alike.compute_s
    busy = min(1.0, compute / (world * result.step_s)) if result.step_s else 0.0
    joules = costs.model.step(result.step_s, busy, world).joules
    return replace(result, rank=pace.rank, waiting_s=result.step_s - alike.step_s, joules=joules)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What ``simulate`` was asked for, checked; ``settings`` are the allocator's."""

    build: Callable[..., Any]
    step: Callable[..., object]
    policy: Policy | str | Path | dict[str, Any] | None
    arrangement: Arrangement
    steps: int
    check_races: bool
    follow: Callable[[Machine], AbstractContextManager[object]] | None
    settings: Settings | None


def _run_rank(
    job: _Asked, machine: Machine, costs: HardwareCosts, begins: Callable[[], None] = lambda: None
) -> Simulation:
    """Build, attach and step as one rank, on its machine; ``begins`` is called before each step."""
    holders, races = Holders(), Races()
    with ExitStack() as following:
        machine.listeners += [holders, races] if job.check_races else [holders]
        allocations = Allocations(machine)
        if job.settings is not None:
            machine.listeners.append(allocations)
        if job.follow is not None:
            following.enter_context(job.follow(machine))
        axes = job.arrangement.mesh()
        made = built(job.build, job.arrangement, axes)
        for optimizer in made.optimizers if not machine.accelerated else ():
            for options in (optimizer.defaults, *optimizer.param_groups):
                # What torch chooses on a CPU, where it can choose; of other devices it takes all parameters at once.
                if "foreach" in options and options["foreach"] is None:
                    options["foreach"] = False
        attachments: list[Attachment] = []
        try:
            for model in made.models:
                attachments.append(attach(model, *made.optimizers, policy=job.policy, mesh=axes))
            with ExitStack() as observed:
                for attachment in attachments:
                    observed.enter_context(attachment.observe(holders))
                gc.collect()
                for number in range(1, job.steps + 1):
                    begins()
                    # The states that the last step has made are seen by nobody else.
                    state_all()
                    holders.reset()
                    begin, before, operations = machine.now, costs.counted(), costs.operations
                    with program_calls(machine), kernels_refused():
                        job.step(*made.given)
                    if costs.operations == operations:
                        raise SimulationError(
                            "simulate expected that each call of step trains on tensors of device \"virtual\", found that "
                            f"call {number} of {job.steps} ran nothing on the device. Run forward, backward and "
                            "optimizer.step() in every call; an exhausted iterator of batches ends a loop silently."
                        )
                    issued = machine.now - begin
                    machine.current.synchronize()
            following.close()
            result = _result(machine, costs, holders, job.arrangement.world, begin, issued, before)
            if job.settings is not None:
                machine.listeners.remove(allocations)
                result = replace(result, reserved=allocations.reserved(job.settings, costs.memory[ACCELERATOR]))
        except BaseException:
            # What the step raised is what counts, not that a model cannot be detached in the middle of it.
            for attachment in attachments:
                with suppress(ZhooksError):
                    attachment.detach()
            raise
        if not job.check_races:
            for attachment in attachments:
                abandon(attachment.session)
            return result
        # The way back uses memory, too, and what is freed after it may have been in use.
        for attachment in attachments:
            try:
                attachment.detach()
            except SimulationError:
                # States that one rank owns whole go through the real host on their way.
                abandon(attachment.session)
        attachments.clear()
        del model, made, attachment
        gc.collect()
    return replace(result, races=tuple(races.found))


def _result(
    machine: Machine, costs: HardwareCosts, holders: Holders, world: int, begin: float, issued: float,
    before: tuple[float, float, float],
) -> Simulation:  # fmt: skip
    profile, seconds = costs.hardware, machine.now - begin
    compute = holders.on("compute") if costs.accelerated else holders.on("host")
    flops, link, network = (now - then for now, then in zip(costs.counted(), before, strict=True))
    peak = max(rate for rate in (profile.peak.bf16, profile.peak.fp16, profile.peak.fp32) if rate)
    cost = costs.model.step(seconds, min(1.0, covered(compute) / seconds) if seconds else 0.0, world)
    return Simulation(
        hardware=profile.name,
        world=world,
        step_s=seconds,
        compute_s=covered(compute),
        exposed_s=covered(holders.on("gather", "reduce", "collectives"), compute),
        host_s=issued,
        device=holders.peak(ACCELERATOR),
        host=holders.peak(HOST),
        flops=int(flops),
        link_nbytes=link,
        network_nbytes=network,
        mfu=flops / seconds / peak if seconds else math.nan,
        joules=cost.joules,
        price=cost.price,
        races=(),
        device_memory=costs.memory[ACCELERATOR],
        host_memory=costs.memory[HOST],
    )


def _pipeline(job: _Asked, hardware: Hardware) -> Simulation:
    """Simulate one rank of each stage, and sum them up."""
    check_no_group()
    arrangement = job.arrangement
    places, world = range(arrangement.stages), arrangement.world
    costs = [HardwareCosts(hardware, world) for _ in places]
    machines = [Machine(each) for each in costs]
    ranks = [arrangement.first_of(place) for place in places]
    with stages_on_paper(ranks, arrangement.stage_of) as stages:

        def program(place: int) -> Simulation:
            join_on_paper(ranks[place], world)
            waited = 0.0

            def begins() -> None:
                nonlocal waited
                stages.together()
                waited = stages.waited[place]

            found = _run_rank(job, machines[place], costs[place], begins)
            return replace(found, rank=ranks[place], bubble_s=stages.waited[place] - waited)

        turns = Turns(machines, [partial(program, place) for place in places], stages.begin, lambda place: f"stage {place}")
        stages.turns = turns
        found = turns.run()
    return _together(found, costs[0])


def _together(found: Sequence[Simulation], costs: HardwareCosts) -> Simulation:
    """The step takes what it takes the stage that is the last to end; the others wait for it."""
    seconds, each_world = max(one.step_s for one in found), found[0].world // len(found)

    def of_whole(one: Simulation) -> Simulation:
        share = one.step_s / seconds if seconds else 1.0
        cost = costs.model.step(seconds, min(1.0, one.compute_s / seconds) if seconds else 0.0, each_world)
        return replace(
            one, step_s=seconds, bubble_s=one.bubble_s + seconds - one.step_s, mfu=one.mfu * share, joules=cost.joules,
            price=cost.price,
        )  # fmt: skip

    every = tuple(of_whole(one) for one in found)
    largest = max(every, key=lambda one: one.device.nbytes)
    return replace(
        largest,
        compute_s=fmean(one.compute_s for one in every),
        exposed_s=fmean(one.exposed_s for one in every),
        bubble_s=fmean(one.bubble_s for one in every),
        host_s=max(one.host_s for one in every),
        host=max((one.host for one in every), key=lambda peak: peak.nbytes),
        flops=round(fmean(one.flops for one in every)),
        link_nbytes=fmean(one.link_nbytes for one in every),
        network_nbytes=fmean(one.network_nbytes for one in every),
        mfu=fmean(one.mfu for one in every),
        joules=None if any(one.joules is None for one in every) else sum(one.joules or 0.0 for one in every),
        price=None if any(one.price is None for one in every) else sum(one.price or 0.0 for one in every),
        races=tuple(race for one in every for race in one.races),
        reserved=max((one.reserved for one in every if one.reserved is not None), key=lambda one: one.nbytes, default=None),
        stages=every,
    )
