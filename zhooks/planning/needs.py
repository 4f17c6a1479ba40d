"""What a policy has one rank hold and move, before anything is attached: layouts added up, no tensor.

``bounds.py`` makes times of it, ``automatic.py`` chooses by it.  Layouts are those that ``attach`` would build, and bytes are
counted by their one place, ``FlatPlan.footprint``.  It never asks what hardware there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from offload.policy import Policy
from offload.tier import Tier
from zhooks.layout import FlatPlan, Group, Ignored, UnitPlan, find_units
from zhooks.plan import Layouts, device_floor, ignored_here, state_nbytes
from zhooks.planning.axes import Candidate
from zhooks.planning.best_first import Memory

__all__ = ["Need", "Needs"]


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


@dataclass(slots=True)
class Needs:
    """A model's, by candidate; placements that differ in nothing but time are computed once.

    Attributes:
        world: ranks.
        others: optimizers beside the first.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    base: Policy
    world: int
    ignored: Ignored
    device: torch.device
    others: Sequence[torch.optim.Optimizer] = ()
    numel: int = field(init=False)
    _groups: list[Group] = field(init=False)
    _known: dict[Candidate, Need] = field(init=False, default_factory=dict)
    _states: dict[tuple[int, int], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = find_units(self.model, self.base, self.ignored)
        self.numel = sum(param.numel() for param in self.model.parameters())

    def of(self, candidate: Candidate) -> Need:
        """What it comes to."""
        # Not in bytes, but for those in flight: how far ahead is gathered.
        key = replace(candidate, checkpoint="none", kept=False, batch=None)
        if key not in self._known:
            self._known[key] = self._count(key)
        return self._known[key]

    def _count(self, candidate: Candidate) -> Need:
        policy, units = self._units(candidate, self.base)
        flats = tuple(flat for unit in units for flat in unit.flats)
        cells = [cell for flat in flats for cell in flat.footprint()]
        states = self._state_nbytes(candidate)
        # Each flat's share of them lies where its optimizer's cell does.
        trained = [(flat.kind.tiers.optimizer, flat.shard_numel) for flat in flats if flat.kind.trainable]
        updated = sum(numel for _, numel in trained)
        sums = {tier: sum(cell.on(tier) for cell in cells) for tier in Tier}
        if updated:
            shares = {tier: sum(numel for where, numel in trained if where is tier) for tier in Tier}
            sums = {tier: sums[tier] + states * shares[tier] // updated for tier in Tier}
        left = sum(nbytes * (2 if param.requires_grad else 1) for param, nbytes in ignored_here(self.ignored, self.device))
        stored = Memory(sums[Tier.DEVICE] + left, sums[Tier.HOST], sums[Tier.DISK])
        gradients = sum(cell.on(Tier.DEVICE) for cell in cells if cell.what == "gradient")
        kept = sum(cell.on(Tier.DEVICE) for cell in cells)
        floor = stored.device + device_floor(policy, units) - kept
        return Need(stored, gradients, floor, states, flats)

    def _units(self, candidate: Candidate, base: Policy) -> tuple[Policy, Sequence[UnitPlan]]:
        policy, ranks = candidate.policy(base), self.world // candidate.replicate
        layouts = Layouts.over(self.model, policy, ranks, candidate.replicate, self.device)
        return policy, layouts.units(self._groups)

    def _state_nbytes(self, candidate: Candidate) -> int:
        """Of the optimizer on one rank: as it would be with all of them on the device; 0 where nobody can tell."""
        if self.optimizer is None:
            return 0
        key = (min(candidate.stage, 1), candidate.replicate)
        if key not in self._states:
            # By rules some may lie elsewhere whatever the tables say: they count here, too.
            bare = self.base.model_copy(update={"rule": ()})
            _, units = self._units(Candidate(candidate.stage, replicate=candidate.replicate), bare)
            wide = bare.optimizer.rounding == "stochastic"
            self._states[key] = sum(state_nbytes(one, units, 0, wide=wide)[0] for one in (self.optimizer, *self.others))
        return self._states[key]
