"""How the parameters of an optimizer are updated: the one place that chooses.

``build/tiers.py`` asks it once; ``tiered_update.py`` asks what it returns for every flat.  An optimizer that updates whole
matrices gets a kernel of its own here.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from offload.policy import Policy
from zhooks.optim.kernel import Kernel, TorchKernel
from zhooks.optim.numba_kernel import NumbaKernel
from zhooks.optim.rounding import RoundedKernel, Rounding

__all__ = ["kernels_of"]


def kernels_of(policy: Policy, rounding: Rounding) -> Callable[[Optimizer], Kernel]:
    """From an optimizer to what updates its parameters; today the policy alone decides.

    Args:
        rounding: the attachment's noise, used where the policy rounds stochastically.
    """
    stochastic = rounding if policy.optimizer.rounding == "stochastic" else None
    chosen: Kernel = TorchKernel()
    if policy.optimizer.kernel == "numba":
        chosen = NumbaKernel(stochastic)
    elif stochastic is not None:
        chosen = RoundedKernel(stochastic)
    return lambda optimizer: chosen
