"""``attach(policy="auto")``: the policy that moves the least of those that this machine holds, the same on all ranks.

There is no step to simulate, so the choice goes by bytes: what is at rest and gathered by the layouts that would be built, and
a share of the device left for activations.  After three steps it is held against what was measured, and another one may take
its place.

Note: [Order of preference]
    Of what fits, the one that moves the least over disk, then over the host's link, then over links; of equal ones the one that
    holds the least.  Recomputation is not chosen: what it saves, only a forward can tell.  Stages of a pipeline take one, of
    those that fit every stage the one with which all of them together move the least.

Note: [What was measured]
    The device's own count says what was used at the most since the process began: no less than what the steps needed, but it
    may be from before them.  What was used at each event of the steps is no more than that.  So memory counts as left by the
    first, and as short by the second, and between them nothing is changed.  On a CPU both are resident memory.

Note: [What stays]
    The stage and the mesh: over several backward passes a step they decide the order in which gradients are added up, and so
    their last bits.  Recomputation and the tier of activations, for what they save only a forward can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from offload.budget import ALONE, Ranks, available
from offload.device import Device, open_device
from offload.errors import AttachError, BudgetError
from offload.events import Event
from offload.policy import Policy
from offload.text import as_size
from offload.tier import Tier
from offload.virtual import NAME
from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.layout import FLATS
from zhooks.live import go_over
from zhooks.optim import closure_of, holds, watch_steps
from zhooks.plan import Request
from zhooks.session import Chosen, Session
from zhooks.simulate.axes import Candidate, candidates
from zhooks.simulate.best_first import Limits, Memory
from zhooks.simulate.bounds import Need, Needs

__all__ = ["chosen_for"]

#: The share of the memory that is free on the device which is left for activations and what is temporary.
ACTIVATIONS = 0.5
#: After so many steps, or after more where something of a pass was open then.
_STEPS, _LAST = 3, 10
#: What is further from the prediction is a reason to choose again; and so much of the device shall stay free.
_OFF = _FREE = 0.1
#: When a rank may change its layout; that of all of them is the least.
_NEVER, _LATER, _NOW = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A policy that was chosen, and what that went by.

    Attributes:
        request: with the policy, and why.
        base: what the choice leaves as it is.
        tiers: that it may place on.
        expected: bytes that it places, at the most.
        activations: bytes of the device that it leaves for them.
        world: data ranks.
        ranks: of this machine, which share its memory and disk.
        before: bytes of the device that this process used beside the model.
    """

    request: Request
    base: Policy
    tiers: tuple[Tier, ...]
    candidate: Candidate
    expected: Memory
    activations: int
    world: int
    ranks: Ranks
    before: int


