"""What a policy has one rank hold and move, before anything is attached: layouts added up, no tensor.

``bounds.py`` makes times of it, ``automatic.py`` chooses by it.  Layouts are those that ``attach`` would build, and bytes are
counted by their one place, ``FlatPlan.footprint``.  It never asks what hardware there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from offload.policy import Policy
from offload.tier import Tier
from zhooks import tree
from zhooks.layout import FlatPlan, Group, Ignored, UnitPlan, find_units, flats_of
from zhooks.plan import Layouts, device_floor, ignored_here, state_nbytes
from zhooks.simulate.axes import Candidate
from zhooks.simulate.best_first import Memory

__all__ = ["Built", "Need", "Needs"]


@dataclass(frozen=True, slots=True)
class Need:
    """What a policy comes to on one rank.

    Attributes:
        stored: parameters, gradients, masters and states, where they lie at the end of backward.
        gradients: of that, the gradients that are on the device.
        floor: on the device at the most without activations: what is stored, gathered units, sums on their way.
        states: bytes of states, wherever they lie.
        flats: of all units.
    """

    stored: Memory
    gradients: int
    floor: int
    states: int
    flats: tuple[FlatPlan, ...]

    @property
    def least(self) -> Memory:
        """Held for all of a step, so that its peak is above this by what activations take: all but gradients."""
        return replace(self.stored, device=self.stored.device - self.gradients)


@dataclass(frozen=True, slots=True)
class Built:
    """A model, its optimizer and what is left as it is."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    ignored: Ignored


@dataclass(slots=True)
class Needs:
    """A model's, by candidate; placements that differ in nothing but time are computed once.

    Attributes:
        world: ranks.
        others: optimizers beside the first.
        divided: the same model as it is divided, by ranks of ``tp``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    base: Policy
    world: int
    ignored: Ignored
    device: torch.device
    others: Sequence[torch.optim.Optimizer] = ()
    divided: Mapping[int, Built] = field(default_factory=dict)
    numel: int = field(init=False)
    _groups: dict[tuple[int, int | None], list[Group]] = field(init=False, default_factory=dict)
    _known: dict[Candidate, Need] = field(init=False, default_factory=dict)
    _states: dict[tuple[int, int, int], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.numel = sum(param.numel() for param in tree.parameters(self.model))

    def built(self, tp: int) -> Built:
        """The model over so many ranks of ``tp``."""
        return self.divided.get(tp) or Built(self.model, self.optimizer, self.ignored)

    def units(self, candidate: Candidate) -> Sequence[Group]:
        """What is gathered together."""
        built, key = self.built(candidate.tp), (candidate.tp, candidate.min_numel)
        if key not in self._groups:
            self._groups[key] = find_units(built.model, candidate.policy(self.base), built.ignored)
        return self._groups[key]

    def of(self, candidate: Candidate) -> Need:
        """What it comes to."""
        # Not in bytes, but for those in flight: how far ahead is gathered.
        key = replace(candidate, checkpoint="none", kept=False, batch=None)
        if key not in self._known:
            self._known[key] = self._count(key)
        return self._known[key]

    def _count(self, candidate: Candidate) -> Need:
        policy, units = self._units(candidate, self.base)
        flats = tuple(flats_of(units))
        cells = [cell for flat in flats for cell in flat.footprint()]
        states = self._state_nbytes(candidate)
        # Each flat's share of them lies where its optimizer's cell does.
        trained = [(flat.kind.tiers.optimizer, flat.shard_numel) for flat in flats if flat.kind.trainable]
        updated = sum(numel for _, numel in trained)
        sums = {tier: sum(cell.on(tier) for cell in cells) for tier in Tier}
        if updated:
            shares = {tier: sum(numel for where, numel in trained if where is tier) for tier in Tier}
            sums = {tier: sums[tier] + states * shares[tier] // updated for tier in Tier}
        whole = ignored_here(self.built(candidate.tp).ignored, self.device)
        left = sum(nbytes * (2 if param.requires_grad else 1) for param, nbytes in whole)
        stored = Memory(sums[Tier.DEVICE] + left, sums[Tier.HOST], sums[Tier.DISK])
        gradients = sum(cell.on(Tier.DEVICE) for cell in cells if cell.what == "gradient")
        kept = sum(cell.on(Tier.DEVICE) for cell in cells)
        floor = stored.device + device_floor(policy, units) - kept
        return Need(stored, gradients, floor, states, flats)

    def _units(self, candidate: Candidate, base: Policy) -> tuple[Policy, Sequence[UnitPlan]]:
        policy, ranks = candidate.policy(base), self.world // candidate.replicate // candidate.tp
        layouts = Layouts.over(self.built(candidate.tp).model, policy, ranks, candidate.replicate, self.device)
        return policy, layouts.units(self.units(candidate))

    def _state_nbytes(self, candidate: Candidate) -> int:
        """Of the optimizer on one rank: as it would be with all of them on the device; 0 where nobody can tell."""
        optimizer = self.built(candidate.tp).optimizer
        if optimizer is None:
            return 0
        key = (min(candidate.stage, 1), candidate.replicate, candidate.tp)
        if key not in self._states:
            # By rules some may lie elsewhere whatever the tables say: they count here, too.
            bare = self.base.model_copy(update={"rule": ()})
            _, units = self._units(Candidate(candidate.stage, replicate=candidate.replicate, tp=candidate.tp), bare)
            wide = bare.optimizer.rounding == "stochastic"
            self._states[key] = sum(state_nbytes(one, units, 0, wide=wide)[0] for one in (optimizer, *self.others))
        return self._states[key]
