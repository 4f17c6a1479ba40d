"""``[optimizer] kernel = "numba"``: Adam, AdamW, SGD and Lion updated by our own kernels, one pass over each flat's range.

Groups, schedulers and state dicts of the optimizer stay what torch makes them; an optimizer or an option the kernels lack is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload import kernels
from offload.errors import ShardedOpError
from offload.kernels import Noise
from offload.pages import aligned
from offload.store import Mode
from zhooks.optim.groups import Arguments, grad_of
from zhooks.optim.kernel import FlatUpdate, TorchKernel
from zhooks.optim.rounding import Rounding
from zhooks.tensor import ShardedTensor
from zhooks.unit import Flat

__all__ = ["AdamRule", "NumbaKernel"]


class AdamRule:
    """How torch.optim.Adam and AdamW are updated; the rules of other optimizers have the same members.

    Attributes:
        kernel: one pass over a master, its gradient and its states.
    """

    kernel: Callable[..., None] = staticmethod(kernels.adam)

    def __init__(self, *, decoupled: bool = False) -> None:
        self._decoupled = decoupled

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states a parameter of the group has, shaped like it."""
        return ("exp_avg", "exp_avg_sq")

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        """The numbers of one parameter's step, counters moved on; equal for parameters that may share a pass."""
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["step"] += 1
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return kernels.Adam(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay", False)),
            step=int(state["step"]),
            maximize=bool(group["maximize"]),
        )


class SgdRule(AdamRule):
    """torch.optim.SGD; a momentum buffer that does not exist yet takes the first gradient."""

    kernel = staticmethod(kernels.sgd)

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        return kernels.Sgd(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            first=bool(group["momentum"]) and state.get("momentum_buffer") is None,
        )


class LionRule(AdamRule):
    """Lion as its authors published it: groups with lr, betas and weight_decay, one state exp_avg."""

    kernel = staticmethod(kernels.lion)

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def begin(self, group: dict[str, Any], state: dict[str, Any]) -> object:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        return kernels.Lion(float(group["lr"]), beta1, beta2, float(group["weight_decay"]))


_RULES: dict[Any, AdamRule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.SGD: SgdRule(),
}


def rule_for(optimizer: Optimizer) -> AdamRule:
    """The kernels' rule for an optimizer.

    Raises:
        ShardedOpError: there is none, or the optimizer uses an option the kernels lack.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    rule = _RULES.get(kind)
    if rule is None and kind.__name__ == "Lion" and all({"betas", "weight_decay"} <= group.keys() for group in groups):
        rule = LionRule()
    lacks = ("amsgrad", "differentiable", "capturable")
    found = [f" with {option}={group[option]}" for group in groups for option in lacks if group.get(option, False)]
    if rule is None or found:
        raise ShardedOpError(
            f'[optimizer] kernel = "numba" needs Adam, AdamW, SGD or Lion with plain options, found '
            f'{kind.__name__}{found[0] if rule is not None else ""}. Use kernel = "torch".'
        )
    return rule


@dataclass(slots=True)
class _Pass:
    """Neighbouring ranges that one pass covers: the numbers, and the first range of each tensor."""

    how: object
    tensors: list[Tensor]
    numel: int
    last: int
    noise: Noise | None = None

    def takes(self, number: int, how: object, tensors: Sequence[Tensor]) -> bool:
        """The next parameter's ranges follow in the same memory, at the same distance everywhere."""
        if self.noise is not None or number != self.last + 1 or how != self.how or len(tensors) != len(self.tensors):
            return False
        gaps = set[int]()
        for mine, new in zip(self.tensors, tensors, strict=True):
            if mine.untyped_storage()._cdata != new.untyped_storage()._cdata or mine.dtype != new.dtype:
                return False
            gaps.add(int(new.storage_offset()) - int(mine.storage_offset()))
        gap = gaps.pop()
        if gaps or gap < self.numel:
            return False
        self.numel, self.last = gap + tensors[0].numel(), number
        return True

    def whole(self) -> list[Tensor]:
        return [tensor.as_strided((self.numel,), (1,)) for tensor in self.tensors]