def choose(request: Request, comm: Comm) -> Choice:
    """The policy for what was requested.  Collective.

    Raises:
        BudgetError: no placement fits; with the least memory that one needs, on every rank.
    """
    base, replicas = request.policy, comm.replicate.axis.world
    # What the virtual device has is one rank's share already.
    beside = ALONE if request.device.type == NAME else comm.beside
    with ControlPlane(comm.stage, "attach").all_or_none():
        mine, before = _capacity(request, beside)
    # The least of any rank, so that all choose alike.
    budgets = ControlPlane(comm.stage, "compare budgets")
    device, host, disk = (budgets.least(nbytes) or 0 for nbytes in (mine.device, mine.host, mine.disk))
    limits = Limits(device, host, disk, mine.one_memory)
    trained = [param for param in tree.parameters(request.model) if param.requires_grad]
    # What is not known yet is taken to be Adam's.
    optimizer = request.known[0] if request.known else torch.optim.AdamW(trained) if trained else None
    world = comm.shard.axis.world * replicas
    needs = Needs(request.model, optimizer, base, world, request.ignored, request.device)
    # In a CPU's memory the host tier frees nothing.
    tiers = tuple(tier for tier in Tier if not (limits.one_memory and tier is Tier.HOST))
    listed = [
        each
        for each in candidates(base, world, tiers=tiers, host_updates=False, replicas=(replicas,))
        if each.checkpoint == "none"
    ]
    found = {each: held(each, needs.of(each)) for each in listed}
    if not ControlPlane(comm.pp, "choose a policy").agree(repr(listed)):
        raise AttachError(
            'policy = "auto" needs the same candidates on every stage of the pipeline, found different ones. Use the same '
            "mesh and device for all stages, or write a policy for each."
        )
    flags = _over_stages(comm, [[not limits.exceeded(found[each])] for each in listed], "min")
    fits = [each for each, (fits,) in zip(listed, flags, strict=True) if fits]
    if not fits:
        rows = _over_stages(comm, [[found[each].on(tier) for tier in Tier] for each in listed], "max")
        neediest = {each: Memory(*row) for each, row in zip(listed, rows, strict=True)}
        ((device, host, disk),) = _over_stages(comm, [[limits.device, limits.host, limits.disk]], "min")
        raise BudgetError(_refusal(listed, neediest, replace(limits, device=device, host=host, disk=disk), tiers))
    # What all stages move together, and what the one holds that holds the most.
    moves = [moved(each, needs.of(each)) for each in listed]
    sums, most = (_over_stages(comm, moves, op) for op in ("sum", "max"))
    order = {each: (*own[:-1], largest[-1]) for each, own, largest in zip(listed, sums, most, strict=True)}
    best = min(fits, key=lambda each: order[each])
    memory = found[best]
    used = ", ".join(f"{as_size(memory.on(tier))} on {tier.value}" for tier in Tier if memory.on(tier))
    many = "all" if len(fits) == len(listed) else f"{len(fits)} of"
    fitting = "the only placement fits" if len(listed) == 1 else f"{many} {len(listed)} placements fit"
    states = "" if request.known else "; Adam's states are assumed, because no optimizer was given"
    why = (
        f'policy = "auto" chose {best}: at most {used} per rank without activations, within {as_size(limits.device)} of the '
        f"device ({1 - ACTIVATIONS:.0%} of what is free, the rest for activations); {fitting}"
        f"{' every stage' if comm.pipelined else ''}{states}."
    )
    chosen = replace(request, policy=best.policy(base), chosen=why)
    activations = int(limits.device * ACTIVATIONS / (1 - ACTIVATIONS))
    return Choice(chosen, base, tiers, best, memory, activations, world, beside, before)


def _over_stages(comm: Comm, rows: Sequence[Sequence[int]], op: str) -> list[list[int]]:
    """Numbers of each stage of a pipeline, combined over them.  Collective over the stages."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    comm.pp.all_reduce(Call(CONTROL, "choose a policy", "for all stages"), table.view(-1), op)
    combined: list[list[int]] = table.tolist()
    return combined


def _capacity(request: Request, ranks: Ranks) -> tuple[Limits, int]:
    """What this rank may use, being one of those on its machine; and what it uses of the device beside the model."""
    seam = open_device(request.device)
    try:
        # What the model takes now is what it will be made of.
        own = sum(param.nbytes for param in tree.parameters(request.model) if param.device == request.device)
        # Of the virtual device's host nothing has been taken.
        own = 0 if seam.addresses_host and request.device.type != "cpu" else own
        there = on_this_machine(seam, request, ranks)
        device = int((there.device + own) * (1 - ACTIVATIONS))
        limits = replace(there, device=device, host=device if there.one_memory else there.host)
        return limits, max(0, seam.used()[0] - own)
    finally:
        seam.close()


def on_this_machine(seam: Device, request: Request, ranks: Ranks) -> Limits:
    """What is free on each tier for one of the ranks of this machine."""
    folder = request.policy.disk.folder
    host = available(Tier.HOST, seam, folder, ranks=ranks, machine=seam.facts)
    disk = 0 if seam.facts.is_memory(folder) else available(Tier.DISK, seam, folder, ranks=ranks, machine=seam.facts)
    return Limits(host if seam.addresses_host else seam.memory()[0], host, disk, seam.addresses_host)


def held(candidate: Candidate, need: Need) -> Memory:
    """What it places on each tier, at the most."""
    kept = sum(flat.transient_nbytes for flat in need.flats) if candidate.kept else 0
    return replace(need.stored, device=need.floor + kept)


def moved(candidate: Candidate, need: Need) -> tuple[int, int, int, int]:
    """Bytes a step over disk, over the host's link and over links, and what is held."""
    times = 1 if candidate.kept else 2
    gathered = sum(flat.moved_nbytes * (times if flat.releasable else 1) for flat in need.flats)
    # An all-reduce is a reduction and a gather.
    reduced = sum(flat.sum_nbytes * (2 if flat.replicated else 1) for flat in need.flats if flat.kind.trainable)
    return need.stored.disk, need.stored.host, gathered + reduced, held(candidate, need).device


