"""What a unit will be laid out as, before any tensor is made: its flats as names, layouts and sizes.

``plan/layouts.py`` makes it, ``build/`` makes units and flats of it, and what counts bytes ahead (budgets, the arena, tiers)
adds it up.  Pure: it never touches a tensor, and it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from torch import nn

from offload.policy import Footprint
from offload.tier import Tier
from zhooks import tree
from zhooks.layout.flat_kind import Kind
from zhooks.layout.flat_ranges import Layout
from zhooks.layout.units import Group

__all__ = ["FlatPlan", "Keeps", "UnitPlan", "flats_of", "inner_units"]

F = TypeVar("F", covariant=True)


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
