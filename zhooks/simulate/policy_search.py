"""``find_policy``: the policy under which a job's step is the quickest on hardware that is not there, within its memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from statistics import median_low
from typing import Any

from offload.errors import BudgetError, CapabilityError, SimulationError
from offload.hardware import Hardware
from offload.policy import Policy
from offload.text import as_size, counted, one_line
from offload.tier import Tier, Tiers
from zhooks.simulate.axes import Batch, Candidate, candidates, changed, saves
from zhooks.simulate.best_first import TIE, Bound, Limits, Memory, Outcome, Tried, search
from zhooks.simulate.bounds import Bounds, Needs
from zhooks.simulate.job import Build, Job, said
from zhooks.simulate.measure import Usage
from zhooks.simulate.proposals import Proposal, Proposals, folded
from zhooks.simulate.run import Simulation, lasting, simulate

__all__ = ["find_policy"]

#: Depths that are tried of the best one found.
_PREFETCHES = (2, 4)
#: What of the best one's step must be something else than compute for that to be worth a simulation.
_EXPOSED = 0.1

#: Of a device, what CUDA's context and libraries take, and a margin for what a simulation does not see.
CONTEXT_NBYTES = 3 << 29
#: Blocks of a larger unit that are tried.
_JOINED = (2, 4)

#: Of a step of more micro-batches the memory is found first, by a step of the first few: the others hold what the last of
#: these does.
_MANY, _FEW = 8, 2


@contextmanager
def _heap_set_aside() -> Iterator[None]:
    """Leave what is there before to no garbage collection: each attach runs one, which takes longer than a small simulation."""
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@_heap_set_aside()
def find_policy(
    build: Build,
    step: Callable[..., object],
    *,
    world: int = 1,
    hardware: str | PathLike[str] | Mapping[str, Any] | Hardware = "h100",
    policy: Policy | str | Path | dict[str, Any] | None = None,
    precision: Sequence[str] | None = None,
    device: int | None = None,
    host: int | None = None,
    disk: int | None = None,
    keep: int = 5,
    most: int = 16,
    tell: Callable[[str], None] = lambda line: None,
) -> Proposals:
    """Search for the policy with the fastest step of ``world`` ranks that fits in the hardware's memory.

    Args:
        build: as in ``simulate``.  If it has a parameter ``mesh`` with the default None, it is also called with meshes that
            have a "tp" axis, over which it divides the model; ranks of one such axis share their samples.
        step: as in ``simulate``.  If it has parameters ``micro_batch`` and ``accumulation`` with defaults, it is also called
            with smaller micro-batches and more of them; otherwise the batch does not change.
        world: the number of ranks.
        hardware: a profile's name or file.
        policy: what the search may not change: units, ``[comm]`` and every key that it does not search over.
        precision: dtypes that parameters may be computed in, the preferred one first: "bf16", "fp16", "fp32"; None keeps that
            of ``policy``.  fp16 gets a dynamic loss scale in the policy, which is not simulated.
        device: bytes that a device may hold; None is the profile's memory, on a GPU less 1.5 GiB for a context and a margin.
        host: bytes of host memory of a node, for all of its ranks together; None is the profile's, which it may exceed.
        disk: bytes of disk of a node, for all of its ranks together; None is the profile's.
        keep: how many policies to return.
        most: how many simulations to run at most; where none of them fits, up to four more say what would.
        tell: called with a line of text for each simulation.
    Returns:
        The best policies, the fastest first.  An interrupt (KeyboardInterrupt) ends the search: those found by then.
    Raises:
        KeyboardInterrupt: nothing had been found to fit.
        BudgetError: no policy fits; names the least memory that would be enough, by tier.
        SimulationError: as in ``simulate``.
        HardwareError: as in ``simulate``.
        PolicyError: as in ``simulate``.
    """
    profile, base = Hardware.of(hardware), Policy.of(policy)
    if keep < 1 or most < 1 or world < 1:
        raise SimulationError(f"find_policy expected keep, most and world of at least 1, found {keep}, {most} and {world}.")
    if host is not None and host > profile.host.memory:
        profile = profile.replaced(host={"memory": host})
    limits = _limits(profile, world, device, host, disk)
    job = Job(build, step, world, profile)
    batched, dtypes, replicas = job.batched(), job.dtypes(precision), job.replicas()
    space = _Space(job, base, limits, tell, job.needs(base))
    # A tier that the user says is empty, or that the hardware lacks, is none.
    there = [tier for tier in Tier if tier is not Tier.DISK or profile.disk is not None]
    tiers = [tier for tier in there if tier is Tier.DEVICE or getattr(limits, tier.value) > 0]
    listed = list(
        candidates(
            base, world,
            tiers=tiers, host_updates=space.accelerated, batched=batched, replicas=replicas,
            divided=(1, *space.needs.divided), dtypes=dtypes,
        )
    )  # fmt: skip
    # Undivided layers first: what they compute bounds what divided ones do, and not the other way.
    whole, divided = ([each for each in listed if (each.tp > 1) is over] for over in (False, True))
    # A third is kept for divided layers, and for what is near the best.
    ranking = search(space, whole, limits, keep=keep, most=most - most // 3)
    most_divided = min(most, ranking.simulations + max(1, len(space.needs.divided)))
    # Beside whole layers that fit only what may be quicker than all of them is worth a simulation.
    if not ranking.stopped:
        ranking = search(space, divided, limits, keep=1 if ranking.fits else keep, most=most_divided, before=ranking)
    if not ranking.fits and not ranking.stopped and ranking.simulations < most:
        # Gathering nothing ahead is what saves the last bytes.
        nothing_ahead = [replace(each, prefetch=0) for each in listed]
        ranking = ranking.joined(search(space, nothing_ahead, limits, keep=keep, most=most - ranking.simulations))
    if not ranking.fits and ranking.stopped:
        raise KeyboardInterrupt
    if not ranking.fits:
        least = _least(space, tiers, replace(listed[-1], batch=batched[-1], tp=1))
        # What the search has not come to within its simulations may fit after all.
        ranking.fits = [each for each in least if not each.why and not limits.exceeded(each.memory)]
        if not ranking.fits:
            unused = [tier.value for tier in there if tier not in tiers]
            raise BudgetError(_nothing_fits(space, limits, unused, least))
        ranking = ranking.ordered()
    for changes in (_deeper, _larger, _shared):
        further = list(changes(space, ranking.fits[0], limits))[: max(0, most - ranking.simulations)]
        if further and not ranking.stopped:
            more = search(space, further, limits, keep=keep, most=len(further))
            # With what is quicker than the best one so far.
            more.fits = [each for each in more.fits if each.seconds < ranking.fits[0].seconds * (1 - TIE)]
            ranking = ranking.joined(more)
    proposals = tuple(space.proposal(each.candidate, each.memory) for each in ranking.fits[:keep])
    notes = (*job.notes, *(f"tp {tp}: {why}" for tp, why in space.undivided.items()))
    return Proposals(profile.name, world, limits, len(listed), proposals, ranking, space.needs.numel, profile.kind, notes)


@dataclass(slots=True)
class _Space:
    """Candidates of one job: their bounds, and their simulations.

    Attributes:
        undivided: sizes of ``tp`` over which the model cannot run, and why.
    """

    job: Job
    base: Policy
    limits: Limits
    tell: Callable[[str], None]
    needs: Needs
    simulated: dict[Candidate, tuple[Simulation, Usage]] = field(default_factory=dict)
    undivided: dict[int, str] = field(default_factory=dict)
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.needs, self.job.hardware)

    @property
    def accelerated(self) -> bool:
        return self.job.hardware.kind == "gpu"

    def bound(self, candidate: Candidate) -> Bound:
        found = self.bounds.of(candidate)
        return replace(found, seconds=math.inf) if candidate.tp in self.undivided else found

    def exposed(self, best: Tried[Candidate]) -> float:
        """Seconds of the best one's step in which the device computes nothing."""
        busy = self.simulated[best.candidate][1].busy
        return best.seconds - busy["compute"] - busy["update"]

    def saves(self, candidate: Candidate, beside: Candidate) -> bool:
        return saves(candidate, beside, one_memory=not self.accelerated)

    def evaluate(self, candidate: Candidate) -> Outcome:
        batch = candidate.batch
        if batch is not None and batch.accumulation > _MANY:
            few = self._simulated(candidate, replace(batch, accumulation=_FEW))
            if isinstance(few, Outcome):
                return few
            memory = self._memory(candidate, few[0])
            if self.limits.exceeded(memory):
                self.tell(f"{candidate}: {as_size(memory.device)} on the device after {_FEW} micro-batches, does not fit")
                # The first micro-batch adds to no gradient: more of them take no less.
                self.bounds.observe(candidate, few[1].passes_s * batch.accumulation / _FEW, few[1].passes_peak)
                return Outcome(self.bound(candidate).seconds, memory, least=True)
        one = self._simulated(candidate, batch)
        if isinstance(one, Outcome):
            return one
        found, usage = self.simulated[candidate] = one
        memory = self._memory(candidate, found)
        short = self.limits.exceeded(memory)
        unfit = f", does not fit: {', '.join(short)}" if short else ""
        self.tell(f"{candidate}: {lasting(found.step_s)}, {as_size(found.device.nbytes)} on the device{unfit}")
        self.bounds.observe(candidate, usage.passes_s, usage.passes_peak)
        return Outcome(found.step_s, memory)

    def _memory(self, candidate: Candidate, found: Simulation) -> Memory:
        return Memory(found.device.nbytes, found.host.nbytes, self.needs.of(candidate).stored.disk)

    def _simulated(self, candidate: Candidate, batch: Batch | None) -> tuple[Simulation, Usage] | Outcome:
        """Its step with this batch, and what that was busy with; why there is none."""
        usage = Usage()

        def step(*given: Any) -> None:
            with usage.step():
                self.job.step(*given, **({} if batch is None else asdict(batch)))

        try:
            found = simulate(
                self.job.build, step,
                world=self.job.world, mesh=candidate.mesh(self.job.world), hardware=self.job.hardware,
                policy=candidate.simulated(self.base), check_races=False, follow=usage.following,
            )  # fmt: skip
        except (BudgetError, CapabilityError) as error:
            self.tell(f"{candidate}: {error}")
            return Outcome(0.0, self.needs.of(candidate).stored, str(error))
        except Exception as error:
            if candidate.tp == 1:
                raise
            # The model runs whole: what stops it is how it was divided.
            self.undivided[candidate.tp] = said(error)
            self.tell(f"{candidate}: {said(error)}")
            return Outcome(0.0, self.needs.of(candidate).stored, said(error))
        return found, usage

    def proposal(self, candidate: Candidate, memory: Memory) -> Proposal:
        """The candidate's policy, with the limits of this search as budgets, where they change no schedule."""
        policy, (found, usage) = candidate.policy(self.base), self.simulated[candidate]
        budget = {tier.value: getattr(self.limits, tier.value) for tier in (Tier.HOST, Tier.DISK) if memory.on(tier)}
        # At stage 3 units stay gathered as far as [budget] device allows, which counts no activations.
        if not self.limits.one_memory and (candidate.stage < 3 or candidate.kept):
            budget["device"] = self.limits.device
        values = policy.values()
        values["budget"] = {**budget, **values.get("budget", {})}
        within, mesh = Policy.of(changed(Policy(), Policy.of(values))), candidate.mesh(self.job.world)
        return Proposal(candidate, within, mesh, found, memory, dict(usage.busy), dict(usage.moved))


