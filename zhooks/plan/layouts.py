"""Sorts the parameters of each unit into flats, and lays those out over the ranks: integers, before any tensor is made.

``plan.py`` asks at attach, ``attach.py`` again when a policy changed or parameters were frozen or unfrozen.  Pure: every rank
comes to the same, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.budget import shown
from offload.errors import AttachError
from offload.policy import Policy
from zhooks.comm import Comm
from zhooks.layout import FLATS, Cut, FlatPlan, Group, Kind, Table, UnitPlan, flat_layout, kind_of, pieces
from zhooks.tensor import part_numel

__all__ = ["Layouts"]


@dataclass(frozen=True, slots=True)
class Layouts:
    """How a policy has the units of a model laid out.

    Attributes:
        cut: how units are cut into flats.
        wide: parameters, by identity, that are computed with in their own dtype whatever the policy says.
    """

    policy: Policy
    table: Table
    cut: Cut
    device: torch.device
    wide: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module, policy: Policy, comm: Comm, device: torch.device) -> Layouts:
        """How ``policy`` has ``model`` laid out over these ranks."""
        # Parameters of batch and instance norms stay in their own dtype beside their running statistics.
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        wide = frozenset(id(param) for norm in norms for param in norm.parameters(recurse=False))
        cut = Cut(policy.comm.buffer, comm.shard.axis.world, comm.replicate.axis.world)
        return cls(policy, Table.of(policy.table()), cut, device, wide)

    def units(self, groups: Sequence[Group]) -> tuple[UnitPlan, ...]:
        """Every group as a unit.

        Raises:
            PolicyError: [comm] buffer does not hold one aligned row.
            AttachError: it cuts a unit into too many flats.
        """
        return tuple(self.unit(group, number) for number, group in enumerate(groups))

    def anew(self, plan: UnitPlan) -> UnitPlan:
        """A unit that is laid out already, as it would be now."""
        params = {name: param for _, name, param in plan.members()}
        return self.unit(Group(plan.name, plan.group.entries, params), plan.number)

    def following(self, plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        """The same plans, but for units with parameters that were frozen or unfrozen since: those are planned anew."""
        return [
            self.anew(plan) if any(param.requires_grad != flat.kind.trainable for flat, _, param in plan.members()) else plan
            for plan in plans
        ]

    def unit(self, group: Group, number: int) -> UnitPlan:
        """The unit of one group."""
        kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
        for name, param in group.params.items():
            kind = kind_of(name, param, self.policy, self.device, wide=id(param) in self.wide)
            kinds.setdefault(kind, []).append((name, param))
        cut = list(pieces(kinds, self.cut, part_numel))
        if len(cut) > FLATS:
            raise AttachError(
                f"unit {group.name}: expected at most {FLATS} flat buffers, found more: its parameters are cut at "
                f"{shown(self.cut.nbytes)}. Raise [comm] buffer, or make smaller units ([units] names)."
            )
        flats = [self._flat(group.name, number, place, kind, members) for place, (kind, members) in enumerate(cut)]
        return UnitPlan(group, number, tuple(flats))

    def _flat(self, unit: str, number: int, place: int, kind: Kind, members: Sequence[tuple[str, nn.Parameter]]) -> FlatPlan:
        numels = [part_numel(param) for _, param in members]
        replicated = not self.table.shards_optimizer
        resident = self.table.keeps_gathered(kind.tiers)
        long = len(members) == 1 and not self.cut.admits(kind, numels[0])
        undivided = replicated or long or (resident and kind.master == kind.compute)
        layout = flat_layout(
            numels,
            world=self.cut.ranks,
            itemsize=kind.narrow,
            align_bytes=self.cut.align_nbytes,
            max_numel=None if undivided else self.policy.units.max_numel,
        )
        name = f"{unit}#{place}" if place else unit
        return FlatPlan(
            name, number * FLATS + place, kind, tuple(name for name, _ in members), layout, replicated, resident, long
        )
