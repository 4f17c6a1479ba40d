"""``find_policy``: the policy under which a job's step is the quickest on hardware that is not there, within its memory.

``zhooks.planning`` searches, ``simulate`` says what a candidate comes to; here the two are put together, and what was found
is made ready to be read.  Nothing is trained and nothing is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError, CapabilityError, SimulationError
from offload.hardware import Hardware
from offload.policy import Policy
from offload.text import as_size
from offload.tier import Tier, Tiers
from offload.virtual import NAME, Machine, running
from zhooks.layout import Ignored
from zhooks.plan import check_module
from zhooks.planning import (
    TIE,
    Batch,
    Bound,
    Bounds,
    Candidate,
    Limits,
    Memory,
    Needs,
    Outcome,
    Tried,
    batches,
    candidates,
    saves,
    search,
)
from zhooks.simulation.costs import HardwareCosts
from zhooks.simulation.proposals import Proposal, Proposals
from zhooks.simulation.run import Simulation, simulate
from zhooks.simulation.watch import Watch
from zhooks.tensor import ShardedTensor

__all__ = ["find_policy"]

#: Depths that are tried of the best one found.
_PREFETCHES = (2, 4)
#: What of the best one's step must be something else than compute for that to be worth a simulation.
_EXPOSED = 0.1

Build = Callable[[], nn.Module | tuple[nn.Module, torch.optim.Optimizer]]


def find_policy(
    build: Build,
    step: Callable[..., object],
    *,
    world: int = 1,
    hardware: str | PathLike[str] | Mapping[str, Any] | Hardware = "h100",
    policy: Policy | str | Path | dict[str, Any] | None = None,
    device: int | None = None,
    host: int | None = None,
    disk: int | None = None,
    keep: int = 5,
    most: int = 10,
    tell: Callable[[str], None] = lambda line: None,
) -> Proposals:
    """Search for the policy under which a step of ``world`` ranks is the quickest; see ``zhooks.planning``.

    Args:
        build, step: as ``simulate`` takes them.  Where ``step`` has parameters ``micro_batch`` and ``accumulation`` with
            defaults, it is also called with smaller micro-batches and more of them; else the batch stays as it is.
        policy: what the search may not change: dtypes, units, [comm] and all that is not listed in ``zhooks.planning``.
        device: bytes that a device may hold; None is the profile's memory.
        host, disk: bytes of a node, for all of its ranks together; None is the profile's.
        keep: how many policies to return.
        most: simulations of the search; a few more may follow it.
        tell: hears a line for each simulation.
    Raises:
        BudgetError: no policy fits; with the least memory that would, by tier.
        SimulationError, HardwareError, PolicyError: as ``simulate``.
    """
    profile, base = Hardware.of(hardware), Policy.of(policy)
    if keep < 1 or most < 1 or world < 1:
        raise SimulationError(f"find_policy: expected keep, most and world from 1, found {keep}, {most} and {world}.")
    limits = _limits(profile, world, device, host, disk)
    space = _Space(build, step, profile, world, base, tell, _needs(build, base, profile, world))
    # A tier that the user says is empty, or that the hardware lacks, is none.
    tiers = [tier for tier in Tier if tier is Tier.DEVICE or (getattr(limits, tier.value) > 0 and _has(profile, tier))]
    listed = list(
        candidates(
            base, world,
            tiers=tiers, host_updates=space.accelerated, batched=_batched(step), replicas=_replicas(profile, world),
        )
    )  # fmt: skip
    ranking = search(space, listed, limits, keep=keep, most=most)
    if not ranking.fits:
        # Gathering nothing ahead is what saves the last bytes.
        nothing_ahead = [replace(each, prefetch=0) for each in listed]
        ranking = ranking.joined(search(space, nothing_ahead, limits, keep=keep, most=most))
    if not ranking.fits:
        raise BudgetError(_nothing_fits(space, limits, tiers, _batched(step)[-1]))
    best = ranking.fits[0].candidate
    exposed = 1 - sum(space.watched[best].busy[each] for each in ("compute", "update")) / ranking.fits[0].seconds
    if space.accelerated and exposed > _EXPOSED and best.prefetch > 0:
        deeper = [replace(best, prefetch=depth) for depth in _PREFETCHES if depth > best.prefetch]
        further = search(space, deeper, limits, keep=keep, most=len(deeper))
        further.fits = [each for each in further.fits if each.seconds < ranking.fits[0].seconds * (1 - TIE)]
        ranking = ranking.joined(further)
    shared = _shared(space, ranking.fits[0], limits)
    if shared:
        further = search(space, shared, limits, keep=keep, most=len(shared))
        further.fits = [each for each in further.fits if each.seconds < ranking.fits[0].seconds * (1 - TIE)]
        ranking = ranking.joined(further)
    proposals = tuple(space.proposal(each.candidate, each.memory) for each in ranking.fits[:keep])
    return Proposals(profile.name, world, limits, len(listed), proposals, ranking, space.needs.numel, profile.kind)


@dataclass(slots=True)
class _Space:
    """Candidates of one job: their bounds, and their simulations."""

    build: Build
    step: Callable[..., object]
    hardware: Hardware
    world: int
    base: Policy
    tell: Callable[[str], None]
    needs: Needs
    simulated: dict[Candidate, Simulation] = field(default_factory=dict)
    watched: dict[Candidate, Watch] = field(default_factory=dict)
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.needs, self.hardware)

    @property
    def accelerated(self) -> bool:
        return self.hardware.kind == "gpu"

    def bound(self, candidate: Candidate) -> Bound:
        return self.bounds.of(candidate)

    def saves(self, candidate: Candidate, beside: Candidate) -> bool:
        return saves(candidate, beside, one_memory=not self.accelerated)

    def evaluate(self, candidate: Candidate) -> Outcome:
        watch = Watch()

        def build() -> Any:
            watch.open(running())
            return self.build()

        def step(*given: Any) -> None:
            batch = candidate.batch
            chosen = {} if batch is None else {"micro_batch": batch.micro_batch, "accumulation": batch.accumulation}
            watch.begin()
            self.step(*given, **chosen)
            watch.end()

        try:
            found = simulate(
                build, step,
                world=self.world, mesh=candidate.mesh(self.world), hardware=self.hardware, policy=candidate.policy(self.base),
                check_races=False,
            )  # fmt: skip
        except (BudgetError, CapabilityError) as error:
            self.tell(f"{candidate}: {error}")
            return Outcome(0.0, self.needs.of(candidate).stored, str(error))
        finally:
            watch.close()
        self.tell(f"{candidate}: {found.step_s * 1e3:,.1f} ms, {as_size(found.device.nbytes)} on the device")
        self.simulated[candidate], self.watched[candidate] = found, watch
        self.bounds.observe(candidate, watch.busy["compute"], watch.passes_peak)
        return Outcome(found.step_s, Memory(found.device.nbytes, found.host.nbytes, self.needs.of(candidate).stored.disk))

    def proposal(self, candidate: Candidate, memory: Memory) -> Proposal:
        watch = self.watched[candidate]
        return Proposal(
            candidate, candidate.policy(self.base), candidate.mesh(self.world), self.simulated[candidate], memory,
            dict(watch.busy), dict(watch.moved),
        )  # fmt: skip


def _needs(build: Build, base: Policy, profile: Hardware, world: int) -> Needs:
    """The model's layouts; it is built once for them, and let go with the search."""
    with Machine(HardwareCosts(profile, world)).on(), torch.device(NAME):
        built = build()
    model, *optimizers = built if isinstance(built, tuple) else (built,)
    check_module(model)
    ignored = Ignored.of(model, base.units.ignore, ShardedTensor)
    place = next((param.device for param in model.parameters()), torch.device(NAME, 0))
    return Needs(model, optimizers[0] if optimizers else None, base, world, ignored, place)