def _refusal(
    listed: list[Candidate], found: dict[Candidate, Memory], limits: Limits, tiers: tuple[Tier, ...]
) -> str:
    """The least that would do, with each further tier."""
    lines = []
    for number in range(1, len(tiers) + 1):
        allowed = tiers[:number]
        within = [each for each in listed if {*each.tiers.cells} <= {*allowed}]
        best = min(within, key=lambda each: found[each].device)
        used = [f"{tier.value} {as_size(found[best].on(tier))}" for tier in Tier if found[best].on(tier)]
        lines.append(f"{' and '.join(used)} ({best})")
    there = ", ".join(f"{tier.value} {as_size(getattr(limits, tier.value))}" for tier in tiers)
    return (
        f'policy = "auto" needs a placement that fits {there} per rank, with {ACTIVATIONS:.0%} of the device left for '
        f"activations, found none. The least needed is {'; or '.join(lines)}. Use more ranks or memory, or write a policy."
    )


# The second look.


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of all ranks, the one that has least; see Note [What was measured].

    Attributes:
        least, most: bytes of the device that training took at its peak: no less, and no more.
        there: bytes of it that training may take in all. free: those that are free now.
        host, disk: bytes of these that it may take in all.
    """

    least: int
    most: int
    there: int
    free: int
    host: int
    disk: int


def chosen_for(request: Request, comm: Comm) -> Chosen:
    """The policy for what was requested.  Collective.

    Raises:
        BudgetError: no placement fits; with the least memory that one needs, on every rank.
    """
    choice = choose(request, comm)
    return Chosen(choice.request, partial(Replanning, choice))


class Replanning:
    """Of one attachment."""

    def __init__(self, choice: Choice, session: Session) -> None:
        self._choice, self._comm, self._bus, self._session = choice, session.comm, session.bus, session
        self._seam = open_device(choice.request.device)
        self._steps, self._stepped, self._highest, self._over = 0, False, 0, False
        self._closures = False
        self._unwatch = watch_steps(self)

    def close(self) -> None:
        """It is over: another policy was applied, or the model is detached."""
        if not self._over:
            self._over = True
            self._unwatch()
            self._bus.detach(self)
            self._seam.close()

    def on_event(self, event: Event) -> None:
        """What is in use while something happens."""
        if event.kind in ("begin", "end") and not self._over:
            self._highest = max(self._highest, self._seam.used()[0])

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's pre-hook."""
        self._closures = self._closures or (closure_of(args, kwargs) is not None and self._is_ours(optimizer))

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch's post-hook."""
        if self._is_ours(optimizer):
            self._highest = max(self._highest, self._seam.used()[0])
            self._stepped = True

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return holds(optimizer, tree.parameters(self._choice.request.model))

    def applied(self) -> None:
        self.close()

    def meet_again(self) -> None:
        # Ranks may have counted other steps towards it.
        self.close()

    def begin_anew(self) -> None:
        return None

    def training_begins(self, policy: Policy) -> None:
        """A training pass begins on every rank.  Collective after each step from the third on, until it is over."""
        if not self._stepped or self._over:
            if not self._over and not self._steps:
                # Not before: a model that is only evaluated shall not pay for it.
                self._bus.attach(self)
            return
        self._stepped = False
        self._steps += 1
        if self._steps < _STEPS:
            return
        with torch.inference_mode(False), torch.no_grad():
            mine = _NEVER if self._closures else _NOW if self._session.runtime.quiet else _LATER
            ready = ControlPlane(self._comm.stage, "plan again").least(mine)
            if ready == _NOW:
                self._plan_again()
            elif ready == _NEVER:
                # This pass may be the closure's own, inside a step; and steps over tiers take none.
                self.close()
                self._say(
                    f"{self._said} not checked: its optimizer is stepped with a closure, which tiers do not allow."
                )
            elif self._steps >= _LAST:
                self.close()
                self._say(f"{self._said} not checked: each training pass began before the backward of another.")

    def _say(self, why: str) -> None:
        """``describe()`` and observers say what came of it."""
        self._session.why = f"{self._session.why}\n{why}"
        self._bus.instant("policy replanned", why)

    @property
    def _said(self) -> str:
        return f'policy = "auto" after {self._steps} steps:'

    def _plan_again(self) -> None:
        """Measure, decide and go over.  Collective."""
        ranks = ControlPlane(self._comm.stage, "plan again", "the placement")
        try:
            with ranks.all_or_none():
                mine = self._measured()
            # Of what is taken, the rank that takes most.
            taken = [-(ranks.least(-nbytes) or 0) for nbytes in (mine.least, mine.most)]
            there = [ranks.least(nbytes) or 0 for nbytes in (mine.there, mine.free, mine.host, mine.disk)]
            known = self._session.optimizers.agreed("plan again")
            with ranks.all_or_none():
                needs = Needs(
                    self._choice.request.model, next(iter(known), None), self._choice.base, self._choice.world,
                    self._choice.request.ignored, self._choice.request.device, others=known[1:],
                )  # fmt: skip
                candidate, why = decide(self._choice, needs, _Measured(taken[0], taken[1], *there))
            # States that one rank owns whole count there alone: all do what the first has found.
            named = ranks.on_first(lambda: [str(candidate or ""), why])
        except Exception as error:
            # Of whatever kind: the others, whom it was told, go on training, and wait for this rank.
            self._say(f"{self._said} not checked: {error}")
            return
        finally:
            self.close()
        chosen = next((each for each in _listed(self._choice) if str(each) == named[0]), None)
        failed = "" if chosen is None else go_over(self._session, chosen.policy(self._choice.base))
        undone = f" The change failed and was undone: {failed}" if failed else ""
        self._say(f"{self._said} {named[1]}{undone}")

    def _measured(self) -> _Measured:
        choice, (now, most) = self._choice, self._seam.used()
        free = on_this_machine(self._seam, choice.request, choice.ranks)
        return _Measured(
            max(self._highest, now) - choice.before,
            max(self._highest, now, most) - choice.before,
            free.device + max(0, now - choice.before),
            free.device,
            free.host + self._session.tiers.placed(Tier.HOST),
            free.disk + self._session.tiers.placed(Tier.DISK),
        )


