"""What a unit will be laid out as, before any tensor is made: placements, and its flats as names, layouts and sizes.

The same on every rank; what counts bytes ahead (budgets, the arena, tiers) adds these up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import nn

from offload.policy import Footprint, Policy, footprint
from offload.tier import Tier, Tiers
from zhooks import tree
from zhooks.layout.flat_ranges import Layout
from zhooks.layout.units import Group

F = TypeVar("F", covariant=True)

#: A policy's words for dtypes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: More than the kinds of parameters a unit can have: a flat's number is its unit's times this, and its place there.
FLATS = 256


class Placement(Enum):
    """How one cell of the table lies over the ranks (the words of DTensor).

    Source: ZeRO, arXiv:1910.02054, sections 3 and 5.
    """

    REPLICATE = "R"
    PARTIAL = "P"
    SHARD = "S"


@dataclass(frozen=True, slots=True)
class Table:
    """One row: the placement of parameters, gradients and optimizer states at rest."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement

    @classmethod
    def of(cls, cells: Mapping[str, str]) -> Table:
        """Read ``Policy.table()``: ``{"parameter": "R", "gradient": "S", "optimizer": "S"}``."""
        return cls(*(Placement(cells[name]) for name in ("parameter", "gradient", "optimizer")))

    def keeps_gathered(self, tiers: Tiers) -> bool:
        """Parameters on these tiers stay gathered on the device between uses; others are gathered before each."""
        return self.parameter is not Placement.SHARD and tiers.parameter is Tier.DEVICE

    @property
    def shards_optimizer(self) -> bool:
        """Each rank updates its own range; replicated parameters are gathered again after the update."""
        return self.optimizer is Placement.SHARD

    @property
    def accumulates_unreduced(self) -> bool:
        """Inside ``no_sync`` the gradient stays a full partial sum; reduced at the accumulation boundary."""
        return self.gradient is not Placement.SHARD