class NumbaKernel(TorchKernel):
    """One pass over a flat's range where its parameters share a group and a step, else one a run of neighbours."""

    def __init__(self, rounding: Rounding | None = None) -> None:
        self._rounding = rounding

    def writes_copy(self, flat: Flat) -> bool:
        return flat.storage.copy is not None and self._noise(flat) is None

    def apart(self, optimizer: Optimizer) -> bool:
        return True

    def check(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        flat = update.flat
        rule_for(optimizer)
        if arguments.given:
            raise ShardedOpError(
                f'[optimizer] kernel = "numba" needs {type(optimizer).__name__}.step() without arguments, which its kernel '
                f'does not support, found {", ".join(arguments.given)}. Use kernel = "torch".'
            )
        if flat.kind.master is not torch.float32 and self._noise(flat) is None:
            raise ShardedOpError(
                f'[optimizer] kernel = "numba" needs fp32 parameters, found {flat.kind.master} in unit {flat.name}. Use '
                'kernel = "torch", keep the parameters in fp32 and set [precision] param, or set rounding = "stochastic".'
            )

    def update(self, optimizer: Optimizer, update: FlatUpdate, arguments: Arguments) -> None:
        # Before any counter moves: a step that is refused has not happened.
        self.check(optimizer, update, arguments)
        rule, flat = rule_for(optimizer), update.flat
        # What a GradScaler leaves to optimizers with fused=True: whether the step is skipped, and what unscales.
        skipped, divisor = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        scale = 1.0 if divisor is None else 1.0 / float(divisor)
        copy = flat.storage.copy if self.writes_copy(flat) else None
        target = None if copy is None else copy.tensor(Mode.WRITE_ALL)
        passes = [] if skipped is not None and float(skipped) else self._passes(rule, optimizer, update, target)
        if copy is not None and target is not None:
            _cast_between(passes, flat.storage.open(), target)
            copy.touch()
        for one in passes:
            master, grad, *states = one.whole()
            rounded = None if target is None else states.pop()
            rule.kernel(one.how, master, grad, *states, copy=rounded, scale=scale, noise=one.noise)

    def _passes(self, rule: AdamRule, optimizer: Optimizer, update: FlatUpdate, copy: Tensor | None) -> list[_Pass]:
        flat, noise = update.flat, self._noise(update.flat)
        index = {id(param): number for number, param in enumerate(flat.params)}
        passes: list[_Pass] = []
        made: dict[str, Tensor] = {}
        written: list[ShardedTensor] = []
        for param, number_of_group in update.in_order():
            grad, number, group = grad_of(param), index[id(param)], optimizer.param_groups[number_of_group]
            if grad is None:
                continue
            assert isinstance(grad, ShardedTensor)
            state = optimizer.state[param]
            how = rule.begin(group, state)
            kept = [_state(state, key, flat, number, made) for key in rule.states(group)]
            sharded: Any = param
            tensors = [sharded.local_shard.values, grad.local_shard.values, *(tensor.local_shard.values for tensor in kept)]
            tensors += [] if copy is None else [flat.local(number, copy)]
            written += [sharded, *kept]
            if not tensors[0].numel():
                continue
            if noise is not None:
                # One pass a run of the parameter: noise goes by the place in it.
                for at, drawn in noise.over(flat, number):
                    passes.append(_Pass(how, [tensor[at] for tensor in tensors], at.stop - at.start, number, drawn))
            elif not (passes and passes[-1].takes(number, how, tensors)):
                passes.append(_Pass(how, tensors, tensors[0].numel(), number))
        for tensor in written:
            tensor.local_shard.written()
        return passes

    def _noise(self, flat: Flat) -> Rounding | None:
        """Set where the masters are bf16, and updates of them are rounded stochastically."""
        return self._rounding if flat.kind.master is torch.bfloat16 else None


def _cast_between(passes: Sequence[_Pass], master: Tensor, copy: Tensor) -> None:
    """What no pass will write of the copy: parameters without a gradient, of other optimizers, and padding."""
    last, ends = 0, copy.numel()
    ranges = [(int(one.tensors[-1].storage_offset() - copy.storage_offset()), one.numel) for one in passes]
    for start, numel in [*sorted(ranges), (ends, 0)]:
        if last < start:
            copy[last:start].copy_(master[last:start])
        last = max(last, start + numel)


def _state(state: dict[str, Any], key: str, flat: Flat, number: int, made: dict[str, Tensor]) -> ShardedTensor:
    """A parameter's state; new ones of a flat lie side by side, so that one pass can cover them."""
    held = state.get(key)
    if isinstance(held, ShardedTensor) and held.dtype is torch.bfloat16:
        # A state dict that torch loaded has the parameter's dtype.
        held = state[key] = ShardedTensor(held.local_shard.values.float(), held.local_shard.spec, device=flat.kind.device)
    if held is None:
        if key not in made:
            # Pages of its own: they go back to the system when the states have moved to their tier.
            made[key] = aligned(4 * flat.shard_numel).view(torch.float32)
        held = state[key] = ShardedTensor(flat.local(number, made[key]), flat.specs[number], device=flat.kind.device)
    assert isinstance(held, ShardedTensor)
    return held
