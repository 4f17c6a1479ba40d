"""What ``find_policy`` returns: the best policies with what they take and hold, what binds them, and what did not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from offload.policy import Policy, Table, written
from offload.text import as_dollars, as_size, toml_value
from offload.tier import Tier
from zhooks.simulate.axes import Candidate
from zhooks.simulate.best_first import Limits, Memory, Ranking
from zhooks.simulate.measure import RESOURCES
from zhooks.simulate.run import Simulation, lasting

__all__ = ["Bandwidth", "Proposal", "Proposals", "folded"]

#: Of what did not fit, how many are shown.
_SHOWN = 3
#: Columns of a line at most, of a hundred with the mark of a comment in a policy file.
_WIDTH = 98
#: Transfers that could hide behind compute, and what carries them.
_CARRIED = {
    "gather": "gathers, over links",
    "reduce": "reductions, over links",
    "collectives": "collectives of the model's own, over links",
    "copies": "copies, to and from the host",
    "disk": "disk",
}


def folded(lines: Iterable[str]) -> Iterator[str]:
    """The lines, those that are too long for a terminal in several."""
    for line in lines:
        yield from wrap(line, _WIDTH, subsequent_indent="    ") if len(line) > _WIDTH else (line,)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a transfer needs so that it takes no longer than the step computes, beside what the hardware gives it.

    Attributes:
        intensity: FLOPs of the step for each byte that is moved.
        needed, found: bytes a second.

    Source: ZeRO-Infinity, arXiv:2104.07857, section 4: bandwidth needed is compute's rate over arithmetic intensity.
    """

    nbytes: int
    intensity: float
    needed: float
    found: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """One policy that fits.

    Attributes:
        policy: under it ``simulate`` finds the same, over ``mesh`` and with the candidate's batch.
        memory: the most on each tier; of disk what is stored there.
        busy: seconds by resource in the step.
        moved: bytes by resource.
    """

    candidate: Candidate
    policy: Policy
    mesh: Mapping[str, int] | None
    simulation: Simulation
    memory: Memory
    busy: Mapping[str, float]
    moved: Mapping[str, int]

    @property
    def binds(self) -> str:
        """The resource that is busy the longest."""
        return max(RESOURCES, key=lambda name: self.busy.get(name, 0.0))

    def bandwidths(self) -> dict[str, Bandwidth]:
        """By transfer, of those that this policy has."""
        compute, flops = self.busy.get("compute", 0.0), self.simulation.flops
        return {
            name: Bandwidth(moved, flops / moved, moved / compute, moved / self.busy[name])
            for name in _CARRIED
            if (moved := self.moved.get(name, 0)) and compute and self.busy.get(name)
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        batch = self.candidate.batch
        return {
            "says": str(self.candidate),
            "policy": self.policy.values(),
            "mesh": None if self.mesh is None else dict(self.mesh),
            "batch": None if batch is None else asdict(batch),
            "step_s": self.simulation.step_s,
            "memory": asdict(self.memory),
            "binds": self.binds,
            "busy_s": {name: self.busy.get(name, 0.0) for name in RESOURCES},
            "bandwidths": {name: asdict(each) for name, each in self.bandwidths().items()},
            "simulation": self.simulation.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Proposals:
    """The best policies that ``find_policy`` found, the fastest first.  ``print`` it for a table with reasons.

    Attributes:
        hardware: the profile's name.
        world: the number of ranks.
        limits: bytes that a rank may hold, by tier.
        candidates: how many policies there were to choose from.
        best: the policies, each with its simulation, its memory by tier and its bottleneck.
        ranking: the whole search.
        numel: parameters of the model.
        kind: the kind of the hardware, "gpu" or "cpu".
        notes: what was left out of the search, and why.
    """

    hardware: str
    world: int
    limits: Limits
    candidates: int
    best: tuple[Proposal, ...]
    ranking: Ranking[Candidate]
    numel: int
    kind: str
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        ranking = self.ranking
        return {
            "version": 1,
            "hardware": self.hardware,
            "world": self.world,
            "limits": asdict(self.limits),
            "candidates": self.candidates,
            "simulations": ranking.simulations,
            "untried": len(ranking.untried),
            "stopped": ranking.stopped,
            "gap": ranking.gap,
            "notes": list(self.notes),
            "best": [each.as_dict() for each in self.best],
            "unfit": [
                {"says": str(each.candidate), "simulated": each.simulated, "memory": asdict(each.memory), "why": each.why}
                for each in ranking.unfit
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from folded([*self._table(), *self.reasons()])

    def _table(self) -> Iterator[str]:
        there = [(name, limit) for name, _, limit in self.limits.needs(Memory(0, 0, 0))]
        tiers = ", ".join(f"{name} {as_size(nbytes)}" for name, nbytes in there if nbytes)
        yield f"{self.hardware} x {self.world}, {self.numel:,} parameters; a rank may hold: {tiers} (predicted, not measured)"
        yield f"{'':>3} {'step':>12} {'device':>10} {'host':>10} {'disk':>10} {'price':>15}  longest"
        for number, each in enumerate(self.best, 1):
            held = [as_size(each.memory.on(tier)) if each.memory.on(tier) else "-" for tier in Tier]
            columns = "".join(f" {size:>10}" for size in held)
            price = "-" if each.simulation.price is None else as_dollars(each.simulation.price)
            taken = f"{lasting(each.simulation.step_s):>12}{columns} {price:>15}"
            yield f"{number:>2}. {taken}  {each.binds}"
            yield f"    {each.candidate}"
        yield "longest: what a step spends the most time on"
        if any(each.candidate.checkpoint == "unit" for each in self.best):
            yield "activations recomputed: the forward of each unit runs again in backward, which saves their memory"

    def reasons(self) -> Iterator[str]:
        """Yield lines on why the first policy was chosen: what its step is busy with, which bandwidth its tiers need, and what
        would be faster but does not fit."""
        best = self.best[0]
        busy = ", ".join(f"{name} {lasting(best.busy[name])}" for name in RESOURCES if best.busy.get(name, 0.0) >= 5e-5)
        yield f"first: busy with {busy}"
        for name, each in best.bandwidths().items():
            enough = "hides behind compute" if each.needed <= each.found else "does not hide behind compute"
            yield (
                f"  {_CARRIED[name]}: {as_size(each.nbytes)} per step, {each.intensity:,.0f} FLOP per byte; needs "
                f"{each.needed / 1e9:,.1f} GB/s, has {each.found / 1e9:,.1f} GB/s: {enough}"
            )
        quicker = [each for each in self.ranking.unfit if each.seconds < best.simulation.step_s]
        # What was simulated says more than what a bound excluded.
        for tried in sorted(quicker, key=lambda each: not each.simulated)[:_SHOWN]:
            at = lasting(tried.seconds) if tried.simulated else f"at least {lasting(tried.seconds)}"
            yield f"does not fit: {tried.candidate} ({at}): {tried.why}"
        if len(quicker) > _SHOWN:
            yield f"  and {len(quicker) - _SHOWN} more that would be quicker"
        yield from (f"not searched: {note}" for note in self.notes)
        ranking = self.ranking
        stopped = ", and was stopped before its end" if ranking.stopped else ""
        others = "no other is quicker than the first by its bound"
        if ranking.untried:
            unknown = f"whether {len(ranking.untried)} more fit is not known"
            others = f"{unknown}; they could be quicker by at most {ranking.gap:.1%}"
        yield f"searched {self.candidates} policies by bounds, {ranking.simulations} by simulation{stopped}; {others}"

    def policy_text(self, number: int = 0) -> str:
        """Return policy ``number`` of ``best`` as the text of a TOML file that loads as an equal policy.

        Comments say why it was chosen, and which mesh and batch it is for.
        """
        chosen = self.best[number]
        said = list(self._lines()) if number == 0 else [str(chosen.candidate)]
        use = [] if chosen.mesh is None else [f"Attach over a mesh of {dict(chosen.mesh)}."]
        if chosen.candidate.tp > 1:
            use.append('Divide the model over mesh["tp"], as build does; the ranks of that axis share their samples.')
        if chosen.policy.precision.loss_scale is not None:
            use.append("The prediction does not include the cost of the loss scale.")
        if chosen.candidate.batch is not None:
            batch = chosen.candidate.batch
            use.append(f"Step with micro_batch = {batch.micro_batch} and accumulation = {batch.accumulation}.")
        words = folded([f"Found by zprof plan: {chosen.candidate}.", *use, "", *said])
        head = [f"# {line}".rstrip() for line in words]
        return "\n".join([*head, "", *_keys(chosen.policy)]) + "\n"


def _keys(policy: Policy) -> Iterator[str]:
    """What differs from the defaults."""
    plain = Policy()
    yield f"stage = {policy.stage}"
    for name, table in policy:
        if isinstance(table, Table):
            before = getattr(plain, name)
            keys = {key: value for key, value in table if value is not None and value != getattr(before, key)}
            yield from ("", f"[{name}]") if keys else ()
            yield from (f"{key} = {written(type(table), key, value)}" for key, value in keys.items())
    for rule in policy.rule:
        yield from ("", "[[rule]]", f"match = {toml_value(rule.match)}")
        says = rule.says().items()
        yield from (f"{table}.{key} = {toml_value(value)}" for table, keys in says for key, value in keys.items())
