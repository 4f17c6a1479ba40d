"""How the parameters of an optimizer are updated, and where: the one place that chooses.

``build/tiers.py`` asks it once; ``tiered_update.py`` asks what it returns for every flat.  It never updates anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.policy import Policy
from offload.tier import Tier
from zhooks.layout import Kind
from zhooks.optim.kernel import Kernel, TorchKernel
from zhooks.optim.numba_kernel import NumbaKernel
from zhooks.optim.rounding import RoundedKernel, Rounding

__all__ = ["Choice", "choices_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one flat is updated, and where: DEVICE or HOST."""

    kernel: Kernel
    place: Tier


def choices_of(policy: Policy, rounding: Rounding) -> Callable[[Kind], Choice]:
    """From a flat's kind to how it is updated.

    Args:
        rounding: the attachment's noise, used where the policy rounds stochastically.
    """
    stochastic = rounding if policy.optimizer.rounding == "stochastic" else None
    plain: Kernel = TorchKernel() if stochastic is None else RoundedKernel(stochastic)
    chosen = NumbaKernel(stochastic) if policy.optimizer.kernel == "numba" else plain
    place = Tier.HOST if policy.optimizer.compute == "host" else Tier.DEVICE

    def choice(kind: Kind) -> Choice:
        if place is Tier.DEVICE or kind.tiers.optimizer is not Tier.DEVICE:
            return Choice(chosen, place)
        # What device_share keeps there; our own kernels run on CPUs.
        return Choice(chosen if kind.device.type == "cpu" else plain, Tier.DEVICE)

    return choice