def _limits(profile: Hardware, world: int, device: int | None, host: int | None, disk: int | None) -> Limits:
    beside = min(world, profile.device.count)
    node_host = profile.host.memory if host is None else host
    drives = 0 if profile.disk is None else profile.disk.count * profile.disk.capacity
    node_disk = drives if disk is None else disk
    # Of a small device no more than an eighth is kept free.
    context = min(CONTEXT_NBYTES, profile.device.memory // 8) if profile.kind == "gpu" else 0
    own = profile.device.memory - context if device is None else device
    there = {"device": (device, profile.device.memory), "host": (host, profile.host.memory), "disk": (disk, drives)}
    for name, (asked, most) in there.items():
        if asked is not None and not 0 <= asked <= most:
            raise SimulationError(
                f"find_policy expected {name} from 0 to the {as_size(most)} that {profile.name} has, found "
                f"{as_size(asked) if asked >= 0 else asked}. Ask for less, or describe other hardware: zprof hardware show "
                f"{profile.name} > other.toml, change it there, and name that file."
            )
    if profile.kind == "cpu":
        # One memory: what bounds the device bounds the host tier beside it.
        both = min(node_host // beside, own if device is not None else node_host // beside)
        return Limits(both, both, node_disk // beside, one_memory=True)
    return Limits(own, node_host // beside, node_disk // beside)


def _deeper(space: _Space, best: Tried[Candidate], limits: Limits) -> Iterator[Candidate]:
    """The same with more units gathered ahead, where something else than compute takes long."""
    prefetch = best.candidate.prefetch
    if space.accelerated and space.exposed(best) > _EXPOSED * best.seconds and prefetch > 0:
        yield from (replace(best.candidate, prefetch=depth) for depth in _PREFETCHES if depth > prefetch)


def _larger(space: _Space, best: Tried[Candidate], limits: Limits) -> Iterator[Candidate]:
    """The same with neighbouring units joined, where the latency that this saves could be seen in the step."""
    worth = TIE * best.seconds
    if space.exposed(best) <= worth:
        return
    numel = median_low(unit.numel for unit in space.needs.groups(best.candidate))
    for blocks in _JOINED:
        floor = (blocks - 1) * numel + 1
        joined = replace(best.candidate, min_numel=floor)
        if floor > space.base.units.min_numel and space.bound(best.candidate).traffic - space.bound(joined).traffic > worth:
            yield joined


def _shared(space: _Space, best: Tried[Candidate], limits: Limits) -> Iterator[Candidate]:
    """The same with as many of its states on the device as the memory that is left takes, and with half as many."""
    candidate, need = best.candidate, space.needs.of(best.candidate)
    states = need.states + sum(cell.nbytes for flat in need.flats for cell in flat.footprint() if cell.what == "optimizer")
    if not space.accelerated or candidate.tiers.optimizer is Tier.DEVICE or space.base.optimizer.device_share or not states:
        return
    # In hundredths; of all of them a candidate of its own has been thought of.
    most = min(99, 100 * (limits.device - best.memory.device) // states)
    yield from (replace(candidate, device_share=share / 100) for share in (most, most // 2) if share > 0)


def _least(space: _Space, tiers: list[Tier], smallest: Candidate) -> list[Tried[Candidate]]:
    """What holds the least, with each further tier; ``why`` it was refused."""
    out = []
    for last in tiers if space.accelerated else [tier for tier in tiers if tier is not Tier.HOST]:
        compute = "host" if last is not Tier.DEVICE and space.accelerated else "device"
        least = Candidate(
            3, Tiers(last, last, last), compute, "unit", prefetch=0, batch=smallest.batch, dtype=smallest.dtype  # type: ignore[arg-type]
        )  # fmt: skip
        outcome = space.evaluate(least)
        memory = space.needs.of(least).least if outcome.refused else outcome.memory
        out.append(Tried(least, outcome.seconds, memory, not outcome.least, outcome.refused))
    return out


def _nothing_fits(space: _Space, limits: Limits, unused: list[str], least: list[Tried[Candidate]]) -> str:
    """The least memory that would do, with each further tier, beside what there is; then what to do."""
    hardware, world = space.job.hardware, space.job.world
    alone, *further = (_needed(limits, each) for each in least)
    lines = [f"find_policy: does not fit on {counted(world, 'rank')} of {hardware.name}, by simulation: {alone}"]
    lines += [
        f"  with state on the {each.candidate.tiers.optimizer.value}: {needed}"
        for each, needed in zip(least[1:], further, strict=True)
    ]
    lines.append("Use more ranks, hardware with more memory, or a smaller batch or model.")
    if unused:
        lines.append(f"Of {' and '.join(unused)} 0 bytes may be used: allow more.")
    if space.job.batched() == (None,):
        lines.append("To try smaller micro-batches, give step the parameters micro_batch and accumulation with defaults.")
    return "\n".join(folded(lines))


def _needed(limits: Limits, tried: Tried[Candidate]) -> str:
    """What a candidate needs of each tier, and what those have that are too small; of a refused one, why."""
    needs = limits.needs(tried.memory)
    said = " and ".join(f"{as_size(need)} on the {name}" for name, need, _ in needs if need)
    there = " and ".join(f"the {name} has {as_size(limit)}" for name, need, limit in needs if need > limit)
    least = "at least " if tried.why else ""
    return f"needs {least}{said} per rank, {there or one_line(tried.why)} ({tried.candidate})"