def _limits(profile: Hardware, world: int, device: int | None, host: int | None, disk: int | None) -> Limits:
    beside = min(world, profile.device.count)
    node_host = profile.host.memory if host is None else host
    drives = 0 if profile.disk is None else profile.disk.count * profile.disk.capacity
    node_disk = drives if disk is None else disk
    own = profile.device.memory if device is None else device
    there = {"device": (device, profile.device.memory), "host": (host, profile.host.memory), "disk": (disk, drives)}
    for name, (asked, most) in there.items():
        if asked is not None and not 0 <= asked <= most:
            raise SimulationError(
                f"find_policy: expected {name} from 0 to the {as_size(most)} that {profile.name} has, found "
                f"{as_size(asked) if asked >= 0 else asked}. Ask for less, or name a profile of other hardware."
            )
    if profile.kind == "cpu":
        # One memory: what bounds the device bounds the host tier beside it.
        both = min(node_host // beside, own if device is not None else node_host // beside)
        return Limits(both, both, node_disk // beside, one_memory=True)
    return Limits(own, node_host // beside, node_disk // beside)


def _has(profile: Hardware, tier: Tier) -> bool:
    return tier is not Tier.DISK or profile.disk is not None


def _replicas(profile: Hardware, world: int) -> tuple[int, ...]:
    """Shards over all ranks, or over those of a node with a replica on each."""
    devices = profile.device.count
    return (1, world // devices) if world > devices > 1 and world % devices == 0 else (1,)


def _shared(space: _Space, best: Tried[Candidate], limits: Limits) -> list[Candidate]:
    """The same with as many of its states on the device as the memory that is left takes, and with half as many."""
    candidate, need = best.candidate, space.needs.of(best.candidate)
    states = need.states + sum(cell.nbytes for flat in need.flats for cell in flat.footprint() if cell.what == "optimizer")
    if not space.accelerated or candidate.tiers.optimizer is Tier.DEVICE or space.base.optimizer.device_share or not states:
        return []
    # In hundredths; of all of them a candidate of its own has been thought of.
    most = min(99, 100 * (limits.device - best.memory.device) // states)
    return [replace(candidate, device_share=share / 100) for share in (most, most // 2) if share > 0]


def _batched(step: Callable[..., object]) -> tuple[Batch | None, ...]:
    named = inspect.signature(step).parameters
    if not {"micro_batch", "accumulation"} <= named.keys():
        return (None,)
    given = [named[name].default for name in ("micro_batch", "accumulation")]
    if not all(isinstance(each, int) and each > 0 for each in given):
        raise SimulationError(
            "find_policy: expected defaults from 1 for the step's micro_batch and accumulation, which say how many samples a "
            f"step has, found {given[0]!r} and {given[1]!r}. Write step(model, optimizer, *, micro_batch=8, accumulation=1)."
        )
    return batches(given[0], given[1])


def _nothing_fits(space: _Space, limits: Limits, tiers: list[Tier], batch: Batch | None) -> str:
    """What was asked, and the least memory that would do, with each further tier."""
    lines = []
    for last in tiers if space.accelerated else [tier for tier in tiers if tier is not Tier.HOST]:
        compute = "host" if last is not Tier.DEVICE and space.accelerated else "device"
        least = Candidate(3, Tiers(last, last, last), compute, "unit", prefetch=0, batch=batch)  # type: ignore[arg-type]
        outcome = space.evaluate(least)
        memory = space.needs.of(least).least if outcome.refused else outcome.memory
        used = [f"{tier.value} {as_size(memory.on(tier))}" for tier in Tier if memory.on(tier)]
        lines.append(("at least " if outcome.refused else "") + " and ".join(used) + f" a rank ({least})")
    there = ", ".join(f"{tier.value} {as_size(getattr(limits, tier.value))}" for tier in tiers)
    return (
        f"find_policy: expected a policy that fits {there} a rank on {space.world} rank(s) of {space.hardware.name}, found "
        f"none. The least that would, by simulation: {'; or '.join(lines)}. Use more ranks, larger tiers, or a smaller batch "
        "or model."
    )