def _listed(choice: Choice) -> list[Candidate]:
    """What may be gone over to, see Note [What stays]; with fewer units gathered ahead, too."""
    kept = choice.candidate
    every = candidates(choice.base, choice.world, tiers=choice.tiers, host_updates=False, replicas=(kept.replicate,))
    alike = [each for each in every if each.checkpoint == "none" and each.stage == kept.stage]
    return alike + [replace(each, prefetch=0) for each in alike]


def decide(choice: Choice, needs: Needs, measured: _Measured) -> tuple[Candidate | None, str]:
    """Another placement, if one is better for what was measured, and why: pure, and the same on all ranks."""
    candidate = choice.candidate
    placed = held(candidate, needs.of(candidate))
    one_memory = choice.request.device.type == "cpu"
    expected = _near(choice.expected, one_memory) + choice.activations
    took = as_size(measured.most)
    if measured.least < measured.most:
        took = f"{as_size(max(0, measured.least))} to {took}"
    seen = f"the device took {took} at its peak, of {as_size(expected)} that were allowed for states and activations"
    for tier in (Tier.HOST, Tier.DISK):
        if _off(placed.on(tier), choice.expected.on(tier)):
            seen += f"; {tier.value} {as_size(placed.on(tier))}, {as_size(choice.expected.on(tier))} expected"
    usable = int(measured.there * (1 - _FREE))

    def limits(peak: int) -> Limits:
        left = max(0, usable - (peak - _near(placed, one_memory)))
        return Limits(left, left if one_memory else measured.host, measured.disk, one_memory)

    short = bool(limits(measured.least).exceeded(placed))
    off = _off(measured.least, expected) or _off(measured.most, expected)
    if not short and not off and not any(_off(placed.on(tier), choice.expected.on(tier)) for tier in (Tier.HOST, Tier.DISK)):
        return None, f"{seen}, within {_OFF:.0%}. Nothing was changed."
    bound = limits(measured.least if short else measured.most)
    fits = [each for each in _listed(choice) if not bound.exceeded(held(each, needs.of(each)))]
    best = min(fits, key=lambda each: _order(each, needs.of(each)), default=candidate)
    if short and not fits:
        less = f"{seen}; less than {_FREE:.0%} of {as_size(measured.there)} is left"
        remedy = 'Write a policy with a higher stage or [activation] checkpoint = "unit", or use more ranks.'
        return None, f"{less}, and no placement of stage {candidate.stage} frees enough. Nothing was changed. {remedy}"
    if not short and _order(best, needs.of(best))[:3] >= _order(candidate, needs.of(candidate))[:3]:
        return None, f"{seen}. No placement of stage {candidate.stage} that fits moves less. Nothing was changed."
    passing = _passing(needs.of(candidate))
    if passing > measured.free:
        takes = f"the change itself needs {as_size(passing)}, and {as_size(measured.free)} is free"
        return None, f"{seen}. {best} would be better, but {takes}. Nothing was changed."
    after = held(best, needs.of(best))
    used = ", ".join(f"{as_size(after.on(tier))} on {tier.value}" for tier in Tier if after.on(tier))
    why = f"less than {_FREE:.0%} of {as_size(measured.there)} was left" if short else "it fits and moves less data"
    return best, f"{seen}. Changed from {candidate} to {best}: {used} per rank without activations; {why}."


def _near(memory: Memory, one_memory: bool) -> int:
    """Bytes of the device's memory."""
    return memory.device + (memory.host if one_memory else 0)


def _off(found: int, expected: int) -> bool:
    return abs(found - expected) > _OFF * expected


def _order(candidate: Candidate, need: Need) -> tuple[int, int, int, bool, int]:
    """What is preferred: what moves least, then what gathers ahead, then what holds least."""
    disk, host, links, device = moved(candidate, need)
    return disk, host, links, candidate.prefetch == 0, device


def _passing(need: Need) -> int:
    """Bytes of the device that going over takes meanwhile: of the largest unit all values twice, gradients and states."""
    updated = sum(flat.shard_numel for flat in need.flats if flat.kind.trainable)
    state = -(-need.states // updated) if updated else 0
    units: dict[int, int] = {}
    for flat in need.flats:
        size = 3 * flat.kind.master.itemsize + (state if flat.kind.trainable else 0)
        units[flat.number // FLATS] = units.get(flat.number // FLATS, 0) + size * flat.layout.padded
    return max(units.values(), default=0)