@dataclass(frozen=True, slots=True)
class Kind:
    """What the parameters of one flat buffer have in common: dtypes at rest and in use, device, trainable or not, tiers."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    device: torch.device
    trainable: bool
    tiers: Tiers

    @property
    def wide(self) -> int:
        """Bytes of one element in the widest of its dtypes."""
        return max(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize)

    @property
    def narrow(self) -> int:
        """Bytes of one element in the narrowest: what alignment is counted in."""
        return min(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize)

    @property
    def apart(self) -> bool:
        """Masters and computed values are two things that rest in two places."""
        anywhere = self.tiers.parameter is not Tier.DEVICE or self.tiers.optimizer is not Tier.DEVICE
        return anywhere and self.master != self.compute

    @property
    def reduces_in_place(self) -> bool:
        """What reduces a gradient may write it where it is kept: in the same dtype, on the device."""
        return self.reduce == self.master and self.tiers.gradient is Tier.DEVICE

    def footprint(self, full: int, shard: int, *, resident: bool) -> tuple[Footprint, Footprint, Footprint]:
        """What a rank keeps between steps: parameter, gradient and masters.

        Args:
            full: elements of the full buffer.
            shard: elements of it that the rank updates.
            resident: the full buffer stays between uses.
        """
        return footprint(
            self.tiers,
            parameter=full if resident else shard,
            shard=shard,
            master=self.master.itemsize,
            compute=self.compute.itemsize,
            apart=self.apart or (resident and self.master != self.compute),
            trainable=self.trainable,
        )


def kind_of(names: Sequence[str], param: nn.Parameter, policy: Policy, device: torch.device, *, wide: bool = False) -> Kind:
    """How the policy wants a parameter of these names held; ``wide``: it stays in its own dtype."""
    said = policy.dtypes(*names)
    chosen, reduce = said.param, said.reduce
    plain = wide or not param.is_floating_point()
    compute = param.dtype if plain or chosen is None else DTYPES[chosen]
    reduced = param.dtype if reduce is None or not param.is_floating_point() else DTYPES[reduce]
    tiers = policy.tiers(*names)
    if not param.requires_grad:
        tiers = Tiers(tiers.parameter, tiers.gradient, tiers.parameter)
    return Kind(param.dtype, compute, reduced, device, param.requires_grad, tiers)


class Keeps(Enum):
    """Where a rank's range of a flat lies between uses."""

    FULL = "in the full buffer"
    RANGE = "on the device, in memory of its own"
    BLOCKS = "in blocks of a store"


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """One flat buffer: parameters of a kind, divided over the data ranks.

    Attributes:
        names: of its parameters, in order.
        layout: divides the full buffer over those ranks, for reductions where each keeps all of it too.
        replicated: each rank keeps and updates all of it.
        resident: the full buffer stays between uses.
        long: one parameter that is larger than any buffer may be.
        keeps: where a rank's range lies between uses; see Note [Master and copy] in ``unit/storage.py`` for blocks.
    """

    name: str
    number: int
    kind: Kind
    names: tuple[str, ...]
    layout: Layout
    replicated: bool
    resident: bool
    long: bool
    keeps: Keeps = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A buffer of no elements, or of the range alone, in the dtype that is updated.
        in_place = not self.sharded or (self.resident and len(self.layout.segments) == 1)
        full = not self.layout.padded or (in_place and self.kind.master == self.kind.compute)
        blocks = self.layout.padded and (self.kind.apart or self.kind.tiers.parameter is not Tier.DEVICE)
        object.__setattr__(self, "keeps", Keeps.BLOCKS if blocks else Keeps.FULL if full else Keeps.RANGE)

    @property
    def ranks(self) -> int:
        """How many share the values."""
        return 1 if self.replicated else self.layout.world

    @property
    def shared(self) -> Layout:
        """The buffer as it is divided over the ranks that share the values."""
        return self.layout.undivided() if self.replicated else self.layout

    @property
    def sharded(self) -> bool:
        """More than one rank shares them."""
        return self.ranks > 1

    @property
    def shard_numel(self) -> int:
        """Elements that a rank updates."""
        return self.layout.padded // self.ranks

    @property
    def releasable(self) -> bool:
        """The full buffer comes and goes with its uses."""
        return not self.resident and self.keeps is not Keeps.FULL

    @property
    def shard_nbytes(self) -> int:
        """Bytes on the device of a rank's range, where it has memory of its own there."""
        return self.shard_numel * self.kind.master.itemsize if self.keeps is Keeps.RANGE else 0

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.padded * self.kind.compute.itemsize

    @property
    def transient_nbytes(self) -> int:
        """Bytes of it that come and go with its uses."""
        return self.full_nbytes if self.releasable else 0

    @property
    def resident_nbytes(self) -> int:
        """Bytes of it that stay beside the range."""
        return self.full_nbytes if self.resident and self.keeps is not Keeps.FULL else 0

    @property
    def sum_nbytes(self) -> int:
        """Bytes of a partial gradient."""
        return self.layout.padded * self.kind.reduce.itemsize

    @property
    def moved_nbytes(self) -> int:
        """Bytes that ranks exchange in a gather."""
        return self.full_nbytes if self.sharded else 0

    def footprint(self) -> tuple[Footprint, Footprint, Footprint]:
        """What a rank keeps between steps: parameter, gradient and masters."""
        return self.kind.footprint(self.layout.padded, self.shard_numel, resident=self.resident)

    def owned_numel(self, index: int, rank: int) -> int:
        """Elements of parameter ``index`` that a data rank updates."""
        return self.layout.numels[index] if self.replicated else sum(run.numel for run in self.layout.pieces(index, rank))


@dataclass(frozen=True, slots=True, eq=False)
class UnitPlan:
    """One unit: the group of parameters it is made of, and the flats they are sorted into."""

    group: Group
    number: int
    flats: tuple[FlatPlan, ...]

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def trainable(self) -> bool:
        return any(flat.kind.trainable for flat in self.flats)

    @property
    def releasable(self) -> bool:
        return any(flat.releasable for flat in self.flats)

    @property
    def full_nbytes(self) -> int:
        return sum(flat.full_nbytes for flat in self.flats)

    def params(self, flat: FlatPlan) -> list[nn.Parameter]:
        """The parameters of one of its flats, in order."""
        return [self.group.params[name] for name in flat.names]

    def members(self) -> Iterator[tuple[FlatPlan, str, nn.Parameter]]:
        """Its parameters in the order of the flats."""
        for flat in self.flats:
            for name in flat.names:
                yield flat, name, self.group.params[name]


class _Unit(Protocol[F]):
    @property
    def flats(self) -> Sequence[F]: ...


def flats_of(units: Iterable[_Unit[F]]) -> list[F]:
    """All flats of these units, planned or there, in order."""
    return [flat for unit in units for flat in unit.flats]


def inner_units(units: Sequence[UnitPlan]) -> dict[int, frozenset[int]]:
    """Of each unit, the others that run inside its modules; all by their numbers."""
    at: dict[int, set[int]] = {}
    for unit in units:
        for entry in unit.group.entries:
            at.setdefault(id(entry), set()).add(unit.number)
    below = {
        unit.number: {
            number for entry in unit.group.entries for module in tree.modules(entry) for number in at.get(id(module), ())
        }
        for unit in units
    }
    return {number: frozenset(found - {number}) for number, found in below.items()}
