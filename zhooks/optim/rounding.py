"""``[optimizer] rounding = "stochastic"``: bf16 parameters are their own masters, updated in fp32 and rounded stochastically.

Note: [Stand-ins]
    While torch updates a flat, the optimizer's groups hold fp32 stand-ins for its bf16 parameters: the same ranges, the same
    gradients, both widened, and the parameters' own states, which so are made and kept in fp32 (moments in bf16 would lose
    what they add up just as parameters do).  Then the stand-ins are rounded into the parameters and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offload.errors import CapabilityError
from offload.kernels import Noise, noise_for, round_to_bf16
from offload.policy import Policy
from zhooks.layout import Group
from zhooks.optim.groups import Arguments
from zhooks.optim.kernel import FlatUpdate, TorchKernel, step_groups
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["RoundedKernel", "Rounding", "check_rounding"]


class Rounding:
    """The noise of one attachment: a seed, and how often each parameter has been rounded.

    ``stochastic``: it is made, for bf16 parameters are rounded so.
    """

    def __init__(self, seed: int, *, stochastic: bool = True) -> None:
        self.seed, self.stochastic = seed, stochastic
        self._counts: dict[str, int] = {}

    def over(self, flat: Flat, index: int) -> Iterator[tuple[slice, Noise]]:
        """The noise of the coming rounding of a parameter, which counts as made, for this rank's range of it.

        Noise goes by the place in the parameter, so run by run of it.
        """
        name, first = flat.specs[index].name, flat.span(index)[0]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        noise = noise_for(self.seed, name, count)
        for run in flat.group.pieces(index):
            yield slice(run.local - first, run.local - first + run.numel), noise.at(run.start)

    def state(self) -> dict[str, Any]:
        """Plain data; the same on every rank."""
        return {"seed": self.seed, "counts": dict(self._counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that saved ``state`` would have."""
        self.seed, self._counts = int(state["seed"]), {str(name): int(count) for name, count in state["counts"].items()}


class RoundedKernel(TorchKernel):
    """torch's arithmetic in fp32 over bf16 parameters; see Note [Stand-ins]."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding

    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        if update.flat.kind.master is not torch.bfloat16:
            super().update(optimizer, update, arguments)
            return
        index = {id(param): number for number, param in enumerate(update.flat.params)}
        with torch._C.DisableTorchFunctionSubclass():
            pairs: dict[Any, Any] = {param: _widened(param) for param in update.params() if param.grad is not None}
        _hand_over(optimizer, pairs)
        try:
            groups = [tuple(pairs[param] for param in group if param in pairs) for group in update.groups]
            step_groups(optimizer, arguments, groups)
        finally:
            _hand_over(optimizer, {stand: param for param, stand in pairs.items()})
        for param, stand in pairs.items():
            for at, noise in self._rounding.over(update.flat, index[id(param)]):
                round_to_bf16(stand.local_shard.values[at], param.local_shard.values[at], noise)
            param.local_shard.written()


def _widened(param: Any) -> nn.Parameter:
    """An fp32 parameter with the same range and gradient."""
    grad, on = param.grad, param.local_shard.device
    made = nn.Parameter(ShardedTensor(param.local_shard.values.float(), param.local_shard.spec, device=on))
    made.grad = ShardedTensor(grad.local_shard.values.float(), grad.local_shard.spec, device=on)
    return made


def _hand_over(optimizer: Optimizer, pairs: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Move the states of one set of parameters to another, those of 16 bits (a state dict that torch loaded) widened."""
    for one, other in pairs.items():
        if one not in optimizer.state:
            continue
        states = optimizer.state[other] = optimizer.state.pop(one)
        for key, value in states.items():
            if isinstance(value, ShardedTensor) and value.dtype in (torch.bfloat16, torch.float16):
                shard = value.local_shard
                states[key] = ShardedTensor(shard.values.float(), shard.spec, device=shard.device)


def check_rounding(policy: Policy, groups: Sequence[Group]) -> None:
    """What is trained must be something that stochastic rounding is for.

    Raises:
        CapabilityError: a parameter is neither bf16 nor fp32, or none is bf16.
    """
    if policy.optimizer.rounding == "nearest":
        return
    trained = {name: param.dtype for group in groups for name, param in group.params.items() if param.requires_grad}
    strange = [name for name, dtype in trained.items() if dtype not in (torch.bfloat16, torch.float32)]
    if strange or torch.bfloat16 not in trained.values():
        found = f"{strange[0]} in {str(trained[strange[0]]).removeprefix('torch.')}" if strange else "only fp32"
        raise CapabilityError(
            f'[optimizer] rounding = "stochastic" needs trained parameters stored in bf16 (fp32 ones stay as they are), '
            f'found {found}. Make the model bf16 before attach (model.bfloat16()), or set rounding = "nearest".'
        )
