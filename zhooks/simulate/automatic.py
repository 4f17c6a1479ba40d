"""``attach(policy="auto")``: the policy that moves the least of those that this machine holds, the same on all ranks.

``attach.py`` asks once ranks are connected.  There is no step to simulate, so it goes by bytes: what is at rest and gathered by
the layouts that would be built, and a share of the device left for activations; ``replanning.py`` looks at what that came to.
It never changes the model.

Note: [Order of preference]
    Of what fits, the one that moves the least over disk, then over the host's link, then over links; of equal ones the one that
    holds the least.  Recomputation is not chosen: what it saves, only a forward can tell.  Stages of a pipeline take one, of
    those that fit every stage the one with which all of them together move the least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload.budget import ALONE, Ranks, available
from offload.device import Device, open_device
from offload.errors import AttachError, BudgetError
from offload.policy import Policy
from offload.text import as_size
from offload.tier import Tier
from offload.virtual import NAME
from zhooks import tree
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.plan import Request
from zhooks.simulate.axes import Candidate, candidates
from zhooks.simulate.best_first import Limits, Memory
from zhooks.simulate.needs import Need, Needs

__all__ = ["ACTIVATIONS", "Choice", "choose", "held", "moved", "on_this_machine"]

#: The share of the memory that is free on the device which is left for activations and what is temporary.
ACTIVATIONS = 0.5


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
    limits = _agreed(mine, comm)
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
    stages = _Stages(comm, listed)
    fits = stages.that_fit([not limits.exceeded(found[each]) for each in listed])
    if not fits:
        raise BudgetError(_refusal(listed, stages.neediest(found), stages.least(limits), tiers))
    moves = stages.moved([moved(each, needs.of(each)) for each in listed])
    best = min(fits, key=lambda each: moves[each])
    memory = found[best]
    used = ", ".join(f"{as_size(memory.on(tier))} on {tier.value}" for tier in Tier if memory.on(tier))
    states = "" if request.known else "; Adam's states are assumed, because no optimizer was given"
    why = (
        f'policy = "auto" chose {best}: at most {used} per rank without activations, within {as_size(limits.device)} of the '
        f"device ({1 - ACTIVATIONS:.0%} of what is free, the rest for activations); {_fitting(len(fits), len(listed))}"
        f"{' every stage' if comm.pipelined else ''}{states}."
    )
    chosen = replace(request, policy=best.policy(base), chosen=why)
    activations = int(limits.device * ACTIVATIONS / (1 - ACTIVATIONS))
    return Choice(chosen, base, tiers, best, memory, activations, world, beside, before)


def _fitting(fits: int, listed: int) -> str:
    """How many placements fit, the begin of "fits every stage" too."""
    if listed == 1:
        return "the only placement fits"
    return f"all {listed} placements fit" if fits == listed else f"{fits} of {listed} placements fit"


class _Stages:
    """What stages of a pipeline, each a model of its own, come to with each candidate: one of them is chosen for all.

    Each method is collective over the stages.
    Raises:
        AttachError: stages have other candidates, for what the search may not change differs between them.
    """

    def __init__(self, comm: Comm, listed: list[Candidate]) -> None:
        self._pp, self._listed = comm.pp, listed
        if not ControlPlane(comm.pp, "choose a policy").agree(repr(listed)):
            raise AttachError(
                'policy = "auto" needs the same candidates on every stage of the pipeline, found different ones. Use the '
                'same '
                "mesh and device for all stages, or write a policy for each."
            )

    def that_fit(self, here: list[bool]) -> list[Candidate]:
        """Those that fit each stage."""
        flags = self._combined([[int(fits)] for fits in here], "min")
        return [each for each, (fits,) in zip(self._listed, flags, strict=True) if fits]

    def moved(self, here: list[tuple[int, int, int, int]]) -> dict[Candidate, tuple[int, ...]]:
        """Bytes that all stages move together, and what the one holds that holds the most."""
        sums, most = (self._combined([list(each) for each in here], op) for op in ("sum", "max"))
        return {each: (*own[:-1], largest[-1]) for each, own, largest in zip(self._listed, sums, most, strict=True)}

    def neediest(self, held: dict[Candidate, Memory]) -> dict[Candidate, Memory]:
        """The most that any stage holds, tier by tier."""
        rows = self._combined([[memory.on(tier) for tier in Tier] for memory in held.values()], "max")
        return {each: Memory(*row) for each, row in zip(held, rows, strict=True)}

    def least(self, limits: Limits) -> Limits:
        """The least that a rank of any stage may use."""
        ((device, host, disk),) = self._combined([[limits.device, limits.host, limits.disk]], "min")
        return replace(limits, device=device, host=host, disk=disk)

    def _combined(self, rows: list[list[int]], op: str) -> list[list[int]]:
        table = torch.tensor(rows, dtype=torch.int64, device="cpu")
        flat = table.view(-1)
        self._pp.all_reduce(_CALL, flat, op)
        combined: list[list[int]] = table.tolist()
        return combined


_CALL = Call(CONTROL, "choose a policy", "for all stages")


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


def _agreed(mine: Limits, comm: Comm) -> Limits:
    """The least of any rank, so that all choose alike."""
    budgets = ControlPlane(comm.stage, "compare budgets")
    device, host, disk = (budgets.least(nbytes) or 0 for nbytes in (mine.device, mine.host, mine.disk))
    return Limits(device, host, disk, mine.one_memory)


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
