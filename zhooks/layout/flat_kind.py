"""What parameters of one flat buffer have in common, and how that buffer is held.

``plan/layouts.py`` sorts a unit's parameters by it; every module that sees a flat buffer reads it.  Facts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload.policy import Footprint, Policy, footprint
from offload.tier import Tier, Tiers

#: A policy's words for dtypes.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: More than the kinds of parameters a unit can have: a flat's number is its unit's times this, and its place there.
FLATS = 256


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
