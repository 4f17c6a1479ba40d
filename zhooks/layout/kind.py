"""What parameters of one flat buffer have in common, and how that buffer is held.

``plan/layouts.py`` sorts a unit's parameters by it; every module that sees a flat buffer reads it.  Facts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from offload.errors import PolicyError
from offload.policy import Footprint, Policy, footprint
from offload.tier import Tier, Tiers
from zhooks.layout.ranges import ALIGN_BYTES

#: A policy's words for dtypes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: More than the kinds of parameters a unit can have: a flat's number is its unit's times this, and its place there.
FLATS = 256


#: Masters of one flat that is kept on a tier, unless a single parameter is larger: what an update stages at once.
PIECE_NBYTES = 32 << 20

Member = TypeVar("Member", bound=tuple[Any, ...])


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


@dataclass(frozen=True, slots=True)
class Cut:
    """How a unit's parameters are cut into flats: none above ``nbytes`` in any of its dtypes, unless one parameter alone is.

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


def pieces(
    kinds: Mapping[Kind, Sequence[Member]], cut: Cut, numel_of: Callable[[Any], int]
) -> Iterator[tuple[Kind, list[Member]]]:
    """The flats of a unit: one a kind; several where ``cut`` demands it, or something is kept on a tier, whose staging buffers
    stay small.  A parameter above the bound is a flat of its own, and the small ones beside it stay together.

    Args:
        numel_of: elements of a parameter that this place on the tp axis has.
    Raises:
        PolicyError: the bound does not hold one aligned row.
    """
    for kind, members in kinds.items():
        if not cut.admits(kind, 1):
            raise PolicyError(
                f"[comm] buffer: expected room for one aligned row over {cut.ranks * cut.replicas} ranks, "
                f"{cut.row(kind) * kind.wide} B for parameters such as {members[0][0]}, found {cut.nbytes} B. Raise it."
            )
        piece: list[Member] = []
        size = 0
        for member in members:
            numel = -(-numel_of(member[1]) // cut.align(kind)) * cut.align(kind)
            if not cut.admits(kind, numel):
                yield kind, [member]
                continue
            staged = kind.tiers.anywhere and (size + numel) * kind.master.itemsize > PIECE_NBYTES
            if piece and (staged or not cut.admits(kind, size + numel)):
                yield kind, piece
                piece, size = [], 0
            piece.append(member)
            size += numel
        if piece:
            yield kind, piece


def kind_of(name: str, param: nn.Parameter, policy: Policy, device: torch.device, *, wide: bool = False) -> Kind:
    """How the policy wants a parameter held; ``wide``: it stays in its own dtype."""
    said = policy.dtypes(name)
    chosen, reduce = said.param, said.reduce
    plain = wide or not param.is_floating_point()
    compute = param.dtype if plain or chosen is None else DTYPES[chosen]
    reduced = param.dtype if reduce is None or not param.is_floating_point() else DTYPES[reduce]
    tiers = policy.tiers(name)
    if not param.requires_grad:
        tiers = Tiers(tiers.parameter, tiers.gradient, tiers.parameter)
    return Kind(param.dtype, compute, reduced, device, param.requires_grad, tiers)
