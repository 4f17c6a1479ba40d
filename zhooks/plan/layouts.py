"""Sorts the parameters of each unit into flats, and lays those out over the ranks: integers, the same on every rank.

Note: [Which flats stay on the device]
    Of ``[optimizer] device_share`` the first ones that fit, in the order of the units.  Under ``overlap`` backward comes to
    them last, when nothing is left for a transfer to hide behind, and the next forward begins with their parameters.  Layouts
    are the same whatever the share, so that checkpoints are read under any other.  In which order a step updates them is
    Note [Both sides at once] in ``optim/tiered_update.py``.

    Where parameters were frozen or unfrozen nothing else moves: a budget was held to what lay on the device before.  What was
    unfrozen takes what is left of the share.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from offload.errors import AttachError, PolicyError
from offload.policy import Policy
from offload.text import as_size
from offload.tier import Tier
from zhooks import tree
from zhooks.comm import Comm
from zhooks.layout import ALIGN_BYTES, FLATS, FlatPlan, Group, Kind, Table, UnitPlan, flat_layout, kind_of
from zhooks.tensor import part_numel

__all__ = ["STAGED_NBYTES", "Bound", "Layouts"]

#: A rank's masters of one flat that is kept on a tier, unless a single parameter has more: what an update stages at once.
STAGED_NBYTES = 32 << 20

Member = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class Bound:
    """No flat is above ``nbytes`` in any of its dtypes, unless one parameter alone is.

    ``ranks`` share a flat over ``replicas`` replicas of it; every range of a rank begins and ends on an aligned element.
    """

    nbytes: int
    ranks: int = 1
    replicas: int = 1

    @property
    def align_nbytes(self) -> int:
        """Where every parameter and every range starts."""
        return ALIGN_BYTES * self.replicas

    def row(self, kind: Kind) -> int:
        """Elements of one aligned row: the least that every rank can own a range of."""
        return self.ranks * self.align(kind)

    def align(self, kind: Kind) -> int:
        """Elements between places where something may start."""
        return max(1, self.align_nbytes // kind.narrow)

    def admits(self, kind: Kind, numel: int) -> bool:
        """A flat of so many elements, padding included, is within the bound."""
        return -(-numel // self.row(kind)) * self.row(kind) * kind.wide <= self.nbytes


@dataclass(frozen=True, slots=True)
class Layouts:
    """How a policy has the units of a model laid out.

    Attributes:
        bound: how large a flat may be.
        wide: parameters, by identity, that are computed with in their own dtype whatever the policy says.
    """

    policy: Policy
    table: Table
    bound: Bound
    device: torch.device
    wide: frozenset[int]

    @classmethod
    def of(cls, model: nn.Module, policy: Policy, comm: Comm, device: torch.device) -> Layouts:
        """How ``policy`` has ``model`` laid out over these ranks."""
        return cls.over(model, policy, comm.shard.axis.world, comm.replicate.axis.world, device)

    @classmethod
    def over(cls, model: nn.Module, policy: Policy, ranks: int, replicas: int, device: torch.device) -> Layouts:
        """How it would be over so many ranks, and replicas of their shards."""
        # Parameters of batch and instance norms stay in their own dtype beside their running statistics.
        norms = [module for module in tree.modules(model) if isinstance(module, _NormBase)]
        wide = frozenset(id(param) for norm in norms for param in tree.own_parameters(norm))
        bound = Bound(policy.comm.buffer, ranks, replicas)
        return cls(policy, Table.of(policy.table()), bound, device, wide)

    def units(self, groups: Sequence[Group]) -> tuple[UnitPlan, ...]:
        """Every group as a unit.

        Raises:
            PolicyError: [comm] buffer does not hold one aligned row.
            AttachError: under that bound a unit has too many flats.
        """
        return _keep_on_device([self.unit(group, number) for number, group in enumerate(groups)], self.policy)

    def anew(self, plans: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
        """Units that are laid out already, as they would be now."""
        return _keep_on_device([self._anew(plan) for plan in plans], self.policy)

    def following(self, plans: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
        """The same plans, but for units with parameters that were frozen or unfrozen since: those are planned anew."""
        frozen = [any(param.requires_grad != flat.kind.trainable for flat, _, param in plan.members()) for plan in plans]
        now = [self._anew(plan) if changed else plan for plan, changed in zip(plans, frozen, strict=True)]
        return _keep_on_device(now, self.policy, frozenset(plans)) if any(frozen) else tuple(plans)

    def _anew(self, plan: UnitPlan) -> UnitPlan:
        params = {name: param for _, name, param in plan.members()}
        return self.unit(Group(plan.name, plan.group.entries, params, plan.group.aliases), plan.number)

    def unit(self, group: Group, number: int) -> UnitPlan:
        """The unit of one group."""
        kinds: dict[Kind, list[Member]] = {}
        for name, param in group.params.items():
            kind = kind_of(group.names(name), param, self.policy, self.device, wide=id(param) in self.wide)
            kinds.setdefault(kind, []).append((name, param))
        owners = self.bound.ranks if self.table.shards_optimizer else 1
        split = list(_split(kinds, self.bound, STAGED_NBYTES * owners))
        if len(split) > FLATS:
            raise AttachError(
                f"Unit {group.name} is too large. Expected at most {FLATS} flat buffers, found more: its parameters are split "
                f"at {as_size(self.bound.nbytes)}. Raise [comm] buffer, or make smaller units ([units] names)."
            )
        flats = [self._flat(group.name, number, place, kind, members) for place, (kind, members) in enumerate(split)]
        return UnitPlan(group, number, tuple(flats))

    def _flat(self, unit: str, number: int, place: int, kind: Kind, members: Sequence[Member]) -> FlatPlan:
        numels = [part_numel(param) for _, param in members]
        replicated = not self.table.shards_optimizer
        resident = self.table.keeps_gathered(kind.tiers)
        long = len(members) == 1 and not self.bound.admits(kind, numels[0])
        undivided = replicated or long or (resident and kind.master == kind.compute)
        layout = flat_layout(
            numels,
            world=self.bound.ranks,
            itemsize=kind.narrow,
            align_bytes=self.bound.align_nbytes,
            max_numel=None if undivided else self.policy.units.max_numel,
        )
        name = f"{unit}#{place}" if place else unit
        return FlatPlan(
            name, number * FLATS + place, kind, tuple(name for name, _ in members), layout, replicated, resident, long
        )


def _split(
    kinds: Mapping[Kind, Sequence[Member]], bound: Bound, staged_nbytes: int
) -> Iterator[tuple[Kind, list[Member]]]:
    """The parameters of each flat of a unit: one flat a kind; several where the bound demands it, or something is kept on a
    tier, whose staging buffers stay small.  A parameter above the bound has a flat of its own, and the small ones beside it
    stay together.

    Args:
        staged_nbytes: masters of a flat that is kept on a tier, those of all ranks together.
    Raises:
        PolicyError: the bound does not hold one aligned row.
    """
    for kind, members in kinds.items():
        if not bound.admits(kind, 1):
            raise PolicyError(
                f"[comm] buffer needs to hold one aligned row over {bound.ranks * bound.replicas} ranks, "
                f"{bound.row(kind) * kind.wide} B for parameters such as {members[0][0]}, found {bound.nbytes} B. Raise it."
            )
        flat: list[Member] = []
        size = 0
        for member in members:
            numel = -(-part_numel(member[1]) // bound.align(kind)) * bound.align(kind)
            if not bound.admits(kind, numel):
                yield kind, [member]
                continue
            staged = kind.tiers.anywhere and (size + numel) * kind.master.itemsize > staged_nbytes
            if flat and (staged or not bound.admits(kind, size + numel)):
                yield kind, flat
                flat, size = [], 0
            flat.append(member)
            size += numel
        if flat:
            yield kind, flat


def _keep_on_device(
    plans: Sequence[UnitPlan], policy: Policy, laid: Container[UnitPlan] = frozenset()
) -> tuple[UnitPlan, ...]:
    """The units, with at most ``device_share`` of what [optimizer] tier places kept on the device: see the Note above.

    Args:
        laid: units that stay as they are: what they keep on the device counts, and they are returned as the same objects.
    """
    if not policy.optimizer.device_share:
        return tuple(plans)
    tier = Tier(policy.optimizer.tier)
    # What a rule placed on another tier is where the rule has it.
    divided = [
        (plan, flat)
        for plan in plans
        for flat in plan.flats
        if flat.kind.trainable and policy.tiers(*plan.group.names(flat.names[0])).optimizer is tier
    ]
    left = policy.optimizer.kept_on_device(sum(flat.layout.numel for _, flat in divided))
    left -= sum(flat.layout.numel for plan, flat in divided if plan in laid and flat.kind.tiers.optimizer is Tier.DEVICE)
    on_device: set[int] = set()
    for flat in (flat for plan, flat in divided if plan not in laid):
        if flat.layout.numel <= left:
            on_device.add(flat.number)
            left -= flat.layout.numel

    def placed(flat: FlatPlan) -> FlatPlan:
        tiers = replace(flat.kind.tiers, optimizer=Tier.DEVICE)
        return replace(flat, kind=replace(flat.kind, tiers=tiers)) if flat.number in on_device else flat

    return tuple(
        replace(plan, flats=tuple(map(placed, plan.flats))) if any(flat.number in on_device for flat in plan.flats) else plan
        for plan in plans
    )
