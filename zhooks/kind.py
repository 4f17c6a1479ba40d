"""What parameters of one flat buffer have in common, and how that buffer is held.

``build.py`` sorts a unit's parameters by it; every room that sees a flat buffer reads it.  Facts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from offload.tier import Tier, Tiers

#: A policy's words for dtypes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: More than the kinds of parameters a unit can have: a flat's number is its unit's times this, and its place there.
FLATS = 256


#: Masters of one flat that rests on a tier, unless a single parameter is larger: what an update stages at once.
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
    def apart(self) -> bool:
        """Masters and computed values are two things that rest in two places."""
        anywhere = self.tiers.parameter is not Tier.DEVICE or self.tiers.optimizer is not Tier.DEVICE
        return anywhere and self.master != self.compute


@dataclass(frozen=True, slots=True)
class Ownership:
    """How a flat buffer is held between steps.

    ``whole``: every rank keeps all of it (optimizer replicated).  ``resident``: the full buffer stays between uses.
    """

    whole: bool
    resident: bool


def pieces(kinds: Mapping[Kind, Sequence[Member]]) -> Iterator[tuple[Kind, list[Member]]]:
    """The flats of a unit: one a kind; several where something rests on a tier, so that staging buffers stay small."""
    for kind, members in kinds.items():
        piece: list[Member] = []
        size = 0
        for member in members:
            nbytes = member[1].numel() * kind.master.itemsize
            if piece and kind.tiers.anywhere and size + nbytes > PIECE_NBYTES:
                yield kind, piece
                piece, size = [], 0
            piece.append(member)
            size += nbytes
        yield kind, piece
